"""Follows a run's journal: each new line once and in order.

The cost does not grow with the journal.
"""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.segments import SegmentRef, journals, read_from, segments
from orchestrator.history.journal.journal_version import LaterLineError, require_known
from orchestrator.storage.files import Storage


class JournalFollower:
    """Reads the journal from its current end on. Not for several threads."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        """`attempt`: the newest one. Lines of older ones are not followed. Raises `StorageError`."""
        self._storage, self._attempt = storage, attempt
        self._offsets: dict[str, int] = {}  # by segment: bytes that were read
        self._read_out: set[str] = set()  # closed segments
        self._seen: dict[int, int] = {}  # by attempt: the newest line's number
        self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines since the last call.

        A line that was written twice, because storage failed in between, occurs once. Raises `StorageError`,
        and `LaterLineError` for a line of a later version. The next call continues at the same place.
        """
        found: list[dict[str, Any]] = []
        for attempt in journals(self._storage):
            if attempt < self._attempt:
                continue
            refs = segments(self._storage, attempt)
            for ref in refs:
                if ref.path in self._read_out:
                    continue
                found += self._read(ref)
                if ref is not refs[-1]:  # it was closed before the next one was begun
                    self._read_out.add(ref.path)
        return found

    def _read(self, ref: SegmentRef) -> list[dict[str, Any]]:
        offset = self._offsets.get(ref.path, 0)
        try:
            data = read_from(self._storage, ref, offset)
        except FileNotFoundError:
            return []  # it existed a moment ago: the run is being deleted
        complete = data[: data.rfind(b"\n") + 1]
        lines = list(filter(None, (_parsed(ref.path, text) for text in complete.splitlines())))
        self._offsets[ref.path] = offset + len(complete)
        return [line for line in lines if self._is_new(ref.attempt, int(line["seq"]))]

    def _is_new(self, attempt: int, seq: int) -> bool:
        if seq <= self._seen.get(attempt, 0):
            return False
        self._seen[attempt] = seq
        return True


def _parsed(path: str, text: bytes) -> dict[str, Any] | None:
    """None for a line that a failed write has torn: the next segment has it whole."""
    try:
        line = orjson.loads(text)
        require_known(line, path)
        return line if isinstance(line["seq"], int) else None
    except LaterLineError:
        raise
    except (orjson.JSONDecodeError, OrchestratorError, AttributeError, KeyError):
        return None
