"""What the commands say of a run that goes on while they read it, and that real damage is still shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli import commands as cli
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.survey import LOOKS
from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError, RefusedError, StorageError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect import run as monitor
from orchestrator.inspect.run import Run
from orchestrator.launch.start import preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.inspect.live_run import READS, ROOT, LiveRun, Paused, reader
from tests.inspect.trained_run import TrainedRun
from tests.launch.runner import Runner
from tests.raising import exits, raises
from tests.storage.crashfs import ModelDisk


@pytest.fixture
def disk() -> ModelDisk:
    return ModelDisk()


@pytest.fixture(scope="module")
def job(tiny_config: Any) -> JobConfig:
    return parse_config(tiny_config({"train.max_steps": 100_000}))


@pytest.fixture(scope="module")
def data(job: JobConfig, tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return starting.prepare(job, Storage(str(tmp_path_factory.mktemp("frozen"))), freeze=True)


@pytest.fixture
def live(disk: ModelDisk, job: JobConfig, data: DataSpec) -> LiveRun:
    """A run of one attempt with two points, which are all that it keeps."""
    made = LiveRun(disk, job, data)
    made.launch()
    for _ in range(2):
        made.save(made.live)
    return made


def once_at(
    path: str, happens: Callable[[], Any], call: str = "open", number: int = 1
) -> Callable[[str, str], None]:
    """Something that happens right before the `number`-th such call for a path that ends so."""
    calls = itertools.count(1)

    def before(name: str, at: str) -> None:
        if name == call and at.endswith(path) and next(calls) == number:
            happens()

    return before


def read_points(run: Run) -> list[dict[str, Any]]:
    """`orchestrator points --verify`."""
    return run.list_points(verify=True)


def as_it_is_read(first: str, file: str, happens: Callable[[], Any]) -> Callable[[str, str], None]:
    """The same for a file of a point that is read; who lists the points has looked into COMMIT before."""
    return once_at(f"{first}/{file}", happens, number=2 if file == "COMMIT" else 1)


def after(path: str, happens: Callable[[], Any]) -> Callable[[str, str], None]:
    """Something that happens right before the first call behind one for such a path."""
    seen, waiting = [], [happens]

    def before(_: str, at: str) -> None:
        if seen and waiting:
            waiting.pop()()
        if at.endswith(path):
            seen.append(at)

    return before


@pytest.mark.parametrize("command", [Run.verify, Run.list_points, read_points])
@pytest.mark.parametrize("file", ["COMMIT", "cursor.json", "parts.json"])
def test_a_point_that_retention_deletes_while_it_is_read_is_not_shown(
    disk: ModelDisk, live: LiveRun, command: Callable[[Run], list[dict[str, Any]]], file: str
) -> None:
    first, second = live.on_lineage
    at = as_it_is_read(first, file, lambda: live.save(live.live))
    with reader(disk, at) as (run, _):
        assert [(row["name"], row["healthy"] is False) for row in command(run)] == [(second, False)]
    assert first not in live.on_lineage, "it was deleted meanwhile"


@pytest.mark.parametrize("command", [Run.verify, Run.list_points, read_points])
def test_if_all_listed_points_are_deleted_meanwhile_the_new_ones_are_shown(
    disk: ModelDisk, job: JobConfig, data: DataSpec, command: Callable[[Run], list[dict[str, Any]]]
) -> None:
    live = LiveRun(disk, job, data, keep_latest=1)
    live.launch()
    live.save(live.live)
    with reader(disk, once_at("/config.json", lambda: live.save(live.live))) as (run, _):
        rows = command(run)
        assert [(row["name"], row["healthy"] is False) for row in rows] == [(live.on_lineage[-1], False)]


def test_a_named_point_that_is_deleted_while_it_is_read_is_refused_as_deleted(
    disk: ModelDisk, live: LiveRun
) -> None:
    first = live.on_lineage[0]
    at = once_at(f"{first}/cursor.json", lambda: live.save(live.live))
    with reader(disk, at) as (run, _), raises(RefusedError, "point.deleted", first):
        run.verify(first)


@pytest.mark.parametrize("command", [Run.verify, Run.list_points, read_points])
@pytest.mark.parametrize("file", ["COMMIT", "state/00000-of-00002.safetensors"])
def test_damage_is_shown_by_file_while_another_point_is_deleted(
    disk: ModelDisk, live: LiveRun, command: Callable[[Run], list[dict[str, Any]]], file: str
) -> None:
    first, second = live.on_lineage
    live.store.storage.delete(f"points/{second}/{file}")
    with reader(disk, as_it_is_read(first, "COMMIT", lambda: live.save(live.live))) as (run, _):
        (row,) = (row for row in command(run) if row["name"] == second)
        assert not row["healthy"]
        assert file in (row.get("reason") or row["damaged"][0]["file"])
        assert first not in [each["name"] for each in command(run)]


def test_a_damaged_point_whose_deletion_was_announced_but_not_begun_is_still_damaged(
    disk: ModelDisk, live: LiveRun
) -> None:
    first = live.on_lineage[0]
    live.live.journal.event(EventKind.DELETING_POINTS, points=[first])
    live.live.journal.flush()
    live.store.storage.delete(f"points/{first}/cursor.json")
    with reader(disk, lambda call, path: None) as (run, _):
        (row,) = (row for row in run.verify() if not row["healthy"])
    assert (row["name"], row["damaged"]) == (first, [{"file": "cursor.json", "reason": "is missing"}])


def test_damage_of_a_run_ends_the_command_with_1(
    runner: Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = runner.launch().point_name
    (runner.folder / "points" / name / "cursor.json").unlink()
    with exits(1):
        cli.main(["verify", str(runner.folder)])
    assert "cursor.json is missing" in capsys.readouterr().out


READERS: list[Callable[[Run], Any]] = [
    Run.list_points,
    Run.verify,
    Run.records,
    Run.config,
    lambda run: run.status(0),
]


@pytest.mark.quick(
    "0001.json-list_points",
    "0001.json-<lambda>",
    "0001.parent.json-verify",
    "0001.parent.json-config",
    "000001.jsonl-records",
    "000001.jsonl-<lambda>",
    "/COMMIT-verify",
    "/COMMIT-list_points",
)
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("path", ["0001.json", "0001.parent.json", "000001.jsonl", "/COMMIT"])
def test_a_coordinator_that_restarts_between_two_looks_is_no_contradiction(
    disk: ModelDisk, live: LiveRun, read: Callable[[Run], Any], path: str
) -> None:
    def restart() -> None:
        live.restart()
        live.save(live.live)

    for before in (once_at(path, restart), after(path, restart)):
        with reader(disk, before) as (run, _):
            found = read(run)
        rows = found if isinstance(found, list) else []
        assert all(row["healthy"] is not False and row.get("on_lineage", True) for row in rows)
    with reader(disk, lambda call, path: None) as (run, _):
        assert {row["name"] for row in run.list_points()} == {*live.on_lineage}


@pytest.mark.parametrize("file", ["attempts/0002.json", "attempts/0001.json"])
def test_a_claim_that_is_lost_is_still_a_contradiction(disk: ModelDisk, live: LiveRun, file: str) -> None:
    live.restart()
    live.store.storage.delete(file)
    with reader(disk, lambda call, path: None) as (run, _):
        for read in (Run.list_points, Run.verify, Run.records):
            with raises(OrchestratorError, "history.inconsistent", "no claim"):
                read(run)


def test_a_run_that_is_claimed_at_each_look_is_said_to_go_on_and_not_to_be_damaged(
    disk: ModelDisk, live: LiveRun
) -> None:
    looks: list[str] = []

    def before(call: str, path: str) -> None:
        if call == "list" and path == f"{ROOT}/journal":
            looks.append(path)
            live.restart()

    values = f"{LOOKS} times", f"newest attempt is {LOOKS + 1}"
    with reader(disk, before) as (run, _), raises(StorageError, "run.changed_while_read", *values):
        run.list_points()
    assert len(looks) == LOOKS


def test_a_point_of_a_generation_formed_meanwhile_is_on_the_lineage(disk: ModelDisk, live: LiveRun) -> None:
    def form_and_save() -> None:
        live.reform(live.live)
        live.save(live.live)

    with reader(disk, once_at(f"{ROOT}/points", form_and_save, "list")) as (run, _):
        rows = run.list_points()
    assert [row["name"] for row in rows] == live.on_lineage
    assert all(row["on_lineage"] for row in rows)


def test_a_list_of_points_has_the_newest_whatever_is_saved_and_deleted_meanwhile(
    disk: ModelDisk, job: JobConfig, data: DataSpec
) -> None:
    live = LiveRun(disk, job, data, keep_latest=1)
    live.launch()
    live.save(live.live)
    before = once_at(f"{live.on_lineage[0]}/COMMIT", lambda: live.save(live.live), "size")
    with reader(disk, before) as (_, store):
        assert store.point_names() == live.on_lineage


@pytest.mark.parametrize("call", ["open", "size"])
def test_a_plan_takes_the_newest_point_though_the_one_it_looked_at_is_deleted(
    disk: ModelDisk, job: JobConfig, data: DataSpec, call: str
) -> None:
    live = LiveRun(disk, job, data, keep_latest=1)
    live.launch()
    live.save(live.live)
    at = once_at(f"{live.on_lineage[0]}/cursor.json", lambda: live.save(live.live), call)
    with reader(disk, at) as (_, store):
        found = preview.look_ahead(store, live.job, data)
    assert (found.action, found.point) == ("resume", live.on_lineage[-1])
    assert not [note for note in found.notes if "warning" in note]


def test_a_plan_that_looked_at_the_data_before_the_first_start_froze_them_finds_them(
    runner: Runner,
) -> None:
    seen_before = runner.prepared()
    at = runner.launch()
    assert preview.look_ahead(runner.store, runner.config(), seen_before).point == at.point_name


def test_an_attempt_that_is_claimed_when_the_watch_has_ended_is_alive(disk: ModelDisk, live: LiveRun) -> None:
    live.end()
    with reader(disk, after("0001.end.json", live.launch)) as (run, _):
        view = run.status()
    assert (view.attempt, view.alive, view.is_broken) == (2, True, False)


def test_a_claim_without_a_parent_file_hides_no_point_from_status(disk: ModelDisk, live: LiveRun) -> None:
    live.kill()
    live.claim()
    with reader(disk, lambda call, path: None) as (run, _):
        assert run.status(0).newest_point == live.on_lineage[-1]


def test_a_run_that_is_begun_while_it_is_opened_is_opened(
    disk: ModelDisk, job: JobConfig, data: DataSpec
) -> None:
    def begin() -> None:
        LiveRun(disk, job, data).launch()

    with reader(disk, once_at(f"{ROOT}/attempts", begin, "list")) as (run, store):
        assert run.list_points() == []
        assert isinstance(store, RunStore)


@pytest.mark.quick("once_at-0001.json", "after-000001.jsonl", "once_at-0001.parent.json")
@pytest.mark.parametrize("path", ["0001.json", "0001.parent.json", "000001.jsonl"])
@pytest.mark.parametrize("when", [once_at, after])
def test_an_audit_beside_a_new_attempt_proves_what_it_has_read(
    mapping: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    when: Callable[[str, Callable[[], Any]], Callable[[str, str], None]],
) -> None:
    trained = TrainedRun(mapping)
    trained.attempt(7)
    disk = Paused(OsDisk(), READS, when(path, lambda: trained.attempt(5)))
    monkeypatch.setattr(monitor, "open_storage", lambda root: Storage(root, disk))
    report = Run(trained.folder).audit()
    assert (report["exactly_once"], report["first_difference"]) == (True, None)
    assert report["steps"] in (7, 12)
