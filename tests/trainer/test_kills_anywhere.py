"""SIGKILL of one rank, of a rank and the neighbour that keeps its copy, of all ranks, and of the coordinator,
at every place of a step, a save, a neighbour's copy and a re-forming, under replicate, FSDP2 and HSDP.

All cells of that table are made from `CASES`. Each ends in the losses and the state of runs that nobody
disturbs, to the last bit, and nearly in those of one process; what was lost on the way is no more than is
promised, and every point that was committed is read back. `make test` has a few cells, `make chaos` all.
Under DDP, whose last bits depend on how often a group was formed, they end in nearly the same losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import evaluations, survey
from orchestrator.faults import FaultPlan
from orchestrator.planning.state.copy_placement import neighbours
from orchestrator.records.steps import StepRecord
from orchestrator.trainer.interfaces.loop_interface import TrainJob
from tests.trainer.killable import KillableLaunch
from tests.trainer.kills import killed
from tests.trainer.launch import Launch
from tests.trainer.lora import base_in
from tests.trainer.member import Members, Plan, members, run_to_end
from tests.trainer.read_back import read_back
from tests.trainer.sharded_kills import END, HSDP, REPLICATE, SHARD, Segments, job_of, segments_of

pytestmark = pytest.mark.xdist_group("forked")

LAYOUTS = {"replicate": REPLICATE, "fsdp2": SHARD, "hsdp": HSDP}
DDP = "ddp"  # replicate, with fast numerics
WHOLE = ("replicate", DDP)  # each rank has all of the state
SAVED = 3
GATE = ("step_begin", SAVED + 1)  # all stand there until that save is committed
# where one is lost first: all know of a memory point, and no point is newer
SEALED_GATE = ("sealed", 2)
HALVES = ("state_half_sent", "state_half_received")  # who passes these depends on the layouts
PHASES = {  # places, and from which step on
    "step": (("step_begin", "gradient_done", "summary_received", "applied"), 5),
    "save": (("staging_begun", "staged", "save_part_written"), 2 * SAVED),
    "evaluation": (("evaluating",), 2 * SAVED),
    "neighbour copy": (("memory_staged", "neighbour_half_sent", "sealed"), 4),
    "joining": (("connecting", "resharding", *HALVES, "state_agreed", "joined"), 0),
    "losing": (("connecting", "resharding", *HALVES, "state_agreed", "joined"), 0),
}
REFORMS = ("joining", "losing")  # somebody comes, or is lost: the others form a group
ONE, NEIGHBOURS, ALL, COORDINATOR = "one rank", "a rank and its neighbour", "all ranks", "the coordinator"
# places of the coordinator itself
OWN = {
    "votes_complete": "save",
    "commit_sent": "save",
    "generation_journalled": "joining",
    "claim_made": "joining",
}

_FOLDERS: list[TemporaryDirectory[str]] = []
BY_TEACHER = {
    "model__frozen": {"wise": {"factory": "tests.trainer.member:PoisonModel"}},
    "train__objective_args": {"teacher": "wise"},
}


@cache
def base_of_adapters() -> str:
    """The folder of a model, for as long as the tests run."""
    _FOLDERS.append(TemporaryDirectory())
    return base_in(Path(_FOLDERS[-1].name))


def averaged(optimizer: str) -> dict[str, Any]:
    """An optimizer, and averaged weights beside it."""
    return {"train__optimizer": optimizer, "train__ema": 0.9}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who is killed when a rank stands at a place of a phase; the coordinator also at its own places. `node`:
    all ranks are there, so that a neighbour borrows the copies; else each is on one of its own. `objective`:
    a plug-in; None: the built-in one. `optimizer`: that of the run. `distils`: the built-in objective has a
    teacher. `adapts`: adapters are trained.
    """

    layout: str
    phase: str
    place: str
    who: str
    node: str | None = None
    objective: str | None = None
    optimizer: str = "adamw"
    distils: bool = False
    adapts: bool = False

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.layout}{where}, {self.who}, {self.phase}: {self.place}"

    @property
    def job(self) -> TrainJob:
        numerics = "invariant" if self.layout == "replicate" else "fast"
        every = None if self.phase == "losing" else SAVED
        parallel = LAYOUTS.get(self.layout, REPLICATE)
        changes: dict[str, Any] = {} if self.objective is None else {"train__objective": self.objective}
        if self.distils:
            changes = BY_TEACHER
        changes = {**changes, **self.trained}
        if self.phase == "evaluation":
            changes = {**changes, "eval__every_steps": SAVED, "eval__at_end": True}
        return job_of(parallel, train__numerics=numerics, resume__every_steps=every, **changes)

    @property
    def trained(self) -> dict[str, Any]:
        """What the run trains, and with which optimizer, as far as it differs from the usual."""
        found = averaged(self.optimizer) if self.optimizer != "adamw" else {}
        return found | ({"adapters": base_of_adapters()} if self.adapts else {})

    @property
    def loses_no_step(self) -> bool:
        """All of the state is on somebody who is left, whatever has become of the group meanwhile."""
        if self.who == COORDINATOR:  # and before it perhaps a rank
            return self.layout != "fsdp2" or self.phase != "losing"
        if self.layout in WHOLE:
            return self.who != ALL
        return self.layout == "hsdp" and self.who in (ONE, NEIGHBOURS) and self.phase not in REFORMS


CASES = [
    Case(layout=layout, phase=phase, place=place, who=who)
    for layout in LAYOUTS
    for phase, (places, _) in PHASES.items()
    for place in places
    # nobody lacks anything after a loss where all have all of it
    if not (phase == "losing" and place in HALVES and layout == "replicate")
    for who in (ONE, NEIGHBOURS, ALL, COORDINATOR)
]
CASES += [
    Case(layout=layout, phase=phase, place=place, who=COORDINATOR)
    for layout in LAYOUTS
    for place, phase in OWN.items()
]
CASES += [
    replace(case, node="one machine")
    for case in CASES
    if case.layout == "fsdp2" and case.phase in ("neighbour copy", "losing")
]
CASES += [
    replace(case, layout=DDP)
    for case in CASES
    if case.layout == "replicate" and case.phase in ("step", *REFORMS) and case.who in (ONE, COORDINATOR)
]
WITH_METRICS = "tests.trainer.objectives:with_z_loss"
PLUG_INS = [
    replace(case, objective=WITH_METRICS)
    for case in CASES
    if case.phase == "step" and case.who in (ONE, ALL, COORDINATOR) and case.layout != DDP
]
DISTILLED = [
    replace(case, distils=True)
    for case in CASES
    if case.phase in ("step", "joining") and case.who in (ONE, ALL) and case.layout != DDP
]
OPTIMIZERS = [
    replace(case, optimizer=optimizer)
    for optimizer in ("muon", "adafactor")
    for case in CASES
    if case.phase in ("step", "losing") and case.who in (ONE, ALL) and case.layout != DDP
]
ADAPTED = [
    replace(case, adapts=True)
    for case in CASES
    if case.phase in ("step", "save", "joining", "losing") and case.who in (ONE, ALL) and case.layout != DDP
]
IN_EVERY_TEST = {
    Case(layout="replicate", phase="evaluation", place="evaluating", who=COORDINATOR),
    Case(layout="fsdp2", phase="evaluation", place="evaluating", who=ALL),
    Case(layout="hsdp", phase="neighbour copy", place="neighbour_half_sent", who=COORDINATOR),
    Case(layout="fsdp2", phase="losing", place="state_half_received", who=ONE),
    Case(layout="replicate", phase="save", place="save_part_written", who=NEIGHBOURS),
    Case(layout="replicate", phase="step", place="gradient_done", who=ALL, objective=WITH_METRICS),
    Case(layout="fsdp2", phase="step", place="applied", who=ONE, objective=WITH_METRICS),
    Case(layout="fsdp2", phase="joining", place="resharding", who=ONE, distils=True),
    Case(layout="hsdp", phase="step", place="summary_received", who=ONE, optimizer="muon"),
    Case(layout="replicate", phase="save", place="save_part_written", who=ALL, adapts=True),
}


@contextmanager
def killable(folder: Path, case: Case, names: str, plans: dict[str, Plan], faults: str) -> Iterator[Members]:
    with members(folder, list(names), plans, case.job, kind=KillableLaunch, fault_plan=faults) as group:
        try:
            yield group
        finally:
            group.launch.close()  # type: ignore[attr-defined]


class Kill:
    """One case, carried out."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.victims, self.expected = set[str](), set[str]()
        self.sealed, self.loads = -1, -1
        folder.mkdir(exist_ok=True)
        self._armed = FaultPlan(folder=str(folder / "faults"))
        (folder / "faults").mkdir()
        if case.place in OWN:
            self._armed = self._armed.kill("armed by the test").kill(case.place, after=0)

    def run(self, folder: Path) -> Launch:
        """To the end."""
        case, names = self.case, "abcd"
        gate = SEALED_GATE if case.phase == "losing" else GATE
        plans = {name: Plan(script=(gate, *self._stop(name)), node=case.node) for name in names}
        with killable(folder / "run", case, names, plans, self._armed.to_json()) as self.group:
            self.launch: KillableLaunch = self.group.launch  # type: ignore[assignment]
            self._wait_for_held(set(names))
            if case.phase == "losing":
                self._kill({"d"})
                names = "abc"
            else:
                self.launch.wait_for(lambda: bool(self.launch.points))
            if case.phase == "joining":
                self.group.start("e", Plan(script=self._stop("e"), node=case.node))
                self.launch.wait_for(lambda: self.launch.waits("e"))
                names = "abcde"
            self._go_on(names)
            self.group.finish()
            assert killed(self.group) == self.expected
            assert self.launch.wait_for_end().ended == "done"
            return self.launch

    def _stop(self, name: str) -> tuple[tuple[str, int], ...]:
        """Where it stands still in the phase, if it does."""
        case = self.case
        stops = name == "b" or case.who == ALL or (case.who == NEIGHBOURS and name == "c")
        if case.place in OWN or not (stops or self._any_first):
            return ()
        return ((case.place, PHASES[case.phase][1]),)

    @property
    def _any_first(self) -> bool:
        """Whether it is decided there who comes to that place: of shards, whoever lacks rows that lie in no
        copy at hand, and how old the copies are depends on what was quicker.
        """
        return self.case.place in HALVES and self.case.phase == "joining"

    def _go_on(self, names: str) -> None:
        """All pass the gate, and the kill happens."""
        case, launch = self.case, self.launch
        if case.place in OWN:
            self._kill_coordinator_there(names)
            return
        stopping = {name for name in names if self._stop(name)}
        for name in names.replace("e", ""):
            launch.release(name)
        if case.place in HALVES:  # one is enough: others may wait for it elsewhere
            self._wait_for(lambda: any(launch.held(name) for name in stopping))
            first = next(name for name in names if launch.held(name))
        else:
            self._wait_for_held(stopping)
            first = "b"
        self.sealed = launch.sealed
        if case.who == COORDINATOR:
            launch.kill_coordinator()
        else:
            self._kill({ONE: {first}, NEIGHBOURS: {first, keeper(first)}, ALL: set(names)}[case.who])
        launch.let_all_pass(set(names) - self.expected)
        if case.who == ALL:
            self.group.join_all()
            for name in "fghi":
                self.group.start(name, Plan(node=case.node))

    def _kill_coordinator_there(self, names: str) -> None:
        """At a place of its own, to which it comes when the members go on, or when it begins anew."""
        launch = self.launch
        (Path(self._armed.folder) / "fault-0").touch()
        if self.case.place == "claim_made":
            launch.kill_coordinator()
        launch.let_all_pass(set(names))
        self._wait_for(lambda: self._armed.struck() == [0, 1])

    def _wait_for_held(self, names: set[str]) -> None:
        self._wait_for(lambda: all(self.launch.held(name) for name in names))

    def _wait_for(self, what: Callable[[], bool]) -> None:
        """It comes while they train."""
        self.launch.wait_for(lambda: what() or bool(self.launch.outcomes))
        seen = [(view.members, view.step, view.point) for view in self.launch.views]
        assert what(), f"the run ended before that; its generations were {seen}"

    def _kill(self, names: set[str]) -> None:
        for name in names:
            self.group.processes[name].kill()
        for name in names:
            self.group.processes[name].join()
        self.launch.wait_for(lambda: names <= self.launch._gone)
        self.expected |= names


def keeper(name: str, names: str = "abcd") -> str:
    """Who keeps the copies of this member; of one that came later any other."""
    at = names.find(name)
    return names[neighbours([f"node-{each}" for each in names])[at]] if at >= 0 else names[0]


def history(launch: Launch) -> list[StepRecord]:
    """What storage says was trained."""
    return list(survey(RunStore(launch.storage)).lineage.records)


def worlds_of(launch: Launch) -> Segments:
    """Which world trained up to which step. One that forms again as it was changes no bit."""
    segments = segments_of(launch.views)
    later = (*segments[1:], (0, END))
    return tuple(each for each, after in zip(segments, later, strict=True) if each[0] != after[0])


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """One process under the numerics that give the same bits everywhere."""
    return run_to_end(tmp_path_factory.mktemp("exact"), 1, job=job_of(REPLICATE, train__numerics="invariant"))


def assert_as_undisturbed(case: Case, launch: Launch, calm: Any, alone: list[float], exact: Launch) -> None:
    found, digest = history(launch), launch.last_point().state_digest
    one = sorted(exact.records.values(), key=lambda record: record.step)
    assert [(r.step, r.digest) for r in found] == [(r.step, r.digest) for r in one], "the same samples"
    if case.layout == "replicate":
        assert [(r.loss, r.grad_norm, r.lr) for r in found] == [(r.loss, r.grad_norm, r.lr) for r in one]
        assert digest == exact.last_point().state_digest
        return
    if case.layout == DDP:
        assert [r.loss for r in found] == pytest.approx(alone, rel=1e-5)
        return
    losses, expected = calm("hsdp" if case.layout == "hsdp" else SHARD, worlds_of(launch))
    assert [r.loss for r in found] == losses
    assert digest == expected
    assert losses == pytest.approx(alone, rel=1e-5)


def assert_no_more_is_lost_than_promised(kill: Kill) -> None:
    launch, case = kill.launch, kill.case
    steps = sorted(record.step for record in launch.records.values())
    later = launch.views[1:]
    if case.loses_no_step:
        assert steps == list(range(1, END + 1)), "no step was trained twice"
        assert all(view.point is None for view in later), "storage is the last resort"
    elif case.who in (ONE, COORDINATOR):
        assert all(view.step >= kill.sealed for view in later), "not before the memory point"
        assert all(view.point is None or view.step > kill.sealed for view in later)
    if case.phase != "losing":
        assert all(view.step >= SAVED for view in later), "not before the newest point"


@pytest.mark.quick("fsdp2, one rank, losing: state_half_received")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=[] if c in IN_EVERY_TEST else pytest.mark.chaos) for c in CASES],
)
def test_a_kill_anywhere_ends_in_the_run_that_nobody_disturbed(
    tmp_path: Path,
    calm: Any,
    alone: list[float],
    exact: Launch,
    case: Case,
) -> None:
    kill = Kill(case, tmp_path)
    launch = kill.run(tmp_path)
    assert kill.launch.deaths == (0 if case.who != COORDINATOR else 2 if case.place == "claim_made" else 1)
    assert_as_undisturbed(case, launch, calm, alone, exact)
    assert_no_more_is_lost_than_promised(kill)
    assert read_back(launch.storage, case.job.model, case.job.train) >= 1
    if case.phase == "evaluation":
        found = evaluations(survey(RunStore(launch.storage)))
        due = sorted({*range(SAVED, END + 1, SAVED), END})
        expected = [(step, part) for step in due for part in ("held", "few")]
        assert [(each.step, each.part) for each in found] == expected


def test_every_cell_of_the_table_has_a_case() -> None:
    for layout in LAYOUTS:
        for phase in PHASES:
            for who in (ONE, NEIGHBOURS, ALL, COORDINATOR):
                assert any((c.layout, c.phase, c.who) == (layout, phase, who) for c in CASES)
    assert IN_EVERY_TEST.issubset({*CASES, *PLUG_INS, *DISTILLED, *OPTIMIZERS, *ADAPTED})


@pytest.fixture(scope="module")
def exact_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Launch]:
    """`exact` with the objective of `PLUG_INS`, or of `DISTILLED` if the argument is true."""

    @cache
    def run(distils: bool) -> Launch:
        changes: dict[str, Any] = BY_TEACHER if distils else {"train__objective": WITH_METRICS}
        job = job_of(REPLICATE, train__numerics="invariant", **changes)
        return run_to_end(tmp_path_factory.mktemp("exact"), 1, job=job)

    return run


@pytest.mark.quick("replicate, all ranks, step: gradient_done")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            id=f"{c}{', distilled' if c.distils else ''}",
            marks=[] if c in IN_EVERY_TEST else pytest.mark.chaos,
        )
        for c in (*PLUG_INS, *DISTILLED)
    ],
)
def test_a_kill_changes_neither_losses_nor_metrics_of_an_objective(
    tmp_path: Path, exact_with: Callable[[bool], Launch], case: Case
) -> None:
    kill = Kill(case, tmp_path)
    launch = kill.run(tmp_path)
    found, exact = history(launch), exact_with(case.distils)
    one = sorted(exact.records.values(), key=lambda record: record.step)
    assert [(r.step, r.digest) for r in found] == [(r.step, r.digest) for r in one], "the same samples"
    if case.layout == "replicate":
        assert [(r.loss, r.grad_norm, r.metrics) for r in found] == [
            (r.loss, r.grad_norm, r.metrics) for r in one
        ]
        assert launch.last_point().state_digest == exact.last_point().state_digest
    for mine, theirs in zip(found, one, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    assert_no_more_is_lost_than_promised(kill)


@pytest.fixture(scope="module")
def exact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Launch]:
    """`exact` with other changes (`Case.trained`)."""

    @cache
    def run(**changes: Any) -> Launch:
        job = job_of(REPLICATE, train__numerics="invariant", **changes)
        return run_to_end(tmp_path_factory.mktemp("exact"), 1, job=job)

    return run


@pytest.mark.quick("hsdp, one rank, step: summary_received, muon")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            c,
            id=f"{c}, {'adapters' if c.adapts else c.optimizer}",
            marks=[] if c in IN_EVERY_TEST else pytest.mark.chaos,
        )
        for c in (*OPTIMIZERS, *ADAPTED)
    ],
)
def test_a_kill_changes_no_bit_of_an_optimizer_that_steps_whole_parameters_and_none_of_adapters(
    tmp_path: Path, calm: Any, exact_of: Callable[..., Launch], case: Case
) -> None:
    kill = Kill(case, tmp_path)
    launch = kill.run(tmp_path)
    found, exact = history(launch), exact_of(**case.trained)
    one = sorted(exact.records.values(), key=lambda record: record.step)
    assert [(r.step, r.digest) for r in found] == [(r.step, r.digest) for r in one], "the same samples"
    digest = launch.last_point().state_digest
    if case.layout == "replicate":
        assert [(r.loss, r.grad_norm) for r in found] == [(r.loss, r.grad_norm) for r in one]
        assert digest == exact.last_point().state_digest
    else:
        layout = "hsdp" if case.layout == "hsdp" else SHARD
        losses, expected = calm(layout, worlds_of(launch), **case.trained)
        assert [r.loss for r in found] == losses
        assert digest == expected
    assert [r.loss for r in found] == pytest.approx([r.loss for r in one], rel=1e-3)
    assert_no_more_is_lost_than_promised(kill)
    assert read_back(launch.storage, case.job.model, case.job.train) >= 1
