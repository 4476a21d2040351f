"""The list of a source's files, frozen once, and the check whether the files are still the same.

It reads names, sizes, a probe of 4 KiB at both ends and Parquet footers, but no document.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
import xxhash

from orchestrator.data.sources.access.input_file import CodeRecords, InputFile, open_input
from orchestrator.data.sources.formats import Format, UserFormat, format_of, recorded_format, user_format
from orchestrator.data.sources.lists.file_rows import VERSION, Cut, FileRow, Files
from orchestrator.data.sources.lists.listing import Listing, list_files, require_regular
from orchestrator.data.sources.records.content import Content
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.planning.resume.source_lists import restart_text
from orchestrator.records.steps import PREFERENCE
from orchestrator.storage.parallel import in_threads

PROBE_BYTES = 4096
# in a probe, precedes the storage's identifier of the content
ETAG = "etag:"
# The maximum number of files named in an error text; the rest is counted.
_NAMED = 5
_FACTS = ("source", "base", "format")
# Metadata of lists of chats whose values have the types that templates need (`Content.as_stored` is false).
_CHAT_VALUES, _TYPED = "chat_values", "typed"
_USER_FORMAT = "user_format"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The frozen list of a source's files, sorted by the bytes of their paths. `base` is an absolute folder.

    `user_format` is None for a format of this package.
    """

    source: str
    base: str
    format: str
    content: Content = Content()
    files: Files
    user_format: UserFormat | None = None

    @property
    def form(self) -> Format:
        """The format, with the code that the list was made with. Raises as `formats.recorded_format`."""
        return recorded_format(self.format, self.user_format)

    @property
    def cut(self) -> Cut:
        """How its files are cut. Imports no user code."""
        return Cut(self.user_format.cut) if self.user_format is not None else format_of(self.format).cut

    @property
    def unit(self) -> str:
        """What a place in its files counts. Imports no user code."""
        return self.user_format.unit if self.user_format is not None else format_of(self.format).unit

    @property
    def digest(self) -> str:
        """blake3 of the files' content, as far as the list records it.

        It covers neither `base` nor modification times, so a copy has the same digest.
        """
        plain = _is_plain_text(self.content)
        return self.files.digest(
            self.format, self.content.text_field if plain else _content_text(self.content)
        )

    @property
    def text_field(self) -> str:
        """The field that holds the text, for `content: text`."""
        return self.content.text_field

    @property
    def num_bytes(self) -> int:
        """The size of all files; decoded for files with row groups."""
        units = int(self.files.group_sizes.sum())
        return units or int(self.files.sizes.sum())

    def path(self, file: int) -> str:
        """The absolute path of a file by its number."""
        return os.path.join(self.base, self.files.path(file))


# ---------------------------------------------------------------------------------------- listing and freezin
def freeze(name: str, path: str | Sequence[str], format_: str, text_field: str) -> Manifest:
    """The manifest of the current files of `path` (a file, a folder or a glob).

    Raises `ConfigError` if there are none, or if one has another format or lacks the fields. Raises
    `DataError` if one cannot be read.
    """
    return freeze_listed(name, list_files(name, path, format_), format_, Content(text_field=text_field))


def freeze_listed(name: str, listing: Listing, format_: str, content: Content) -> Manifest:
    """The manifest of a listing.

    Raises as `freeze`. Also raises `ConfigError` if a name leads to no file, the format cannot hold such
    content, or an index of the files contradicts them.
    """
    format_of(format_).require_content(name, content)
    content = content.needed
    require_regular(name, listing)
    files = _listed(listing) if format_of(format_).cut is not Cut.UNITS and all(listing.etags) else None
    if files is None:
        rows = in_threads(partial(file_row, listing.base, format_, content), listing.names)
        files = Files.of(rows)
    if format_of(format_).has_index:
        by_name = {row.path: row for row in files}
        for folder, names in listing.names_by_folder().items():
            in_folder = {inner: by_name[name] for inner, name in names.items()}
            format_of(format_).check_index(folder, in_folder)
    return Manifest(
        source=name,
        base=listing.base,
        format=format_,
        content=content,
        files=files,
        user_format=user_format(format_),
    )


def _listed(listing: Listing) -> Files | None:
    """The rows of a bucket's objects, all of whose values are in the listing; None for other storages."""
    if not listing.etags:
        return None
    columns = zip(
        listing.names, listing.sizes.tolist(), listing.mtimes_ns.tolist(), listing.etags, strict=True
    )
    return Files.of(
        FileRow(path=name, bytes=size, mtime_ns=mtime_ns, probe=ETAG + etag)
        for name, size, mtime_ns, etag in columns
    )


def file_row(base: str, format_: str, content: Content, path: str) -> FileRow:
    """The row of a file as it is now. Raises as `freeze`."""
    try:
        with open_input(base, path) as file:
            rows, sizes = format_of(format_).units(file, content)
            return FileRow(
                path=path,
                bytes=file.size,
                mtime_ns=file.mtime_ns,
                probe=ETAG + file.etag if file.etag else _probe(file),
                group_rows=rows,
                group_bytes=sizes,
            )
    except OSError as error:
        full = os.path.join(base, path)
        raise DataError(
            f"{full}: cannot be read: {error}; fix its permissions or leave it out",
            code="data.unreadable_file",
        ) from error


def _probe(file: InputFile) -> str:
    ends = file.read_at(0, PROBE_BYTES) + file.read_at(max(0, file.size - PROBE_BYTES), PROBE_BYTES)
    return xxhash.xxh3_64_hexdigest(ends)


# -------------------------------------------------------------------------- comparison with the current files
def difference(row: FileRow, file: InputFile) -> str | None:
    """How the open file differs from its row, with both values; None if it is the same (data rule 13).

    A file that was listed with an etag must have the same one. Any other must have the same time or the same
    probe, also if it lies in a bucket now.
    """
    if isinstance(file, CodeRecords):
        then = row.probe.removeprefix(ETAG)
        return None if then == file.etag else f"it was {then}, and is {file.etag}"
    if file.size != row.bytes:
        return f"it had {row.bytes} bytes and has {file.size}"
    if row.probe.startswith(ETAG):
        etag = row.probe.removeprefix(ETAG)
        return None if etag == file.etag else f"its etag was {etag} and is {file.etag or '(none)'}"
    if file.mtime_ns == row.mtime_ns and not file.etag:
        return None
    probe = _probe(file)
    return None if probe == row.probe else f"its ends had digest {row.probe} and have {probe}"


def require_unchanged(row: FileRow, path: str, file: InputFile, source: str) -> None:
    """Raises `DataIdentityError` with both values if the open file is not what the run was started with."""
    found = difference(row, file)
    if found is not None:
        raise DataIdentityError(changed_text([f"{path}: {found}"], source=source), code="data.changed_files")


def changed_text(
    changes: Sequence[str], gone: Sequence[str] = (), advice: str = "", *, source: str = ""
) -> str:
    """The error text for changed files of a source, and for files that are missing, completely or in part.

    A missing file cannot be replaced. `advice` is the remedy for users who do not continue the run.
    """
    texts = [*gone, *changes]
    more = f"\n  and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    anew = restart_text(source)
    advice = advice or (
        f"put them back, or {anew}; a run cannot continue without a file or a row group of its list"
        if gone
        else f"put them back, {anew}, or continue with the changed files by resume.accept_changed=true"
    )
    return (
        "files differ from those that the run was started with:\n  "
        + "\n  ".join(texts[:_NAMED])
        + f"{more}\n{advice}"
    )


# ---------------------------------------------------------------------------------------- in storage
def _is_plain_text(content: Content) -> bool:
    """Whether `text_field` describes it completely, as in the lists of runs from before other contents
    existed.
    """
    return content.kind == "text" and not content.transform_fields


def _content_text(content: Content) -> str:
    facts = asdict(content)
    del facts["as_stored"]  # affects how a list is read, not its files
    if not content.transform_fields:  # older lists have none
        del facts["transform_fields"]
    if content.kind != PREFERENCE:  # as older lists
        del facts["chosen_field"], facts["rejected_field"]
    return orjson.dumps(facts).decode()


def _content(facts: Mapping[str, str]) -> Content:
    given = {"text_field": facts["text_field"], **orjson.loads(facts.get("content", "{}"))}
    is_old_chat = given.get("kind") == "chat" and facts.get(_CHAT_VALUES) != _TYPED
    fields = tuple(given.get("transform_fields", ()))
    return Content(**{**given, "transform_fields": fields, "as_stored": is_old_chat})


def to_parquet(manifest: Manifest, more: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """The manifest as a Parquet file of one row per file, with its other fields and `more` as schema
    metadata.
    """
    import pyarrow.parquet as pq

    facts = {**more, "version": str(VERSION), "digest": manifest.digest}
    facts |= {name: getattr(manifest, name) for name in _FACTS}
    facts["text_field"] = manifest.content.text_field
    if not _is_plain_text(manifest.content):
        facts["content"] = _content_text(manifest.content)
    if manifest.content.kind == "chat" and not manifest.content.as_stored:
        facts[_CHAT_VALUES] = _TYPED
    if manifest.user_format is not None:
        facts[_USER_FORMAT] = orjson.dumps(manifest.user_format.to_json()).decode()
    out = io.BytesIO()
    encodings = {"path": "DELTA_BYTE_ARRAY"}  # sorted paths share their beginnings
    encodings |= dict.fromkeys(("bytes", "mtime_ns"), "DELTA_BINARY_PACKED")
    pq.write_table(
        manifest.files.table(facts),
        out,
        compression="zstd",
        use_dictionary=["group_rows.list.element", "group_bytes.list.element"],
        column_encoding=encodings,
    )
    return out.getvalue()


def facts_of(data: bytes) -> dict[str, str]:
    """The metadata that `to_parquet` wrote."""
    import pyarrow.parquet as pq

    return _facts(pq.ParquetFile(io.BytesIO(data)).schema_arrow)


def _facts(schema: Any) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}


def from_parquet(data: bytes, where: str) -> Manifest:
    """The inverse of `to_parquet`. Raises `DataIdentityError` if the file was altered; `where` names it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(io.BytesIO(data)).read()  # `read_table` would import pandas
        facts = _facts(table.schema)
        if facts.get("version", str(VERSION)) != str(VERSION):
            raise DataIdentityError(
                f"it has version {facts['version']}, and this version of orchestrator reads {VERSION}; use "
                "the version that wrote it, or a later one",
                code="storage.later_format",
            )
        fields = {name: facts[name] for name in _FACTS}
        made_by = UserFormat.from_json(orjson.loads(facts[_USER_FORMAT])) if _USER_FORMAT in facts else None
        manifest = Manifest(
            files=Files.of_table(table), content=_content(facts), user_format=made_by, **fields
        )
    except DataIdentityError as error:
        raise DataIdentityError(
            f"{where}: the run's manifest cannot be read: {error}", code=error.code
        ) from error
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise DataIdentityError(
            f"{where}: the run's manifest cannot be read: {error}; restore it", code="data.damaged_list"
        ) from error
    if manifest.digest != facts.get("digest"):
        raise DataIdentityError(
            f"{where}: the run's manifest was written with digest {facts.get('digest')} and has "
            f"{manifest.digest}; restore the file",
            code="data.damaged_list",
        )
    return manifest
