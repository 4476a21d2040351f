"""The segments of a journal: their names, and their bytes, in one file or still in pieces.

All readers get segments from here, and the writer gets its names:

    journal/a0003/000001.jsonl            a segment; grows while it is the newest, if files can grow
    journal/a0003/000002.p000001.jsonl    the first piece of a segment, if they cannot (`segment_log`)

The pieces of a segment, joined in order, are the bytes of the whole segment. It is published before the next
one begins, and only then its pieces are deleted, the first one first. So a missing piece means that the whole
segment exists, and a reader's position in the pieces is valid in the segment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import StorageError
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
