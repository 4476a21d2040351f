"""`webdataset`: one record per sample of a tar file.

A sample is a run of consecutive members that share their name up to its first dot. A field is the rest of a
member's name (`txt`, `json`), or a path into a member that is JSON: `json.text`.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from orchestrator.data.sources.access.compressed import ExactReader, decoded, with_compressed
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Objects, Whole
from orchestrator.data.sources.formats.base import Format, Parser
from orchestrator.data.sources.formats.text import json_object
from orchestrator.data.sources.records.columns import BATCH_BYTES
from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    BadRecordError,
    Content,
    Described,
    Document,
    MissingFieldError,
    names,
)
from orchestrator.data.sources.records.documents import document_of, utf8_text, value_or_none
from orchestrator.data.sources.records.line_records import Batch, other_encoding

if TYPE_CHECKING:
    from orchestrator.data.sources.access.input_file import InputFile
    from orchestrator.data.sources.lists.file_rows import FilePart, FileRow
    from orchestrator.data.sources.readers import Part

_BLOCK = 512
# Splits a member's name into the sample's key and the field.
_NAME = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$", re.DOTALL)
# The maximum bytes of a header that describes the next member.
_MAX_HEADER_BYTES = 1 << 20


@dataclass(slots=True)
class _Sample:
    """A sample while its members are read.

    `members` are those that its document may need, `names` are all names.
    """

    key: str
    members: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)
    error: BadRecordError | None = None
    num_bytes: int = 0  # of the needed members, and of every member's header
    too_long: bool = False


class WebDataset(Format):
    """One record per sample."""

    name = "webdataset"
    suffixes = with_compressed(".tar")
    counts_records = True
    unit = "sample"

    @override
    def read(
        self, file: InputFile, row: FileRow, part: FilePart, content: Content, whole: bool
    ) -> Iterator[Batch]:
        """A record's size is that of its needed members, and 512 for each member's header."""
        del part, whole
        place, held, num_bytes = 0, list[_Sample](), 0
        for sample in _samples(ExactReader(decoded(file, row.path, row.bytes)), content):
            if held and (num_bytes + sample.num_bytes > BATCH_BYTES or sample.too_long):
                yield place + 1, _objects(held), place
                place, held, num_bytes = place + len(held), [], 0
            if sample.too_long:
                yield place + 1, Whole(None, sample.num_bytes), place
                place += 1
                continue
            held.append(sample)
            num_bytes += sample.num_bytes
        if held:
            yield place + 1, _objects(held), place

    @override
    def parser(self, content: Content) -> Parser:
        def document(sample: _Sample) -> Document | Described | None:
            made = document_of(_fields(sample, content), content)
            if not content.transform_fields:
                return made
            fields = {name: _value(sample, name) for name in content.transform_fields}
            return Described(document=made, fields=fields)

        return document

    def place(self, path: str, part: Part, index: int, line: Callable[[], int | None]) -> str:
        """The sample's number in its file, and its key."""
        at = super().place(path, part, index, line)
        return f"{at} ({part.records.names[index]})" if isinstance(part.records, Objects) else at


def _objects(samples: list[_Sample]) -> Objects:
    return Objects(
        tuple(sample.error or sample for sample in samples),
        np.array([sample.num_bytes for sample in samples], np.int64),
        tuple(sample.key for sample in samples),
    )


def _fields(sample: _Sample, content: Content) -> dict[str, Any]:
    """The fields of a document: a member as its text, or for a path with dots as its JSON."""
    found = dict[str, Any]()
    for name in content.fields:
        member = _member_of(name, sample.names)
        if member is None:
            raise MissingFieldError(
                f"no field `{name}`; the sample has: {names(sample.names)}", code="record.missing_field"
            )
        if member == name:
            found[name] = _text_of(name, sample)
        else:
            inner: Any = json_object(sample.members[member])
            for part in reversed(member.split(".")):
                inner = {part: inner}
            found |= inner
    if content.messages_at:
        members = (name for name in BESIDE_MESSAGES if name in sample.members and name not in found)
        found |= {name: _text_of(name, sample) for name in members}
    return found


def _text_of(name: str, sample: _Sample) -> str:
    """A member's text. Raises `BadRecordError` if it is not UTF-8."""
    data = sample.members[name]
    if (encoding := other_encoding(data)) is not None:
        raise BadRecordError(
            f"the member {name} is {encoding}, not UTF-8; write it in UTF-8", code="record.not_utf8"
        )
    return utf8_text(data)


def _value(sample: _Sample, name: str) -> Any:
    """The sample's value of a field; None if it is missing."""
    member = _member_of(name, sample.names)
    if member is None:
        return None
    data = sample.members[member]
    if member == name:
        return _text_of(name, sample)
    return value_or_none(json_object(data), name.removeprefix(f"{member}."))


def _member_of(name: str, members: dict[str, None]) -> str | None:
    """The member that holds a field: the longest whose name equals the field's, or begins it at a dot."""
    parts = name.split(".")
    for num in range(len(parts), 0, -1):
        if (begin := ".".join(parts[:num])) in members:
            return begin
    return None


def _samples(tar: ExactReader, content: Content) -> Iterator[_Sample]:
    sample: _Sample | None = None
    for name, size, is_file in _members(tar):
        split = _NAME.match(name)
        if split is None or not is_file:
            if sample is not None:
                yield sample
            sample = None
            tar.skip(_padded(size), f"member {name}")
            what = "has no extension" if is_file else "is no regular file"
            error = BadRecordError(
                f"member {name!r} {what}, and so belongs to no sample; leave it out",
                code="record.stray_member",
            )
            yield _Sample(key=name, error=error, num_bytes=_BLOCK)
            continue
        key, extension = split.groups()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key=key)
        _add(sample, extension, tar, size, content)
    if sample is not None:
        yield sample


def _add(sample: _Sample, extension: str, tar: ExactReader, size: int, content: Content) -> None:
    what = f"member {sample.key}.{extension}"
    if extension in sample.names:
        sample.error = BadRecordError(
            f"two members are called {sample.key}.{extension}", code="record.duplicate_member"
        )
    sample.names[extension] = None
    beside = BESIDE_MESSAGES if content.messages_at and not content.as_stored else ()
    needed = extension in beside or any(
        name == extension or name.startswith(f"{extension}.") for name in content.read
    )
    sample.num_bytes += _BLOCK + (size if needed else 0)
    if sample.num_bytes > MAX_RECORD_BYTES:
        sample.too_long = True
        sample.members.clear()
    if needed and not sample.too_long:
        sample.members[extension] = tar.read(size, what)
        tar.skip(_padded(size) - size, what)
    else:
        tar.skip(_padded(size), what)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


# ---------------------------------------------------------------------------------------- tar
def _members(tar: ExactReader) -> Iterator[tuple[str, int, bool]]:
    """(name, size, whether it is a file) of each member except folders.

    The consumer reads the content and the padding. Raises `EOFError` if the file is truncated, `OSError` if
    it is no tar file. Python's own reader takes a damaged header, and the end of a truncated file, for the
    end of the archive.
    """
    longer = dict[str, str]()  # attributes from a header before the member's own
    while True:
        if tar.at_end():
            raise EOFError(
                f"cut off: the blocks of zeros that end a tar file are missing at byte {tar.place}"
            )
        start = tar.place
        block = tar.read(_BLOCK, "a header")
        if not any(block):
            break
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise OSError(f"no header of a tar file at byte {start}: {error}") from error
        if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            if info.size > _MAX_HEADER_BYTES:
                raise OSError(f"a header at byte {start} has {info.size} bytes")
            data = tar.read(_padded(info.size), "a header")[: info.size]
            is_pax = info.type != tarfile.GNUTYPE_LONGNAME
            longer |= _pax(data, start) if is_pax else {"path": _text(data.rstrip(b"\0"))}
        elif info.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            tar.skip(_padded(info.size), "a header")
        elif info.type == tarfile.GNUTYPE_SPARSE or "GNU.sparse.major" in longer:
            raise OSError(f"a sparse member at byte {start}; write the file without --sparse")
        else:
            size = int(longer.get("size", info.size))
            if not info.isdir():
                yield longer.get("path", info.name), size if info.isreg() else 0, info.isreg()
            longer = {}
    _require_zeros(tar)


def _require_zeros(tar: ExactReader) -> None:
    """Raises `OSError` if data follow the end of the archive, which would not be read."""
    while not tar.at_end():
        start = tar.place
        if any(tar.read(_BLOCK, "the end")):
            raise OSError(
                f"something follows the end of the tar file at byte {start}; tar files cannot be joined"
            )


def _pax(data: bytes, start: int) -> dict[str, str]:
    """The records of a pax header: length, a space, name=value, a newline."""
    found, at = dict[str, str](), 0
    try:
        while at < len(data):
            length = int(data[at : data.index(b" ", at)])
            name, _, value = data[data.index(b" ", at) + 1 : at + length - 1].partition(b"=")
            if length <= 0:
                raise ValueError("a record without length")
            found[_text(name)] = _text(value)
            at += length
        int(found.get("size", 0))
    except ValueError as error:
        raise OSError(f"no pax header at byte {start}: {error}") from error
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


FORMATS: tuple[Format, ...] = (WebDataset(),)
