"""Writers of every format, none of which uses the package: what a user's own tools would write."""

from __future__ import annotations

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cbor2
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import feather

Record = dict[str, Any]
Write = Callable[[Sequence[Record]], bytes]

PRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
}


def jsonl(records: Sequence[Record]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def lines(records: Sequence[Record]) -> bytes:
    return "".join(record["text"] + "\n" for record in records).encode()


def separated(delimiter: str, newline: str) -> Write:
    def write(records: Sequence[Record]) -> bytes:
        out = io.StringIO(newline="")
        names = list(dict.fromkeys(name for record in records for name in record))
        writer = csv.DictWriter(
            out, names, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL
        )
        writer.writeheader()
        writer.writerows(records)
        return out.getvalue().encode()

    return write


def parquet(records: Sequence[Record]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(records)), out, row_group_size=7)
    return out.getvalue()


def arrow_file(records: Sequence[Record], compression: str = "uncompressed") -> bytes:
    out = io.BytesIO()
    feather.write_feather(pa.Table.from_pylist(list(records)), out, chunksize=5, compression=compression)
    return out.getvalue()


def arrow_stream(records: Sequence[Record]) -> bytes:
    table, out = pa.Table.from_pylist(list(records)), io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return out.getvalue()


def tar(records: Sequence[Record], kind: int = tarfile.PAX_FORMAT) -> bytes:
    """A sample per record: each field as a member `txt`-like by its name, and all of them as `json`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as opened:
        for number, record in enumerate(records):
            members = {name: value.encode() for name, value in record.items() if isinstance(value, str)}
            for name, content in {**members, "json": json.dumps(record).encode()}.items():
                info = tarfile.TarInfo(
                    f"{'folder/' * 30}{number:05d}.{name}" if number % 9 == 4 else f"{number:05d}.{name}"
                )
                info.size = len(content)
                opened.addfile(info, io.BytesIO(content))
    return out.getvalue()


def mds(records: Sequence[Record]) -> bytes:
    """A shard, laid out as MosaicML Streaming's writer lays it out; other values than texts as JSON."""
    names = sorted({name for record in records for name in record} | {"number"})
    kinds = {name: "int" if name == "number" else "str" for name in names}
    for record in records:
        kinds |= {name: "json" for name, value in record.items() if not isinstance(value, str)}
    samples = []
    for number, record in enumerate(records):
        encoded = []
        for name in names:
            value = number if name == "number" else record[name]
            kind = kinds[name]
            encoded.append(
                struct.pack("<q", value)
                if kind == "int"
                else value.encode()
                if kind == "str"
                else json.dumps(value).encode()
            )
        sizes = [len(e) for name, e in zip(names, encoded, strict=True) if kinds[name] != "int"]
        samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(encoded))
    config = json.dumps(
        {
            "column_encodings": [kinds[name] for name in names],
            "column_names": names,
            "column_sizes": [8 if kinds[name] == "int" else None for name in names],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": 1 << 26,
            "version": 2,
        },
        sort_keys=True,
    ).encode()
    offset = 4 + 4 * (len(samples) + 1) + len(config)
    offsets = [offset]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<I{len(offsets)}I", len(samples), *offsets) + config + b"".join(samples)


def mds_entry(
    raw: bytes, name: str, zipped: tuple[str, bytes] | None, hashes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What an index says of a shard, as MosaicML Streaming's writer says it."""
    num, first = struct.unpack_from("<II", raw)
    facts = [(name, raw)] + ([zipped] if zipped else [])
    raw_data, zip_data = [
        {
            "basename": basename,
            "bytes": len(data),
            "hashes": {kind: hashlib.new(kind, data).hexdigest() for kind in hashes},
        }
        for basename, data in facts
    ] + [None] * (2 - len(facts))
    return {
        "samples": num,
        "raw_data": raw_data,
        "zip_data": zip_data,
        **json.loads(raw[4 * (num + 2) : first]),
    }


def cbor(records: Sequence[Record]) -> bytes:
    return b"".join(cbor2.dumps(record) for record in records)


WRITERS: dict[str, tuple[str, Write]] = {
    "jsonl": ("jsonl", jsonl),
    "lines": ("txt", lines),
    "csv": ("csv", separated(",", "\r\n")),
    "tsv": ("tsv", separated("\t", "\n")),
    "parquet": ("parquet", parquet),
    "arrow": ("feather", arrow_file),
    "webdataset": ("tar", tar),
    "mds": ("mds", mds),
    "cbor": ("cbor", cbor),
}


def write_files(folder: Path, form: str, files: Sequence[Sequence[Record]], press: str = "") -> None:
    """The records of each file, and what else the format wants in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "text":
        for number, file in enumerate(files):
            (record,) = file
            (folder / f"{number:05d}.txt{press}").write_bytes(PRESS[press](record["text"].encode()))
        return
    if form == "hf_dataset":
        names = [f"data-{n:05d}-of-{len(files):05d}.arrow" for n in range(len(files))]
        for name, file in zip(names, files, strict=True):
            (folder / name).write_bytes(arrow_stream(file))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
        (folder / "dataset_info.json").write_text("{}")
        (folder / "cache-0123456789abcdef.arrow").write_bytes(arrow_stream([{"text": "not of the dataset"}]))
        return
    suffix, write = WRITERS[form]
    shards = []
    for number, file in enumerate(files):
        raw, name = write(file), f"part.{number:05d}.{suffix}"
        (folder / f"{name}{press}").write_bytes(PRESS[press](raw))
        if form == "mds":
            shards.append(mds_entry(raw, name, (f"{name}{press}", PRESS[press](raw)) if press else None))
    if form == "mds":
        (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
