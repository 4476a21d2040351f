"""A stream's state for a checkpoint: its place, and the identity of the stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blake3 import blake3

from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.json_form import decode, encode
from orchestrator.planning.encoders import AUTO, EncoderChoice, EncoderSpan
from orchestrator.planning.resume.identity import OF_A_SOURCE, RunIdentity, compare
from orchestrator.planning.resume.source_lists import RestartRequest, SourceLists, files_text, restart_text
from orchestrator.records.cursor import Cursor, SourceCursor

VERSION = 1
_NAMES_DIGITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesSeen:
    """The number of files of a list, and a digest of their names."""

    num: int
    names: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamState:
    """The document that `state_dict()` returns as plain JSON values.

    It holds the place of the next unread token, and the identity of files, tokenizer, encoder and settings.
    It does not depend on rank, world size, batch size or seq_len. `sources` record which list each epoch
    reads, `files` describe the current lists. The lists themselves are not in it. `restart` is the restart
    that the stream was opened with. States of older versions have none of these three.
    """

    version: int
    cursor: Cursor
    identity: RunIdentity
    sources: tuple[SourceLists, ...] = ()
    files: dict[str, FilesSeen] = field(default_factory=dict)
    restart: RestartRequest | None = None

    def to_json(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        found: dict[str, Any] = encode(self)
        return found


def state_of(spec: DataSpec, cursor: Cursor, restart: RestartRequest | None) -> dict[str, Any]:
    """The state for this place of a stream. Its identity is that of the lists that the place lies in."""
    plans = {
        plan.source: spec.plan_of(plan.source, cursor.sources.get(plan.source, SourceCursor()).epoch)
        for plan in spec.plans
    }
    per_block = {_per_block(name): str(plan.fragments_per_block) for name, plan in plans.items()}
    identity = replace(
        spec.run_identity,
        settings=spec.run_identity.settings | per_block,
        manifests={name: plan.manifest.digest for name, plan in plans.items()},
    )
    return StreamState(
        version=VERSION,
        cursor=cursor,
        identity=identity,
        sources=spec.sources,
        files={name: files_seen(plan.manifest) for name, plan in plans.items()},
        restart=restart,
    ).to_json()


def _per_block(source: str) -> str:
    return f"{OF_A_SOURCE}{source}.fragments_per_block"


def files_seen(manifest: Manifest) -> FilesSeen:
    """The description of a list that a state keeps."""
    names = blake3("\0".join(manifest.files.paths).encode(errors="surrogateescape"))
    return FilesSeen(num=len(manifest.files), names=names.hexdigest()[:_NAMES_DIGITS])


def read_state(state: Mapping[str, Any]) -> StreamState:
    """The inverse of `StreamState.to_json`.

    Raises `DataIdentityError` for a state of another version, `OrchestratorError` for anything else.
    """
    if state.get("version", VERSION) != VERSION:
        raise DataIdentityError(
            f"the stream's state has version {state['version']}, this program reads version {VERSION}; "
            "use the version of orchestrator that made it",
            code="resume.other_version",
        )
    return decode(StreamState, state, "the stream's state")


def continue_from(
    spec: DataSpec,
    found: StreamState,
    wanted_encoder: str,
    accept_changed: bool,
    *,
    kept: frozenset[str] = frozenset(),
    restarted: frozenset[str] = frozenset(),
) -> DataSpec:
    """The stream that a state names: `spec`, with the encoder of the state's stream.

    `wanted_encoder` is `data.encoder`. The `restarted` sources begin with the files of `spec`. The lists of
    the `kept` sources were frozen before. Raises `DataIdentityError` with both values if the state is of
    another stream.
    """
    new = spec.run_identity
    of_files = list(_changed_files(spec, found, accept_changed, kept, restarted))
    # differences in a source's files are reported above; its fragments per block follow from them
    free = {name for name in new.manifests if found.identity.manifests.get(name) != new.manifests[name]}
    old = _with_settings_of(found.identity, new, restarted, {_per_block(n) for n in free - restarted})
    refusals = [*of_files, *(refusal.text for refusal in compare(old, new, accept_changed=True))]
    encoder = EncoderChoice(name=found.identity.encoder_name, version=found.identity.encoder_version)
    if wanted_encoder not in (AUTO, encoder.name):
        refusals.append(
            f"the state's stream was encoded with {encoder}, the job has data.encoder={wanted_encoder}; only "
            "a run can change its encoder; set data.encoder=auto"
        )
    if refusals:
        raise DataIdentityError(
            "the state belongs to another stream (below, the run is the stream that made the state):\n"
            + "\n".join(f"  {text}" for text in refusals),
            code="resume.other_stream",
        )
    identity = replace(new, encoder_name=encoder.name, encoder_version=encoder.version)
    return replace(spec.made_by((EncoderSpan(encoder=encoder),)), run_identity=identity)


def _with_settings_of(
    old: RunIdentity, new: RunIdentity, restarted: frozenset[str], more: set[str]
) -> RunIdentity:
    """A state's identity in which the `restarted` sources have the job's settings, except for their
    `loss`.
    """
    prefixes = tuple(f"{OF_A_SOURCE}{name}." for name in restarted)
    fixed = {f"{OF_A_SOURCE}{name}.loss" for name in restarted} & old.settings.keys() & new.settings.keys()

    def is_free(name: str) -> bool:
        return name in more or (name.startswith(prefixes) and name not in fixed)

    kept = {name: value for name, value in old.settings.items() if not is_free(name)}
    taken = {name: value for name, value in new.settings.items() if is_free(name)}
    return replace(old, settings=kept | taken)


def _changed_files(
    spec: DataSpec,
    found: StreamState,
    accept_changed: bool,
    kept: frozenset[str],
    restarted: frozenset[str],
) -> Iterator[str]:
    """Why the current lists differ from those of the state, for the sources that both have."""
    for plan in spec.plans:
        name, now = plan.source, plan.manifest
        then = found.identity.manifests.get(name)
        if then in (None, now.digest) or name in restarted:
            continue
        if name in kept:
            yield (
                f"the list of source {name} in frozen_dir has digest {now.digest}, the state was made with "
                f"{then}; give the frozen_dir= that the state was made with, or start the source again with "
                f"resume.restart_sources=[{name}]"
            )
            continue
        seen, files = found.files.get(name), files_seen(now)
        if not accept_changed:
            counts = "" if seen is None else f" ({files_text(seen.num)} then, {files.num:,} now)"
            yield (
                f"the files of source {name} have changed: the state was made with a list of digest {then}, "
                f"the files now give {now.digest}{counts}; put the files back, {restart_text(name)}, or "
                "accept changed ones with resume.accept_changed=true. With a frozen_dir=, files that are "
                "added later are not read"
            )
        elif seen is not None and seen != files:
            yield (
                f"source {name} had {files_text(seen.num)} when the state was made, and has {files.num:,} now"
                f"{' with other names' if seen.num == files.num else ''}: added and removed files cannot be "
                "accepted as changed files can, because they move the place of every record; put the files "
                f"back, or {restart_text(name)}. With a frozen_dir=, the list is kept, and such files are "
                "named"
            )
