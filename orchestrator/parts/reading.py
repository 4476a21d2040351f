"""Reads rows of tensors of a point, of any format, straight to where they are wanted, every byte compared
with its digest.

It knows files, pieces and bytes; what a target is, its caller knows. It needs neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from blake3 import blake3

from orchestrator.parts.format1 import extents_of_format_1
from orchestrator.parts.manifest import Manifest, Name, PartDamage
from orchestrator.parts.part_file import FORMAT, PIECE_BYTES, Extent, parse_header, part_path, read_header
from orchestrator.planning.weights_sum import MODULUS
from orchestrator.storage.files import Storage

Result = TypeVar("Result")

_CHECK_BYTES = 8 << 20
_DIRECT_BYTES = 1 << 20  # smaller pieces come together, by way of the buffer: one request for many


class Target(Protocol):
    """Where rows of a tensor go: their bytes, one row after the other."""

    def view(self, start: int, num_bytes: int) -> memoryview | None:
        """These bytes of the target, to be written to; None where they cannot be reached so (on a GPU)."""

    def write(self, start: int, data: memoryview) -> None:
        """Puts `data` at byte `start`; it may be overwritten afterwards."""


class BytesTarget:
    """A target that is memory of this process."""

    def __init__(self, memory: memoryview | bytearray) -> None:
        self._memory = memoryview(memory)

    def view(self, start: int, num_bytes: int) -> memoryview | None:
        """See `Target`."""
        return self._memory[start : start + num_bytes]

    def write(self, start: int, data: memoryview) -> None:
        """See `Target`."""
        self._memory[start : start + len(data)] = data


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Rows of a tensor, and where they go."""

    rows: range
    target: Target


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Bytes of a file with one digest. Of these `length` from `skip` on are wanted at byte `at` of `target`
    (none: they are only compared).
    """

    name: str
    start: int
    num_bytes: int
    digest: str
    target: Target | None = None
    skip: int = 0
    length: int = 0
    at: int = 0

    @property
    def direct(self) -> memoryview | None:
        """Where the whole piece can be read to."""
        if self.target is None or self.length != self.num_bytes:
            return None
        return self.target.view(self.at, self.num_bytes)


def new_buffer(num_bytes: int) -> memoryview:
    """Memory of this process, taken as it is written to."""
    import numpy as np  # who looks at a run reads no tensors, and needs none

    return np.empty(num_bytes, np.uint8).data


class _Buffer:
    """Memory of `most_bytes` for what is not read straight to its target, if there is such."""

    def __init__(self, make: Callable[[int], memoryview], most_bytes: int) -> None:
        self._make, self.most_bytes, self._memory = make, most_bytes, memoryview(b"")

    def room(self, num_bytes: int) -> memoryview:
        """So many bytes of it; what it gave before is overwritten."""
        if not self._memory:
            self._memory = self._make(self.most_bytes)
        return self._memory[:num_bytes]


class PointReader:
    """The tensors of one point, whose manifest is known to be the committed one. Safe to use from threads.

    Each call takes the memory of one buffer beside the targets (`make_buffer` gives it), of at most 64 MiB
    (`read`) or 8 MiB (`check`); the headers of the files that were read stay in memory.
    """

    def __init__(
        self, storage: Storage, manifest: Manifest, make_buffer: Callable[[int], memoryview] = new_buffer
    ) -> None:
        self._storage, self._manifest, self._make_buffer = storage, manifest, make_buffer
        self._extents: dict[str, dict[Name, Extent]] = {}
        self._sums: dict[str, dict[str, int]] = {}

    @property
    def format(self) -> int:
        """Of the point."""
        return 1 if self._manifest.layout is None else FORMAT

    def read(self, wanted: Mapping[Name, Wanted]) -> None:
        """Fills all targets, file by file, each from its begin to its end. Raises `PartDamage` naming the
        file whose bytes are not the committed ones, `StorageError`; then targets hold anything.
        """
        by_file: dict[str, list[_Piece]] = {}
        for name, want in wanted.items():
            found = 0
            for file in self._manifest.files_of(name, want.rows):
                extent = self.extents(file)[name]
                by_file.setdefault(file, []).extend(self._pieces(name, extent, want))
                found += max(
                    0, min(extent.rows.stop, want.rows.stop) - max(extent.rows.start, want.rows.start)
                )
            assert found == len(want.rows), f"{found} of {len(want.rows)} rows of {name} are in the point"
        buffer = _Buffer(self._make_buffer, PIECE_BYTES)
        for file in sorted(by_file):
            self._carry_out(file, by_file[file], buffer)

    def check(self, file: str, first_byte: int = 0, end: int | None = None) -> None:
        """Compares the size of a file, and all its pieces that begin in [first_byte, end) with their digests.
        Raises as `read`.
        """
        self._again(file, lambda: self._check_size(file))
        pieces = [
            piece
            for name, extent in self.extents(file).items()
            for piece in self._pieces(name, extent, None)
            if first_byte <= piece.start and (end is None or piece.start < end)
        ]
        self._carry_out(file, pieces, _Buffer(new_buffer, _CHECK_BYTES))

    def extents(self, file: str) -> dict[Name, Extent]:
        """Which rows of which tensors lie where in a file, as its header says, which is compared with the
        point's documents first. Raises `PartDamage`.
        """
        if file not in self._extents:
            self._extents[file] = self._again(file, lambda: self._read_extents(file))
        return self._extents[file]

    def sums(self) -> dict[str, int]:
        """To each group the sum of all its rows (`planning.weights_sum`), as the headers of all files say
        (format 2). Raises as `extents`.
        """
        total: dict[str, int] = {}
        for file in self._manifest.files:
            self.extents(file)
            for group, found in self._sums[file].items():
                total[group] = (total.get(group, 0) + found) % MODULUS
        return total

    # ---------------------------------------------------------------------- headers
    def _read_extents(self, file: str) -> dict[Name, Extent]:
        manifest, entry, path = self._manifest, self._manifest.files[file], self._path(file)
        size = entry.bytes
        try:
            header = read_header(self._storage, path, size)
        except FileNotFoundError as error:
            raise PartDamage(file, "is missing") from error
        except ValueError as error:
            raise PartDamage(file, f"is not a valid safetensors file ({error})") from error
        if manifest.layout is None:
            return extents_of_format_1(manifest, file, header, size)
        found = blake3(header).hexdigest()
        if found != entry.digest:
            raise PartDamage(file, f"has a header of digest {found}, committed was {entry.digest}")
        try:
            part = parse_header(header, size)
        except ValueError as error:
            raise PartDamage(file, f"was written wrong: {error}") from error
        expected = manifest.rows_of_rank(part.rank) if part.rank < manifest.layout.world_size else {}
        saved = {name: extent.rows for name, extent in part.extents.items()}
        here = (part.layout, part_path(part.rank, part.layout.world_size), saved)
        if here != (manifest.layout, file, expected):
            raise PartDamage(
                file,
                f"is that of rank {part.rank} of {part.layout} with {len(saved)} tensors, parts.json says "
                f"{manifest.layout} with {len(expected)} tensors there",
            )
        for name, extent in part.extents.items():
            whole = manifest.tensors[name]
            shape = (len(extent.rows), *whole.shape[1:]) if whole.shape else ()
            if (extent.dtype, extent.shape) != (whole.dtype, shape):
                raise PartDamage(
                    file,
                    f"holds {'/'.join(name)} as {(extent.dtype, extent.shape)}, saved was "
                    f"{(whole.dtype, shape)}",
                )
        self._sums[file] = part.sums
        return part.extents

    # ---------------------------------------------------------------------- pieces
    def _pieces(self, name: Name, extent: Extent, want: Wanted | None) -> Iterator[_Piece]:
        """The pieces of an extent in which there are wanted rows (None: all, wanted nowhere)."""
        tensor = self._manifest.tensors[name]
        row_bytes = extent.num_bytes // len(extent.rows) if extent.rows else 0
        begin = extent.rows.start * row_bytes  # of the extent in the tensor
        low, high = (want.rows.start * row_bytes, want.rows.stop * row_bytes) if want else (0, 0)
        for number, digest in enumerate(extent.digests):
            first = number * extent.piece_bytes
            num_bytes = min(extent.piece_bytes, extent.num_bytes - first)
            start, stop = max(begin + first, low), min(begin + first + num_bytes, high)
            if want is not None and start >= stop:
                continue
            yield _Piece(
                name=f"{tensor.group}/{tensor.name}",
                start=extent.start + first,
                num_bytes=num_bytes,
                digest=digest,
                target=want.target if want else None,
                skip=start - (begin + first) if want else 0,
                length=stop - start if want else 0,
                at=start - low if want else 0,
            )

    # ---------------------------------------------------------------------- bytes
    def _again(self, file: str, act: Callable[[], Result]) -> Result:
        """`act`, again from the next copy of the file while there is one."""
        while True:
            try:
                return act()
            except PartDamage:
                if not self._storage.elsewhere(self._path(file)):
                    raise

    def _check_size(self, file: str) -> None:
        committed = self._manifest.files[file].bytes
        try:
            found = self._storage.size(self._path(file))
        except FileNotFoundError as error:
            raise PartDamage(file, "is missing") from error
        if found != committed:
            raise PartDamage(file, f"has {found} bytes, committed were {committed}")

    def _carry_out(self, file: str, pieces: Iterable[_Piece], buffer: _Buffer) -> None:
        wanted = list(pieces)
        self._again(file, lambda: self._carry_out_once(file, wanted, buffer))

    def _carry_out_once(self, file: str, pieces: Iterable[_Piece], buffer: _Buffer) -> None:
        for group in _together(sorted(pieces, key=lambda piece: piece.start), buffer.most_bytes):
            if len(group) == 1:
                self._one(file, group[0], buffer)
                continue
            start, end = group[0].start, group[-1].start + group[-1].num_bytes
            data = buffer.room(end - start)
            self._fill(file, start, data)
            for piece in group:
                part = data[piece.start - start : piece.start - start + piece.num_bytes]
                _compare(file, piece, blake3(part))
                _give(piece, part)

    def _one(self, file: str, piece: _Piece, buffer: _Buffer) -> None:
        """A piece of any length: straight to its target, or by way of the buffer."""
        target = piece.direct
        if target is not None:
            self._fill(file, piece.start, target)
            _compare(file, piece, blake3(target))
            return
        hasher = blake3()
        for done in range(0, piece.num_bytes, buffer.most_bytes):
            part = buffer.room(min(buffer.most_bytes, piece.num_bytes - done))
            self._fill(file, piece.start + done, part)
            hasher.update(part)
            _give(piece, part, done)
        _compare(file, piece, hasher)

    def _fill(self, file: str, start: int, into: memoryview) -> None:
        try:
            found = self._storage.read_into(self._path(file), start, into)
        except FileNotFoundError as error:
            raise PartDamage(file, "is missing") from error
        if found != len(into):
            raise PartDamage(file, f"ends {len(into) - found} bytes too early")

    def _path(self, file: str) -> str:
        return f"points/{self._manifest.point}/{file}"


def _together(pieces: Iterable[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Small pieces that lie one after the other, to be read at once, and each large one by itself."""
    group: list[_Piece] = []
    num_bytes = 0
    for piece in pieces:
        follows = bool(group) and group[-1].start + group[-1].num_bytes == piece.start
        small = piece.num_bytes < _DIRECT_BYTES and (not group or group[-1].num_bytes < _DIRECT_BYTES)
        if group and not (follows and small and num_bytes + piece.num_bytes <= most_bytes):
            yield group
            group, num_bytes = [], 0
        group.append(piece)
        num_bytes += piece.num_bytes
    if group:
        yield group


def _compare(file: str, piece: _Piece, hasher: blake3) -> None:
    found = hasher.hexdigest(length=len(piece.digest) // 2)
    if found != piece.digest:
        raise PartDamage(
            file,
            f"holds {piece.name} from byte {piece.start} on with digest {found}, saved was {piece.digest}",
        )


def _give(piece: _Piece, part: memoryview, done: int = 0) -> None:
    """What is wanted of `part`, which begins `done` bytes after the piece's begin."""
    first, last = max(piece.skip, done), min(piece.skip + piece.length, done + len(part))
    if piece.target is not None and first < last:
        piece.target.write(piece.at + first - piece.skip, part[first - done : last - done])
