"""Determines which encoder makes which documents of a run's stream (data rule 6).

A run can change its encoder from the next whole document on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.errors import Refusal
from orchestrator.records.cursor import Cursor, SourceCursor

Place = tuple[int, int, int, int]
"""(epoch, block, window, record in the window's order): the place of a document in its source's stream."""

_BEGIN: Place = (0, 0, 0, 0)
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderChoice:
    """An encoding library and its version."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpan:
    """The documents that `encoder` makes: of each source from `begins[source]` on, until the next span
    begins.

    A missing source begins with its first document.
    """

    encoder: EncoderChoice
    begins: dict[str, Place] = field(default_factory=dict)

    def begin(self, source: str) -> Place:
        """Returns the place of its first document of `source`."""
        return self.begins.get(source, _BEGIN)


def place_of(cursor: SourceCursor) -> Place:
    """Returns the place of the record that a cursor names."""
    return (cursor.epoch, cursor.block, cursor.window, cursor.record)


def encoder_at(spans: tuple[EncoderSpan, ...], source: str, place: Place) -> EncoderChoice:
    """Returns the encoder of the document at `place`: that of the last span that has begun there."""
    return next(span.encoder for span in reversed(spans) if span.begin(source) <= place)


def encoder_of_epoch(spans: tuple[EncoderSpan, ...], source: str, epoch: int) -> EncoderChoice | None:
    """Returns the encoder of all documents of an epoch; None if it is more than one."""
    first = encoder_at(spans, source, (epoch, 0, 0, 0))
    others = {s.encoder for s in spans if (epoch, 0, 0, 0) < s.begin(source) < (epoch + 1, 0, 0, 0)}
    return first if others <= {first} else None


def with_encoder(
    spans: tuple[EncoderSpan, ...], encoder: EncoderChoice, begins: Mapping[str, Place]
) -> tuple[EncoderSpan, ...]:
    """Returns the spans with `encoder` from `begins` on. Spans that would have begun there or later are
    dropped.
    """
    new = EncoderSpan(encoder=encoder, begins=dict(begins))
    kept = tuple(s for s in spans if any(s.begin(source) < place for source, place in begins.items()))
    return kept if kept and kept[-1].encoder == encoder else (*kept, new)


def choose_next(
    spans: tuple[EncoderSpan, ...], wanted: str, cursor: Cursor, installed: Mapping[str, str | None]
) -> tuple[EncoderChoice, tuple[Refusal, ...]]:
    """Returns the next encoder, and why this machine cannot continue with it.

    The encoder applies from the next whole document after `cursor` on. `wanted` is `data.encoder`; `auto`
    keeps the run's newest, by name and version. `installed` are the versions on this machine (None: not
    installed). If something was trained already, the encoder that began the current document is needed too,
    because it finishes that document. Each reason has both versions and what to do.
    """
    newest = spans[-1].encoder
    found = installed.get(wanted)
    if wanted != AUTO and found is None:
        text = f"data.encoder={wanted} is not installed on this machine; install it, or set auto"
        return newest, (Refusal("machine.missing_package", text),)
    encoder = newest if found is None else EncoderChoice(name=wanted, version=found)
    needed = {encoder: "encodes its documents"}
    if cursor.consumed_tokens:
        for source, at in cursor.sources.items():
            needed.setdefault(encoder_at(spans, source, place_of(at)), "began the current document")
    return encoder, tuple(
        Refusal(
            "machine.packages",
            f"the run {why} with {each}, this machine has {each.name} "
            f"{installed.get(each.name) or '(not installed)'}; install {each.name}=={each.version} on every "
            "machine. To encode with another one from the next whole document on, set data.encoder to its "
            "name while both are installed (for a new version of the same library change to the other "
            "library first, in a start of its own)",
        )
        for each, why in needed.items()
        if installed.get(each.name) != each.version
    )
