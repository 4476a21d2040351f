"""The thread that reads a pipeline beside the feeder's event loop, one dataset after the other.

It takes a chunk when the feeder wants one. Ray Data is loaded in the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeVar

import ray

from orchestrator.cluster.data_share import before_loading
from orchestrator.cluster.ray_inventory import DATASET_THREADS
from orchestrator.data.common.process_limits import ProcessLimits
from orchestrator.paused_gc import paused_gc
from orchestrator.records.tokens import TokenChunk

Result = TypeVar("Result")

# A dataset runs over this many slots, then the next one starts: Ray lists a dataset's inputs in advance.
SLOTS_PER_DATASET = 256
# Name prefixes of a pipeline's threads: ours, and Ray Data's.
_PIPELINE_THREADS = ("pipeline-", DATASET_THREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerPool:
    """The tokenizer processes of a feeder.

    `node_id`: where they run while that node lives (None: anywhere). `cpus`: logical CPUs of each.
    `slots_per_dataset`: they are started anew after this many slots.
    """

    num: int
    node_id: str | None = None
    cpus: float = 1.0
    slots_per_dataset: int = SLOTS_PER_DATASET


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSettings:
    """Settings of all pipelines of a feeder. `spec` is an object reference to the `DataSpec`. For `limits`,
    see `pipeline.read_chunks`.
    """

    spec: Any
    tokenizers: TokenizerPool
    limits: ProcessLimits | None


class Taker(Protocol):
    """The consumer of a pipeline's chunks, on the event loop that started its thread."""

    async def goes_on(self, pipeline: int) -> bool:
        """Whether this pipeline has more to read. If not, it stops being the current one."""

    async def take(self, pipeline: int, slot: int, chunk: TokenChunk | None) -> bool:
        """Waits until a chunk is wanted and takes it, or a slot without one. Returns False if no more are
        wanted.
        """

    async def pipeline_failed(self, pipeline: int, error: Exception) -> None:
        """The pipeline ended with `error`."""


class PipelineThreads:
    """The threads of one feeder: the current reader, and earlier ones that may still be ending."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self._threads: list[threading.Thread] = []

    def start(self, pipeline: int, taker: Taker) -> None:
        """Reads the pipeline of this number for `taker`, which runs on the current event loop."""
        reader = threading.Thread(
            target=read_pipeline,
            args=(self._settings, pipeline, taker, asyncio.get_running_loop()),
            name=f"pipeline-{pipeline}",
            daemon=True,
        )
        self._threads = [thread for thread in self._threads if thread.is_alive()] + [reader]
        reader.start()

    async def joined(self) -> None:
        """Waits until all threads have ended."""
        for thread in self._threads:
            await asyncio.to_thread(thread.join)


def read_pipeline(
    settings: PipelineSettings, pipeline: int, taker: Taker, loop: asyncio.AbstractEventLoop
) -> None:
    """Reads to the end of the data or of the pipeline, in the calling thread.

    Raises nothing: errors are reported to `taker`.
    """

    def call(what: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(what, loop).result()

    try:
        before_loading()
        with paused_gc():
            from orchestrator.data.feed.pipeline import read_chunks

        feeder, limit = ray.get_runtime_context().current_actor, settings.tokenizers.slots_per_dataset
        for first in count(0, limit):  # the number of slots is not known in advance
            if not call(taker.goes_on(pipeline)):
                return
            items = read_chunks(
                settings.spec,
                feeder,
                pipeline,
                range(first, first + limit),
                settings.tokenizers.num,
                settings.tokenizers.node_id,
                settings.tokenizers.cpus,
                settings.limits,
            )
            with closing(items):
                for slot, chunk in items:
                    if not call(taker.take(pipeline, slot, chunk)):
                        return
    except Exception as error:  # noqa: BLE001  reported to the ranks
        call(taker.pipeline_failed(pipeline, error))


def num_pipeline_threads() -> int:
    """The number of this process's pipeline threads, ours and Ray Data's."""
    return sum(thread.name.startswith(_PIPELINE_THREADS) for thread in threading.enumerate())
