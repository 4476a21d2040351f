"""Reads files as physical records, by fragment or whole files in order, with the source's format.

Damage raises, whatever `on_bad_document` is: that covers only records.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from orchestrator.data.sources.access.compressed import DAMAGE, damage_code
from orchestrator.data.sources.access.input_file import InputFile, open_input
from orchestrator.data.sources.access.records_in_memory import Records
from orchestrator.data.sources.lists.file_rows import Cut, FilePart
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.lists.manifest import require_unchanged
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.planning.resume.source_lists import restart_text
from orchestrator.records.tokens import Int64Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Consecutive records of one file within one fragment.

    `number` is the first record's number within the fragment. `line` is the 1-based number of its line (or
    row) in the file, None if that would have to be counted. `place` is the first record's byte offset in the
    file, or its row if the records are `rows`.
    """

    fragment: int
    file: int
    number: int
    line: int | None
    records: Records
    place: int
    rows: bool

    @property
    def places(self) -> Int64Array:
        """(num_records,) the byte offset, or the row, of each."""
        if self.rows:
            return np.arange(self.place, self.place + len(self.records), dtype=np.int64)
        sizes = self.records.sizes
        return self.place + np.cumsum(sizes) - sizes

    @property
    def sample_number(self) -> int:
        """The first record's number for fixed samples of records; the next ones count on from it."""
        return self.fragment * 389 + self.number

    def place_of(self, index: int) -> int:
        """The byte offset, or the row, of one record."""
        return self.place + (index if self.rows else self.records.bytes_before(index))

    def cut(self, start: int, stop: int) -> Part:
        """Records [start, stop) of the part."""
        return Part(
            fragment=self.fragment,
            file=self.file,
            number=self.number + start,
            line=None if self.line is None else self.line + start,
            records=self.records.cut(start, stop),
            place=self.place_of(start) if start < len(self.records) else self.place,
            rows=self.rows,
        )


def read_fragment(plan: SourcePlan, fragment: int, accept_changed: bool = False) -> Iterator[Part]:
    """The records of a fragment in file order.

    Raises `DataIdentityError` if a file is missing or not what the run was started with, `DataError` if it is
    damaged or cannot be read.
    """
    number = 0
    for where in plan.parts(fragment):
        path, row = plan.manifest.path(where.file), plan.manifest.files[where.file]
        with naming_damage(path, plan.source), open_input(plan.manifest.base, row.path) as file:
            if not accept_changed:
                require_unchanged(row, path, file, plan.source)
            parts = _parts(file, plan, where, fragment, number, whole=False)
            for part in parts if accept_changed else _counted(parts, plan, where):
                yield part
                number += len(part.records)


def read_files(plan: SourcePlan, accept_changed: bool = False, files: range | None = None) -> Iterator[Part]:
    """The records of all files (or of `files`, by their numbers in the manifest), as if in one fragment.

    Each file is read from its first byte to its last. The result does not depend on how files are cut. Raises
    as `read_fragment`.
    """
    number = 0
    for index in range(len(plan.manifest.files)) if files is None else files:
        path, row = plan.manifest.path(index), plan.manifest.files[index]
        has_units = plan.manifest.cut is Cut.UNITS
        with naming_damage(path, plan.source), open_input(plan.manifest.base, row.path) as file:
            if not accept_changed:
                require_unchanged(row, path, file, plan.source)
            for group in range(len(row.group_rows)) if has_units else (None,):
                where = FilePart(file=index, start=0, stop=row.bytes, group=group)
                parts = _parts(file, plan, where, 0, number, whole=True)
                for part in parts if accept_changed else _counted(parts, plan, where):
                    yield part
                    number += len(part.records)


@contextmanager
def naming_damage(path: str, source: str | None = None) -> Iterator[None]:
    """Converts a reader's errors about the file at `path` to `DataError` or `DataIdentityError` with its
    path.

    `source`: the source whose frozen list the file is in; None before there is a list.
    """
    anew = "start a run without it" if source is None else restart_text(source)
    without = anew if source is None else f"leave it out and {anew}"
    try:
        yield
    except FileNotFoundError as error:
        raise DataIdentityError(
            f"{path}: the run was started with this file, and it is missing; put it back, or {anew}",
            code="data.missing_files",
        ) from error
    except DAMAGE as error:
        raise DataError(
            f"{path}: cannot be read: {error}; put back the whole file, or {without}", code=damage_code(error)
        ) from error


def _counted(parts: Iterator[Part], plan: SourcePlan, where: FilePart) -> Iterator[Part]:
    """Yields the parts of a unit, and checks their number of records.

    Raises `DataError` after the last part if it differs from the file's own index (a footer, the headers of
    record batches) at the time of listing.
    """
    num = 0
    for part in parts:
        yield part
        num += len(part.records)
    if where.group is None:
        return
    expected = plan.manifest.files[where.file].group_rows[where.group]
    if num != expected:
        unit = plan.manifest.unit
        raise DataError(
            f"{plan.manifest.path(where.file)}: its index gives {expected} {unit}s for part {where.group}, "
            f"and {num} are there; replace the file",
            code="data.contradicting_index",
        )


def _parts(
    file: InputFile, plan: SourcePlan, where: FilePart, fragment: int, number: int, whole: bool
) -> Iterator[Part]:
    """The records of `where`, the first of which has `number`."""
    manifest = plan.manifest
    form, row = manifest.form, manifest.files[where.file]
    for line, records, place in form.read(file, row, where, manifest.content, whole):
        yield Part(
            fragment=fragment,
            file=where.file,
            number=number,
            line=line,
            records=records,
            place=place,
            rows=form.counts_records,
        )
        number += len(records)
