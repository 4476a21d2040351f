"""The segments of a journal: their names, and their bytes, whether one lies in one file or still in pieces.

It knows no line. Every reader gets segments from here, and the writer its names:

    journal/a0003/000001.jsonl            a segment; grows while it is the newest, where files can grow
    journal/a0003/000002.p000001.jsonl    the first piece of a segment, where they cannot (`segment_log`)

A segment's pieces, one after the other, are what the whole segment will be. It is published before the next
one begins, and only then its pieces are deleted, the first one first. So a piece that is gone means that the
whole segment is there, and what a reader has counted of the pieces holds for the segment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import StorageError
from orchestrator.storage.at_once import at_once
from orchestrator.storage.files import Storage

FOLDER = "journal"
_ATTEMPT = re.compile(r"a(\d{4,})")
_FILE = re.compile(r"(\d{6,})(?:\.p(\d{6,}))?\.jsonl")
_LOOKS = 5  # at a folder whose names are of several moments


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A file that has some whole lines of a segment, and its size. Never changed."""

    path: str
    number: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRef:
    """A segment as it was when it was listed. `path` is the whole segment's, also while it lies in `pieces`
    (none: it is one file). `num_bytes`: what it had then; None where lists do not say that.
    """

    attempt: int
    number: int
    path: str
    pieces: tuple[Piece, ...] = ()
    num_bytes: int | None = None

    @property
    def gone(self) -> tuple[str, ...]:
        """The pieces that must have been there: one with a higher number is."""
        found = {piece.number for piece in self.pieces}
        numbers = range(1, max(found, default=0))
        return tuple(piece_path(self.attempt, self.number, each) for each in numbers if each not in found)


def journal_folder(attempt: int) -> str:
    """Where an attempt's journal lies."""
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
    """An attempt's segments by number; those that are gone leave gaps. May raise `StorageError`.

    A list of more names than one answer holds is not of one moment. Where that shows, it is made again.
    """
    for _ in range(_LOOKS):
        found = _listed(storage, attempt)
        if not any(ref.pieces for ref in found[:-1]) and not any(ref.gone for ref in found):
            break
    return found


def read_from(storage: Storage, ref: SegmentRef, offset: int = 0) -> bytes:
    """A segment's bytes from `offset` on, as many as are there now or were when it was listed.

    Raises `FileNotFoundError` if the segment is gone, `StorageError` if one of its pieces is, or it cannot be
    read.
    """
    if ref.num_bytes is not None and ref.num_bytes <= offset:
        return b""
    if not ref.pieces:
        return storage.read(ref.path, offset)
    for _ in range(_LOOKS):
        if ref.gone:
            raise StorageError(
                f"{ref.gone[0]} is gone, and so are the lines in it, while later ones are there; restore it"
            )
        try:
            return _joined(storage, ref.pieces, offset)
        except FileNotFoundError:  # the segment was published since
            now = {each.number: each for each in segments(storage, ref.attempt)}
            if ref.number not in now:
                raise
            ref = now[ref.number]
            if not ref.pieces:
                return storage.read(ref.path, offset)
    raise StorageError(f"the pieces of {ref.path} are listed, and cannot be found; look again")


def read_first(storage: Storage, attempt: int) -> bytes:
    """The begin of an attempt's journal, all of which was written at once: its first piece, or its first
    segment. Raises as `read_from`.
    """
    whole = segment_path(attempt, 1)
    try:
        return storage.read(whole)
    except FileNotFoundError:
        if storage.traits.appends:
            raise
    try:
        return storage.read(piece_path(attempt, 1, 1))
    except FileNotFoundError:  # published in between, or there is none
        return storage.read(whole)


def num_bytes(storage: Storage, ref: SegmentRef) -> int:
    """A segment's size. Raises as `read_from`."""
    return storage.size(ref.path) if ref.num_bytes is None else ref.num_bytes


def _listed(storage: Storage, attempt: int) -> list[SegmentRef]:
    wholes: dict[int, int | None] = {}
    pieces: dict[int, list[Piece]] = {}
    for listed in storage.listed(journal_folder(attempt)):
        match = _FILE.fullmatch(listed.name)
        if match is None:
            continue
        number, size = int(match[1]), listed.facts.size if listed.facts is not None else None
        if match[2] is None:
            wholes[number] = size
        else:
            path = f"{journal_folder(attempt)}/{listed.name}"
            found = Piece(
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


def _ref(attempt: int, number: int, pieces: list[Piece]) -> SegmentRef:
    pieces.sort(key=lambda piece: piece.number)
    return SegmentRef(
        attempt=attempt,
        number=number,
        path=segment_path(attempt, number),
        pieces=tuple(pieces),
        num_bytes=sum(piece.num_bytes for piece in pieces),
    )


def _joined(storage: Storage, pieces: Sequence[Piece], offset: int) -> bytes:
    wanted = list[tuple[str, int]]()
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.num_bytes
        if end > offset:
            wanted.append((piece.path, max(0, offset - begin)))
    return b"".join(at_once(storage, lambda each: storage.read(*each), wanted))
