"""An abort from another thread frees communicators of GPUs. Without a GPU a stand-in blocks as NCCL does."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchestrator.trainer.comm.interruptible import Communicators

SOON_S = 10.0


class Blocking:
    """A collective that waits for a peer that never comes."""

    def __init__(self) -> None:
        self.waits, self.aborted = threading.Event(), threading.Event()
        self.num_aborts = 0

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted.set()

    def all_reduce(self) -> str:
        self.waits.set()
        assert self.aborted.wait(SOON_S), "nothing has freed it"
        return "NCCL communicator was aborted"


def test_an_abort_frees_all_waits_and_what_is_added_later() -> None:
    communicators, first, second, later = Communicators(), Blocking(), Blocking(), Blocking()
    for each in (first, second):
        communicators.add(each)
    found: list[str] = []
    waiting = [
        threading.Thread(target=lambda one=each: found.append(one.all_reduce())) for each in (first, second)
    ]
    for thread in waiting:
        thread.start()
    assert first.waits.wait(SOON_S)
    assert second.waits.wait(SOON_S)
    communicators.abort()
    communicators.abort()
    for thread in waiting:
        thread.join(SOON_S)
    assert len(found) == 2
    communicators.add(later)
    assert [each.num_aborts for each in (first, second, later)] == [1, 1, 1]


def test_what_is_forgotten_is_not_aborted() -> None:
    communicators, one = Communicators(), Blocking()
    communicators.add(one)
    communicators.forget()
    communicators.abort()
    assert one.num_aborts == 0


def test_a_group_for_cpus_has_no_communicator(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    communicators = Communicators()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        communicators.add_group(dist.group.WORLD)
        communicators.abort()
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_a_queued_collective_of_nccl_ends_at_an_abort(tmp_path: Path) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        communicators = Communicators()
        assert dist.group.WORLD is not None
        communicators.add_group(dist.group.WORLD)
        tensor = torch.ones(1024, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda._sleep(1 << 33)  # some seconds; the collective is queued behind it
        work = dist.all_reduce(tensor, async_op=True)
        threading.Timer(0.2, communicators.abort).start()
        began = time.monotonic()
        with suppress(RuntimeError):
            work.wait()
        assert time.monotonic() - began < SOON_S
    finally:
        dist.destroy_process_group()
