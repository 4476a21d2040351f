"""`orchestrator fork`, and `resume.from` of another run's point: a new run begins with it, and is a run as
any other from then on.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli import commands as cli
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import ConfigError, RefusedError, ResumePointError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.inspect.run import Run
from orchestrator.launch.branch import fork as forks
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.launch.start import attempt_claim
from orchestrator.records.steps import StateKey
from orchestrator.storage import disk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import write_vote
from tests.folders import files
from tests.inspect.trained_run import TrainedRun, made_in
from tests.launch.runner import Runner, damage_weights, newest_attempt
from tests.raising import exits, raises


class Forked(Runner):
    """Starts of another run of the same job."""

    def __init__(self, parent: Runner, name: str = "mine", **resume: str) -> None:
        mapping = parent.mapping
        run = {**mapping["run"], "name": name}
        super().__init__({**mapping, "run": run, "resume": {**mapping["resume"], **resume}})


@pytest.fixture
def trained(runner: Runner) -> tuple[Runner, list[StateKey]]:
    """A run of twenty steps with a point every ten, and these points."""
    return runner, [runner.launch() for _ in range(2)]


Trained = tuple[Runner, list[StateKey]]


def parent_file(store: RunStore, number: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.storage.read(f"attempts/{number:04d}.parent.json"))["content"]
    return found


def test_a_fork_is_a_run_of_its_own_that_names_and_pins_its_parent(trained: Trained) -> None:
    runner, (first, _) = trained
    fork, before = Forked(runner), survey(runner.store)
    plan = Run(runner.folder).fork(fork.folder, first.point_name)
    assert (plan.done, plan.step, plan.point) == (True, 10, first.point_name)
    (row,) = Run(fork.folder).list_points(verify=True)
    digest = runner.store.read_point(first.point_name).commit.weights_digest
    assert (row["name"], row["healthy"], row["on_lineage"]) == ("00000010-a0000-g0001", True, True)
    assert (row["weights_digest"], row["consumed_tokens"]) == (digest, 2560)
    run, parent = fork.store.read_run(), runner.store.read_run()
    assert run is not None
    assert parent is not None
    assert (run.id != parent.id, run.identity) == (True, parent.identity)
    named = {
        "run": str(runner.folder), "run_id": parent.id, "point": first.point_name, "weights_digest": digest
    }  # fmt: skip
    assert parent_file(fork.store)["origin"]["forked_from"] == named
    (begun, end) = read_journal(fork.store.storage).events
    assert (begun.kind, begun.fields["why"], begun.fields["forked_from"]) == ("attempt", "fork", named)
    assert (end.kind, end.fields["outcome"]) == ("end", "stopped")
    pin = runner.store.pins()[first.point_name]
    assert pin.reason == f"parent of fork {fork.folder}"
    assert survey(runner.store).lineage == before.lineage, "the other run goes on as before"


def test_a_fork_is_planned_trained_and_looked_at_as_any_run(trained: Trained) -> None:
    runner, (first, _) = trained
    fork = Forked(runner)
    Run(runner.folder).fork(fork.folder, step=15)
    plan = fork.plan()
    assert (plan.action, plan.point, plan.step_before) == ("resume", "00000010-a0000-g0001", 10)
    assert (plan.differences, plan.consumed_tokens, plan.refusals) == ((), 2560, ())
    second, third = fork.launch(), fork.launch()
    assert (second, third) == (StateKey(attempt=2, generation=1, step=20), replace(third, attempt=3, step=30))
    seen, run = survey(fork.store), Run(fork.folder)
    assert [record.step for record in seen.lineage.records] == [*range(11, 31)]
    assert not seen.lineage.gaps
    assert [row["on_lineage"] for row in run.list_points()] == [True] * 3
    assert all(row["healthy"] for row in run.verify())
    status = run.status(0)
    assert (status.missing, status.newest_point, status.step) == ((), third.point_name, 30)
    # what the fork does not hold is not needed any more
    shutil.rmtree(runner.folder)
    assert run.rewind("00000010-a0000-g0001").steps_aside == 20
    assert fork.launch().step == 20


def test_who_gives_the_pin_back_hears_of_every_fork_that_still_needs_the_point(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, (first, _) = trained
    made, cut_off = Forked(runner), Forked(runner, "other")
    Run(runner.folder).fork(made.folder, first.point_name)
    with pytest.raises(KeyboardInterrupt), killed_before_the_parent_file():
        Run(runner.folder).fork(cut_off.folder, first.point_name)
    shutil.rmtree(cut_off.folder / "points")  # and before that
    with exits(0):
        cli.main(["unpin", str(runner.folder), first.point_name])
    _, was, still = capsys.readouterr().out.split("; it ")
    assert was.startswith(f"was the parent of fork {made.folder}, which has resume points of its own")
    assert still.startswith(f"is the parent of fork {cut_off.folder}, which has no resume point of its own")


def test_a_fork_without_a_pin_leaves_none(trained: Trained) -> None:
    runner, (first, _) = trained
    fork, wanted = Forked(runner), PointQuery(point=first.point_name)
    forks.fork(runner.store, str(fork.folder), wanted, "me", lambda plan: True, pinned=False)
    assert runner.store.pins() == {}
    assert Run(fork.folder).list_points(verify=True)[0]["healthy"]


def test_a_fork_of_a_fork_keeps_the_lengths_that_were_given_in_steps(trained: Trained) -> None:
    runner, (first, _) = trained
    fork, again = Forked(runner), Forked(runner, "again")
    Run(runner.folder).fork(fork.folder, first.point_name)
    Run(fork.folder).fork(again.folder, "latest")
    plan = again.plan(train={"global_batch_size": 16})
    assert plan.point == "00000010-a0000-g0001"
    assert plan.budgets.max_steps == runner.plan().budgets.max_steps, "at the batch size it was given with"


@pytest.mark.parametrize("when", ["gone", "damaged", "replaced"])
def test_a_fork_without_a_point_of_its_own_says_what_became_of_its_parents(
    trained: Trained, when: str
) -> None:
    runner, (first, _) = trained
    wanted = str(runner.folder / "points" / first.point_name)
    fork = Forked(runner, **{"from": wanted})
    job, spec = fork.config(), fork.prepared()
    with (
        pytest.raises(KeyboardInterrupt),
        killed_before_the_parent_file(),
        attempt_claim.claimed(fork.store, job, spec, 0),
    ):
        pass
    codes = {"replaced": "point.parent_run_gone"}
    reasons = {"gone": "COMMIT is missing", "damaged": "digest", "replaced": str(runner.folder)}
    if when == "gone":
        runner.store.delete_point(first.point_name)
    elif when == "damaged":
        damage_weights(runner.folder, first)
    else:
        shutil.rmtree(runner.folder)
    start = attempt_claim.claimed(fork.store, job, spec, newest_attempt(fork.store))
    code, values = codes.get(when, "point.damaged"), (fork.folder, first.point_name, reasons[when])
    with raises(ResumePointError, code, *values), start:
        pass


def killed_before_the_parent_file() -> Any:
    """Nothing is written of the claim's parent, as after a kill."""
    patch = pytest.MonkeyPatch.context()

    class Killed:
        def __enter__(self) -> None:
            def write(store: RunStore, parent: Any) -> None:
                raise KeyboardInterrupt

            patch.__enter__().setattr(RunStore, "write_parent", write)

        def __exit__(self, *error: Any) -> None:
            patch.__exit__(None, None, None)

    return Killed()


def test_a_start_from_another_runs_point_is_a_fork_and_goes_on_by_the_same_command(trained: Trained) -> None:
    runner, (first, _) = trained
    fork = Forked(runner, **{"from": str(runner.folder / "points" / first.point_name)})
    before = files(runner.folder.parent)
    plan = fork.plan()
    assert (plan.action, plan.point, plan.step_before) == ("resume", first.point_name, 10)
    assert plan.notes[0].startswith(f"forks {runner.folder} at {first.point_name}")
    assert files(runner.folder.parent) == before, "a plan writes nothing"
    assert fork.launch() == StateKey(attempt=1, generation=1, step=20)
    assert parent_file(fork.store)["origin"]["forked_from"]["point"] == first.point_name
    assert fork.store.read_claim(1).why == "fork"
    assert fork.launch() == StateKey(attempt=2, generation=1, step=30), "the same command"
    assert Forked(runner).plan().step_before == 30, "and without resume.from"
    assert runner.store.pins()[first.point_name].reason == f"parent of fork {fork.folder}"


def test_a_killed_start_of_a_fork_is_finished_by_any_start_of_it(trained: Trained) -> None:
    runner, (first, _) = trained
    fork = Forked(runner, **{"from": str(runner.folder / "points" / first.point_name)})
    with pytest.raises(KeyboardInterrupt), killed_before_the_parent_file():
        fork.launch()
    other = Forked(runner)
    assert (other.plan().action, other.plan().point) == ("resume", first.point_name), "it cannot begin anew"
    assert other.launch() == StateKey(attempt=2, generation=1, step=20)
    rows = Run(fork.folder).list_points()
    assert [row["name"] for row in rows if row["on_lineage"]] == ["00000010-a0000-g0002", other_name(20, 2)]
    (orphan,) = Run(fork.folder).prune()
    assert (orphan.point, orphan.deleted) == ("00000010-a0000-g0001", True)
    assert fork.launch().step == 30


def other_name(step: int, attempt: int) -> str:
    return StateKey(attempt=attempt, generation=1, step=step).point_name


def test_the_fork_must_fit_the_data_and_a_run_has_one_beginning(trained: Trained) -> None:
    runner, (first, second) = trained
    wanted = str(runner.folder / "points" / first.point_name)
    fork = Forked(runner, **{"from": wanted})
    plan = fork.plan(train={"seed": 99}, seed=1234)
    assert plan.action == "refuse"
    assert any("data.seed=" in text and "1234" in text for text in plan.refusals)
    assert not fork.folder.exists()
    fork.launch()
    with raises(RefusedError, "run.exists", f"{first.point_name} of {runner.folder}"):
        Forked(runner, **{"from": str(runner.folder / "points" / second.point_name)}).plan()
    other = str(fork.folder / "points" / first.point_name)
    itself = Forked(runner, runner.config().run.name, **{"from": other})
    with raises(RefusedError, "run.exists", runner.folder, "by itself"):
        itself.plan()
    with raises(RefusedError, "run.unknown", "nowhere"):
        Forked(runner, "third", **{"from": f"nowhere/points/{first.point_name}"}).plan()
    for no_point in ("runs/other/points/latest", "other/"):
        with raises(ConfigError, "config.invalid_value", "resume.from", no_point):
            Forked(runner, "third", **{"from": no_point})
    with raises(RefusedError, "point.bad_location", f"runs/{first.point_name}"):
        Forked(runner, "third", **{"from": f"runs/{first.point_name}"}).plan()


def test_a_fork_is_made_once_and_never_over_another_run(trained: Trained) -> None:
    runner, (first, second) = trained
    fork, parent = Forked(runner), Run(runner.folder)
    parent.fork(fork.folder, first.point_name)
    before = files(fork.folder)
    assert parent.fork(fork.folder, first.point_name).stands_there
    with raises(RefusedError, "run.forked_elsewhere", first.point_name, "latest", second.point_name):
        parent.fork(fork.folder, "latest")
    assert files(fork.folder) == before
    with raises(RefusedError, "run.exists", runner.folder):
        parent.fork(runner.folder, first.point_name)
    with raises(ConfigError, "config.invalid_value", "run.name"):
        parent.fork(runner.folder.parent / ".hidden", first.point_name)
    third = Forked(runner, "third")
    with raises(RefusedError, "point.unknown", "00000011-a0001-g0001"):
        parent.fork(third.folder, "00000011-a0001-g0001")
    assert not third.folder.exists()


def starting_at(runner: Runner, folder: Path) -> dict[str, Any]:
    mapping = runner.mapping
    return {**mapping, "run": {**mapping["run"], "storage": str(folder.parent), "name": folder.name}}


@pytest.mark.parametrize("inside", ["points/{point}", "inside", "journal/a0009", "attempts/0002.json"])
def test_no_new_run_lies_inside_a_run(
    trained: Trained, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    runner, (first, _) = trained
    before, folder = files(runner.folder), runner.folder / inside.format(point=first.point_name)
    with exits(2):
        cli.main(["fork", str(runner.folder), str(folder), "--at", "latest", "--yes"])
    told = capsys.readouterr().err
    assert f"{folder} would lie inside the run {runner.folder}" in told
    start = Runner(starting_at(runner, folder))
    with raises(RefusedError, "run.inside_run", folder, f"the run {runner.folder}"):
        start.plan()
    (runner.folder / "run.json").rename(runner.folder.parent / "run.json.away")
    with raises(RefusedError, "run.inside_run", folder, f"the run {runner.folder}"):
        start.plan()
    (runner.folder.parent / "run.json.away").rename(runner.folder / "run.json")
    assert files(runner.folder) == before


def test_a_link_into_a_run_leads_into_it_and_what_lies_there_already_still_opens(trained: Trained) -> None:
    runner, (first, _) = trained
    link = runner.folder.parent / "link"
    link.symlink_to(runner.folder / "points")
    with raises(RefusedError, "run.inside_run", f"the run {runner.folder}"):
        Run(runner.folder).fork(link / "mine", "latest")
    fork = Forked(runner)
    Run(runner.folder).fork(fork.folder, first.point_name)
    inside = fork.copied(runner.folder)
    assert inside.plan().step_before == 10


def test_no_fork_lies_around_a_run(trained: Trained) -> None:
    runner, _ = trained
    for folder in (runner.folder.parent, runner.folder.parent.parent):
        with raises(RefusedError, "run.around_run", folder, f"the run {runner.folder}"):
            Run(runner.folder).fork(folder, "latest")
    away = Forked(runner, "away")
    Run(runner.folder).fork(away.folder / "inner", "latest")
    with raises(RefusedError, "run.around_run", f"the run {away.folder}/inner"):
        Run(runner.folder).fork(away.folder, "latest")


def test_a_point_that_is_damaged_or_gone_is_a_refusal_of_who_asks_for_it(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, (first, second) = trained
    damage_weights(runner.folder, first)
    runner.store.delete_point(second.point_name)
    fork = Forked(runner)
    for name in (first.point_name, second.point_name, "latest"):
        with exits(2):
            cli.main(["fork", str(runner.folder), str(fork.folder), "--at", name, "--yes"])
    assert "damaged" in capsys.readouterr().err
    for name in (first.point_name, second.point_name, "00000011-a0001-g0001"):
        (runner.folder / "points" / name / "COMMIT").unlink(missing_ok=True)
        with pytest.raises(ResumePointError) as refused:
            Forked(runner, **{"from": str(runner.folder / "points" / name)}).plan()
        assert refused.value.exit_code == 2
    assert not fork.folder.exists()


def test_an_orphan_can_be_forked(trained: Trained) -> None:
    runner, (first, second) = trained
    parent, fork = Run(runner.folder), Forked(runner)
    parent.rewind(first.point_name)
    parent.fork(fork.folder, second.point_name)
    assert fork.launch().step == 30
    assert [each.kept for each in parent.prune()] == [pin_text(runner, second)]


def pin_text(runner: Runner, point: StateKey) -> str:
    pin = runner.store.pins()[point.point_name]
    return f"pinned by {pin.by}: {pin.reason}"


def test_where_there_are_no_hard_links_the_files_are_copied(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, (first, _) = trained
    fork = Forked(runner)
    parts = f"points/{first.point_name}/state"

    def link(self: disk.OsDisk, old: str, new: str) -> None:
        raise PermissionError(1, "no hard links")

    monkeypatch.setattr(disk.OsDisk, "link", link)
    Run(runner.folder).fork(fork.folder, first.point_name)
    damage_weights(runner.folder, first)
    assert all(row["healthy"] for row in Run(fork.folder).verify()), "it needs nothing of the other run"
    assert fork.launch().step == 20
    assert runner.store.storage.list(parts)


def test_the_command_makes_a_fork_only_when_it_is_told_to(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    runner, (_, second) = trained
    fork = Forked(runner)

    def run(code: int, *words: str) -> tuple[str, str]:
        with exits(code):
            cli.main(["fork", str(runner.folder), str(fork.folder), *words])
        return tuple(capsys.readouterr())

    out, err = run(2, "--at", "latest")
    assert f"would be a run of its own that begins with {second.point_name} of {runner.folder}" in out
    assert "give exactly one of --at, --step, --samples, --tokens; none is given" in run(2, "--yes")[1]
    assert "nothing is changed" in err
    assert not fork.folder.exists()
    assert not runner.store.pins()
    out, _ = run(0, "--tokens", "5120", "--yes", "--json")
    assert (json.loads(out)["done"], json.loads(out)["point"]) == (True, second.point_name)
    out, _ = run(0, "--at", second.point_name, "--yes")
    assert "it exists already" in out
    assert "forked" not in out
    fork = Forked(runner, "third")
    out, _ = run(0, "--at", second.point_name, "--yes")
    said = f"forked: {fork.folder} begins with {second.point_name} of {runner.folder}, where it is pinned"
    assert out.splitlines()[-1] == said


def test_the_audit_of_a_fork_begins_at_the_parents_cursor_and_says_so(
    tmp_path: Path, tiny_config: Any
) -> None:
    parent = TrainedRun(made_in(tmp_path, tiny_config))
    parent.attempt(6)
    assert parent.key is not None
    vote = replace(write_vote(parent.store.storage, parent.key, 0, world_size=1), cursor=parent.cursor)
    parent.store.commit_point([vote], parent.job.flat(), {"rule": "none"}, None, run_id=parent.run_id)
    Run(parent.folder).fork(parent.folder.parent / "mine", "latest")
    fork = copy.copy(parent)
    fork.folder = parent.folder.parent / "mine"
    fork.store = RunStore(Storage(str(fork.folder)))
    run = fork.store.read_run()
    assert run is not None
    fork.number, fork.run_id, fork.key = 1, run.id, StateKey(attempt=0, generation=1, step=6)
    nothing = Run(fork.folder).audit()
    assert (nothing["exactly_once"], nothing["steps"]) == (None, 0)
    fork.attempt(5)
    report = Run(fork.folder).audit()
    assert (report["exactly_once"], report["first_step"], report["last_step"]) == (True, "7", "11")
    assert (report["steps"], report["samples"], report["tokens"]) == (5, 40, 5 * 8 * 64)
    told = f"the steps up to 6: they are the history of {parent.folder}, of which this run is a fork"
    assert any(told in text for text in report["not_shown"])
    assert Run(fork.folder).audit("9:10")["exactly_once"]
    fork.attempt(3, wrong=13)
    found = Run(fork.folder).audit()["first_difference"]
    assert (found["step"], "digest" in found["reason"]) == ("13", True)
