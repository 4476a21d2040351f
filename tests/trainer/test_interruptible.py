"""What waits for a peer that is gone in the middle of a message ends with its generation, although gloo has
forgotten it.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.trainer.group import Group
from orchestrator.trainer.interruptible import Interruptible
from tests.forked import FORKED
from tests.ports import free_ports
from tests.trainer.launch import WAIT_S

LARGE = 1 << 27  # bytes: more than all that lies in buffers of the system on its way
LONG_S = 10 * WAIT_S
GOES_ON = "the generation is over, and gloo goes on waiting"


@contextmanager
def a_group(rank: int, port: int) -> Iterator[Group]:
    torch.set_num_threads(1)
    view = GenerationView(
        attempt=1, generation=1, rank=rank, world_size=2, members=("a", "b"), host="127.0.0.1",
        port=port, parent=None, source_rank=None, point=None, cursor=Cursor(), step=0, launch="launch",
    )  # fmt: skip
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=datetime.timedelta(seconds=LONG_S))
    with Group.formed(view, store, torch.device("cpu"), LONG_S, lambda: False) as group:
        yield group


def other(port: int) -> None:
    """Rank 1: gives message after message."""
    with a_group(1, port) as group:
        group.gather([os.getpid()], "who is who")
        while True:
            group.give(torch.ones(LARGE, dtype=torch.uint8), 0).wait()


def stopped_inside(group: Group, peer: int) -> Future[None]:
    """The wait for a message whose giver was stopped when a part of it was here."""
    pool = ThreadPoolExecutor(1)
    while True:
        message = torch.zeros(LARGE, dtype=torch.uint8)
        taken = pool.submit(group.take(message, 1).wait)
        some = message[:: LARGE // 64]
        while not some.any():
            pass
        os.kill(peer, signal.SIGSTOP)
        if not some.all():
            return taken
        os.kill(peer, signal.SIGCONT)
        taken.result()


def survivor(port: int, heard: Any) -> None:
    """Rank 0: says how its wait ended, and that it has left the group."""
    with a_group(0, port) as group:
        peer = group.gather([os.getpid()], "who is who")[1][0]
        taken = stopped_inside(group, peer)
        group.call_off()
        heard.put(str(taken.exception(WAIT_S)))
        os.kill(peer, signal.SIGKILL)
    heard.put("left")


def test_a_message_whose_giver_stands_still_in_its_middle_is_waited_for_until_the_generation_ends() -> None:
    heard, port = FORKED.Queue(), free_ports(1)[0]
    ranks = [
        FORKED.Process(target=survivor, args=(port, heard), daemon=True),
        FORKED.Process(target=other, args=(port,), daemon=True),
    ]
    for process in ranks:
        process.start()
    try:
        assert heard.get(timeout=2 * WAIT_S) == GOES_ON
        assert heard.get(timeout=WAIT_S) == "left", "nothing waits for what gloo has forgotten"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def test_work_that_ends_gives_what_it_gives_or_raises_what_it_raises() -> None:
    waits = Interruptible()
    assert waits.end_of(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        waits.end_of(lambda: 1 / 0)


def test_work_that_fails_when_it_is_cut_short_says_why_itself() -> None:
    waits, cut = Interruptible(), threading.Event()

    def fails() -> None:
        assert cut.wait(WAIT_S)
        raise ConnectionError("rank 3 is gone")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.end_of, fails)
        waits.cut()
        cut.set()
        with pytest.raises(ConnectionError, match="rank 3 is gone"):
            waiting.result(WAIT_S)


def test_work_that_waits_on_is_left_alone_however_often_and_early_it_is_cut_short() -> None:
    waits, end = Interruptible(), threading.Event()
    waits.cut()
    waits.cut()
    with pytest.raises(RuntimeError, match=GOES_ON):
        waits.end_of(end.wait)
    end.set()
