"""`mds`: one record per sample of the shards that `index.json` names, as written by MosaicML Streaming.

A shard is: the number n of samples (uint32), n + 1 offsets (uint32), a JSON object that describes the
columns, and the samples. A sample is the sizes (uint32) of its columns without a fixed size, and the columns.
Nothing is ever unpickled.

An entry of the index has the number of samples, the basename, size and hashes of the shard (`raw_data`), the
same of its compressed form (`zip_data`), and the content of the shard's head: the columns, the compression,
the version. A start compares names, sizes and heads. The hashes cover whole files, so they are compared while
a shard is read.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import xxhash
from typing_extensions import override

from orchestrator.data.sources.access.compressed import (
    COMPRESSED,
    DAMAGE,
    ExactReader,
    damage_code,
    decoded,
    with_compressed,
)
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Made, Whole, packed
from orchestrator.data.sources.formats.base import Format, HeadedFormat, Parser
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
from orchestrator.storage.parallel import in_threads

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow

INDEX = "index.json"
CONTRADICTING = "data.contradicting_index"
SUFFIXES = with_compressed(".mds")
_VERSION = 2
# The head of a shard is read in one piece of this many bytes, if it fits.
_HEAD_BYTES = 1 << 16
_UNREADABLE: tuple[type[Exception], ...] = (*DAMAGE, orjson.JSONDecodeError)
_Entry = dict[str, Any]
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
        """Raises `DataError` if the shard lacks a column, or its hash differs from the index."""
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


# -------------------------------------------------------------------------------------------------- the index
@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHead:
    """The head of a shard: the number of samples, the bytes of the whole uncompressed shard, and its
    columns.
    """

    samples: int
    raw_bytes: int
    facts: Mapping[str, Any]


def chosen_shards(folder: str, names: Sequence[str]) -> dict[str, _Entry]:
    """The shards that the folder's index names, with their entries, in compressed form if both forms exist.

    Raises `ConfigError` if the index cannot be read, or contradicts the names of the files.
    """
    found, absent, there, known = dict[str, _Entry](), list[str](), set(names), set[str]()
    for entry in _entries(folder):
        if entry.get("format") != "mds":
            raise ConfigError(
                f"{folder}/{INDEX}: it names shards of format {entry.get('format')!r}, mds is expected",
                code=CONTRADICTING,
            )
        files = [file for _, file in _files(entry)]
        if not files:
            raise ConfigError(
                f"{folder}/{INDEX}: it names no file of a shard; restore it", code=CONTRADICTING
            )
        if twice := known.intersection(files):
            raise ConfigError(
                f"{folder}/{INDEX}: it names {min(twice)} as a file of two shards; restore it",
                code=CONTRADICTING,
            )
        known.update(files)
        present = [name for name in files if name in there]
        if present and not present[0].endswith(SUFFIXES):
            raise ConfigError(
                f"{folder}/{present[0]}: compressed by {entry.get('compression')!r}, which is not supported; "
                "write the shards with zstd, gz or bz2, or without compression",
                code="data.unsupported_compression",
            )
        if present:
            found[present[0]] = entry
        else:
            absent.append(files[0])
    if absent:
        raise ConfigError(
            f"{folder}: {INDEX} names {len(found) + len(absent)} shards, and {len(absent)} are "
            f"missing, e.g. {absent[0]}; put them back",
            code=CONTRADICTING,
        )
    folders = {os.path.dirname(name) for name in found}
    surplus = {n for n in there - known if n.endswith(SUFFIXES) and os.path.dirname(n) in folders}
    if surplus:
        raise ConfigError(
            f"{folder}: {INDEX} names {len(found)} shards, and {len(surplus)} other shards lie beside them, "
            f"e.g. {min(surplus)}; restore {INDEX}, move the other shards away, or give the shards to read "
            "as a glob",
            code=CONTRADICTING,
        )
    return found


def require_agreement(folder: str, rows: Mapping[str, FileRow]) -> None:
    """Compares the index with the sizes and the heads of the shards.

    `rows` are the chosen shards by their names in the folder. Raises `ConfigError` for the first that
    differs, `DataError` if one cannot be read.
    """
    named = [(name, entry) for entry in _entries(folder) for _, name in _files(entry)]
    shards = [(name, entry, rows[name].bytes) for name, entry in named if name in rows]
    in_threads(partial(_compare, folder), shards)


def hashed(pieces: Iterator[bytes], file: InputFile, path: str) -> Iterator[bytes]:
    """Yields the pieces of an uncompressed shard and verifies its hashes.

    Raises `DataError` after the last piece if an index beside the shard has another hash for it. `path` is
    the shard's path below the source's folder.
    """
    name, expected = _expected_hashes(file, path)
    hashers = {kind: hasher for kind in expected if (hasher := _hasher(kind)) is not None}
    for piece in pieces:
        for hasher in hashers.values():
            hasher.update(piece)
        yield piece
    for kind, hasher in hashers.items():
        if hasher.hexdigest() != expected[kind]:
            raise DataError(
                f"{file.name}: its {kind} is {hasher.hexdigest()}, and {name} says {expected[kind]}; restore "
                "the shard or the index",
                code=CONTRADICTING,
            )


def _entries(folder: str) -> list[_Entry]:
    try:
        with open_input(folder, INDEX) as file:
            index = orjson.loads(file.read_at(0, file.size))
            shards = index["shards"]
    except (OSError, KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise ConfigError(
            f"{folder}/{INDEX}: cannot be read: {error!r}; restore it", code="data.unreadable_index"
        ) from error
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        raise ConfigError(
            f"{folder}/{INDEX}: it has no list of shards; restore it", code="data.unreadable_index"
        )
    for shard in shards:
        for key in ("raw_data", "zip_data"):
            facts = shard.get(key) or {}
            if not isinstance(facts, dict) or not isinstance(facts.get("hashes") or {}, dict):
                raise ConfigError(
                    f"{folder}/{INDEX}: {key} of a shard is {shard[key]!r}; restore it", code=CONTRADICTING
                )
    for version in (each.get("version", _VERSION) for each in (index, *shards)):
        if version != _VERSION:
            raise ConfigError(
                f"{folder}/{INDEX}: it has version {version!r}, and version {_VERSION} is read; write the "
                "dataset anew with a version of MosaicML Streaming that writes it",
                code=CONTRADICTING,
            )
    return shards


def _files(entry: _Entry) -> list[tuple[_Entry, str]]:
    """The forms of a shard with their basenames, the compressed one first."""
    facts = [entry[key] for key in ("zip_data", "raw_data") if isinstance(entry.get(key), dict)]
    return [(fact, str(fact["basename"])) for fact in facts if "basename" in fact]


def _compare(folder: str, shard: tuple[str, _Entry, int]) -> None:
    name, entry, file_bytes = shard
    head = _read_head(folder, name, file_bytes)
    raw, zipped = ((entry.get(key) or {}) for key in ("raw_data", "zip_data"))
    said = {"samples": entry.get("samples"), "bytes": raw.get("bytes")}
    shown: dict[str, Any] = {"samples": head.samples, "bytes": head.raw_bytes}
    if name.endswith(COMPRESSED):
        said["bytes of the compressed shard"] = zipped.get("bytes")
        shown["bytes of the compressed shard"] = file_bytes
    else:
        said["bytes of the file"], shown["bytes of the file"] = raw.get("bytes"), file_bytes
    for key, value in head.facts.items():
        said[key], shown[key] = entry.get(key), value
    for key, value in said.items():
        if (value is not None or key in entry) and not _same(value, shown[key]):
            raise ConfigError(
                f"{folder}/{name}: {INDEX} says {key}={value!r}, and the shard has {shown[key]!r}; restore "
                f"{INDEX} or the shard, or give the shards as a glob to read them without {INDEX}",
                code=CONTRADICTING,
            )


def _same(said: Any, shown: Any) -> bool:
    """Whether two JSON values are the same: `true` is not 1."""
    return bool(said == shown) and orjson.dumps(said) == orjson.dumps(shown)


def _read_head(folder: str, name: str, file_bytes: int) -> ShardHead:
    """Reads the number of samples, the offsets and the columns, but no sample."""
    try:
        with open_input(folder, name) as file:
            if name.endswith(COMPRESSED):
                return _head_of(ExactReader(decoded(file, name, file_bytes)))
            return _head_of_plain(file)
    except _UNREADABLE as error:
        raise DataError(
            f"{folder}/{name}: the head of the shard cannot be read: {error}; put back the whole file, or "
            "leave it out",
            code=damage_code(error),
        ) from error


def _head_of(shard: ExactReader) -> ShardHead:
    num = int.from_bytes(shard.read(4, "the number of samples"), "little")
    first = shard.read(4, "the first offset")
    config_bytes = _config_bytes(num, first)
    if num:
        shard.skip(4 * (num - 1), "the offsets")
    last = shard.read(4, "the last offset") if num else first
    return _head(num, last, shard.read(config_bytes, "the columns"))


def _head_of_plain(file: InputFile) -> ShardHead:
    data = file.read_at(0, _HEAD_BYTES)
    num, first = int.from_bytes(data[:4], "little"), data[4:8]
    begin = 4 * (num + 1)  # of the last offset; the columns follow it
    stop = begin + 4 + _config_bytes(num, first)
    rest = data[begin:stop] if stop <= len(data) else file.read_at(begin, stop - begin)
    if len(rest) != stop - begin:
        raise EOFError("it is cut off in its head")
    return _head(num, rest[:4], rest[4:])


def _config_bytes(num: int, first: bytes) -> int:
    """The bytes of the columns, which lie between the offsets and the first sample."""
    size = int.from_bytes(first, "little") - 4 * (num + 2)
    if len(first) != 4 or size < 0:
        raise OSError(f"no MDS shard: it begins with {num:,} as the number of its samples")
    return size


def _head(num: int, last: bytes, config: bytes) -> ShardHead:
    facts = orjson.loads(config)
    if not isinstance(facts, dict):
        raise OSError("no MDS shard: what its columns are is no JSON object")
    return ShardHead(samples=num, raw_bytes=int.from_bytes(last, "little"), facts=facts)


def _hasher(kind: str) -> Any:
    """A hasher of this kind; None for a kind that is not supported here."""
    if kind in xxhash.algorithms_available:
        return getattr(xxhash, kind)()
    known = kind in hashlib.algorithms_available and not kind.startswith("shake_")
    return hashlib.new(kind, usedforsecurity=False) if known else None


_index_lock = threading.Lock()
_newest_index: dict[tuple[str, int, int, str], dict[str, _Entry]] = {}  # of the most recently used index


def _expected_hashes(file: InputFile, path: str) -> tuple[str, dict[str, str]]:
    """(path of the index, its hashes of the uncompressed shard).

    The nearest index that names the shard is used: in its folder, or in a folder above it within the
    source's. No hashes if there is none.
    """
    base, inner = file.name.removesuffix(path).rstrip("/"), os.path.dirname(path)
    while True:
        folder = f"{base}/{inner}" if inner else base
        entries = _entries_by_name(folder)
        if (entry := entries.get(path.removeprefix(f"{inner}/") if inner else path)) is not None:
            hashes = (entry.get("raw_data") or {}).get("hashes") or {}
            return f"{folder}/{INDEX}", dict(hashes)
        if not inner:
            return "", {}
        inner = os.path.dirname(inner)


def _entries_by_name(folder: str) -> dict[str, _Entry]:
    """For each file that the folder's index names, the entry of its shard. Empty without a readable index."""
    try:
        with open_input(folder, INDEX) as file:
            key = (file.name, file.size, file.mtime_ns, file.etag)
        with _index_lock:
            if (known := _newest_index.get(key)) is not None:
                return known
        entries = {name: entry for entry in _entries(folder) for _, name in _files(entry)}
    except (OSError, ConfigError):
        return {}
    with _index_lock:
        _newest_index.clear()
        _newest_index[key] = entries
    return entries


FORMATS: tuple[Format, ...] = (MosaicShards(),)
