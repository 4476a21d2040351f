"""The Ray Data pipeline: turns slot numbers into the token chunks of their windows, in slot order.

Its tokenizers ask the feeder which window a slot is, and wait there until there is room for it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Generator, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.data_share import looking_often, take_own_share
from orchestrator.cluster.shield import expose_forks
from orchestrator.data.common.process_limits import ProcessLimits, limit_process
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.feed.buffers import chunk_bytes
from orchestrator.data.feed.feed_reports import WorkReports
from orchestrator.data.feed.stream_session import UNEXPECTED
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.windows import Window, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chunks import Encoders, Passed, tokenize_window
from orchestrator.errors import FeedError, OrchestratorError
from orchestrator.records.tokens import TokenChunk, WindowTask

# The open blocks of a tokenizer process: reading a later window continues where an earlier one ended.
# At most one block of a source is open, for this many sources. An open block keeps its file and its decoder's
# state.
MAX_OPEN = 8


class NotWantedError(Exception):
    """The feeder no longer wants the task whose earlier windows are being skipped."""


class OpenBlocks:
    """Reads windows of blocks by their number. Not thread-safe."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._open: dict[str, _OpenBlock] = {}  # by source, least recently used first

    def read(
        self, task: WindowTask, plan: SourcePlan, settings: StreamSettings, passed: Passed = lambda _: True
    ) -> Window | int:
        """The task's window, or the block's number of windows if it has fewer.

        Windows before it are read and skipped, from the block's open position or from its beginning. That may
        take an hour, so `passed` is called with the decoded bytes of each skipped window. Raises
        `NotWantedError` if it returns False. Raises as `read_windows` does.
        """
        opened = self._open.pop(task.source, None)  # after an error the block is reopened
        if opened is None or not opened.leads_to(task):
            opened = _OpenBlock(task, read_windows(plan, settings, task.epoch, task.block))
        found = opened.read(task.window, passed)
        self._open[task.source] = opened
        if len(self._open) > self._max_open:
            del self._open[next(iter(self._open))]
        return found


class _OpenBlock:
    def __init__(self, task: WindowTask, windows: Iterator[Window]) -> None:
        self._block, self._windows = (task.epoch, task.block), windows
        self._next = 0  # the window that is read next
        self._num_windows: int | None = None  # known at the end

    def leads_to(self, task: WindowTask) -> bool:
        """Whether the task's window is still to come, or known to lie beyond the end."""
        ahead = task.window >= (self._next if self._num_windows is None else self._num_windows)
        return (task.epoch, task.block) == self._block and ahead

    def read(self, number: int, passed: Passed) -> Window | int:
        while self._num_windows is None:
            window = next(self._windows)
            self._next += 1
            if window.last:
                self._num_windows = self._next
            if window.number == number:
                return window
            num_bytes = sum(int(part.records.sizes.sum()) for part in window.parts)
            del window  # frees it before the next one is read
            if not passed(num_bytes):
                raise NotWantedError
        return self._num_windows


# A tokenizer runs one slot at a time. A slot that Ray repeats after a kill can then never queue behind one
# that waits for room, which would deadlock. The feeder's prefetch hides the gap between two slots.
SLOTS_PER_TOKENIZER = 1
# Training processes have priority on a shared machine.
TOKENIZER_NICENESS = 19

_INT32S = ("tokens", "record", "piece", "num_tokens", "kind", "last_piece", "special_texts", "file")
# `loss` is null if all tokens are targets, `output` if each record gives one document, `row` if each sample
# has one row
_BINARIES = dict.fromkeys((*_INT32S, "output", "row"), "<i4") | {"place": "<i8", "loss": "?"}
_TEXTS = ("bad_reasons", "encoder_differences")
_SCALARS = ("source", "epoch", "block", "window", "ends_window", "ends_block")
_ROW = pa.schema(
    [
        ("slot", pa.int64()),
        ("source", pa.string()),
        ("epoch", pa.int64()),
        ("block", pa.int64()),
        ("window", pa.int64()),
        ("ends_window", pa.bool_()),
        ("ends_block", pa.bool_()),
        *((name, pa.list_(pa.string())) for name in _TEXTS),
        *((name, pa.large_binary()) for name in _BINARIES),
    ]
)


class SlotSource(Datasource):
    """Slot numbers, one block each. Reading one opens no file. Ray does it inside the tokenizer."""

    def __init__(self, slots: range) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots = slots

    def estimate_inmemory_data_size(self) -> int:
        """Bytes of all slot numbers."""
        return 8 * len(self._slots)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """One task per slot, whatever parallelism Ray proposes: the blocks must not depend on the cluster."""
        del parallelism, per_task_row_limit, data_context
        one = BlockMetadata(num_rows=1, size_bytes=8, input_files=None, exec_stats=None)
        return [ReadTask(partial(_slot_block, slot), one) for slot in self._slots]


def _slot_block(slot: int) -> list[pa.Table]:
    return [pa.table({"slot": [slot]})]


class Tokenizer:
    """The actor of the pool: asks the feeder for its slot's window, reads that window and encodes it.

    Every failure is first reported to the feeder, as an error of ours with its full text. The exception then
    ends the dataset. A slot that is repeated after this process was killed gives the same chunks.
    """

    def __init__(self, spec: Any, feeder: Any, pipeline: int, limits: ProcessLimits | None) -> None:
        """`spec`: an object reference to the spec. `pipeline`: the feeder's number of the pipeline."""
        self._reference, self._feeder, self._pipeline = spec, feeder, pipeline
        limits = limits or ProcessLimits()
        limit_process(limits)
        self._blocks = OpenBlocks(limits.open_blocks)
        expose_forks()
        os.nice(TOKENIZER_NICENESS)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it has one CPU

    # both are loaded at the first slot: an error at actor start would cause restarts instead of a report
    @cached_property
    def _spec(self) -> DataSpec:
        spec: DataSpec = ray.get(self._reference)
        return spec

    @cached_property
    def _encoders(self) -> Encoders:
        return self._spec.build_encoders()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Yields the chunks of one slot, each as a table of one row.

        A slot that is no window yields a row without a chunk. So does a slot that is no longer wanted because
        the feeder moved to another place, after the chunks made so far.
        """
        slot = int(batch["slot"][0].as_py())
        try:
            for chunk in self._chunks(slot):
                yield chunk_to_row(slot, chunk)
        except TaskCancelledError:
            raise  # the dataset is being closed, and its closer reports why
        except NotWantedError:
            yield _no_window(slot)
        except Exception as error:
            if ray.get(self._feeder.failed.remote(self._pipeline, slot, _of_ours(error))):
                raise
            yield _no_window(slot)

    def _chunks(self, slot: int) -> Iterator[TokenChunk]:
        task, window, wanted = self._read(slot)
        plan = self._spec.plan_of(task.source, task.epoch)
        for chunk in tokenize_window(task, window, plan, self._encoders, self._spec.settings):
            # Requested for each chunk, so that a tokenizer waits for room and abandons an unwanted place
            # within two chunks. The feeder answers while the next chunk is made.
            if not ray.get(wanted):
                raise NotWantedError
            wanted = self._feeder.room.remote(self._pipeline, slot, chunk_bytes(chunk))
            yield chunk

    def _read(self, slot: int) -> tuple[WindowTask, Window, Any]:
        """Reads the slot's window. Returns its task, the window, and a reference to whether it is still
        wanted.

        The feeder is notified at once of what follows the window, so that it can assign that to other
        tokenizers. Raises `NotWantedError` if there is no window for the slot.
        """
        while (task := ray.get(self._feeder.slot.remote(self._pipeline, slot))) is not None:
            plan = self._spec.plan_of(task.source, task.epoch)
            passed = WorkReports(partial(self._working, slot))
            found = self._blocks.read(task, plan, self._spec.settings, passed)
            num_windows = found if isinstance(found, int) else task.window + 1 if found.last else None
            wanted = self._feeder.read.remote(self._pipeline, slot, task, num_windows)
            if isinstance(found, Window):
                return task, found, wanted
            if not ray.get(wanted):
                break
        raise NotWantedError

    def _working(self, slot: int, bytes_passed: int) -> bool:
        wanted: bool = ray.get(self._feeder.working.remote(self._pipeline, slot, bytes_passed))
        return wanted


def _no_window(slot: int) -> pa.Table:
    return pa.table({name: [slot if name == "slot" else None] for name in _ROW.names}, schema=_ROW)


def _of_ours(error: Exception) -> OrchestratorError:
    """The error itself if it is one of ours. Any other as a `FeedError` with the traceback, because its class
    may not pickle.
    """
    if isinstance(error, OrchestratorError):
        return error
    return FeedError(
        f"a tokenizer failed: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}",
        code=UNEXPECTED,
    )


def chunk_to_row(slot: int, chunk: TokenChunk) -> pa.Table:
    """A chunk as a table of one row: integers, and the arrays as little-endian bytes that share memory."""
    values: dict[str, Any] = {"slot": [slot]}
    values |= {name: [getattr(chunk, name)] for name in _SCALARS}
    values |= {name: [list(getattr(chunk, name))] for name in _TEXTS}
    values |= {name: _binary(getattr(chunk, name), kind) for name, kind in _BINARIES.items()}
    return pa.table(values, schema=_ROW)


def _binary(array: npt.NDArray[Any] | None, kind: str) -> pa.LargeBinaryArray:
    """A column of one value over the array's memory. Arrow's own constructor would copy it."""
    if array is None:
        return pa.nulls(1, pa.large_binary())
    data = np.ascontiguousarray(array, dtype=kind).view(np.uint8)
    offsets = np.array([0, len(data)], "<i8")
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def row_to_chunk(row: pa.Table) -> tuple[int, TokenChunk | None]:
    """The inverse of `chunk_to_row`: (slot, chunk), with None for a slot that is no window.

    The arrays are read-only views of the table's memory.
    """
    slot = int(row["slot"][0].as_py())
    if row["source"][0].as_py() is None:
        return slot, None
    scalars: dict[str, Any] = {name: row[name][0].as_py() for name in _SCALARS}
    texts: dict[str, Any] = {name: tuple(row[name][0].as_py()) for name in _TEXTS}
    arrays: dict[str, Any] = {name: _array(row[name].chunk(0), kind) for name, kind in _BINARIES.items()}
    return slot, TokenChunk(**scalars, **arrays, **texts)


def _array(value: pa.LargeBinaryArray, kind: str) -> npt.NDArray[Any] | None:
    """The inverse of `_binary`. Works on the buffers, because a value taken out of its column is a copy."""
    if value.null_count:
        return None
    _, offsets, data = value.buffers()
    begin, end = np.frombuffer(offsets, "<i8", count=2, offset=8 * value.offset).tolist()
    kind_bytes = np.dtype(kind).itemsize
    return np.frombuffer(data or b"", kind, count=(end - begin) // kind_bytes, offset=begin)


def _configure(num_cpus: float) -> None:
    """Configures Ray Data for this process, the feeder's, which runs no other dataset."""
    take_own_share(num_cpus)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.target_max_block_size = 1  # every chunk is a block: it leaves the actor as soon as it is made
    context.execution_no_progress_timeout_s = -1  # waiting for room is normal: training may pause for hours
    context.max_errored_blocks = 0
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def read_chunks(
    spec: Any,
    feeder: Any,
    pipeline: int,
    slots: range,
    num_tokenizers: int,
    node_id: str | None = None,
    tokenizer_cpus: float = 1.0,
    limits: ProcessLimits | None = None,
) -> Generator[tuple[int, TokenChunk | None]]:
    """Runs one dataset over `slots` and yields (slot, chunk) in order, with None for a slot that is no
    window.

    `spec`: an object reference to the `DataSpec`. `pipeline`: the number by which tokenizers identify
    themselves to the feeder. Each tokenizer takes `tokenizer_cpus` logical CPUs; with 0 it runs beside
    others, at its low priority.

    Blocks while the tokenizers have no room. Closing the generator ends the dataset; its actors end after
    their current chunk. Raises the error that ended the dataset. A killed tokenizer is not an error: it is
    replaced and its slots are repeated.
    """
    _configure(num_tokenizers * tokenizer_cpus)
    # The node on which the launch has reserved room for tokenizers, so that they take no worker's place;
    # another node if it is gone. Reading uses the same options as encoding. Otherwise Ray would not fuse the
    # two, and separate reading tasks would wait for a CPU that was never reserved.
    placed: dict[str, Any] = {"num_cpus": tokenizer_cpus}
    if node_id is not None:
        placed["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node_id, soft=True)
    reading = ray.data.read_datasource(
        SlotSource(slots), override_num_blocks=len(slots), ray_remote_args=dict(placed)
    )
    dataset = reading.map_batches(
        Tokenizer,
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ray.data.ActorPoolStrategy(
            size=min(num_tokenizers, len(slots)), max_tasks_in_flight_per_actor=SLOTS_PER_TOKENIZER
        ),
        fn_constructor_args=(spec, feeder, pipeline, limits),
        **placed,
    )
    bundles = dataset.iter_internal_ref_bundles()
    while True:
        with looking_often():
            bundle = next(bundles, None)
        if bundle is None:
            return
        for reference in bundle.block_refs:
            block = ray.get(reference)
            for i in range(block.num_rows):
                yield row_to_chunk(block.slice(i, 1))
