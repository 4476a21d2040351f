"""The ranks of a group without torchrun's agent: each is a process that runs the whole program of a rank, and
begins with everything imported. The store that an agent holds is in the test's process.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import TCPStore

from orchestrator.config.schema import JobConfig
from orchestrator.faults import FaultPlan
from orchestrator.launch.start import run_preparation
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from orchestrator.torchrun.run import main
from tests.forked import FORKED


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank of a group that meets at `port`."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def as_rank(rank: int, world_size: int, port: int, store_is_the_agents: bool = False) -> None:
    """This process becomes a rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= rank_environment(rank, world_size, port)
    if store_is_the_agents:
        os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    logs: Path,
    words: list[str],
    plan: str,
    environment: Mapping[str, str],
    full: str,
) -> None:
    os.environ |= environment
    if full:
        run_preparation.run_storage = _on_a_full_disk(full)
    file = os.open(logs / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(file, standard)
    as_rank(rank, world_size, port, store_is_the_agents=True)
    os.chdir(folder)
    main(words, fault_plan=plan)


class FullDisk(OsDisk):
    """No part of the points whose names begin so can be written."""

    def __init__(self, begin: str) -> None:
        self.begin = begin

    def create(self, path: str) -> int:
        if f"/points/{self.begin}" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def _on_a_full_disk(begin: str) -> Any:
    return lambda job: Storage(job.run.run_uri, FullDisk(begin), lambda seconds: None)


class Ranks:
    """A group that has been started in `folder` with these words. `full`: rank -> see `FullDisk`."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        world_size: int,
        words: list[str],
        faults: FaultPlan | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        full: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._logs = logs
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        plan = faults.to_json() if faults else ""
        shared = (world_size, self._store.port, folder, logs, words, plan, dict(environment))
        self.processes = [
            FORKED.Process(
                target=_rank,
                args=(rank, *shared, full.get(rank, "")),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def end(self, limit_s: float) -> list[int | None]:
        """The exit codes of ranks that end by themselves; None: it does not."""
        for process in self.processes:
            process.join(limit_s)
        return [process.exitcode for process in self.processes]

    def said(self, rank: int = 0) -> str:
        """What the rank has printed."""
        return (self._logs / f"rank-{rank}.log").read_text()

    def kill(self) -> None:
        """No process is left afterwards."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def ranks(
    folder: Path,
    world_size: int,
    job: JobConfig,
    faults: FaultPlan | None = None,
    full: Mapping[int, str] = MappingProxyType({}),
) -> Iterator[Ranks]:
    """A group that trains the job. `full` as in `Ranks`."""
    logs = folder / f"group-{len(list(folder.glob('group-*')))}"
    logs.mkdir(parents=True)
    (logs / "job.json").write_text(json.dumps(job.to_json()))
    group = Ranks(logs, logs, world_size, ["job.json"], faults, full=full)
    try:
        yield group
    finally:
        group.kill()
