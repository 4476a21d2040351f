"""The lines that a run's journal gets while somebody watches it, each once and in order.

It knows segments and lines; it interprets none. What it costs does not grow with the journal.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from orchestrator.history.journal import FOLDER
from orchestrator.storage.files import Storage

_ATTEMPT, _SEGMENT = re.compile(r"a(\d{4,})"), re.compile(r"\d{6,}\.jsonl")


class JournalFollower:
    """Reads on from where the journal ends when it is made. Not for several threads."""

    def __init__(self, storage: Storage, attempt: int) -> None:
        """`attempt`: the newest one; what older ones write is not followed. Raises `StorageError`."""
        self._storage, self._attempt = storage, attempt
        self._offsets: dict[str, int] = {}  # by segment: bytes that were read
        self._read_out: set[str] = set()  # closed segments
        self._seen: dict[str, int] = {}  # by folder: the newest line's number
        self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines that came since the last call. A line that was written twice, because storage
        failed in between, comes once. Raises `StorageError`; the next call goes on at the same place.
        """
        found: list[dict[str, Any]] = []
        for folder in self._folders():
            names = [name for name in self._storage.list(folder) if _SEGMENT.fullmatch(name)]
            for name in names:
                segment = f"{folder}/{name}"
                if segment in self._read_out:
                    continue
                found += self._read(folder, segment)
                if name != names[-1]:  # it was closed before the next one was begun
                    self._read_out.add(segment)
        return found

    def _read(self, folder: str, segment: str) -> list[dict[str, Any]]:
        offset = self._offsets.get(segment, 0)
        try:
            data = self._storage.read(segment, offset)
        except FileNotFoundError:
            return []  # it was there a moment ago: somebody deletes the run
        complete = data[: data.rfind(b"\n") + 1]
        self._offsets[segment] = offset + len(complete)
        lines = (self._new(folder, text) for text in complete.splitlines())
        return [line for line in lines if line is not None]

    def _new(self, folder: str, text: bytes) -> dict[str, Any] | None:
        try:
            line = orjson.loads(text)
            seq = int(line["seq"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            return None  # torn by a write that failed: it stands whole in the next segment
        if seq <= self._seen.get(folder, 0):
            return None
        self._seen[folder] = seq
        return line  # type: ignore[no-any-return]

    def _folders(self) -> list[str]:
        matches = (match for match in map(_ATTEMPT.fullmatch, self._storage.list(FOLDER)) if match)
        attempts = sorted((int(match[1]), match[0]) for match in matches)
        return [f"{FOLDER}/{name}" for number, name in attempts if number >= self._attempt]
