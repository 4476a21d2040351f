"""Forked ranks that train in one layout after the other in the same processes; no launch is
around them."""

from __future__ import annotations

import datetime
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from orchestrator.errors import TrainingError
from orchestrator.planning import batches
from orchestrator.planning.state.state_layout import held_rows
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import StateKey, StepRange
from orchestrator.trainer.comm.group import Group
from orchestrator.trainer.gradient.invariant import Gradient, InvariantGradient
from orchestrator.trainer.gradient.parallel import FastGradient, ShardedGradient
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.objective.micro_batches import Objective, StepPlace, cut
from orchestrator.trainer.objective.objective import objective_of
from orchestrator.trainer.state.sharded_state import ShardedState
from orchestrator.trainer.state.train_state import TrainState
from tests.forked import FORKED
from tests.ports import free_ports
from tests.trainer.feed import VOCABULARY, FormulaFeed
from tests.trainer.launch import WAIT_S
from tests.trainer.states import begun_state

CPU = torch.device("cpu")
SEQ_LEN = 8


class Odd(nn.Module):
    """Five rows that four shards cannot share, a frozen weight, a buffer that is saved and one that is not,
    two that both blocks have, a weight that nobody uses, one list of blocks, the first of which comes again,
    and a table that is also the head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in "ab")
        self.blocks.append(self.blocks[0])
        self.frozen = nn.Parameter(torch.empty(5).uniform_(0.5, 1.5), requires_grad=False)
        self.unused = nn.Parameter(torch.empty(3, 2).normal_())
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.empty(5).uniform_())
        self.register_buffer("scale", torch.full((5,), 2.0), persistent=False)
        angles, halves = torch.empty(5).uniform_(0.5, 1.5), torch.full((5,), 0.5)
        for block in self.blocks:
            block.register_buffer("angles", angles)
            block.register_buffer("halves", halves, persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(input_ids) * self.frozen + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden * block.angles) * block.halves
        return self.head(hidden * self.scale)


class Bypassing(nn.Module):
    """Uses the weights of its blocks without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(9))
        self.head = nn.Linear(5, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(input_ids) @ sum(block.weight for block in self.blocks))


def resizing() -> nn.Module:
    """A factory whose weights cannot be made one by one."""
    module = nn.Linear(VOCABULARY, VOCABULARY)
    module.more = nn.Parameter(torch.empty(2).resize_(6).fill_(0.5))
    return module


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a rank has seen: the loss of each step over all ranks, the norms of their gradients, and on rank 0
    the whole tensors at the end, by group and name.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    state: dict[tuple[str, str], torch.Tensor]


def view_of(rank: int, world_size: int, generation: int = 1) -> GenerationView:
    """A generation that begins from nothing."""
    return GenerationView(
        attempt=1, generation=generation, rank=rank, world_size=world_size,
        members=tuple(f"m{number}" for number in range(world_size)), host="127.0.0.1", port=1, parent=None,
        source_rank=None, point=None, cursor=None, step=0, launch="launch",
    )  # fmt: skip


def train_steps(
    job: TrainJob, state: TrainState, gradient: Gradient, rank: int, world_size: int, steps: int
) -> tuple[list[float], list[float]]:
    """Losses (each rank's share) and norms."""
    feed, cursor, micro_size = FormulaFeed(), Cursor(), job.train.micro_batch_size
    num, losses, norms = job.train.global_batch_size, [], []
    for _ in range(steps):
        step = StepRange(
            first_sample=cursor.consumed_samples,
            num_samples=num,
            num_tokens=num * SEQ_LEN,
            seq_len=SEQ_LEN,
        )
        batch = feed.get(step, rank, world_size, micro_size, cursor)
        micros = cut(batch, micro_size, rank, world_size, CPU)
        num_micro = batches.num_micro_batches(num, micro_size)
        place = StepPlace(step=len(losses) + 1, consumed_tokens=cursor.consumed_tokens)
        terms = gradient.reduce(micros, num_micro, batch.step_targets, place).total()
        assert terms.loss is not None
        losses.append(terms.loss / 2**24 / batch.step_targets)
        norms.append(gradient.clip(job.train.max_grad_norm))
        state.prepare(job.train.lr)
        state.apply(job.train.lr, num_units=1)
        cursor = batch.cursor
    return losses, norms


def objective(job: TrainJob) -> Objective:
    return objective_of(job.train, job.document_attention, SEQ_LEN)


def alone(job: TrainJob, steps: int) -> Trained:
    """One process without a group; a weight that nobody uses has a gradient of zero."""
    state = begun_state(job.model, job.train, CPU, invariant=False)
    gradient = InvariantGradient(state.model, objective(job))
    losses, norms = train_steps(job, state, gradient, 0, 1, steps)
    whole = {(item.group, item.name): item.tensor.clone() for item in state.items()}
    return Trained(losses=tuple(losses), norms=tuple(norms), state=whole)


def gathered(state: TrainState, group: Group) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor whole on rank 0, put together from the rows of the ranks; nothing on the others. All
    holders of a row must have the same bits, and each holds exactly the rows of its shard.
    """
    mine = [(item.whole, item.first_row, item.tensor.detach().clone()) for item in state.items()]
    everyone: list[Any] = [None] * group.view.world_size
    dist.all_gather_object(everyone, mine)
    whole: dict[tuple[str, str], torch.Tensor] = {}
    for number, item in enumerate(state.items()):
        held: dict[int, torch.Tensor] = {}
        for rank, theirs in enumerate(everyone):
            of_whole, first_row, tensor = theirs[number]
            assert of_whole == item.whole, "all ranks have the same items in the same order"
            rows = held_rows(of_whole, state.layout.num_shards, state.layout.shard_of(rank))
            assert (first_row, tensor.shape[:1] or (1,)) == (rows.start, (len(rows),))
            assert torch.equal(held.setdefault(rows.start if len(rows) else -1, tensor), tensor)
        parts = [held[start] for start in sorted(held) if start >= 0]
        made = torch.cat(parts) if parts[0].ndim else parts[0]
        assert tuple(made.shape) == item.whole.shape
        whole[item.group, item.name] = made
    return whole if group.view.rank == 0 else {}


def trained_in_group(
    job: TrainJob, state: TrainState | None, group: Group, steps: int, *, form: bool = True
) -> Trained:
    """One generation from the first weights on. `state`: a sharded one; None: replicate. `form`: whether the
    state is still to be formed for it.
    """
    view = group.view
    if isinstance(state, ShardedState):
        gradient: Gradient = ShardedGradient(state, objective(job))
    else:
        state = begun_state(job.model, job.train, CPU, invariant=False)
        gradient = FastGradient(state.model, objective(job))
    if form:
        state.form(group)
        state.fixed_sums()  # reads them
    state.initialise()
    state.formed()
    gradient.enter(view.rank, view.world_size)
    try:
        losses, norms = train_steps(job, state, gradient, view.rank, view.world_size, steps)
        summed = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(summed)
        whole = gathered(state, group)
        # what a survivor would hold
        state.key = StateKey(attempt=1, generation=view.generation, step=steps)
    finally:
        gradient.leave()
        state.leave()
    return Trained(losses=tuple(summed.tolist()), norms=tuple(norms), state=whole)


def _rank_main(rank: int, port: int, body: Callable[..., Any], arguments: Sequence[Any], heard: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=datetime.timedelta(seconds=WAIT_S))
        answer = body(rank, store, *arguments)
        heard.put(pickle.dumps((rank, answer, "")))
    except Exception:  # noqa: BLE001  the test shows it
        heard.put(pickle.dumps((rank, None, traceback.format_exc())))
    threading.Event().wait()  # until it is killed: its store serves the others


def on_ranks(
    num_ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    killed: Collection[int] = (),
    limit_s: float = WAIT_S,
) -> list[Any]:
    """What `body(rank, store, *arguments)` returns on each of so many forked ranks, but for those that are
    killed in it.
    """
    heard, port = FORKED.Queue(), free_ports(1)[0]
    processes = [
        FORKED.Process(target=_rank_main, args=(rank, port, body, arguments, heard), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    try:
        for _ in range(num_ranks - len(killed)):
            rank, answer, problem = pickle.loads(heard.get(timeout=limit_s))
            assert not problem, f"rank {rank}: {problem}"
            answers[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [answers[rank] for rank in sorted(answers)]


def formed(store: TCPStore, view: GenerationView) -> Any:
    """The group of a generation, through keys of its own."""
    own = PrefixStore(f"generation {view.generation}", store)
    return Group.formed(view, own, CPU, WAIT_S, lambda: False)


def in_each_layout(
    rank: int, store: TCPStore, job: TrainJob, layouts: Sequence[tuple[int, int | None]], steps: int
) -> dict[tuple[int, int | None], Trained]:
    """For each (world size, number of shards; 1: replicate, None: as many as ranks) what this rank saw; it
    takes no part in worlds that are too small for it. One sharded state goes through all of them that have
    its number of shards.
    """
    states: dict[int | None, TrainState | None] = {1: None}
    found = {}
    for generation, (world_size, num_shards) in enumerate(layouts, 1):
        if rank >= world_size:
            continue
        if num_shards not in states:
            states[num_shards] = ShardedState(job.model, job.train, CPU, num_shards)
        own = rank if generation % 2 else world_size - 1 - rank  # a process has another rank each time
        with formed(store, view_of(own, world_size, generation)) as group:
            found[world_size, num_shards] = trained_in_group(job, states[num_shards], group, steps)
    return found


def refused_step(rank: int, store: TCPStore, job: TrainJob) -> TrainingError | None:
    """What ends the first step of a sharded member that is alone."""
    state = ShardedState(job.model, job.train, CPU, None)
    with formed(store, view_of(rank, 1)) as group, state.within():
        try:
            trained_in_group(job, state, group, 1)
        except TrainingError as error:
            return error
    return None


def first_weights(rank: int, store: TCPStore, job: TrainJob) -> dict[str, torch.Tensor]:
    """The tensors of a new sharded state of one member."""
    state = ShardedState(job.model, job.train, CPU, None, job.weights_by_name)
    with formed(store, view_of(rank, 1)) as group, state.within():
        state.form(group)
        state.initialise()
        return {item.name: item.tensor.clone() for item in state.items()}
