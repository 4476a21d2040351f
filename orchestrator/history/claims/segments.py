"""The segments of a journal: their names, and how they are read and written, whole or in pieces.

All readers get segments from here, and so does the writer:

    journal/a0003/000001.jsonl            a segment; grows while it is the newest, if files can grow
    journal/a0003/000002.p000001.jsonl    the first piece of a segment, if they cannot

The pieces of a segment, joined in order, are the bytes of the whole segment. It is published before the next
one begins, and only then its pieces are deleted, the first one first. So a missing piece means that the whole
segment exists, and a reader's position in the pieces is valid in the segment. One process writes an attempt's
journal, and no name of it is ever reused for other bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from orchestrator.errors import StorageError
from orchestrator.storage.disk import AppendHandle
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import at_once

FOLDER = "journal"
_ATTEMPT = re.compile(r"a(\d{4,})")
_FILE = re.compile(r"(\d{6,})(?:\.p(\d{6,}))?\.jsonl")
_LOOKS = 5  # at a folder whose list is not of one moment


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentPiece:
    """A file with some complete lines of a segment, and its size. Never changed."""

    path: str
    number: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRef:
    """A segment as it was when it was listed.

    `path` is the whole segment's, even while it is in `pieces` (none: it is one file). `num_bytes` is its
    size then; None if lists have no sizes.
    """

    attempt: int
    number: int
    path: str
    pieces: tuple[SegmentPiece, ...] = ()
    num_bytes: int | None = None

    @property
    def gone(self) -> tuple[str, ...]:
        """The missing pieces: a piece with a higher number exists."""
        found = {piece.number for piece in self.pieces}
        numbers = range(1, max(found, default=0))
        return tuple(piece_path(self.attempt, self.number, each) for each in numbers if each not in found)


def journal_folder(attempt: int) -> str:
    """The folder of an attempt's journal."""
    return f"{FOLDER}/a{attempt:04d}"


def segment_path(attempt: int, number: int) -> str:
    """The file of a whole segment."""
    return f"{journal_folder(attempt)}/{number:06d}.jsonl"


def piece_path(attempt: int, number: int, piece: int) -> str:
    """The file of a piece."""
    return f"{journal_folder(attempt)}/{number:06d}.p{piece:06d}.jsonl"


def journals(storage: Storage) -> list[int]:
    """The attempts that have a folder for their journal, ascending. May raise `StorageError`."""
    matches = (match for match in map(_ATTEMPT.fullmatch, storage.list(FOLDER)) if match)
    return sorted(int(match[1]) for match in matches)


def segments(storage: Storage, attempt: int) -> list[SegmentRef]:
    """An attempt's segments by number; missing ones leave gaps. May raise `StorageError`.

    A list with more names than one response holds is not of one moment. If that shows, it is listed again.
    """
    for _ in range(_LOOKS):
        found = _listed(storage, attempt)
        if not any(ref.pieces for ref in found[:-1]) and not any(ref.gone for ref in found):
            break
    return found


def read_from(storage: Storage, ref: SegmentRef, offset: int = 0) -> bytes:
    """A segment's bytes from `offset` on, as many as there are now or were when it was listed.

    A missing piece (`SegmentRef.gone`) is left out: a reader sees from the numbers of the lines what was in
    it. Raises `FileNotFoundError` if the segment is missing, and `StorageError`.
    """
    if ref.num_bytes is not None and ref.num_bytes <= offset:
        return b""
    if not ref.pieces:
        return storage.read(ref.path, offset)
    for _ in range(_LOOKS):
        try:
            return _joined(storage, ref.pieces, offset)
        except FileNotFoundError:  # the segment was published meanwhile
            now = {each.number: each for each in segments(storage, ref.attempt)}
            if ref.number not in now:
                raise
            ref = now[ref.number]
            if not ref.pieces:
                return storage.read(ref.path, offset)
    raise StorageError(
        f"storage lists the pieces of {ref.path}, but cannot find them; try again",
        code="storage.contradicting_answers",
    )


def read_first(storage: Storage, attempt: int) -> bytes:
    """The beginning of an attempt's journal: its first piece, or its first segment.

    It was written in one call. Raises as `read_from`.
    """
    whole = segment_path(attempt, 1)
    try:
        return storage.read(whole)
    except FileNotFoundError:
        if storage.traits.appends:
            raise
    try:
        return storage.read(piece_path(attempt, 1, 1))
    except FileNotFoundError:  # published meanwhile, or there is none
        return storage.read(whole)


def num_bytes(storage: Storage, ref: SegmentRef) -> int:
    """A segment's size. Raises as `read_from`."""
    return storage.size(ref.path) if ref.num_bytes is None else ref.num_bytes


def _listed(storage: Storage, attempt: int) -> list[SegmentRef]:
    wholes: dict[int, int | None] = {}
    pieces: dict[int, list[SegmentPiece]] = {}
    for listed in storage.listed(journal_folder(attempt)):
        match = _FILE.fullmatch(listed.name)
        if match is None:
            continue
        number, size = int(match[1]), listed.facts.size if listed.facts is not None else None
        if match[2] is None:
            wholes[number] = size
        else:
            path = f"{journal_folder(attempt)}/{listed.name}"
            found = SegmentPiece(
                path=path, number=int(match[2]), num_bytes=storage.size(path) if size is None else size
            )
            pieces.setdefault(number, []).append(found)
    return [
        _ref(attempt, number, pieces[number])
        if number not in wholes
        else SegmentRef(
            attempt=attempt, number=number, path=segment_path(attempt, number), num_bytes=wholes[number]
        )
        for number in sorted({*wholes, *pieces})
    ]


def _ref(attempt: int, number: int, pieces: list[SegmentPiece]) -> SegmentRef:
    pieces.sort(key=lambda piece: piece.number)
    return SegmentRef(
        attempt=attempt,
        number=number,
        path=segment_path(attempt, number),
        pieces=tuple(pieces),
        num_bytes=sum(piece.num_bytes for piece in pieces),
    )


def _joined(storage: Storage, pieces: Sequence[SegmentPiece], offset: int) -> bytes:
    wanted = list[tuple[str, int]]()
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.num_bytes
        if end > offset:
            wanted.append((piece.path, max(0, offset - begin)))
    return b"".join(at_once(storage, lambda each: storage.read(*each), wanted))


# ---------------------------------------------------------------------------------------------------- writing
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
