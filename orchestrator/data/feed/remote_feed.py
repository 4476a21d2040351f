"""The rank's side of the feeder: `Feed` of the training loop over remote calls, some steps ahead, through a
restart of the feeder.

It knows no pipeline and no packer, so that a training process loads neither.
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
from orchestrator.records.batches import BatchSlice, StepRange
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes
    from orchestrator.data.packing.step_samples import StepShare

# A killed feeder is back after about a second; a lost machine takes as long as Ray needs to notice.
AWAY_LIMIT_S = 120.0
# A feeder that says nothing for so long is asked whether it lives, and has as long again to answer.
UNRESPONSIVE_S = 60.0
# A feeder that dies so often over one step dies because of it.
MAX_DEATHS = 5
_RETRY_S = 0.1

_Rank = tuple[int, int, int]  # rank, world size, micro-batch size


@dataclass(frozen=True, kw_only=True, slots=True)
class Reopen:
    """The feeder's answer instead of a slice: it holds nothing at that place; open it with the cursor you
    hold and ask again.

    `generation` is the newest (attempt, generation) that it has heard of: a caller of an older one has been
    left behind.
    """

    generation: tuple[int, int]
    reason: str


@cache
def _named(name: str) -> Any:
    """Asked for once: the GCS, which knows it, may stand still later."""
    return ray.get_actor(name)


async def notes_of(name: str, consumed_samples: int) -> FeedNotes | None:
    """What the feeder of this name has noted (see `Feeder.notes`), for another actor of its launch; None if
    it is away.
    """
    try:
        feeder = await asyncio.to_thread(_named, name)
        notes: FeedNotes = await feeder.notes.remote(consumed_samples)
    except (RayError, ValueError):  # the latter: there is no such actor
        return None
    return notes


class RayFeed:
    """`trainer.membership.Feed` of one rank. `feeder` is the handle of the launch's `Feeder`.

    Every answer is a pure function of the range asked for, so a slice fetched ahead stays good in another
    generation as long as it is still this rank's, and everything may be asked for again. The arrays of a
    slice belong to the caller and may be written to.
    """

    def __init__(self, feeder: Any, launch: str, away_limit_s: float = AWAY_LIMIT_S) -> None:
        self._feeder, self._launch, self._away_limit_s = feeder, launch, away_limit_s
        self._generation = (0, 0)
        self._rank: _Rank = (0, 1, 1)  # whose shares the following are
        self._held: dict[StepRange, StepShare] = {}  # by what was asked, in the order of the steps
        self._ahead: tuple[tuple[StepRange, ...], Any] | None = None  # what is asked for

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """A new generation, which goes on at `cursor`. Returns at once; the feeder opens in the background.
        Idempotent.
        """
        self._generation = (view.attempt, view.generation)
        # what is still this rank's is recognized by its request; a call that fails here shows in the next
        # `get`
        self._feeder.open.remote(self._launch, self._generation, cursor)

    def prefetch(self, steps: Sequence[StepRange], rank: int, world_size: int, micro_batch_size: int) -> None:
        """Asks for the slices that will probably be wanted next, unless half of them are here or they are
        asked for already: the answer then comes while the other half is trained. Never blocks; a failure
        shows in the `get` for them.
        """
        self._serve((rank, world_size, micro_batch_size))
        missing = tuple(step for step in steps if step not in self._held)
        asked = self._ahead is not None and self._ahead[0][:1] == missing[:1]
        if missing and not asked and 2 * len(missing) >= len(steps):
            self._ahead = (missing, self._ask(missing, urgent=False))

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """This rank's share of `step`; blocks until it is there. `cursor` is the one at `step.first_sample`,
        for a feeder that lost its place.

        Raises the error that the data ended with (`DataError`, `DataIdentityError`, …), `FeedError` if no
        feeder answers, and `RuntimeError` if this rank's generation is over for the others and its samples
        are gone.
        """
        self._serve((rank, world_size, micro_batch_size))
        share = self._held.pop(step, None)
        if share is not None:
            return share.slice()
        self._held.clear()  # of steps before it, or of another place
        ahead, self._ahead = self._ahead, None
        steps, answer = ahead if ahead is not None and ahead[0][0] == step else ((step,), None)
        answer = answer or self._ask(steps)
        deaths = 0
        while True:
            try:
                reply = ray.get(answer, timeout=UNRESPONSIVE_S)
            except GetTimeoutError:
                self._require_alive(step)
                continue  # the feeder lives, and says itself when it gives up
            except RayActorError as error:
                deaths += 1
                if deaths > MAX_DEATHS:
                    raise FeedError(
                        f"the feeder died {deaths} times over the samples from {step.first_sample} on "
                        f"({error}); its log says why, often it is memory: make data.window_bytes or "
                        "train.global_batch_size smaller"
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
        """What is here or asked for is dropped if it is not this rank's."""
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
        """Raises `FeedError` if the feeder's process is there, but does not answer: it is frozen."""
        with suppress(RayActorError):  # dead is not frozen: `get` sees to it
            try:
                ray.get(self._feeder.stats.remote(), timeout=UNRESPONSIVE_S)
            except GetTimeoutError as error:
                raise FeedError(
                    f"the feeder has not answered for {2 * UNRESPONSIVE_S:.0f} s, asked for the samples from "
                    f"{step.first_sample} on: its process is frozen, or its machine; start the same command "
                    "again: it continues from the newest resume point"
                ) from error

    def _await_feeder(self, last: RayActorError) -> None:
        """Returns when it answers; `FeedError` where it stays away, or is there and hangs, for too long."""
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
            "start the same command again: it continues from the newest resume point"
        ) from last
