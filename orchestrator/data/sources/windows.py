"""Reads a block's records in windows, and a record as a document or as the reason why it is bad.

`planning.order` defines the order in a window. A record keeps its number, whatever its outcome.
`WindowColumns` has the places and sizes of a window's records as arrays, to process many records at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from orchestrator.data.common.process_limits import process_limits
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES, Lines, Values
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.readers import Part, read_fragment
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Described,
    Document,
    WrongFieldError,
)
from orchestrator.data.sources.records.line_records import line_numbers
from orchestrator.errors import DataError
from orchestrator.planning.order import (
    block_at,
    holdout_bound,
    holdout_key,
    is_held_out,
    record_seed,
    transform_key,
    window_order,
)
from orchestrator.records.tokens import BoolArray, Int32Array, Int64Array

__all__ = ["BadRecordError", "OrderedWindow", "Window", "WrongFieldError", "read_windows"]

_BOM = b"\xef\xbb\xbf"
# Texts are processed in runs of at most this many; runs shorter than `_LEAST_RUN` are processed one by one.
_RUN_RECORDS, _LEAST_RUN = 4096, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Records that are permuted together, as parts in file order. `last`: it is the block's last window."""

    number: int
    last: bool
    parts: tuple[Part, ...]


class OrderedWindow:
    """A window's records in the order of an epoch. `position` counts in that order."""

    def __init__(self, window: Window, plan: SourcePlan, settings: StreamSettings, epoch: int) -> None:
        self._window, self._plan, self._settings, self._epoch = window, plan, settings, epoch
        self._ends = list(accumulate(len(part.records) for part in window.parts))
        runs = [(part.fragment, part.number, len(part.records)) for part in window.parts]
        self._limits = process_limits()
        self._require_room(plan)
        self._order = window_order(runs, settings.seed, plan.source, epoch, settings.shuffle)
        self._format = plan.manifest.form
        self._parse = self._format.parser(plan.manifest.content)
        self._holdout_bound = holdout_bound(settings.holdout.get(plan.source, 0))
        self._holdout_keys = dict[int, int]()  # by file
        self._transform_keys = dict[int, int]()  # by file
        self._columns: WindowColumns | None = None  # made on demand
        self._has_columns = self.content.kind == "text"
        # cache of the last lookup: each position is queried several times
        self._found_at = -1
        self._found: tuple[Part, int] | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def content(self) -> Content:
        """The content of its records, and their fields."""
        return self._plan.manifest.content

    def size(self, position: int) -> int:
        """Decoded bytes of the record, with its line end. A document's text is at most this long in UTF-8."""
        part, index = self._find(position)
        return part.records.size(index)

    def document(self, position: int) -> Document | None:
        """The document; None for a blank line, which is no document. Raises `BadRecordError`."""
        found = self.described(position)
        return found.document if isinstance(found, Described) else found

    def described(self, position: int) -> Document | Described | None:
        """The document, with the fields for its transforms, if there are any. Raises as `document`."""
        part, index = self._find(position)
        size = part.records.size(index)
        if size <= MAX_RECORD_BYTES:
            self._limits.require_record(size)
        record = part.records[index]
        if record is None and size:
            raise BadRecordError(
                f"it has {size:,} bytes, and a record may have {MAX_RECORD_BYTES:,}; split it into several",
                code="record.too_long",
            )
        if record is None:
            field = self._plan.manifest.text_field
            raise BadRecordError(f"{field!r} is null", code="record.null_field")
        if index == part.place == 0 and self._format.drops_bom:
            record = record.removeprefix(_BOM)
        return self._parse(record)

    def _require_room(self, plan: SourcePlan) -> None:
        """Raises `DataError` if the records cannot be ordered in this process. The error names the first
        file.
        """
        first = self._window.parts[0] if self._window.parts else None
        num_records = self._ends[-1] if first is not None else 0
        try:
            self._limits.require_records(num_records)
        except DataError as error:
            assert first is not None, "a window of no records takes nothing"
            raise DataError(f"{plan.manifest.path(first.file)}: {error}", code=error.code) from None

    def is_sampled(self, position: int, one_in: int) -> bool:
        """Whether the record belongs to a fixed sample of about one record in `one_in`."""
        part, index = self._find(position)
        return (part.sample_number + index) % one_in == 0

    def texts(self, position: int, num_bytes: int, one_in: int) -> TextRun | None:
        """The texts of the records from a position on, as many as have about `num_bytes`.

        `one_in` is for `is_sampled`. None: they must be processed one by one.
        """
        if self._columns is None and self._has_columns:
            self._columns = columns_of(self._window.parts)
            self._has_columns = self._columns is not None
        if self._columns is None:
            return None
        numbers = self._order[position : position + _RUN_RECORDS]
        files, places, sizes, sampled = self._columns.lie_at(numbers, one_in)
        num = max(1, int(np.searchsorted(np.cumsum(sizes), num_bytes, side="right")))
        if num < _LEAST_RUN:
            return None
        texts = [self._text(record) for record in self._columns.records(numbers[:num])]
        return TextRun(
            texts=texts, files=files[:num], places=places[:num], sizes=sizes[:num], sampled=sampled[:num]
        )

    def _text(self, record: bytes | None) -> str:
        try:
            found = self._parse(record) if record is not None else None
        except BadRecordError:
            return ""
        return found if isinstance(found, str) else ""

    @property
    def takes_all(self) -> bool:
        """Whether the stream takes every record: nothing is held out, and it is not the stream of held-out
        records.
        """
        return not self._holdout_bound and not self._settings.held_out

    def is_held_out(self, position: int) -> bool:
        """Whether the record belongs to the hold-out of its source, in every epoch."""
        file, place = self.origin(position)
        if (key := self._holdout_keys.get(file)) is None:
            path = self._plan.manifest.files.path(file)
            key = self._holdout_keys[file] = holdout_key(self._plan.source, path)
        return is_held_out(place, key, self._holdout_bound)

    def seed(self, position: int) -> int:
        """The record's seed for its transforms, different in each epoch."""
        file, place = self.origin(position)
        if (key := self._transform_keys.get(file)) is None:
            path = self._plan.manifest.files.path(file)
            key = transform_key(self._settings.seed, self._plan.source, self._epoch, path)
            self._transform_keys[file] = key
        return record_seed(place, key)

    def origin(self, position: int) -> tuple[int, int]:
        """The record's place: (number of the file in the manifest, byte offset or row in it)."""
        part, index = self._find(position)
        return part.file, part.place_of(index)

    def place(self, position: int) -> str:
        """The record's place, for messages: file, byte offset and line, or the format's unit."""
        part, index = self._find(position)
        manifest = self._plan.manifest
        path = manifest.path(part.file)

        def line() -> int | None:  # relative to the part's place, so one place is counted for all lines
            row = manifest.files[part.file]
            numbers = line_numbers(manifest.base, row.path, row.bytes, row.probe)
            before = numbers.newlines_before(part.place)
            return None if before is None else before + 1

        return self._format.place(path, part, index, line)

    def in_place(self, position: int) -> str:
        """How to change the record's document so that the run may continue with it; see `Format.in_place`."""
        return self._format.in_place(self._plan.manifest.path(self._find(position)[0].file))

    def _find(self, position: int) -> tuple[Part, int]:
        if self._found is None or position != self._found_at:
            record = self._order.item(position)
            number = bisect_right(self._ends, record)
            before = self._ends[number - 1] if number else 0
            self._found_at, self._found = position, (self._window.parts[number], record - before)
        return self._found


def read_windows(plan: SourcePlan, settings: StreamSettings, epoch: int, position: int) -> Iterator[Window]:
    """The windows of the block at `position` in the epoch's order; at least one, which may be empty.

    A window takes records while they fit into `window_bytes`. A longer record is a window of its own. The
    last window is yielded when the block is read to its end, so two windows are never held at once.
    """
    block = block_at(settings.seed, plan.source, epoch, position, plan.num_blocks, settings.shuffle)
    held: list[Part] = []
    number = total = 0
    for fragment in plan.fragments(block):
        for whole in read_fragment(plan, fragment, settings.accept_changed):
            part = whole
            while len(part.records):
                ends = total + np.cumsum(part.records.sizes)
                fits = int(np.searchsorted(ends, settings.window_bytes, side="right"))
                if not held:
                    fits = max(fits, 1)
                if fits:
                    held.append(part.cut(0, fits))
                    total = int(ends[fits - 1])
                    part = part.cut(fits, len(part.records))
                if len(part.records):  # the next record does not fit
                    del ends
                    yield _closed(number, held)
                    number, total = number + 1, 0
    yield _closed(number, held, last=True)


def _closed(number: int, held: list[Part], last: bool = False) -> Window:
    """A window of the held parts, which are released: a generator that is suspended here keeps none of
    them.
    """
    parts = tuple(held)
    held.clear()
    return Window(number=number, last=last, parts=parts)


# ---------------------------------------------------------------------------------------- columns of a window
# The arrays take 12 bytes a record, little beside this many. Records that are shorter on average, or parts
# with fewer records than this, are processed one by one.
_LEAST_BYTES, _LEAST_RECORDS = 64, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRun:
    """Texts of consecutive records in a window's order, and their places.

    The text is empty for a record that must be processed alone (for example a blank, empty or bad one).
    """

    texts: list[str]
    files: Int64Array
    places: Int64Array
    sizes: Int64Array
    sampled: BoolArray  # the result of `OrderedWindow.is_sampled`

    def __len__(self) -> int:
        return len(self.texts)


class WindowColumns:
    """Of all records of a window in file order: each one's place in its file, and its decoded bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        nums = [len(part.records) for part in parts]
        self._stops = np.cumsum(nums)
        self._firsts = self._stops - nums
        self._parts = parts
        self._records = [part.records for part in parts]
        self._files = np.array([part.file for part in parts], np.int64)
        self._first_samples = np.array([part.sample_number for part in parts], np.int64)
        self.places: Int64Array = np.concatenate([part.places for part in parts])
        sizes = np.concatenate([part.records.sizes for part in parts])
        self.sizes = sizes.astype(np.int32) if sizes.max(initial=0) < 1 << 31 else sizes

    def lie_at(
        self, numbers: Int32Array, one_in: int
    ) -> tuple[Int64Array, Int64Array, Int64Array, BoolArray]:
        """(file, place, decoded bytes, whether in a sample of one in `one_in`) of these records."""
        parts = np.searchsorted(self._stops, numbers, side="right")
        samples = self._first_samples[parts] + numbers - self._firsts[parts]
        sizes = self.sizes[numbers].astype(np.int64)
        return self._files[parts], self.places[numbers], sizes, samples % one_in == 0

    def records(self, numbers: Int32Array) -> list[bytes | None]:
        """These records. None: a null, or one at the beginning of its file, which may have a byte order
        mark.
        """
        parts = np.searchsorted(self._stops, numbers, side="right")
        indices, held = numbers - self._firsts[parts], self._records
        found = [held[part][i] for part, i in zip(parts.tolist(), indices.tolist(), strict=True)]
        for at in np.flatnonzero(self.places[numbers] == 0).tolist():
            found[at] = None
        return found


def columns_of(parts: Sequence[Part]) -> WindowColumns | None:
    """The columns of a window's parts.

    None if its records are not bytes in memory, or are processed as quickly one by one.
    """
    num = sum(len(part.records) for part in parts)
    if num < _LEAST_RECORDS * max(1, len(parts)):
        return None
    if not all(isinstance(part.records, Lines | Values) for part in parts):
        return None
    if sum(_num_bytes(part) for part in parts) < _LEAST_BYTES * num:
        return None
    return WindowColumns(parts)


def _num_bytes(part: Part) -> int:
    last = len(part.records) - 1
    return part.records.bytes_before(last) + part.records.size(last) if last >= 0 else 0
