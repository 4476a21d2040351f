"""Which files a source has: a list that is frozen once, and whether the files are still those.

It reads names, sizes, a probe of 4 KiB at both ends and Parquet footers, never a document; it knows no token.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import orjson
import xxhash
from blake3 import blake3

from orchestrator.data.sources.documents import Content
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.input_file import InputFile, open_input
from orchestrator.data.sources.listing import Listing, list_files, require_regular
from orchestrator.errors import DataError, DataIdentityError

VERSION = 1
PROBE_BYTES = 4096
_THREADS = 8
# In an error text; the rest is counted.
_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRow:
    """One file: path relative to the source's base, size, and what shows whether it is still the same.

    `probe` is the xxh3_64 (16 hex digits) of its first and its last 4 KiB. `group_rows` and `group_bytes`
    (decoded) describe the row groups of a Parquet file.
    """

    path: str
    bytes: int
    mtime_ns: int
    probe: str
    group_rows: tuple[int, ...] = ()
    group_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The frozen list of a source's files, sorted by the bytes of their paths. `base` is an absolute
    folder, `content` what documents are made of.
    """

    source: str
    base: str
    format: str
    content: Content = Content()
    files: tuple[FileRow, ...]

    @property
    def text_field(self) -> str:
        """The field that holds the text; the content may be another one."""
        return self.content.text_field

    @property
    def digest(self) -> str:
        """blake3 of what the files contain, as far as the list knows; neither base nor mtime is in it, so a
        copy has the same digest.
        """
        rows = [[f.path, f.bytes, f.probe, f.group_rows, f.group_bytes] for f in self.files]
        content = [self.text_field] if self.content.kind == "text" else [_content_text(self.content)]
        return blake3(orjson.dumps([VERSION, self.format, *content, rows])).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Size of all files; of those with row groups, decoded."""
        return sum(sum(row.group_bytes) or row.bytes for row in self.files)

    def path(self, file: int) -> str:
        """The absolute path of a file by its number."""
        return os.path.join(self.base, self.files[file].path)


# ---------------------------------------------------------------------------------------- listing and freezin
def freeze(name: str, path: str, format_: str, text_field: str) -> Manifest:
    """The manifest of the files that `path` (a file, a folder or a glob) means now.

    Raises `ConfigError` if there are none, or one is to be a Parquet file and is none, or lacks the column;
    `DataError` if one cannot be read.
    """
    return freeze_listed(name, list_files(name, path, format_), format_, Content(text_field=text_field))


def freeze_listed(name: str, listing: Listing, format_: str, content: Content) -> Manifest:
    """The manifest of what is listed. Raises as `freeze` does, also where a name leads to no file, or the
    format cannot hold such content.
    """
    format_of(format_).require_content(name, content)
    content = content.needed
    require_regular(name, listing)
    with ThreadPoolExecutor(_THREADS) as pool:
        files = tuple(pool.map(partial(_row, listing.base, format_, content), listing.names))
    return Manifest(source=name, base=listing.base, format=format_, content=content, files=files)


def _row(base: str, format_: str, content: Content, path: str) -> FileRow:
    try:
        with open_input(base, path) as file:
            rows, sizes = format_of(format_).units(file, content)
            return FileRow(
                path=path,
                bytes=file.size,
                mtime_ns=file.mtime_ns,
                probe=_probe(file),
                group_rows=rows,
                group_bytes=sizes,
            )
    except OSError as error:
        full = os.path.join(base, path)
        raise DataError(f"{full}: cannot be read: {error}; fix its rights or leave it out") from error


def _probe(file: InputFile) -> str:
    ends = file.read_at(0, PROBE_BYTES) + file.read_at(max(0, file.size - PROBE_BYTES), PROBE_BYTES)
    return xxhash.xxh3_64_hexdigest(ends)


# ---------------------------------------------------------------------------------------- unchanged?
def difference(row: FileRow, file: InputFile) -> str | None:
    """How the open file differs from its row, with both values; None if it is the same (data rule 13)."""
    if (file.size, file.mtime_ns) == (row.bytes, row.mtime_ns):
        return None
    if file.size != row.bytes:
        return f"it had {row.bytes} bytes and has {file.size}"
    probe = _probe(file)
    return None if probe == row.probe else f"its ends had digest {row.probe} and have {probe}"


def require_unchanged(row: FileRow, path: str, file: InputFile) -> None:
    """Raises `DataIdentityError` with both values if the open file is not what the run was started with."""
    found = difference(row, file)
    if found is not None:
        raise DataIdentityError(changed_text([f"{path}: {found}"]))


def changed_text(changes: Sequence[str], gone: Sequence[str] = (), advice: str = "") -> str:
    """The refusal for these changed files, and those that are gone, whole or in part: nothing can stand for
    them. `advice` for whoever does not want to go on with the run.
    """
    texts = [*gone, *changes]
    more = f"\n  and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    advice = advice or (
        "put them back; a file that is gone cannot be accepted as a changed one can, nor one that has lost "
        "row groups: without it this run cannot go on, and a new run (under another run.name) is the only way"
        if gone
        else "put them back, start a new run, or go on with them by resume.accept_changed=true"
    )
    return (
        "files of the data are not those that the run was started with:\n  "
        + "\n  ".join(texts[:_NAMED])
        + f"{more}\n{advice}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What lies at a manifest's base now: `now` is the list without the files that are gone; how files
    differ, and which are gone or have fewer row groups than the run reads, for people.
    """

    now: Manifest
    changed: tuple[str, ...]
    gone: tuple[str, ...]


def changes_since(manifest: Manifest) -> Changes:
    """How the files at the manifest's base differ from it. Raises `DataError` if one cannot be read."""

    def look(row: FileRow) -> tuple[FileRow | None, str | None]:
        path = os.path.join(manifest.base, row.path)
        try:
            with open_input(manifest.base, row.path) as file:
                found = difference(row, file)
        except (FileNotFoundError, NotADirectoryError):
            return None, f"{path}: it had {row.bytes} bytes and is gone"
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error}; fix its rights") from error
        if found is None:
            return row, None
        now = _row(manifest.base, manifest.format, manifest.content, row.path)
        groups, left = len(row.group_rows), len(now.group_rows)
        if left < groups:
            return None, f"{path}: it had {groups} row groups and has {left}"
        return now, f"{path}: {found}"

    with ThreadPoolExecutor(_THREADS) as pool:
        looks = list(pool.map(look, manifest.files))
    return Changes(
        now=replace(manifest, files=tuple(row for row, _ in looks if row is not None)),
        changed=tuple(text for row, text in looks if row is not None and text is not None),
        gone=tuple(text for row, text in looks if row is None and text is not None),
    )


# ---------------------------------------------------------------------------------------- in storage
def _content_text(content: Content) -> str:
    return orjson.dumps(asdict(content)).decode()


def to_parquet(manifest: Manifest) -> bytes:
    """The manifest as a Parquet file of one row per file, its other fields as metadata of the schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        "path": pa.string(),
        "bytes": pa.int64(),
        "mtime_ns": pa.int64(),
        "probe": pa.string(),
        "group_rows": pa.list_(pa.int64()),
        "group_bytes": pa.list_(pa.int64()),
    }
    facts = {"version": str(VERSION), "digest": manifest.digest}
    facts |= {name: getattr(manifest, name) for name in ("source", "base", "format", "text_field")}
    if manifest.content.kind != "text":
        facts["content"] = _content_text(manifest.content)
    columns = {name: [getattr(row, name) for row in manifest.files] for name in kinds}
    out = io.BytesIO()
    pq.write_table(pa.table(columns, schema=pa.schema(list(kinds.items()), metadata=facts)), out)
    return out.getvalue()


def from_parquet(data: bytes, where: str) -> Manifest:
    """The inverse of `to_parquet`. Raises `DataIdentityError` if the file was altered; `where` names it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(io.BytesIO(data)).read()  # `read_table` would import pandas
        facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        rows = table.to_pylist()
        lists = ("group_rows", "group_bytes")
        columns: list[dict[str, Any]] = [
            {name: tuple(value) if name in lists else value for name, value in row.items()} for row in rows
        ]
        files = tuple(FileRow(**values) for values in columns)
        fields = {name: facts[name] for name in ("source", "base", "format")}
        content = Content(**{"text_field": facts["text_field"], **orjson.loads(facts.get("content", "{}"))})
    except (orjson.JSONDecodeError, pa.ArrowException, OSError, KeyError, TypeError) as error:
        raise DataIdentityError(f"{where}: the run's manifest cannot be read: {error}; restore it") from error
    manifest = Manifest(files=files, content=content, **fields)
    if manifest.digest != facts.get("digest"):
        raise DataIdentityError(
            f"{where}: the run's manifest was written with digest {facts.get('digest')} and has "
            f"{manifest.digest}; restore the file"
        )
    return manifest
