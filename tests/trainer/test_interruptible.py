"""What waits for a peer that is gone ends with its generation, also where gloo has forgotten it in the middle
of a message, and is known to be no error of the model's.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.distributed import HashStore, TCPStore

from orchestrator.trainer.comm.group import GenerationEnded, Group
from orchestrator.trainer.comm.interruptible import (
    KEEPS_WAITING,
    Interruptible,
    InterruptibleGloo,
    carried_out,
)
from orchestrator.trainer.gradient.parallel import state_and_gradient
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.forked import FORKED
from tests.ports import free_ports
from tests.trainer.feed import VOCABULARY
from tests.trainer.launch import WAIT_S
from tests.trainer.member import tiny_job
from tests.trainer.sharded import CPU, train_steps, view_of

LONG_S = 10 * WAIT_S
LARGE = torch.ones(1 << 26, dtype=torch.uint8)  # more than all that lies in buffers of the system on its way

Step = Callable[[], object]  # one that both ranks take together


def tensors_in(asked: object) -> list[torch.Tensor]:
    if isinstance(asked, torch.Tensor):
        return [asked]
    return [tensor for one in asked for tensor in tensors_in(one)] if isinstance(asked, (list, tuple)) else []


class Inside:
    """Stops the peer when a part of a large message of it is here, and calls the generation off."""

    def __init__(self, group: Group, peer: int) -> None:
        self._group, self._peer = group, peer
        self._pool = ThreadPoolExecutor(1)
        self._stopped: Future[bool] | None = None

    def method(self) -> Any:
        """For `InterruptibleGloo.begin`: does what that does, and looks at what is written."""
        return lambda group, *asked: self._begin(group, *asked)  # noqa: PLW0108  a method, unlike what it calls

    def _begin(self, group: InterruptibleGloo, operation: str, *asked: object) -> dist.Work:
        large = [one for one in tensors_in(asked) if one.nbytes >= 1 << 22 and operation != "send"]
        looks = [part.view(-1)[:: part.numel() // 64] for part in large]
        before = [look.clone() for look in looks]
        work = _BEGIN(group, operation, *asked)
        if looks and (self._stopped is None or not self._stopped.result(WAIT_S)):
            self._stopped = self._pool.submit(self._stop, work, looks, before)
        return work

    def _stop(self, work: dist.Work, looks: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
        gloo: dist.Work = work._work  # type: ignore[attr-defined]
        while all(torch.equal(*pair) for pair in zip(looks, before, strict=True)):
            if gloo.is_completed():
                return False
        os.kill(self._peer, signal.SIGSTOP)
        if gloo.is_completed():
            os.kill(self._peer, signal.SIGCONT)
            return False
        self._group.call_off()
        return True


_BEGIN = InterruptibleGloo.begin


@contextmanager
def a_group(rank: int, port: int) -> Iterator[Group]:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=datetime.timedelta(seconds=LONG_S))
    with Group.formed(view_of(rank, 2), store, CPU, LONG_S, lambda: False) as group:
        yield group


def peer(port: int, steps: Callable[[Group], Step]) -> None:
    """Rank 1: takes step after step."""
    with a_group(1, port) as group:
        group.gather([os.getpid()], "who is who")
        step = steps(group)
        while True:
            step()


def survivor(port: int, steps: Callable[[Group], Step], heard: Any) -> None:
    """Rank 0: says how its wait ended, and that it has left the group."""
    with a_group(0, port) as group:
        other = group.gather([os.getpid()], "who is who")[1][0]
        inside, step = Inside(group, other), steps(group)
        InterruptibleGloo.begin = inside.method()  # type: ignore[method-assign]
        try:
            while True:
                step()
        except (GenerationEnded, RuntimeError) as error:
            heard.put(str(error))
        os.kill(other, signal.SIGKILL)
    heard.put("left")


def messages(group: Group) -> Step:
    if group.view.rank == 0:
        return lambda: group.take(torch.zeros_like(LARGE), 1).wait()
    return lambda: group.give(LARGE, 0).wait()


def job_of(numerics: str, parallel: str) -> TrainJob:
    """As many bytes as a message above in each of two blocks."""
    return tiny_job(
        model__factory="tests.trainer.test_interruptible:Large",
        train__numerics=numerics,
        train__parallel=parallel,
        train__micro_batch_size=4,
    )


class Large(nn.Module):
    """Each of its blocks has 32 MiB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 1 << 19, bias=False), nn.Linear(1 << 19, 8, bias=False)) for _ in "ab"
        )
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def steps_of(group: Group, job: TrainJob) -> Step:
    state, gradient = state_and_gradient(job, CPU)
    state.form(group)
    state.initialise()
    state.formed()
    gradient.enter(group.view.rank, 2)
    return lambda: train_steps(job, state, gradient, group.view.rank, 2, 1)


def invariant(group: Group) -> Step:
    return steps_of(group, job_of("invariant", "replicate"))


def fast(group: Group) -> Step:
    return steps_of(group, job_of("fast", "replicate"))


def sharded(group: Group) -> Step:
    return steps_of(group, job_of("fast", "shard"))


@pytest.mark.quick("messages")
@pytest.mark.parametrize("steps", [messages, invariant, fast, sharded])
def test_who_waits_for_a_peer_that_stands_still_inside_a_message_is_free_when_the_generation_ends(
    steps: Callable[[Group], Step],
) -> None:
    heard, port = FORKED.Queue(), free_ports(1)[0]
    ranks = [
        FORKED.Process(target=survivor, args=(port, steps, heard), daemon=True),
        FORKED.Process(target=peer, args=(port, steps), daemon=True),
    ]
    for process in ranks:
        process.start()
    try:
        assert heard.get(timeout=2 * WAIT_S), "it raised"
        assert heard.get(timeout=WAIT_S) == "left", "nothing waits for what gloo has forgotten"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def gone(port: int, job: TrainJob, num_steps: int) -> None:
    """Rank 1, which is killed between two steps."""
    with a_group(1, port) as group:
        step = steps_of(group, job)
        for _ in range(num_steps):
            step()
        os.kill(os.getpid(), signal.SIGKILL)


def left_behind(port: int, job: TrainJob, heard: Any) -> None:
    """Rank 0: says by what its wait ended."""
    with a_group(0, port) as group:
        step = steps_of(group, job)
        try:
            while True:
                step()
        except Exception as error:  # noqa: BLE001  the test says which it must be
            heard.put((type(error).__name__, str(error)))


@pytest.mark.quick("fast-shard-several passes a step-2")
@pytest.mark.parametrize("num_steps", [0, 1, 2])  # DDP agrees on its buckets in the second forward pass
@pytest.mark.parametrize("micro_batch_size", [2, 6], ids=["several passes a step", "one pass a step"])
@pytest.mark.parametrize(("numerics", "parallel"), [("fast", "replicate"), ("fast", "shard")])
def test_a_peer_that_is_lost_between_two_steps_ends_the_generation_and_not_its_survivor(
    numerics: str, parallel: str, micro_batch_size: int, num_steps: int
) -> None:
    job = tiny_job(
        train__numerics=numerics, train__parallel=parallel, train__micro_batch_size=micro_batch_size
    )
    heard, port = FORKED.Queue(), free_ports(1)[0]
    ranks = [
        FORKED.Process(target=left_behind, args=(port, job, heard), daemon=True),
        FORKED.Process(target=gone, args=(port, job, num_steps), daemon=True),
    ]
    for process in ranks:
        process.start()
    try:
        name, text = heard.get(timeout=WAIT_S)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert name == GenerationEnded.__name__, text


def two_of(waits: Interruptible) -> list[InterruptibleGloo]:
    """Both ranks of a group, in this process."""
    store, limit = HashStore(), datetime.timedelta(seconds=LONG_S)

    def made(rank: int) -> InterruptibleGloo:
        return InterruptibleGloo(waits, dist.ProcessGroupGloo(store, rank, 2, limit))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(made, range(2)))


def operations() -> dict[str, Callable[[InterruptibleGloo], dist.Work]]:
    """What is asked of a group here, by FSDP2, DDP and `dist`."""
    whole, part, rows = torch.ones(2 * 64), torch.ones(64), [torch.ones(64), torch.ones(64)]
    return {
        "allreduce": lambda group: group.allreduce([whole], AllreduceOptions()),
        "broadcast": lambda group: group.broadcast([whole], BroadcastOptions()),
        "allgather": lambda group: group.allgather([rows], [part], AllgatherOptions()),
        "all_gather_single": lambda group: group.all_gather_single(whole, part, AllgatherOptions()),
        "_allgather_base": lambda group: group._allgather_base(whole, part, AllgatherOptions()),
        "reduce_scatter_single": lambda group: group.reduce_scatter_single(
            part, whole, ReduceScatterOptions()
        ),
        "_reduce_scatter_base": lambda group: group._reduce_scatter_base(part, whole, ReduceScatterOptions()),
        "all_to_all_single": lambda group: group.all_to_all_single(
            whole, whole.clone(), [64, 64], [64, 64], AllToAllOptions()
        ),
        "alltoall_base": lambda group: group.alltoall_base(
            whole, whole.clone(), [64, 64], [64, 64], AllToAllOptions()
        ),
        "send and recv": lambda group: (
            group.send([LARGE], 1, 0) if group.rank() == 0 else group.recv([LARGE.clone()], 0, 0)
        ),
        "recv and send": lambda group: (
            group.recv([LARGE.clone()], 1, 0) if group.rank() == 0 else group.send([LARGE], 0, 0)
        ),
    }


@pytest.mark.quick("allreduce", "_allgather_base", "reduce_scatter_single", "send and recv")
@pytest.mark.parametrize("name", operations())
def test_each_operation_is_cut_short_although_gloo_waits_on(name: str) -> None:
    begin, waits = operations()[name], Interruptible()
    one, other = two_of(waits)
    work = begin(one)
    future = work.get_future()
    waits.cut()
    with pytest.raises(RuntimeError, match=KEEPS_WAITING):
        work.wait()
    with pytest.raises(RuntimeError, match=KEEPS_WAITING):
        future.wait()
    begin(other)._work.wait()  # type: ignore[attr-defined]  # gloo itself was left in peace
    for thread in threading.enumerate():
        if thread.name == "collective":
            thread.join(WAIT_S)
            assert not thread.is_alive()


def test_work_that_ends_gives_what_it_gives_or_raises_what_it_raises() -> None:
    waits = Interruptible()
    assert waits.end_of(carried_out(lambda: 7)) == 7
    with pytest.raises(ZeroDivisionError):
        waits.end_of(carried_out(lambda: 1 / 0))


def test_work_that_fails_when_it_is_cut_short_says_why_itself() -> None:
    waits, cut = Interruptible(), threading.Event()

    class GoneError(ConnectionError):
        pass

    def fails() -> None:
        assert cut.wait(WAIT_S)
        raise GoneError

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.end_of, carried_out(fails))
        waits.cut()
        cut.set()
        with pytest.raises(GoneError):
            waiting.result(WAIT_S)


def test_work_that_waits_on_is_left_alone_however_often_and_early_it_is_cut_short() -> None:
    waits, end = Interruptible(), threading.Event()
    waits.cut()
    waits.cut()
    with pytest.raises(RuntimeError, match=KEEPS_WAITING):
        waits.end_of(carried_out(end.wait))
    end.set()
