"""Makes a journal's lines durable: in files that grow, or in pieces if the store cannot append.

One process writes an attempt's journal, and no name of it is ever reused for other bytes.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Protocol

from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.history.claims.segments import piece_path, segment_path
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage

SEGMENT_BYTES = 16 << 20
SEGMENT_PIECES = 256
PIECES_EVERY_S = 5.0  # minimum interval of pieces that no process waits for: each is an object


class SegmentLog(Protocol):
    """The newest segment of a journal, and those that follow. For one thread at a time."""

    least_flush_s: float  # the minimum interval of flushes that no process waits for

    def write(self, lines: list[bytes]) -> None:
        """Makes the lines durable, beginning a new segment whenever one is full.

        Removes the durable lines from `lines`, also if it raises. After a `StorageError`, pass the remaining
        lines again, with new ones after them.
        """
        ...

    def why_lost(self) -> str:
        """Why the newest name no longer leads to what was written here, because it was deleted or replaced.

        Empty if all is well. Raises `StorageError` if that cannot be determined.
        """
        ...

    def close(self) -> None:
        """Closes the newest segment. Raises `StorageError`; everything written is durable."""
        ...


def segment_log(storage: Storage, attempt: int, segment_bytes: int) -> SegmentLog:
    """The segment log for this storage. A segment is closed when it has reached `segment_bytes`."""
    if storage.traits.appends:
        return GrowingSegments(storage, attempt, segment_bytes)
    return SegmentsInPieces(storage, attempt, segment_bytes)


class GrowingSegments(SegmentLog):
    """A file for each segment.

    The lines of a failed call are written again, into a new segment. So a segment may end with lines that are
    also in the next one, and with an incomplete line.
    """

    least_flush_s = 0.0

    def __init__(self, storage: Storage, attempt: int, segment_bytes: int) -> None:
        self._storage, self._attempt, self._segment_bytes = storage, attempt, segment_bytes
        self.num_segments = 0
        self._file: AppendHandle | None = None
        self._newest_file: AppendHandle | None = None  # of the newest segment, also after that is closed

    @override
    def write(self, lines: list[bytes]) -> None:
        try:
            while lines:
                if self._file is None:
                    self._file = self._newest_file = self._new_segment()
                taken = num_taken(lines, self._segment_bytes - self._file.num_bytes)
                self._file.write(b"".join(lines[:taken]))
                self._file.sync()
                if self._file.num_bytes >= self._segment_bytes:
                    self.close()  # if that fails, the lines are written again: readers take each once
                del lines[:taken]
        except BaseException:
            with suppress(Exception):  # the first failure is reported
                self.close()
            raise

    @override
    def why_lost(self) -> str:
        return self._newest_file.why_lost() if self._newest_file else ""

    @override
    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _new_segment(self) -> AppendHandle:
        path = segment_path(self._attempt, self.num_segments + 1)
        try:
            file = self._storage.append(path)
        except StorageError:
            # segments are numbered without gaps: one that exists despite the error keeps its number
            with suppress(StorageError):
                self.num_segments += self._storage.exists(path)
            raise
        self.num_segments += 1
        return file


class SegmentsInPieces(SegmentLog):
    """A new object for each call, created exclusively, with complete lines: no line is ever torn.

    A full segment is published as one object, and then its pieces are deleted. The next segment begins only
    then. The claim gives the attempt's journal to one launch, so a refused create shows that another process
    writes it by mistake.

    Rewriting one object would not be safe: a request that is repeated late could replace newer content with
    older. Here a late request finds its name taken, or creates a piece that existed before, of a segment that
    is published.

    If it is not known whether a piece was created, the piece is tried again with the same lines, until that
    is known. A segment is also in memory until it is published: 16 MiB.
    """

    least_flush_s = PIECES_EVERY_S

    def __init__(
        self, storage: Storage, attempt: int, segment_bytes: int, segment_pieces: int = SEGMENT_PIECES
    ) -> None:
        self._storage, self._attempt = storage, attempt
        self._segment_bytes, self._segment_pieces = segment_bytes, segment_pieces
        self._number = 1  # of the current segment
        self._pieces: list[bytes] = []  # of the current segment, durable
        self._num_bytes = 0  # in them
        self._tried = 0  # the number of lines of the next piece, from its first try on
        self._newest = ("", 0)  # path and bytes of what was written last

    @override
    def write(self, lines: list[bytes]) -> None:
        while lines or self._is_full():
            if self._is_full():
                self._publish()
                continue
            self._tried = self._tried or num_taken(lines, self._segment_bytes - self._num_bytes)
            data = b"".join(lines[: self._tried])
            self._create(data)
            del lines[: self._tried]
            self._tried = 0

    @override
    def why_lost(self) -> str:
        path, written = self._newest
        if not path:
            return ""
        try:
            found = self._storage.size(path)
        except FileNotFoundError:
            return f"{self._storage.root}/{path} is gone"
        if found != written:
            return f"{self._storage.root}/{path} has {found} bytes, written were {written}"
        return ""

    @override
    def close(self) -> None:
        if self._pieces:
            self._publish()

    def _is_full(self) -> bool:
        return self._num_bytes >= self._segment_bytes or len(self._pieces) >= self._segment_pieces

    def _create(self, data: bytes) -> None:
        path = piece_path(self._attempt, self._number, len(self._pieces) + 1)
        if not self._storage.create(path, data) and self._found(path) != data:
            raise StorageError(
                f"{self._storage.root}/{path} has other lines than this process wrote: another process "
                "writes the journal of this attempt; end that process, then run again",
                code="run.second_writer",
            )
        self._pieces.append(data)
        self._num_bytes += len(data)
        self._newest = path, len(data)

    def _found(self, path: str) -> bytes:
        try:
            return self._storage.read(path)
        except FileNotFoundError as error:
            raise StorageError(
                f"cannot create {self._storage.root}/{path}: storage refuses the name as taken, but has no "
                "such file; try again",
                code="storage.contradicting_answers",
            ) from error

    def _publish(self) -> None:
        """Publishes the segment, and deletes its pieces.

        If storage fails, it starts again from the beginning: the bytes are the same.
        """
        path = segment_path(self._attempt, self._number)
        self._storage.put(path, lambda: self._pieces, self._num_bytes)
        self._newest = path, self._num_bytes
        first, *others = (
            piece_path(self._attempt, self._number, number + 1) for number in range(len(self._pieces))
        )
        self._number += 1
        self._pieces, self._num_bytes = [], 0
        with suppress(StorageError):  # they are no longer read: the remaining ones only take space
            self._storage.delete(first)
            self._storage.delete_all(others)


def num_taken(lines: list[bytes], room: int) -> int:
    """The number of lines for a segment that is closed once `room` more bytes are in it."""
    sizes = itertools.accumulate(map(len, lines), initial=0)
    return sum(size < room for size in itertools.islice(sizes, len(lines)))
