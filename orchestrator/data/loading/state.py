"""A stream's state for a checkpoint: its place, and of which stream that is. It reads no file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.json_form import decode, encode
from orchestrator.planning.encoders import AUTO, EncoderChoice, EncoderSpan
from orchestrator.planning.identity import RunIdentity, compare
from orchestrator.records import Cursor

VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """What `state_dict()` gives as plain JSON values: the place of the next unread token, and the identity of
    files, tokenizer, encoder and settings. Nothing in it depends on rank, world size, batch size or seq_len.
    """

    version: int
    cursor: Cursor
    identity: RunIdentity

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        found: dict[str, Any] = encode(self)
        return found


def state_of(spec: DataSpec, cursor: Cursor) -> dict[str, Any]:
    """The document for this place of a stream."""
    return StreamState(version=VERSION, cursor=cursor, identity=spec.run_identity).to_json()


def continue_from(
    spec: DataSpec, state: Mapping[str, Any], wanted_encoder: str, accept_changed: bool
) -> tuple[DataSpec, Cursor]:
    """The stream and the place in it that a state names: `spec`, encoded by whoever made the state's stream.

    `wanted_encoder` is `data.encoder`. Raises `DataIdentityError` with both values if the state is of another
    stream, `OrchestratorError` if it is no such document.
    """
    if state.get("version", VERSION) != VERSION:
        raise DataIdentityError(
            f"the stream's state has version {state['version']}, this program reads version {VERSION}; "
            "use the version of orchestrator that made it"
        )
    found = decode(StreamState, state, "the stream's state")
    refusals = list(compare(found.identity, spec.run_identity, accept_changed))
    encoder = EncoderChoice(name=found.identity.encoder_name, version=found.identity.encoder_version)
    if wanted_encoder not in (AUTO, encoder.name):
        refusals.append(
            f"the state's stream was encoded by {encoder}, the job asks for data.encoder={wanted_encoder}; "
            "only a run can take up another encoder: set data.encoder=auto"
        )
    if refusals:
        raise DataIdentityError(
            "the state is not one of this stream, so nothing is read; where it says run, it was the stream "
            "that made the state:\n" + "\n".join(f"  {text}" for text in refusals)
        )
    identity = replace(spec.run_identity, encoder_name=encoder.name, encoder_version=encoder.version)
    return replace(spec.made_by((EncoderSpan(encoder=encoder),)), run_identity=identity), found.cursor
