"""`orchestrator rewind`: a run goes back without training, and the same start continues from there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli import commands as cli
from orchestrator.coordinator.attempt import survey as surveying
from orchestrator.errors import BusyError, RefusedError, ResumePointError, WantedPointError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.inspect.run import Run
from orchestrator.launch.branch import rewind as rewinding
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.branch.rewind import RewindPlan
from orchestrator.launch.start import attempt_claim
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.folders import files
from tests.launch.runner import Runner, damage_weights
from tests.raising import exits, raises


@pytest.fixture
def trained(runner: Runner) -> tuple[Runner, list[StateKey]]:
    """A run of thirty steps with a point every ten, and these points."""
    return runner, [runner.launch() for _ in range(3)]


Trained = tuple[Runner, list[StateKey]]


def test_the_next_start_continues_from_the_point_and_what_is_behind_it_is_an_orphan(trained: Trained) -> None:
    runner, (first, second, third) = trained
    newest = Run(runner.folder).rewind(step=30)
    assert (newest.stands_there, runner.store.claim_numbers()) == (True, [1, 2, 3])
    plan = Run(runner.folder).rewind(first.point_name)
    assert (plan.done, plan.step, plan.consumed_tokens) == (True, 10, 2560)
    assert (plan.steps_aside, plan.first_step_aside, plan.last_step_aside) == (20, 11, 30)
    assert (plan.tokens_aside, plan.orphans) == (5120, (second.point_name, third.point_name))
    assert runner.plan().point == first.point_name
    rows = Run(runner.folder).list_points()
    assert [row["on_lineage"] for row in rows] == [True, False, False], "all are kept"
    claim, end = runner.store.read_claim(4), runner.store.read_end(4)
    assert end is not None
    assert Run(runner.folder).status(0).step == 10, "what is set aside is no step of the run"
    assert (claim.why, end.outcome) == ("rewind", "stopped")
    assert end.reason.startswith(f"rewound to {first.point_name} by ")
    assert runner.launch().step == 20
    assert [row["on_lineage"] for row in Run(runner.folder).list_points()] == [True, False, False, True]


def test_who_repeats_a_rewind_changes_nothing(trained: Trained) -> None:
    runner, (first, _, _) = trained
    Run(runner.folder).rewind(first.point_name)
    before = files(runner.folder)
    assert Run(runner.folder).rewind("00000010-a0001-g0001").stands_there
    again = Run(runner.folder).rewind(step=10)
    assert (again.stands_there, again.done, again.point) == (True, True, first.point_name)
    beyond = "command.beyond_history"
    with raises(RefusedError, beyond, "step 15", "step 10 "):  # its step 15 is set aside
        Run(runner.folder).rewind(step=15)
    assert files(runner.folder) == before


def test_a_start_that_had_rewound_by_its_configuration_goes_on_after_a_rewind(trained: Trained) -> None:
    runner, (first, second, _) = trained
    back = {"resume": {"from": second.point_name}}
    runner.launch(**back)
    Run(runner.folder).rewind(first.point_name)
    assert runner.plan(**back).point == first.point_name, "the same command continues from there"


def test_a_point_that_somebody_has_begun_to_delete_is_refused_before_anything_is_claimed(
    trained: Trained,
) -> None:
    runner, (first, second, _) = trained
    assert runner.store.may_delete(first.point_name, "attempt 3", "resume.keep_latest", "")
    before = files(runner.folder)
    hold = f"{runner.folder}/pins/{first.point_name}.json"
    for act in (
        lambda: Run(runner.folder).rewind(first.point_name),
        lambda: runner.plan(resume={"from": first.point_name}),
    ):
        with raises(RefusedError, "point.being_deleted", "attempt 3", hold):
            act()
    assert files(runner.folder) == before
    assert runner.plan(resume={"from": second.point_name}).point == second.point_name
    Path(hold).unlink()
    assert Run(runner.folder).rewind(first.point_name).done, "as the message says"


PLACES: list[tuple[dict[str, int], int, int]] = [
    ({"step": 20}, 20, 0),
    ({"step": 29}, 20, 9),
    ({"step": 30}, 30, 0),
    ({"tokens": 7680}, 30, 0),
    ({"samples": 240}, 30, 0),
    ({"tokens": 2561}, 10, 0),
    ({"samples": 239}, 20, 9),
]
BEYOND = "command.beyond_history"
NO_PLACES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"step": 0}, BEYOND, ("step 1 (8 samples, 256 tokens)", "step 30")),
    ({"step": 31}, BEYOND, ("step 31", "step 30 (240 samples, 7,680 tokens)")),
    ({"samples": 241}, BEYOND, ("241 samples", "step 30")),
    ({"tokens": 7681}, BEYOND, ("7,681 tokens", "step 30")),
    ({"step": 9}, "point.none_before", ("00000010-a0001-g0001", "step 10")),
    ({"to": "00000011-a0001-g0001"}, "point.unknown", ("00000011-a0001-g0001",)),
    ({}, "command.not_exactly_one", ("none is given",)),
    ({"step": 3, "tokens": 5}, "command.not_exactly_one", ("step and tokens are given",)),
]


def test_a_place_means_the_newest_point_at_or_before_it(trained: Trained) -> None:
    runner, _ = trained
    before = files(runner.folder)
    for place, step, steps_before in PLACES:
        plan = Run(runner.folder).rewind(**place, agree=lambda plan: False)
        assert (plan.step, plan.steps_before, plan.done) == (step, steps_before, False), place
    for place, code, values in NO_PLACES:
        with raises(RefusedError, code, *values):
            Run(runner.folder).rewind(**place)
    assert files(runner.folder) == before


def test_what_is_beyond_the_end_is_refused_also_where_the_run_stands_at_its_end(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, _ = trained
    with exits(2):
        cli.main(["rewind", str(runner.folder), "--step", "5000", "--yes"])
    assert "step 5,000: the run's history goes from step 1 " in capsys.readouterr().err


def test_a_rewind_to_an_orphan_names_the_fork_that_can_take_it(trained: Trained) -> None:
    runner, (first, second, _) = trained
    Run(runner.folder).rewind(first.point_name)
    fork = f"orchestrator fork {runner.folder} NEW_RUN --at {second.point_name}`"
    with raises(RefusedError, "point.orphan", fork):
        Run(runner.folder).rewind(second.point_name)


def test_a_damaged_point_is_passed_over_by_place_and_refused_by_name(trained: Trained) -> None:
    runner, (first, second, _) = trained
    file = damage_weights(runner.folder, second)
    with raises(ResumePointError, "point.damaged", second.point_name, file):
        Run(runner.folder).rewind(second.point_name)
    plan = Run(runner.folder).rewind(step=25)
    assert (plan.point, plan.steps_before, plan.done) == (first.point_name, 15, True)
    (passed,) = plan.damages
    assert second.point_name in passed
    assert file in passed


def test_a_wish_that_cannot_be_met_is_refused_without_a_watch(trained: Trained) -> None:
    runner, _ = trained
    runner.begin()  # it may be alive: a watch would say that it looks
    said: list[str] = []
    with raises(RefusedError, "point.none_before", "step 5"):
        Run(runner.folder).rewind(step=5, say=said.append)
    assert said == []


def test_a_living_launch_is_left_alone(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, (first, _, _) = trained
    attempt = runner.begin()
    heart = runner.store.heartbeat(attempt.number)
    monkeypatch.setattr(attempt_claim, "BUSY_WATCH_S", 60.0)
    monkeypatch.setattr(
        runner.store.__class__, "signs_of_life", beating_at(heart, runner.store.signs_of_life)
    )
    with raises(BusyError, "run.busy", "attempt 4 of launch", f"`orchestrator stop {runner.folder}`"):
        Run(runner.folder).rewind(first.point_name)
    assert max(runner.store.claim_numbers()) == attempt.number


def beating_at(heart: Any, signs_of_life: Any) -> Any:
    """Each look at them finds that the launch has shown another one."""

    def look(store: Any, number: int, listed: Any = None) -> Any:
        heart.beat()
        return signs_of_life(number)

    return look


def test_a_run_that_moved_on_since_the_plan_is_left_as_it_is(trained: Trained) -> None:
    runner, (first, _, _) = trained
    shown: list[RewindPlan] = []

    def agree(plan: RewindPlan) -> bool:
        shown.append(plan)
        runner.launch()
        return True

    with pytest.raises(BusyError):
        Run(runner.folder).rewind(first.point_name, agree=agree)
    assert shown[0].steps_aside == 20
    stale = shown[0]
    with raises(RefusedError, "run.changed_since_plan", "20 steps", "30"):
        rewinding.carry_out(runner.store, stale, 4, "me")
    assert runner.plan().step_before == 40
    assert Run(runner.folder).status(0).state != "broken"


def test_the_plan_says_how_far_before_the_wanted_step_the_point_lies(trained: Trained) -> None:
    runner, (_, second, third) = trained
    plan = rewinding.look(runner.store, PointQuery(step=27), "runs/mine")
    assert plan.lines() == [
        f"runs/mine: would go back to {second.point_name}, 7 steps (1,792 tokens) before step 27",
        "  step 20, 160 samples, 5,120 tokens",
        "  would set aside 10 steps, 21 to 30 (2,560 tokens)",
        f"  would leave the history, and be kept: {third.point_name}",
        "  `orchestrator points runs/mine --prune` deletes what is off the history",
        "  afterwards the command that trained the run continues it from there",
    ]


def test_the_command_asks_and_without_a_terminal_or_yes_changes_nothing(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, (first, second, _) = trained
    before = files(runner.folder)

    def run(code: int, *words: str) -> tuple[str, str]:
        with exits(code):
            cli.main(["rewind", str(runner.folder), *words])
        return tuple(capsys.readouterr())

    out, err = run(2, "--to", first.point_name)
    assert "would set aside 20 steps, 11 to 30" in out
    assert "rewound" not in out
    assert "nothing is changed: there is no terminal to ask on; give --yes to rewind the run" in err
    out, _ = run(2, "--step", "25", "--json")
    assert (json.loads(out)["point"], json.loads(out)["done"]) == (second.point_name, False)
    for words in ([], ["--step", "10", "--to", first.point_name]):
        given = "--to and --step are given" if words else "none is given"
        told = f"give exactly one of --to, --step, --samples, --tokens; {given}"
        assert told in run(2, *words, "--yes")[1]
    assert files(runner.folder) == before
    out, _ = run(0, "--step", "25", "--yes")
    said = f"rewound: {runner.folder} ends at {second.point_name} now (step 20); 10 steps set aside"
    assert out.splitlines()[-1] == said
    assert "rewound" not in run(0, "--step", "20", "--yes")[0], "the run is at that step already"
    out, _ = run(0, "--tokens", "2560", "--yes", "--json")
    assert (json.loads(out)["point"], json.loads(out)["done"]) == (first.point_name, True)
    assert runner.plan().point == first.point_name
    kinds = [event.kind for event in read_journal(runner.store.storage).events if event.attempt == 5]
    assert kinds == ["attempt", "end"]


class Counting(LocalStore):
    """Counts the bytes that are read of each part behind its header."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.behind: Counter[str] = Counter()

    def read(self, path: str, start: int, into: memoryview) -> int:
        found = super().read(path, start, into)
        if "/state/" in path and start:
            self.behind[path] += found
        return found


def counted(folder: Path) -> tuple[RunStore, Counting]:
    store = Counting(str(folder))
    return RunStore(Storage.on(store)), store


def test_a_rewind_reads_the_run_before_and_after_its_claim_and_each_byte_of_the_point_once(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, (first, _, _) = trained
    store, reads = counted(runner.folder)
    surveys: list[RunStore] = []
    survey = surveying.survey
    monkeypatch.setattr(surveying, "survey", lambda *of: [surveys.append(of[0]), survey(*of)][1])
    plan = rewinding.rewind(store, PointQuery(point=first.point_name), "me", lambda plan: True)
    assert plan.done
    folder = runner.folder / "points" / first.point_name / "state"
    for path in folder.iterdir():
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        (read,) = [num for name, num in reads.behind.items() if name.endswith(path.name)]
        assert read == len(content) - header
    assert {first.point_name in path for path in reads.behind} == {True}, "no other point"
    assert len(surveys) == 2


def test_damage_that_only_the_bytes_show_changes_nothing_and_the_next_rewind_passes_it_over(
    trained: Trained,
) -> None:
    runner, (first, second, newest) = trained
    part = max((runner.folder / "points" / second.point_name / "state").iterdir())
    part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    for wanted in ({"to": second.point_name}, {"step": 25}):
        runner.store.lift_mark(second.point_name)
        with raises(WantedPointError, "point.damaged", part.name):
            Run(runner.folder).rewind(**wanted)
        assert runner.plan().point == newest.point_name, "nothing is changed"
    assert runner.store.is_quarantined(second.point_name)
    assert Run(runner.folder).rewind(step=25).point == first.point_name


def test_a_list_of_points_reads_no_tensor_and_says_that_none_was_verified(trained: Trained) -> None:
    runner, points = trained
    store, reads = counted(runner.folder)
    run = Run(runner.folder)
    run._store = store
    rows = run.list_points()
    assert [(row["name"], row["healthy"]) for row in rows] == [(at.point_name, None) for at in points]
    assert reads.behind == Counter()
    assert [row["healthy"] for row in run.list_points(verify=True)] == [True] * len(points)
    assert reads.behind
