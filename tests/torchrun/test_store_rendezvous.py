"""Ranks meet in torchrun's store, whatever older starts have left there."""

from __future__ import annotations

import os
from typing import Any

import pytest
from torch.distributed import TCPStore

from orchestrator.errors import ElasticError
from orchestrator.torchrun.store_rendezvous import meet
from tests.forked import FORKED
from tests.raising import raises
from tests.torchrun.ranks import as_rank, rank_environment
from tests.trainer.launch import WAIT_S

pytestmark = pytest.mark.xdist_group("forked")


def rendezvous_rank(rank: int, world_size: int, port: int, restarts: int, name: str, heard: Any) -> None:
    """Meets the others in a store that outlives it; rank 0 gives them its name."""
    as_rank(rank, world_size, port)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    rendezvous = meet()
    if rank == 0:
        rendezvous.publish("name", name)
    heard.put((rank, rendezvous.receive("name")))


def test_ranks_that_were_restarted_unequally_often_meet_and_hear_nothing_of_older_starts():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = FORKED.Queue()

    def started(rank: int, restarts: int, name: str) -> Any:
        arguments = (rank, 3, store.port, restarts, name, heard)
        process = FORKED.Process(target=rendezvous_rank, args=arguments, daemon=True)
        process.start()
        return process

    killed = started(1, 0, "")
    store.wait(["rendezvous/rank/1"])
    killed.kill()
    killed.join(WAIT_S)
    # the restarts that each machine has counted, start by start
    for name, restarts in {"first": (0, 1, 0), "second": (0, 1, 1), "third": (1, 0, 2)}.items():
        ranks = [started(rank, count, name) for rank, count in enumerate(restarts)]
        assert sorted(heard.get(timeout=WAIT_S) for _ in ranks) == [(rank, name) for rank in range(3)]
        for process in ranks:
            process.join(WAIT_S)


@pytest.mark.quick("1-keys: /rendezvous/answer/")
@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "missing: rank 1, rank 2"), (1, "keys: /rendezvous/answer/")]
)
def test_a_rank_that_stays_alone_says_where_it_waited_and_for_whom(monkeypatch, rank, missing):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = rank_environment(rank, 3, store.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    values = (f"rank {rank} of 3", f"127.0.0.1:{store.port}", "3 s", missing)
    with raises(ElasticError, "launch.ranks_not_met", *values):
        meet(limit_s=3.0)
