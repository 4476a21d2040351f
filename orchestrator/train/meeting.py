"""How the ranks of a static group find each other in torchrun's store, and how rank 0 tells the others
something, or why it cannot.

It knows torchrun's environment and store; what is told, its users know.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from orchestrator.errors import ElasticError
from orchestrator.train.membership import STORE_TIMEOUT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The ranks of one start of the group. The keys of `store` belong to this start alone: nobody
    reads what an older one wrote. A store serves one blocked caller at a time.
    """

    start: str
    store: Store
    rank: int
    world_size: int

    def again(self) -> Meeting:
        """The same over a connection of its own, for another thread."""
        return meet()

    def tell(self, name: str, value: Any) -> None:
        """Rank 0 tells the value, as JSON."""
        self.store.set(name, json.dumps({"value": value}))

    @contextmanager
    def telling_failure(self, name: str) -> Iterator[None]:
        """An exception of rank 0 reaches the other ranks instead of leaving them waiting for `name`; it goes
        on here when they have heard of it, or after `STORE_TIMEOUT_S`.
        """
        try:
            yield
        except BaseException as error:
            with suppress(RuntimeError):  # the store is gone
                self.store.set(name, json.dumps({"error": f"{type(error).__name__}: {error}"}))
                if isinstance(error, Exception):  # no Ctrl-C, which is every rank's
                    # the store may end with this process: the others read it first, if they live
                    heard = [f"{name}/heard/{rank}" for rank in range(1, self.world_size)]
                    self.store.wait(heard, datetime.timedelta(seconds=STORE_TIMEOUT_S))
            raise

    def hear(self, name: str, limit: datetime.timedelta = default_pg_timeout) -> Any:
        """What rank 0 told. `ElasticError` if it failed, or says nothing for `limit`."""
        try:
            self.store.wait([name], limit)
            answer = json.loads(self.store.get(name))
            if "error" in answer:
                self.store.set(f"{name}/heard/{self.rank}", "")
        except RuntimeError as error:
            raise ElasticError(f"rank 0 said nothing ({error}); start the same command again") from error
        if "error" in answer:
            raise ElasticError(f"rank 0 failed: {answer['error']}")
        return answer["value"]


def meet() -> Meeting:
    """Reads RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

    torchrun keeps one store over its restarts, so the keys stand under TORCHELASTIC_RESTART_COUNT (0 where it
    is not set). It does not help where agents of several machines count differently.
    """
    store, rank, world_size = next(rendezvous("env://"))
    start = f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Meeting(start=start, store=PrefixStore(start, store), rank=rank, world_size=world_size)
