"""Lets the ranks of a static group meet in torchrun's store, and rank 0 publish values or failures."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import ElasticError, text_of
from orchestrator.trainer.interfaces.loop_interface import STORE_TIMEOUT_S

RENDEZVOUS_LIMIT_S = 600.0  # as long as torchrun's own rendezvous waits for a machine
POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRendezvous:
    """The ranks of one start of the group, after they have met.

    The keys of `store` belong to this start alone: values of an older start are never read.
    """

    start: str
    store: Store
    rank: int
    world_size: int

    def round(self, number: int) -> StoreRendezvous:
        """Returns the same ranks with separate keys, for another attempt of this start."""
        return replace(self, start=f"{self.start}/{number}", store=PrefixStore(str(number), self.store))

    def publish(self, name: str, value: Any) -> None:
        """Rank 0 publishes a value to the others, as JSON."""
        self.store.set(name, json.dumps({"value": value}))

    @contextmanager
    def reporting_failure(self, name: str) -> Iterator[None]:
        """Reports an exception of rank 0 to the other ranks, which would otherwise wait for `name`.

        The exception propagates here once they have received it, or after `STORE_TIMEOUT_S`.
        """
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store is gone
                self.store.set(name, json.dumps({"error": text_of(error)}))
                if isinstance(error, Exception):  # not Ctrl-C, which every rank gets
                    # the store may end with this process: the live ranks read it first
                    received = [f"{name}/received/{rank}" for rank in range(1, self.world_size)]
                    self.store.wait(received, datetime.timedelta(seconds=STORE_TIMEOUT_S))
            raise

    def receive(self, name: str, limit: datetime.timedelta = default_pg_timeout) -> Any:
        """Returns what rank 0 published. Raises `ElasticError` if it failed, or published nothing within
        `limit`.
        """
        try:
            self.store.wait([name], limit)
            answer = json.loads(self.store.get(name))
            if "error" in answer:
                self.store.set(f"{name}/received/{self.rank}", "")
        except RuntimeError as error:
            raise ElasticError(
                f"rank 0 did not answer ({error}); start the same command again",
                code="launch.rank_zero_silent",
            ) from error
        if "error" in answer:
            raise ElasticError(f"rank 0 failed: {answer['error']}", code="launch.rank_zero_failed")
        return answer["value"]


def meet(limit_s: float = RENDEZVOUS_LIMIT_S) -> StoreRendezvous:
    """Waits until all ranks of this start have met. Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    Raises `ElasticError` if they have not after `limit_s`.
    """
    try:
        store, rank, world_size = _connect(limit_s)
        start = _agree_on_start(PrefixStore("rendezvous", store), rank, world_size, limit_s)
    except RuntimeError as error:
        where = "rank {RANK} of {WORLD_SIZE} has not met the others at {MASTER_ADDR}:{MASTER_PORT}"
        raise ElasticError(
            f"{where.format_map(os.environ)} within {limit_s:.0f} s ({error}); "
            "start the same command again on every machine",
            code="launch.ranks_not_met",
        ) from error
    return StoreRendezvous(start=start, store=PrefixStore(start, store), rank=rank, world_size=world_size)


def _connect(limit_s: float) -> tuple[Store, int, int]:
    """Returns a connection, this rank, and the world size."""
    store, rank, world_size = next(rendezvous("env://", timeout=datetime.timedelta(seconds=limit_s)))
    store.set_timeout(default_pg_timeout)  # for a key; `limit_s` was for the connection
    return store, rank, world_size


def _agree_on_start(store: Store, rank: int, world_size: int, limit_s: float) -> str:
    """Returns a random name of this start, the same on all ranks.

    torchrun's store survives its restarts. No variable in a rank's environment is the same for all ranks of a
    start and new in each, because every machine counts its own restarts. Therefore each rank writes a random
    name of its own over what an older process wrote in its place. Rank 0's name is the start's. Rank 0
    publishes it as the answer under every name that it finds, and the rank repeats it. When all have done so,
    no rank is of an older start, because such a rank cannot know the name. (torchrun ends all ranks of a
    start before the next.)
    """
    own = secrets.token_hex(8)
    if rank != 0:
        store.set(f"rank/{rank}", own)
        store.wait([f"answer/{own}"], datetime.timedelta(seconds=limit_s))
        start = store.get(f"answer/{own}").decode()
        store.set(f"rank/{rank}", start)
        return start
    missing, deadline = set(range(1, world_size)), time.monotonic() + limit_s
    while True:
        for other in sorted(missing):
            said = store.get(f"rank/{other}").decode() if store.check([f"rank/{other}"]) else ""
            if said == own:
                missing.remove(other)
            elif said:
                store.set(f"answer/{said}", own)
        if not missing:
            return own
        if time.monotonic() > deadline:
            raise RuntimeError(f"missing: {', '.join(f'rank {other}' for other in sorted(missing))}")
        time.sleep(POLL_S)
