"""The rank's side of the feeder: `Feed` of the training loop over remote calls, one step ahead, through a
restart of the feeder.

It knows no pipeline and no packing, so that a training process loads neither.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from orchestrator.errors import FeedError, OrchestratorError
from orchestrator.records import BatchSlice, Cursor, GenerationView, StepRange

if TYPE_CHECKING:
    from orchestrator.data.feed.feed_notes import FeedNotes

# A killed feeder is back after about a second; a lost machine takes as long as Ray needs to notice.
AWAY_LIMIT_S = 120.0
# A feeder that says nothing for so long is asked whether it lives, and has as long again to answer.
UNRESPONSIVE_S = 60.0
# A feeder that dies so often over one step dies because of it.
MAX_DEATHS = 5
_RETRY_S = 0.1

_Request = tuple[StepRange, int, int, int]


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
        self._ahead: tuple[_Request, Any] | None = None

    def open(self, view: GenerationView, cursor: Cursor) -> None:
        """A new generation, which goes on at `cursor`. Returns at once; the feeder opens in the background.
        Idempotent.
        """
        self._generation = (view.attempt, view.generation)
        # what is still this rank's is recognized by its request; a call that fails here shows in the next
        # `get`
        self._feeder.open.remote(self._launch, self._generation, cursor)

    def prefetch(self, step: StepRange, rank: int, world_size: int, micro_batch_size: int) -> None:
        """Asks for the slice that will probably be wanted next. Never blocks; a failure shows in the `get`
        for it.
        """
        request = (step, rank, world_size, micro_batch_size)
        self._ahead = (request, self._ask(request))

    def get(
        self, step: StepRange, rank: int, world_size: int, micro_batch_size: int, cursor: Cursor
    ) -> BatchSlice:
        """This rank's share of `step`; blocks until it is there. `cursor` is the one at `step.first_sample`,
        for a feeder that lost its place.

        Raises the error that the data ended with (`DataError`, `DataIdentityError`, …), `FeedError` if no
        feeder answers, and `RuntimeError` if this rank's generation is over for the others and its samples
        are gone.
        """
        request = (step, rank, world_size, micro_batch_size)
        ahead, self._ahead = self._ahead, None
        answer = ahead[1] if ahead is not None and ahead[0] == request else self._ask(request)
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
                if isinstance(reply, BatchSlice):
                    return _own(reply)
                if isinstance(reply, OrchestratorError):
                    raise reply
                self._reopen(reply, step, cursor)
            answer = self._ask(request)

    def _ask(self, request: _Request) -> Any:
        return self._feeder.get.remote(self._launch, self._generation, *request)

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


def _own(reply: BatchSlice) -> BatchSlice:
    """The slice with arrays of its own: those that Ray hands out are read-only and keep its object store
    filled.
    """
    arrays = {
        name: getattr(reply, name).copy()
        for name in ("source_numbers", "input_ids", "labels", "document_ids")
    }
    return replace(reply, **arrays)
