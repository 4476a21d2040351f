"""A rank's batches, made ahead in a thread, with a state from which a loader of any other shape can continue.

The stream is read, tokenized and packed in this process, on demand. torch is loaded only for tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from orchestrator.data.loading.state import state_of
from orchestrator.data.packing.samples import Sample, draw_samples, draw_step
from orchestrator.data.packing.step_samples import NO_LOSS, PAD_TOKEN, PADDING, StepSamples
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError, RefusedError
from orchestrator.planning.batches import micro_batches_per_rank, next_range, num_micro_batches, rank_samples
from orchestrator.planning.resume.source_lists import RestartRequest
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import Int32Array, TokenChunk

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Iterates over `items` in its own thread. At most `depth` items are buffered and one is being made.

    For one consumer.

    An error of the iterator is raised by `take` after the items before it, and by every later `take`.
    """

    def __init__(self, items: Iterator[Item], depth: int, name: str) -> None:
        self._items, self._depth = items, depth
        self._waiting: deque[Item] = deque()
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """Waits for the next item. Raises `StopIteration` after the last one, `FeedError` once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._closed)
            if self._closed:
                raise FeedError(
                    "the stream is closed; open it again at the cursor or state that you have",
                    code="command.stream_closed",
                )
            if self._waiting:
                item = self._waiting.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stops the thread after its current item and waits for it. Idempotent, thread-safe."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # garbage collection runs in any thread
            self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._waiting) < self._depth or self._closed)
                    if self._closed:
                        return
                    self._waiting.append(item)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  the consumer's thread raises it
            self._error = error
        finally:
            del self._items  # frees all that it holds
            with self._changed:
                self._ended = True
                self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A stream at a place in it. Its states record `restart`. `notes` are for the user."""

    spec: DataSpec
    cursor: Cursor
    restart: RestartRequest | None = None
    notes: tuple[str, ...] = ()


Open = Callable[[Mapping[str, Any]], Opened]


def _made(
    drawing: Drawing, share: Share, tensors: Tensors, collate: Callable[[Batch], Any] | None
) -> Iterator[tuple[list[Any], Cursor]]:
    """Yields (this rank's batches, the cursor after them) for each step."""
    for drawn in drawing.steps(share.global_batch_size, share.seq_len):
        batches = rank_batches(drawn, share, tensors)
        yield (batches if collate is None else [collate(each) for each in batches]), drawn.cursor


class Loader:
    """An iterator of a rank's batches to the end of the data. `SampleStream.batches` makes it.

    A thread reads, tokenizes, packs and collates `prefetch` steps ahead. `next` raises the errors of this
    thread. `iter()` returns the loader itself, at its position. Not thread-safe, and not for other processes
    (see `dataset`). The thread ends with `close`, at the end of a `with`, or when the loader is deleted.
    """

    def __init__(
        self,
        drawing: Drawing,
        opened: Opened,
        *,
        share: Share,
        tensors: Tensors,
        collate: Callable[[Batch], Any] | None,
        prefetch: int,
        reopen: Open,
    ) -> None:
        self._share, self._tensors, self._collate, self._prefetch = share, tensors, collate, prefetch
        self._reopen = reopen
        self._begin(drawing, opened)

    def _begin(self, drawing: Drawing, opened: Opened) -> None:
        self._opened, self._cursor, self._after = opened, opened.cursor, opened.cursor
        self._rest: deque[Any] = deque()  # of the current step
        self._given = 0  # of the current step
        made = _made(drawing, self._share, self._tensors, self._collate)
        self._ahead = Ahead(made, self._prefetch, "batches")
        self._end = weakref.finalize(self, self._ahead.close)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if not self._rest:
            batches, self._after = self._ahead.take()
            self._rest, self._given = deque(batches), 0
        batch = self._rest.popleft()
        self._given += 1
        if not self._rest:
            self._cursor = self._after
        return batch

    @property
    def cursor(self) -> Cursor:
        """The place after the last step of which all batches were returned."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """The loader's position as plain JSON values, the same on every rank. Prefetched batches are not
        counted as read.

        Raises `RefusedError` inside a step, when only some of its micro-batches were returned: no checkpoint
        contains their gradient.
        """
        if self._rest:
            raise RefusedError(
                f"the loader has returned {self._given} of the {self._given + len(self._rest)} micro-batches "
                "of a step; take the state after the last one, when the optimizer has stepped",
                code="command.inside_step",
            )
        return state_of(self._opened.spec, self._cursor, self._opened.restart)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at exactly the next unread token of `state`. The world size, batch size and seq_len may
        differ from those at which it was taken.

        Raises `DataIdentityError` with both values if it is a state of other files, another tokenizer or
        other settings of the stream. The loader then keeps its position.
        """
        opened = self._reopen(state)
        drawing = Drawing(opened.spec, opened.cursor)
        self.close()
        self._begin(drawing, opened)

    def dataset(self) -> IterableDataset[Any]:
        """The same batches as a torch `IterableDataset`, for `DataLoader(loader.dataset(), batch_size=None)`.

        It needs `num_workers=0`, because each worker process would read the whole stream. The dataset's
        iterator raises `RefusedError` in a worker process.
        """
        from orchestrator.data.loading.torch_dataset import LoaderDataset

        return LoaderDataset(self)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --------------------------------------------------------------------------------------------- a rank's share
Tensors = Literal["numpy", "torch"]
Batch = dict[str, Any]
_NAMES = ("input_ids", "labels", "document_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Which samples of each step a rank receives (`planning.batches.rank_samples`), and in which batches:
    single micro-batches (`micro_batches`), or all of them as one batch.
    """

    global_batch_size: int  # samples of a step, over all ranks
    micro_batch_size: int  # samples; ranks receive whole micro-batches
    seq_len: int  # positions of a sample
    rank: int
    world_size: int
    micro_batches: bool


def rank_batches(drawn: StepSamples, share: Share, tensors: Tensors) -> list[Batch]:
    """The batches of this rank in a step. Every rank has the same number, so that collectives match.

    Each has `input_ids`, `labels` (the next token of each position, -100: no loss) and `document_ids` (-1:
    padding), all (num_samples, seq_len), int32 as arrays, int64 as tensors. `step_targets` is the number of
    target tokens of the whole step over all ranks. `first_index` is the index of the batch's first sample in
    the stream. A rank without samples in the step gets one sample of padding. A sample of
    `content: preference` has two rows, (2 · num_samples, seq_len).
    """
    step, micro = drawn.step, share.micro_batch_size
    first, stop = rank_samples(0, step.num_samples, micro, share.rank, share.world_size)
    _, *tables = drawn.arrays(first, stop)
    num = micro_batches_per_rank(num_micro_batches(step.num_samples, micro), share.world_size)
    size = micro if share.micro_batches else max(1, num * micro)
    return [
        _batch([table[at : at + size] for table in tables], drawn, first + min(at, stop - first), tensors)
        for at in range(0, num * micro, size)
    ]


def _batch(tables: list[Int32Array], drawn: StepSamples, first: int, tensors: Tensors) -> Batch:
    if not len(tables[0]):
        fillers = (PAD_TOKEN, NO_LOSS, PADDING)
        tables = [np.full((1, drawn.step.seq_len), filler, np.int32) for filler in fillers]
    shape = (len(tables[0]) * drawn.rows_per_sample, drawn.step.seq_len // drawn.rows_per_sample)
    batch: Batch = dict(zip(_NAMES, (table.reshape(shape) for table in tables), strict=True))
    if tensors == "torch":
        import torch

        batch = {name: torch.from_numpy(table).long() for name, table in batch.items()}
    return {**batch, "step_targets": drawn.targets, "first_index": drawn.first_index + first}


# --------------------------------------------------------------------------------- the stream in this process
class Drawing:
    """The stream from `cursor` on. Opening reads enough to verify that the cursor belongs to this stream.

    For one consumer, in any thread. Raises `DataIdentityError` (with both values) if the data, the tokenizer
    or the encoder are not those of the cursor, and `DataError` for data that cannot be read.
    """

    def __init__(self, spec: DataSpec, cursor: Cursor, seq_len: int | None = None) -> None:
        self._stream, encoders = spec.stream(cursor, seq_len), spec.build_encoders()
        self._names = [plan.source for plan in spec.plans]
        self._chunks = {name: spec.chunks(cursor, name, encoders) for name in self._names}
        for name in self._names:
            ended = name in cursor.mixture and cursor.mixture[name].ended
            if cursor.sources.get(name, SourceCursor()) != SourceCursor() and not ended:
                self._verify(name)

    def samples(self, seq_len: int) -> Iterator[Sample]:
        """All samples to the end of the data."""
        return draw_samples(self._stream, self._next_chunk, seq_len)

    def steps(self, global_batch_size: int, seq_len: int) -> Iterator[StepSamples]:
        """All steps to the end of the data. The last one may have fewer samples."""
        while True:
            at = self._stream.cursor
            step = next_range(at.consumed_samples, at.consumed_tokens, global_batch_size, seq_len)
            assert step is not None, "without a budget there is no last step"
            drawn = draw_step(self._stream, step, self._next_chunk)
            if drawn.step.num_samples:
                yield drawn
            if drawn.end_of_data or not drawn.step.num_samples:
                return

    def _next_chunk(self, source: str) -> TokenChunk | None:
        return next(self._chunks[source], None)

    def _verify(self, source: str) -> None:
        """Feeds the chunks that the cursor's digests cover. They are drawn later."""
        while (chunk := self._next_chunk(source)) is not None:
            self._stream.feed(chunk)
            if chunk.ends_window or self._stream.buffered_tokens(source):
                return
