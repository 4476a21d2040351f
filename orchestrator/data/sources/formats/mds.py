"""`mds`: one record per sample of the shards that `index.json` names, as written by MosaicML Streaming.

A shard is: the number n of samples (uint32), n + 1 offsets (uint32), a JSON object that describes the
columns, and the samples. A sample is the sizes (uint32) of its columns without a fixed size, and the columns.
Nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from typing_extensions import override

from orchestrator.data.sources.access.compressed import ExactReader, decoded
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Made, Whole, packed
from orchestrator.data.sources.formats.base import Format, HeadedFormat, Parser
from orchestrator.data.sources.formats.mds_index import (
    INDEX,
    SUFFIXES,
    chosen_shards,
    hashed,
    require_agreement,
)
from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    BadRecordError,
    Content,
    WrongFieldError,
    names,
)
from orchestrator.data.sources.records.documents import described, utf8_text
from orchestrator.data.sources.records.line_records import Batch
from orchestrator.errors import ConfigError, DataError
from orchestrator.records.tokens import Int64Array

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

# Samples are yielded in batches of about this many bytes.
_BATCH_BYTES = 1 << 20
# Encodings that are numbers: their little-endian types, and the functions that parse texts.
_NUMBERS = {"int": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8"}
_NUMBERS |= {f"int{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)}
_NUMBERS |= {f"uint{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {"str_int": int, "str_float": float, "str_decimal": Decimal}
_SIZE = "record.sample_size"


class MosaicShards(HeadedFormat):
    """One record per sample."""

    name = "mds"
    suffixes = SUFFIXES
    counts_records = True
    unit = "sample"
    has_index = True

    def passed_over(self, names: Sequence[str]) -> list[str]:
        """None: the dataset's index determines its files, not their names."""
        del names
        return []

    def choose(self, folder: str, names: Sequence[str]) -> list[str]:
        """The shards that `index.json` names, in compressed form if both forms exist.

        Raises `ConfigError` if it contradicts the names of the files.
        """
        if INDEX not in names:
            raise ConfigError(
                f"{folder}: it has no {INDEX}, so it is not an MDS dataset; give the folder of one split, or "
                "the shards themselves as a glob",
                code="data.missing_index",
            )
        return list(chosen_shards(folder, names))

    @override
    def check_index(self, folder: str, rows: Mapping[str, FileRow]) -> None:
        """Compares `index.json` with the sizes and heads of its shards."""
        require_agreement(folder, rows)

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """Raises `DataError` if the shard lacks a column, or its hash differs from the
        index.
        """
        del part, whole
        shard = ExactReader(hashed(decoded(file, row.path, row.bytes), file, row.path))
        num = int.from_bytes(shard.read(4, "the number of samples"), "little")
        if 4 * (num + 1) > MAX_RECORD_BYTES:
            raise OSError(f"no MDS shard: it begins with {num:,} as the number of its samples")
        offsets = np.frombuffer(shard.read(4 * (num + 1), "the offsets"), "<u4").astype(np.int64)
        sizes = np.diff(offsets)
        if offsets[0] < shard.place or (sizes < 0).any():
            raise OSError("no MDS shard: its offsets are not in order")
        columns = _columns(file, shard.read(int(offsets[0]) - shard.place, "the columns"), content)
        begin = 0
        for stop in _batch_ends(sizes):
            if sizes[begin] > MAX_RECORD_BYTES:
                shard.skip(int(sizes[begin]), f"sample {begin}")
                yield begin + 1, Whole(None, int(sizes[begin])), begin
            else:
                found = [
                    shard.read(n, f"sample {begin + i}") for i, n in enumerate(sizes[begin:stop].tolist())
                ]
                yield begin + 1, Made(packed(found), columns.fields), begin
            begin = stop
        if not shard.at_end():
            raise OSError(f"something follows its last sample at byte {shard.place}")

    @override
    def parser(self, content: Content) -> Parser:
        return lambda record: described(record, content)


def _batch_ends(sizes: Int64Array) -> Iterator[int]:
    """Ends of batches of about `_BATCH_BYTES`, or of one sample that is larger."""
    num_bytes = 0
    for index, size in enumerate(sizes.tolist()):
        if num_bytes and num_bytes + size > _BATCH_BYTES:
            yield index
            num_bytes = 0
        num_bytes += size
    if len(sizes):
        yield len(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Columns:
    """The columns of a shard, in the order of a sample, and those that are needed.

    A size is None if each sample stores its own.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    needed: frozenset[str]

    def fields(self, sample: bytes) -> dict[str, Any]:
        """The sample's values in the needed columns. Raises `BadRecordError`."""
        num = sum(size is None for size in self.sizes)
        if len(sample) < 4 * num:
            raise BadRecordError(
                f"it has {len(sample)} bytes, too few for the sizes of {num} columns", code=_SIZE
            )
        given, at, found = iter(np.frombuffer(sample, "<u4", num).tolist()), 4 * num, dict[str, Any]()
        for name, encoding, fixed in zip(self.names, self.encodings, self.sizes, strict=True):
            size = next(given) if fixed is None else fixed
            if name in self.needed:
                found[name] = _decode(name, encoding, sample[at : at + size])
            at += size
        if at != len(sample):
            raise BadRecordError(f"it has {len(sample)} bytes, and its columns take {at}", code=_SIZE)
        return found


def _decode(name: str, encoding: str, data: bytes) -> Any:
    if encoding in ("str", "bytes"):
        return utf8_text(data)
    try:
        if encoding in _FROM_TEXT:
            return _FROM_TEXT[encoding](utf8_text(data))
        if encoding in _NUMBERS:
            (number,) = np.frombuffer(data, _NUMBERS[encoding])
            return number.item()
    except (ValueError, ArithmeticError) as error:
        raise BadRecordError(
            f"column {name!r} holds no {encoding}: {error}", code="record.field_value"
        ) from error
    if encoding == "json":
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise BadRecordError(f"column {name!r} is not JSON: {error}", code="record.not_json") from error
    raise WrongFieldError(
        f"column {name!r} is encoded as {encoding}, text, JSON or a number is expected",
        code="record.field_type",
    )


def _columns(file: InputFile, config: bytes, content: Content) -> _Columns:
    try:
        facts = orjson.loads(config)
        given = tuple(facts["column_names"])
        columns = {(f if f in given else f.partition(".")[0]): f for f in reversed(content.read)}
        found = _Columns(
            names=given,
            encodings=tuple(facts["column_encodings"]),
            sizes=tuple(facts["column_sizes"]),
            needed=frozenset(columns)
            | (set(BESIDE_MESSAGES) & set(given) if content.messages_at else set()),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise OSError(f"no MDS shard: what its columns are cannot be read: {error!r}") from error
    if not len(found.names) == len(found.encodings) == len(found.sizes):
        raise OSError("no MDS shard: it does not say of each column what it is")
    for name, field in columns.items():
        if name not in given:
            raise DataError(
                f"{file.name}: no column `{name}`; it has: {names(dict.fromkeys(given))}. Set "
                f"{content.setting_of(field)}",
                code="data.missing_field",
            )
    return found


FORMATS: tuple[Format, ...] = (MosaicShards(),)
