"""Computes how much is left of the data if a launch of the run has reached their end before.

An epoch then is as long as it was at that time. Nothing is estimated: if the length of an epoch may have
changed, the result is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.records.cursor import Cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownEpochs:
    """`attempt` has drawn the `num_epochs` epochs of its only source to their end: `drawn` positions.

    The stream continues across epochs, and all tokens except the first are targets once (data rule 1).
    """

    attempt: int
    source: str
    num_epochs: int
    drawn: int

    @property
    def tokens(self) -> int:
        """The tokens of an epoch."""
        return (self.drawn + 1) // self.num_epochs

    def left(self, num_epochs: int | None, cursor: Cursor) -> int | None:
        """Returns the positions from the cursor to the end of `num_epochs` epochs; None: endless."""
        if num_epochs is None:
            return None
        return max(0, self.tokens * num_epochs - 1 - _drawn(cursor))

    def epochs(self, cursor: Cursor) -> float:
        """Returns how many epochs were drawn up to the cursor."""
        return (_drawn(cursor) + 1) / self.tokens if _drawn(cursor) else 0.0


def known_epochs(attempt: int, flat: Mapping[str, Any], end: Cursor) -> KnownEpochs | None:
    """Returns the epochs' length from an attempt that reached the end of its data at `end`.

    `flat` is its configuration. None if another pass may have another length: several sources, packed whole
    documents, transforms (they draw anew in each epoch), lists that are refreshed, changed files that were
    accepted.
    """
    num_epochs = epochs_of(flat)
    if num_epochs is None or (_drawn(end) + 1) % num_epochs:
        return None
    (source,) = flat["data.sources"]
    return KnownEpochs(attempt=attempt, source=source["name"], num_epochs=num_epochs, drawn=_drawn(end))


def nothing_left(flat: Mapping[str, Any], cursor: Cursor) -> bool:
    """Whether the cursor itself shows that the data are at their end.

    If whole documents are packed, the cursor is after a source's last epoch once that is taken. Under
    `concat` it stays in it, at the last token.
    """
    if flat["pack.mode"] == "concat":
        return False
    for source in flat["data.sources"]:
        limit = source.get("max_epochs")
        if limit is None:
            limit = None if flat.get("data.on_end") == "repeat" else flat["data.num_epochs"]
        at = cursor.sources.get(source["name"])
        if limit is None or at is None or at.epoch < limit:
            return False
    return True


def epochs_of(flat: Mapping[str, Any]) -> int | None:
    """Returns how many epochs of equal length a job reads; None if unknown or unlimited."""
    sources = flat["data.sources"]
    if len(sources) != 1 or flat["pack.mode"] != "concat":
        return None
    (source,) = sources
    transforms = source.get("transforms")
    if flat.get("data.transforms") if transforms is None else transforms:
        return None
    if flat.get("data.refresh") is not None or flat.get("resume.accept_changed"):
        return None
    limit = source.get("max_epochs")
    num_epochs: int | None = flat["data.num_epochs"] if limit is None else limit
    return num_epochs


def _drawn(cursor: Cursor) -> int:
    return cursor.consumed_tokens + cursor.skipped_tokens
