"""The file that one rank writes at a save: its rows of the state, as safetensors.

    8 bytes                 length of the header that follows (little-endian), as in every safetensors file
    header                  JSON, padded with spaces: to each tensor its dtype, shape and place, and
                            `__metadata__`, whose values are texts:
        format              "pt" (required by transformers)
        point               the name of the point it was saved for, e.g. 00000480-a0003-g0007 (a fork keeps
                            the file unchanged)
        part                JSON: format 2, rank, num_shards, num_replicas, piece_bytes
        rows                JSON: to each tensor [first row, row after the last], of the whole tensor
        pieces              JSON: to each tensor the blake3 digests (32 hex digits each) of its bytes, cut
                            into pieces of `piece_bytes`
        sums                JSON: to each group the sum of its rows here, 32 hex digits
                            (`planning.state.state_layout`)
    bytes of the tensors    one after the other without gaps, the widest types first: names are
                            `model/<name>` and `optimizer/<name>`, rows in their order

**The digest of such a file is the blake3 of its length and header.** The header has the digests of the
pieces, and these guard every other byte. The file is thus hashed once while it is written. A reader of some
rows verifies the pieces that contain them, and need not read the whole file to trust a part.

`safetensors_name` and `num_bytes` map torch's names of number types to those of safetensors files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.errors import ResumePointError
from orchestrator.planning.state.state_layout import SUM_MODULUS, Layout, StateTensor, row_seed, rows_sum
from orchestrator.records.points import FileEntry
from orchestrator.storage.files import Storage

# torch's name of a type → its name in safetensors files, and the bytes of one number.
SAFETENSORS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


def safetensors_name(dtype: str) -> str:
    """Returns the name in safetensors files. Raises `ResumePointError` for an unknown type."""
    return _known(dtype)[0]


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the size of a tensor in bytes. Raises `ResumePointError` for an unknown type."""
    return math.prod(shape) * _known(dtype)[1]


def _known(dtype: str) -> tuple[str, int]:
    if dtype not in SAFETENSORS:
        raise ResumePointError(
            f"a tensor has the type {dtype}, but this version writes only {', '.join(SAFETENSORS)}; train "
            "with one of these",
            code="model.unsupported_dtype",
        )
    return SAFETENSORS[dtype]


FORMAT = 2
FOLDER = "state"  # the folder of a point that contains its parts
PIECE_BYTES = 64 << 20
LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins
_ALIGN_BYTES = 64  # the tensors begin at a multiple of it
_FIRST_BYTES = 64 << 10  # most headers fit into it: one request
_MOST_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_DIGEST_BYTES = 16  # of a piece
_METADATA = "__metadata__"
_SUM_BLOCK_BYTES = 8 << 20  # between two checks whether the part is still wanted


def goes_on() -> None:
    """The default `check` while a part is made: never raises. A check that raises ends the work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRows:
    """Rows of a tensor that a rank writes.

    `data` is their bytes, one row after the other, little-endian. `dtype` is torch's name.
    """

    tensor: StateTensor
    dtype: str
    rows: range
    data: memoryview


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFile:
    """A part that is ready to be written.

    `path` is relative to the point's folder. `content` is the header and then the bytes of the tensors, in
    views of at most `PIECE_BYTES`. `sums` has a sum for each group.
    """

    path: str
    header: bytes
    content: tuple[memoryview, ...]
    sums: dict[str, int]

    @property
    def entry(self) -> FileEntry:
        """Its path, size and digest, as COMMIT lists them."""
        size = sum(map(len, self.content))
        return FileEntry(path=self.path, bytes=size, digest=blake3(self.header).hexdigest())


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The place of rows of a tensor in a file of a point, one row after the other from byte `start` on.

    `digests` are those of their bytes, cut into pieces of `piece_bytes`, in order. The last piece may be
    shorter.
    """

    dtype: str
    shape: tuple[int, ...]  # of these rows
    rows: range
    start: int
    num_bytes: int
    digests: tuple[str, ...]
    piece_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PartHeader:
    """The contents of a part's header. `extents` are by (group, name)."""

    point: str
    rank: int
    layout: Layout
    sums: dict[str, int]
    extents: dict[tuple[str, str], Extent]


def part_path(rank: int, world_size: int) -> str:
    """Returns the path of a rank's part in the point's folder."""
    return f"{FOLDER}/{rank:05d}-of-{world_size:05d}.safetensors"


def piece_digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the digest of a piece: the first 128 bits of its blake3, as 32 hex digits."""
    return blake3(data).hexdigest(length=_DIGEST_BYTES)


# ---------------------------------------------------------------------------------------------------- writing
def make_part(
    point: str, layout: Layout, rank: int, parts: Iterable[PartRows], check: Callable[[], None] = goes_on
) -> PartFile:
    """Builds the part of `rank`, hashed. Tensors without rows are left out.

    Its `content` are views of the data of `parts`, which must not change until it is written. `check` is
    called between pieces. Raises what `check` raises, and `ResumePointError` for a type of numbers that files
    cannot hold.
    """
    written = sorted(
        (part for part in parts if part.rows),
        key=lambda part: (-part.tensor.itemsize, part.tensor.group, part.tensor.name),
    )
    laid = list[_Laid]()
    for part in written:
        laid.append(_lay(part, laid[-1].stop if laid else 0, check))
    sums: dict[str, int] = {}
    for each in laid:
        sums[each.group] = (sums.get(each.group, 0) + each.sum) % SUM_MODULUS
    header = _header(point, layout, rank, laid, sums)
    return PartFile(
        path=part_path(rank, layout.world_size),
        header=header,
        content=(memoryview(header), *(piece for each in laid for piece in each.pieces)),
        sums=sums,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Laid:
    """Rows of a tensor at their place in the file: bytes [start, stop) after the header.

    They are in pieces with their digests. `name` is the tensor's in the file.
    """

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    rows: range
    start: int
    stop: int
    pieces: list[memoryview]
    digests: list[str]
    sum: int


def _lay(part: PartRows, start: int, check: Callable[[], None]) -> _Laid:
    """Hashes and sums rows for the place from byte `start` on."""
    name, tensor = f"{part.tensor.group}/{part.tensor.name}", part.tensor
    shape = (len(part.rows), *tensor.shape[1:]) if tensor.shape else ()
    data = part.data.cast("B") if part.data.nbytes else memoryview(b"")
    expected = num_bytes(part.dtype, shape)
    assert len(data) == expected, f"{name} {part.dtype} {shape} has {len(data)} bytes, not {expected}"
    pieces, digests = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)], []
    for piece in pieces:
        check()
        digests.append(piece_digest(piece))
    return _Laid(
        name=name,
        group=tensor.group,
        dtype=part.dtype,
        shape=shape,
        rows=part.rows,
        start=start,
        stop=start + len(data),
        pieces=pieces,
        digests=digests,
        sum=part_sum(part, check),
    )


def _header(point: str, layout: Layout, rank: int, laid: Sequence[_Laid], sums: Mapping[str, int]) -> bytes:
    """Returns the file's length and header."""
    tensors = {
        each.name: {
            "dtype": safetensors_name(each.dtype),
            "shape": list(each.shape),
            "data_offsets": [each.start, each.stop],
        }
        for each in laid
    }
    this = {
        "format": FORMAT,
        "rank": rank,
        "num_shards": layout.num_shards,
        "num_replicas": layout.num_replicas,
        "piece_bytes": PIECE_BYTES,
    }
    metadata = {
        "format": "pt",
        "point": point,
        "part": _text(this),
        "rows": _text({each.name: [each.rows.start, each.rows.stop] for each in laid}),
        "pieces": _text({each.name: " ".join(each.digests) for each in laid}),
        "sums": _text({group: f"{total:032x}" for group, total in sorted(sums.items())}),
    }
    text = orjson.dumps({_METADATA: metadata, **tensors})
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGN_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def part_sum(part: PartRows, check: Callable[[], None] = goes_on) -> int:
    """Returns the sum of rows (`planning.state.state_layout`). `check` as in `make_part`."""
    import numpy as np  # reading a run needs no sums, and thus no numpy

    tensor, total = part.tensor, 0
    seed = row_seed(tensor.group, tensor.name, part.dtype, tensor.shape)
    matrix = np.frombuffer(part.data, np.uint8).reshape(len(part.rows), tensor.row_bytes)
    block = max(1, _SUM_BLOCK_BYTES // max(1, tensor.row_bytes))
    for first in range(0, len(matrix), block):
        check()
        total += rows_sum(matrix[first : first + block], seed, part.rows.start + first)
    return total % SUM_MODULUS


def write_part(
    storage: Storage, point: str, part: PartFile, check: Callable[[], None] = goes_on
) -> FileEntry:
    """Writes a part into the folder of `point`, whole and durable; returns its entry in COMMIT.

    `check` is called before each piece. Raises `StorageError`, and what `check` raises. Then no part of the
    file is left, unless even its removal failed.
    """

    def pieces() -> Iterator[memoryview]:
        for piece in part.content:
            check()
            yield piece

    entry, folder = part.entry, f"points/{point}"
    storage.put(f"{folder}/{part.path}", pieces, entry.bytes)
    storage.sync(f"{folder}/{FOLDER}")
    return entry


def _text(value: Any) -> str:
    return orjson.dumps(value).decode()


# ---------------------------------------------------------------------------------------------------- reading
def read_header(storage: Storage, path: str, size: int) -> bytes:
    """Reads the length and the header of a safetensors file of `size` bytes at `path` in the storage.

    It takes at most two requests, most often one. Raises `ValueError` with what is wrong with the file,
    `FileNotFoundError` and `StorageError` as `Storage.read`.
    """
    first = bytes(storage.read_part(path, 0, min(size, _FIRST_BYTES)))
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if len(first) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, _MOST_HEADER_BYTES):
        raise ValueError(f"its header would have {length} bytes, the file has {size}")
    end = LENGTH_BYTES + length
    if end > len(first):
        first += storage.read_part(path, len(first), end - len(first))
    if len(first) < end:
        raise ValueError(f"its header has {end} bytes, {len(first)} can be read")
    return first[:end]


def parse_header(header: bytes, size: int) -> PartHeader:
    """Parses a header (with its length) of a file of `size` bytes.

    Raises `ValueError` if it is not the header of a part as this version writes them, with a digest for every
    byte of the file.
    """
    try:
        return _parsed(header, size)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"its header is not that of a part: {type(error).__name__} {error}") from error


def _parsed(header: bytes, size: int) -> PartHeader:
    content: dict[str, Any] = orjson.loads(header[LENGTH_BYTES:])
    metadata = content.pop(_METADATA)
    part, rows = orjson.loads(metadata["part"]), orjson.loads(metadata["rows"])
    digests, sums = orjson.loads(metadata["pieces"]), orjson.loads(metadata["sums"])
    if (
        part["format"] != FORMAT
        or part["piece_bytes"] < 1
        or not content.keys() == rows.keys() == digests.keys()
    ):
        raise ValueError("its header is not that of a part of format 2")
    names = {name: (torch_name, width) for torch_name, (name, width) in SAFETENSORS.items()}
    piece_bytes, at = int(part["piece_bytes"]), 0
    extents: dict[tuple[str, str], Extent] = {}
    for name, form in content.items():
        dtype, width = names[form["dtype"]]
        shape, (begin, end) = tuple(map(int, form["shape"])), map(int, form["data_offsets"])
        first, last = map(int, rows[name])
        whole = tuple(digests[name].split())
        extent = Extent(
            dtype=dtype,
            shape=shape,
            rows=range(first, last),
            start=len(header) + begin,
            num_bytes=end - begin,
            digests=whole,
            piece_bytes=piece_bytes,
        )
        group, _, own = name.partition("/")
        fits = (
            begin == at
            and extent.num_bytes == math.prod(shape) * width
            and last - first == (shape[0] if shape else 1)
            and list(map(len, whole)) == [2 * _DIGEST_BYTES] * -(-extent.num_bytes // piece_bytes)
        )
        if not fits:
            raise ValueError(f"its header says of {name} what does not fit together")
        extents[group, own] = extent
        at = end
    if len(header) + at != size:
        raise ValueError(f"its header speaks of {len(header) + at} bytes, the file has {size}")
    layout = Layout(num_shards=int(part["num_shards"]), num_replicas=int(part["num_replicas"]))
    return PartHeader(
        point=str(metadata["point"]),
        rank=int(part["rank"]),
        layout=layout,
        sums={group: int(text, 16) for group, text in sums.items()},
        extents=extents,
    )
