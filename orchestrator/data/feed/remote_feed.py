"""The rank's side of the feeder: the training loop's `Feed`, over remote calls.

It prefetches some steps and survives a restart of the feeder. It does not import the pipeline or the packer,
so a training process loads neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from orchestrator.errors import FeedError, OrchestratorError
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import BatchSlice, StepRange

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_reports import FeedNotes
    from orchestrator.data.packing.step_samples import StepShare

# A killed feeder is back after about a second. For a lost machine, it takes as long as Ray needs to detect
# that.
AWAY_LIMIT_S = 120.0
# A feeder that does not answer for this long is checked for life, and has as long again to answer.
UNRESPONSIVE_S = 60.0
# A feeder that dies this often over one step dies because of that step.
MAX_DEATHS = 5
_RETRY_S = 0.1
_SILENT = "feed.feeder_silent"

_Rank = tuple[int, int, int]  # rank, world size, micro-batch size


@dataclass(frozen=True, kw_only=True, slots=True)
class Reopen:
    """The feeder's answer if it does not hold a step: call `open` with your cursor and ask again.

    `generation` is the newest (attempt, generation) that called the feeder. A caller of an older generation
    has been left behind.
    """

    generation: tuple[int, int]
    reason: str


@cache
def _named(name: str) -> Any:
    """Looked up once: the GCS, which resolves the name, may hang later."""
    return ray.get_actor(name)


async def notes_of(name: str, consumed_samples: int) -> FeedNotes | None:
    """The notes of the feeder with this name (see `Feeder.notes`), for another actor of its launch.

    Returns None if the feeder is unavailable.
    """
    try:
        feeder = await asyncio.to_thread(_named, name)
        notes: FeedNotes = await feeder.notes.remote(consumed_samples)
    except (RayError, ValueError):  # ValueError: there is no such actor
        return None
    return notes


class RayFeed:
    """`trainer.interfaces.loop_interface.Feed` of one rank. `feeder` is the handle of the launch's `Feeder`.

    Every answer is a pure function of the requested range. A prefetched slice therefore stays valid in
    another generation as long as it is still this rank's, and everything may be requested again. The arrays
    of a slice belong to the caller, who may write to them.
    """

    def __init__(self, feeder: Any, launch: str, away_limit_s: float = AWAY_LIMIT_S) -> None:
        self._feeder, self._launch, self._away_limit_s = feeder, launch, away_limit_s
        self._generation = (0, 0)
        self._rank: _Rank = (0, 1, 1)  # the rank of the shares below
        self._held: dict[StepRange, StepShare] = {}  # by requested step, in the order of the steps
        self._ahead: tuple[tuple[StepRange, ...], Any] | None = None  # the request in flight

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """Starts a new generation, which continues at `cursor`.

        Returns at once; the feeder opens in the background. Idempotent.
        """
        self._generation = (view.attempt, view.generation)
        # `_serve` drops held shares that are no longer this rank's. A call that fails here shows in the next
        # `get`.
        self._feeder.open.remote(self._launch, self._generation, cursor)

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Requests the slices that will probably be needed next.

        Does nothing if half of them are held or if they are already requested: the answer then arrives while
        the other half is trained. Never blocks. A failure shows in the `get` for them.
        """
        self._serve((rank, world_size, micro_batch_size))
        missing = tuple(step for step in steps if step not in self._held)
        asked = self._ahead is not None and self._ahead[0][:1] == missing[:1]
        if missing and not asked and 2 * len(missing) >= len(steps):
            self._ahead = (missing, self._ask(missing, urgent=False))

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """Waits for this rank's share of `step`. `cursor` is the cursor at `step.first_sample`, for a feeder
        that lost its place.

        Raises the error that the data ended with (`DataError`, `DataIdentityError`, …), `FeedError` if no
        feeder answers, and `RuntimeError` if the other ranks have left this rank's generation and its samples
        are gone.
        """
        self._serve((rank, world_size, micro_batch_size))
        share = self._held.pop(step, None)
        if share is not None:
            return share.slice()
        self._held.clear()  # of earlier steps, or of another place
        ahead, self._ahead = self._ahead, None
        steps, answer = ahead if ahead is not None and ahead[0][0] == step else ((step,), None)
        answer = answer or self._ask(steps)
        deaths = 0
        while True:
            try:
                reply = ray.get(answer, timeout=UNRESPONSIVE_S)
            except GetTimeoutError:
                self._require_alive(step)
                continue  # the feeder is alive, and itself reports when it gives up
            except RayActorError as error:
                deaths += 1
                if deaths > MAX_DEATHS:
                    raise FeedError(
                        f"the feeder died {deaths} times over the samples from {step.first_sample} on "
                        f"({error}); its log has the reason, often too little memory: lower "
                        "data.window_bytes or train.global_batch_size",
                        code="feed.feeder_died",
                    ) from error
                self._await_feeder(error)
            else:
                if isinstance(reply, tuple):
                    first: StepShare = reply[0]
                    self._held.update(zip(steps[1:], reply[1:], strict=False))
                    return first.slice()
                if isinstance(reply, OrchestratorError):
                    raise reply
                self._reopen(reply, step, cursor)
            answer = self._ask(steps)

    def _serve(self, rank: _Rank) -> None:
        """Drops held and requested shares if they are not this rank's."""
        if rank != self._rank:
            self._rank, self._ahead = rank, None
            self._held.clear()

    def _ask(self, steps: tuple[StepRange, ...], urgent: bool = True) -> Any:
        return self._feeder.get.remote(self._launch, self._generation, steps, *self._rank, urgent)

    def _reopen(self, reply: Reopen, step: StepRange, cursor: Cursor) -> None:
        if reply.generation > self._generation:
            raise RuntimeError(
                f"generation {self._generation} asked for the samples from {step.first_sample} on, but "
                f"generation {reply.generation} has begun without this rank"
            )
        self._feeder.open.remote(self._launch, self._generation, cursor)

    def _require_alive(self, step: StepRange) -> None:
        """Raises `FeedError` if the feeder's process is alive but does not answer."""
        with suppress(RayActorError):  # a dead feeder is not frozen; `get` handles it
            try:
                ray.get(self._feeder.stats.remote(), timeout=UNRESPONSIVE_S)
            except GetTimeoutError as error:
                raise FeedError(
                    f"the feeder has not answered for {2 * UNRESPONSIVE_S:.0f} s to the request for the "
                    f"samples from {step.first_sample} on: its process or its machine is frozen; start the "
                    "same command again: it continues from the newest resume point",
                    code=_SILENT,
                ) from error

    def _await_feeder(self, last: RayActorError) -> None:
        """Waits until the feeder answers. Raises `FeedError` if it is away or hangs for too long."""
        deadline = time.monotonic() + self._away_limit_s
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(GetTimeoutError):
                try:
                    ray.get(self._feeder.stats.remote(), timeout=left_s)
                except RayActorError:
                    time.sleep(_RETRY_S)
                else:
                    return
        raise FeedError(
            f"no feeder of launch {self._launch} answered for {self._away_limit_s:.0f} s ({last}); "
            "start the same command again: it continues from the newest resume point",
            code=_SILENT,
        ) from last
