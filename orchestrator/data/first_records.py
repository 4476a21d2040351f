"""Whether a source's files hold what `format` and `text_field` say: a look at each source's first records,
before a start.

It tokenizes nothing and knows no order; what a record is, and why it is bad, `sources` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from orchestrator.data.sources.fragments import SourcePlan
from orchestrator.data.sources.readers import READ_BYTES, decoded, naming_damage
from orchestrator.data.sources.windows import BadRecordError, WrongFieldError, json_text, utf8_text
from orchestrator.data.spec import DataSpec
from orchestrator.errors import ConfigError

# Looked at are so many records in each of so many files, as far as they lie in a file's first MiB.
NUM_FILES = 8
NUM_RECORDS = 64


def check_first_records(spec: DataSpec) -> None:
    """Raises `ConfigError` if none of a source's first records can be read, whatever `on_bad_document` says,
    naming the first of them and why; for one without its `text_field`, the fields that it has. Raises
    `DataError` if a file cannot be read.

    Takes milliseconds: at most 8 MiB a source are decoded. A single record that is bad passes here and is a
    bad document of the stream; whether a file is a Parquet file, and has the column, was seen when the files
    were listed, and its values are not looked at. A source whose first records are longer than 1 MiB is not
    judged, of a `text` only its lines in the first MiB.
    """
    for plan in spec.plans:
        if plan.manifest.format != "parquet":
            _check(plan)


def _check(plan: SourcePlan) -> None:
    manifest, seen = plan.manifest, 0
    bad: str | None = None
    wrong: str | None = None
    for file in range(min(NUM_FILES, len(manifest.files))):
        path, size = manifest.path(file), manifest.files[file].bytes
        for number, record in islice(_first_records(path, size, manifest.format), NUM_RECORDS):
            seen += 1
            try:
                if manifest.format == "jsonl":
                    json_text(record, manifest.text_field)
                else:
                    utf8_text(record)
            except BadRecordError as error:
                text = f"data.sources {plan.source}: {path}: line {number}: {error}"
                bad = bad or text
                if isinstance(error, WrongFieldError):
                    wrong = wrong or text
            else:
                return
    if wrong is not None:
        raise ConfigError(f"{wrong}. Set text_field")
    if bad is not None:
        raise ConfigError(
            f"{bad}; none of the {seen} records looked at can be read: "
            f"is data.sources[].format={manifest.format} right? If it is, repair the files or leave them out"
        )


def _first_records(path: str, file_bytes: int, format_: str) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, record) of the records in the file's first MiB that end there and are not
    blank; of a `text`, which is one record, the lines that end there.
    """
    with naming_damage(path), open(path, "rb") as file:
        pieces = decoded(file, path, file_bytes)
        begin = next(pieces, b"")[:READ_BYTES]
        whole = len(begin) < READ_BYTES and next(pieces, None) is None
    lines = begin.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = lines if whole else lines[:-1]
    for number, record in [(1, b"\n".join(lines))] if format_ == "text" else enumerate(lines, start=1):
        if record.strip():
            yield number, record
