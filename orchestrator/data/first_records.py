"""Whether `text_field` names what the records hold: a look at each source's first records, before a start.

It tokenizes nothing and knows no order; what a record is, and why it is bad, `sources` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from orchestrator.data.sources.fragments import SourcePlan
from orchestrator.data.sources.readers import READ_BYTES, decoded, naming_damage
from orchestrator.data.sources.windows import BadRecordError, WrongFieldError, json_text
from orchestrator.data.spec import DataSpec
from orchestrator.errors import ConfigError

# Looked at are so many records in each of so many files, as far as they lie in a file's first MiB.
NUM_FILES = 8
NUM_RECORDS = 64


def check_first_records(spec: DataSpec) -> None:
    """Raises `ConfigError` if none of a source's first records has its `text_field` with text in it, naming
    the first of them and the fields that it has; `DataError` if a file cannot be read.

    Takes milliseconds: at most 8 MiB a source are decoded. A single record without the field passes here and
    is a bad document of the stream; a column of a Parquet file was looked for when the files were listed;
    `text` and `lines` have no fields. A source whose first records are longer than 1 MiB is not judged.
    """
    for plan in spec.plans:
        if plan.manifest.format == "jsonl":
            _check(plan)


def _check(plan: SourcePlan) -> None:
    wrong = None
    for file in range(min(NUM_FILES, len(plan.manifest.files))):
        path, size = plan.manifest.path(file), plan.manifest.files[file].bytes
        for number, line in islice(_first_lines(path, size), NUM_RECORDS):
            try:
                json_text(line, plan.manifest.text_field)
            except WrongFieldError as error:
                wrong = wrong or f"data.sources {plan.source}: {path}: line {number}: {error}"
            except BadRecordError:
                continue  # it says nothing of the field
            else:
                return
    if wrong is not None:
        raise ConfigError(wrong)


def _first_lines(path: str, file_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines in the file's first MiB that end there and are not blank."""
    with naming_damage(path), open(path, "rb") as file:
        pieces = decoded(file, path, file_bytes)
        begin = next(pieces, b"")[:READ_BYTES]
        whole = len(begin) < READ_BYTES and next(pieces, None) is None
    lines = begin.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines if whole else lines[:-1], start=1):
        if line.strip():
            yield number, line
