"""Where a journal's lines become durable: in files that grow, or, where a store has none, in pieces.

It knows bytes that end with a newline and the names of `segments`; it knows no line's meaning. One process
writes an attempt's journal, and no name of it is ever used for other bytes.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Protocol

from orchestrator.errors import StorageError
from orchestrator.history.segments import piece_path, segment_path
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage

SEGMENT_BYTES = 16 << 20
SEGMENT_PIECES = 256
PIECES_EVERY_S = 5.0  # the least time between pieces that nobody waits for: each is an object, and a request


class SegmentLog(Protocol):
    """The newest segment of a journal, and those that follow. For one thread at a time."""

    least_flush_s: float  # what writes without being asked to waits so long between two flushes

    def write(self, lines: list[bytes]) -> None:
        """Make the lines durable, beginning a new segment whenever one is full; takes out of `lines` what is
        durable, also when it raises.

        After a `StorageError` the next call gets the lines that were left, with new ones after them.
        """
        ...

    def why_lost(self) -> str:
        """How it shows that the newest name does not lead to what was written here any more, because somebody
        deleted or replaced it; empty if all is well. Raises `StorageError` if that cannot be determined.
        """
        ...

    def close(self) -> None:
        """Nothing follows in the newest segment. Raises `StorageError`; all that was written is durable."""
        ...


def segment_log(storage: Storage, attempt: int, segment_bytes: int) -> SegmentLog:
    """The one for this storage. A segment is closed when it has reached `segment_bytes`."""
    if storage.traits.appends:
        return GrowingSegments(storage, attempt, segment_bytes)
    return SegmentsInPieces(storage, attempt, segment_bytes)


class GrowingSegments:
    """A file for each segment. What a failed call wrote comes again, in a new segment: so a segment may end
    in lines that stand in the next one, too, and in a part of one.
    """

    least_flush_s = 0.0

    def __init__(self, storage: Storage, attempt: int, segment_bytes: int) -> None:
        self._storage, self._attempt, self._segment_bytes = storage, attempt, segment_bytes
        self.num_segments = 0
        self._file: AppendHandle | None = None
        self._newest_file: AppendHandle | None = None  # of the newest segment, also when that is closed

    def write(self, lines: list[bytes]) -> None:
        """See `SegmentLog`."""
        try:
            while lines:
                if self._file is None:
                    self._file = self._newest_file = self._new_segment()
                taken = num_taken(lines, self._segment_bytes - self._file.num_bytes)
                self._file.write(b"".join(lines[:taken]))
                self._file.sync()
                if self._file.num_bytes >= self._segment_bytes:
                    self.close()  # if that fails the lines come again: readers take each once
                del lines[:taken]
        except BaseException:
            with suppress(Exception):  # the first failure is the one to tell
                self.close()
            raise

    def why_lost(self) -> str:
        """See `SegmentLog`."""
        return self._newest_file.why_lost() if self._newest_file else ""

    def close(self) -> None:
        """See `SegmentLog`."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _new_segment(self) -> AppendHandle:
        path = segment_path(self._attempt, self.num_segments + 1)
        try:
            file = self._storage.append(path)
        except StorageError:
            # segments are numbered without gaps: one that was created although that failed keeps its number
            with suppress(StorageError):
                self.num_segments += self._storage.exists(path)
            raise
        self.num_segments += 1
        return file


class SegmentsInPieces:
    """A new object for each call, created exclusively, with whole lines: no line is ever torn. A segment that
    is full is published as one object, and then its pieces are deleted; the next one begins only then.

    The claim gives the attempt's journal to one launch, so a create that is refused shows that another
    process writes it by mistake.

    An object that is put again and again would not do: a request that is repeated late could put an older
    content in the place of a newer one. Here what comes late finds its name taken, or makes a piece that
    stood there before, of a segment that is published.

    A piece of which nobody knows whether it was created is tried again, with the same lines, until that is
    known. Until a segment is published it is in memory, too: 16 MiB.
    """

    least_flush_s = PIECES_EVERY_S

    def __init__(
        self, storage: Storage, attempt: int, segment_bytes: int, segment_pieces: int = SEGMENT_PIECES
    ) -> None:
        self._storage, self._attempt = storage, attempt
        self._segment_bytes, self._segment_pieces = segment_bytes, segment_pieces
        self._number = 1  # of the segment
        self._pieces: list[bytes] = []  # of the segment, durable
        self._num_bytes = 0  # in them
        self._tried = 0  # the lines of the next piece, from its first try on
        self._newest = ("", 0)  # path and bytes of what was published last

    def write(self, lines: list[bytes]) -> None:
        """See `SegmentLog`."""
        while lines or self._is_full():
            if self._is_full():
                self._publish()
                continue
            self._tried = self._tried or num_taken(lines, self._segment_bytes - self._num_bytes)
            data = b"".join(lines[: self._tried])
            self._create(data)
            del lines[: self._tried]
            self._tried = 0

    def why_lost(self) -> str:
        """See `SegmentLog`."""
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

    def close(self) -> None:
        """See `SegmentLog`."""
        if self._pieces:
            self._publish()

    def _is_full(self) -> bool:
        return self._num_bytes >= self._segment_bytes or len(self._pieces) >= self._segment_pieces

    def _create(self, data: bytes) -> None:
        path = piece_path(self._attempt, self._number, len(self._pieces) + 1)
        if not self._storage.create(path, data) and self._found(path) != data:
            raise StorageError(
                f"{self._storage.root}/{path} holds other lines than this process wrote: somebody else "
                "writes the journal of this attempt; end that process, then run again"
            )
        self._pieces.append(data)
        self._num_bytes += len(data)
        self._newest = path, len(data)

    def _found(self, path: str) -> bytes:
        try:
            return self._storage.read(path)
        except FileNotFoundError as error:
            raise StorageError(
                f"cannot create {self._storage.root}/{path}: it is taken, and nothing is there; try again"
            ) from error

    def _publish(self) -> None:
        """Publish the segment, and take its pieces away. Anew from the begin if storage fails: the bytes are
        the same.
        """
        path = segment_path(self._attempt, self._number)
        self._storage.put(path, lambda: self._pieces, self._num_bytes)
        self._newest = path, self._num_bytes
        first, *others = (
            piece_path(self._attempt, self._number, number + 1) for number in range(len(self._pieces))
        )
        self._number += 1
        self._pieces, self._num_bytes = [], 0
        with suppress(StorageError):  # nobody reads them any more: what stays costs its place
            self._storage.delete(first)
            self._storage.delete_all(others)


def num_taken(lines: list[bytes], room: int) -> int:
    """How many of the lines go into a segment that is closed when `room` more bytes are in it."""
    sizes = itertools.accumulate(map(len, lines), initial=0)
    return sum(size < room for size in itertools.islice(sizes, len(lines)))
