"""What a member process of the tests runs, and how a test starts one: forked from a server that has imported
everything once."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  DDP needs it; the server imports it once for all members
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401

from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.config.loading import parse_config
from orchestrator.errors import StorageError
from orchestrator.launch.member.remote_membership import MemberAddress, RemoteMembership
from orchestrator.planning.schedule import budgets_for
from orchestrator.storage.files import Storage
from orchestrator.storage.store import Pieces, Traits
from orchestrator.trainer.comm.group import GenerationEnded
from orchestrator.trainer.evaluation import EvalPart
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from orchestrator.trainer.loop import train
from orchestrator.trainer.objective import logit_loss
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import MODEL
from tests.forked import FORKED
from tests.processes import say_where_it_stands, where_it_stands
from tests.trainer.feed import POISON, VOCABULARY, FormulaFeed
from tests.trainer.launch import LAUNCH, WAIT_S, Launch, LinkCalls

Moment = tuple[str, int]  # (place of the fault hook, step)


@dataclass(frozen=True)
class Plan:
    """What happens to one member: SIGKILL at a place; a stop there until the test releases it; the summary of
    a step that is lost on the way to it, although others have it."""

    kill: Moment | None = None
    hold: Moment | None = None
    hold_again: Moment | None = None
    unreachable: int = 0  # how often it cannot reach the store of rank 0, before any of the above
    lose_summary: int | None = None
    lose_agreement: int | None = None  # a generation's at this step: that all have received their state
    kill_forming: int | None = None  # the how many-th process group, when all its members have met
    full_disk_at: int | None = None  # the step whose part of a save cannot be written
    flip: Moment | None = None  # a bit of its weights flips
    flips: int = 1  # how often it does
    node: str | None = None  # where it is; else on a node of its own
    # stops one after the other, each waited for once the one before it is over: there, at that step or later
    script: tuple[Moment, ...] = ()
    chunk: int | None = None  # positions whose logits exist together


def tiny_job(**changes: Any) -> TrainJob:
    """A Llama of about 4,000 parameters; `train__lr=…` sets `train.lr`."""
    mapping: dict[str, Any] = {
        "run": {"name": "tiny"},
        "data": {
            "sources": [{"name": "formula", "path": "none", "format": "lines"}],
            "tokenizer": "none",
            "holdout": 0.5,
        },
        "pack": {"seq_len": 8},
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
                "attention_dropout": 0.1,
                "tie_word_embeddings": True,
            }
        },
        "train": {
            "global_batch_size": 12,
            "micro_batch_size": 2,
            "max_steps": 8,
            "lr": 0.01,
            "warmup_steps": 2,
        },
        "resume": {"every_steps": None},
        "eval": {},
    }
    for dotted, value in changes.items():
        section, _, name = dotted.partition("__")
        if section == "model" and name != "frozen":
            mapping["model"].pop("config", None)
        mapping[section][name] = value
    config = parse_config(mapping)
    return TrainJob(
        model=config.model,
        train=config.train,
        resume=config.resume,
        eval=config.eval,
        seq_len=config.pack.seq_len,
        budgets=budgets_for(config, None),
        config_digest="tiny",
        num_shards=config.train.num_shards,
        collective_limit_s=30.0,
    )


class PoisonModel(torch.nn.Module):
    """Its logits are NaN for a sample that holds POISON."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        poison = (input_ids == POISON).any(1)[:, None, None]
        return self.table(input_ids).masked_fill(poison, float("nan"))


class SpikeModel(PoisonModel):
    """Its logits are large for a sample that holds POISON."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        poison = (input_ids == POISON).any(1)[:, None, None]
        return self.table(input_ids) * torch.where(poison, 1000.0, 1.0)


class ModelOfCollectives(PoisonModel):
    """Its forward pass raises from torch's code for collectives: what is said of tensors that do not fit
    together, or `text`.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if not self.text:
            dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2))
        # torch's own frame is the innermost one then
        exec(f"raise RuntimeError({self.text!r})", {"__name__": "torch.distributed.made"})  # noqa: S102
        raise AssertionError


class FullDisk(Storage):
    """Storage of a member, which may have no room for the points of one step."""

    def __init__(self, root: str, step: int | None) -> None:
        super().__init__(root)
        self._step = step

    @property
    def traits(self) -> Traits:
        """Each member is on a node of its own, to which files come from afar."""
        return replace(super().traits, cached_by_machine=False)

    def put(self, path: str, pieces: Pieces, size: int) -> None:
        if self._step is not None and path.startswith(f"points/{self._step:08d}-"):
            raise StorageError(f"cannot write {path}: no space left on device (ENOSPC)")
        super().put(path, pieces, size)


class Script:
    """Stops of one member, see `Plan.script`; places are passed in any thread."""

    def __init__(self, stops: Sequence[Moment], stand: Callable[[str], None]) -> None:
        self._left, self._stand = list(stops), stand
        self._lock, self._stands = threading.Lock(), False

    def pass_by(self, place: str, step: int) -> None:
        """Stands still if this is the next stop, and nobody stands there already."""
        with self._lock:
            if self._stands or not self._left or self._left[0][0] != place or step < self._left[0][1]:
                return
            self._stands = True
        self._stand(place)
        with self._lock:
            del self._left[0]
            self._stands = False


def flip_a_bit() -> None:
    """Flips a bit of one weight that the member trains, as faulty memory does. The trainer is the
    `self` of a calling frame.
    """
    frame = sys._getframe()
    while not isinstance(state := getattr(frame.f_locals.get("self"), "_state", None), TrainState):
        assert frame.f_back is not None, "not called from a trainer"
        frame = frame.f_back
    weight = max((item for item in state.items() if item.group == MODEL), key=lambda i: i.tensor.numel())
    weight.tensor.view(torch.int32).view(-1)[:1].bitwise_xor_(1 << 20)


def kill_at_call(function: str, number: int) -> None:
    """SIGKILL to this process when it calls a function for the `number`-th time."""
    module, _, name = function.rpartition(".")
    original, calls = getattr(sys.modules[module], name), itertools.count(1)

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(sys.modules[module], name, counted)


def eval_parts(job: TrainJob) -> list[EvalPart]:
    """Two parts of 22 samples and a half, and of 3 samples."""
    if not job.eval.is_wanted:
        return []
    lengths = {"held": 22 * job.seq_len + job.seq_len // 2, "few": 3 * job.seq_len}
    return [
        EvalPart(name=name, feed=FormulaFeed(total_tokens=length), sources={0: "formula"})
        for name, length in lengths.items()
    ]


def member_main(address: Any, name: str, root: str, job: TrainJob, feed: FormulaFeed, plan: Plan) -> None:
    """A member's whole life; what it came to is told to the launch."""
    warnings.simplefilter("ignore")
    say_where_it_stands(root, name)
    torch.set_num_threads(1)  # several members share few cores; waiting OpenMP threads would stop each other
    logit_loss._MIN_POSITIONS = plan.chunk or logit_loss._MIN_POSITIONS
    logit_loss._MIN_LOGITS = logit_loss._MIN_LOGITS if plan.chunk is None else 1
    calls = LinkCalls(address, name)
    place = MemberAddress(actor_id=name, node_id=plan.node or f"node-{name}", host="127.0.0.1")
    # what a member makes of a busy machine is no part of what these tests show
    membership = RemoteMembership(calls, LAUNCH, place, look=lambda: None)
    membership.member = name
    if plan.kill_forming is not None:
        kill_at_call("torch.distributed.init_process_group", plan.kill_forming)
    files = CommittedFiles(FullDisk(root, plan.full_disk_at))
    done: set[str] = (
        set()
    )  # a step is trained again after its summary was lost; what was planned for it happens once

    flipped: list[int] = []
    unreached = iter(range(plan.unreachable))
    script = Script(plan.script, calls.hold)

    def fault(place: str, step: int, rank: int) -> None:
        if place == "connecting" and next(unreached, None) is not None:
            raise RuntimeError("the network does not answer")
        if plan.script and place == "sealed":
            calls.send("sealed", step)
        script.pass_by(place, step)
        for what, moment in (("hold", plan.hold), ("hold again", plan.hold_again)):
            if moment == (place, step) and what not in done:
                done.add(what)
                calls.hold(place)
        if (
            plan.flip is not None
            and plan.flip[0] == place
            and step >= plan.flip[1]
            and len(flipped) < plan.flips
        ):
            flipped.append(step)
            flip_a_bit()
        if plan.kill == (place, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if place == "state_agreed" and plan.lose_agreement == step and "agreement" not in done:
            done.add("agreement")
            raise GenerationEnded("the agreement was lost")
        if place == "summary_received" and plan.lose_summary == step and "summary" not in done:
            done.add("summary")
            raise GenerationEnded("the summary was lost")

    try:
        outcome = train(job, membership, feed, files, fault, eval_parts(job))
        calls.send("outcome", outcome)
    except Exception as error:  # noqa: BLE001  the test reads it
        calls.send("error", f"{type(error).__name__}: {error}")
        membership.failed(error)


@dataclass
class Members:
    """The member processes of one test."""

    launch: Launch
    job: TrainJob
    feed: FormulaFeed
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def start(self, name: str, plan: Plan | None = None, job: TrainJob | None = None) -> None:
        arguments = (
            self.launch.address,
            name,
            self.launch.storage.root,
            job or self.job,
            self.feed,
            plan or Plan(),
        )
        process = FORKED.Process(target=member_main, args=arguments, daemon=True)
        process.start()
        self.processes[name] = process

    def finish(self) -> None:
        """Waits until all are gone; every one that was not killed must have had an outcome."""
        self.join_all()
        self.launch.wait_for(
            lambda: all(
                p.exitcode == -signal.SIGKILL or n in self.launch.outcomes for n, p in self.processes.items()
            )
        )

    def join_all(self) -> None:
        """Waits until all are gone, however they ended, and the launch knows it."""
        for name, process in self.processes.items():
            process.join(WAIT_S)
            assert process.exitcode is not None, f"member {name} does not end\n{self._stacks()}"
        with self.launch.changed:
            assert self.launch.changed.wait_for(lambda: not self.launch.has_links(), WAIT_S)

    def _stacks(self) -> str:
        """What the launch knows, and where the threads of those who live stand."""
        alive = {name: process for name, process in self.processes.items() if process.is_alive()}
        if isinstance(coordinator := getattr(self.launch.coordinator, "process", None), BaseProcess):
            alive["coordinator"] = coordinator
        stacks = [where_it_stands(self.launch.storage.root, *each) for each in alive.items()]
        return "\n".join([f"{self.launch.views}\n{self.launch.joins}", *stacks])


@contextmanager
def members(
    folder: Path,
    names: Sequence[str],
    plans: dict[str, Plan] | None = None,
    job: TrainJob | None = None,
    feed: FormulaFeed | None = None,
    kind: type[Launch] = Launch,
    jobs: dict[str, TrainJob] | None = None,
    **launch: Any,
) -> Iterator[Members]:
    """A launch with these members started; whatever happens, no process of theirs is left. `jobs`: of members
    with another job than `job`.
    """
    group = Members(kind(folder, first_size=len(names), **launch), job or tiny_job(), feed or FormulaFeed())
    try:
        for name in names:
            group.start(name, (plans or {}).get(name), (jobs or {}).get(name))
        yield group
    finally:
        for process in group.processes.values():
            process.kill()
            process.join()


def run_to_end(folder: Path, world_size: int, **settings: Any) -> Launch:
    """An undisturbed run of `world_size` members to its end."""
    with members(folder, [f"m{i}" for i in range(world_size)], **settings) as group:
        group.finish()
        return group.launch
