"""What a start compares before it claims, and how it continues an older point when its workers find the
newest one damaged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce, ReadingProgress
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import OrchestratorError, ResumePointError, StorageError, WantedPointError
from orchestrator.launch.start import attempt_claim
from orchestrator.launch.start.preview import is_damaged_load, plan_older_point
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage
from orchestrator.records.run_status import RunStatus
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.checkpoint.samples import key, write_vote
from tests.launch.runner import Runner, newest_attempt
from tests.raising import raises
from tests.storage.model_store import FarModelStore, ModelBucket


def part_of(folder: Path, point: StateKey) -> Path:
    return max((folder / "points" / point.point_name / "state").iterdir())


def flipped(path: Path) -> Damage:
    """One bit of the last tensor is another: neither sizes nor headers show it."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    return Damage(point=path.parents[1].name, file=f"state/{path.name}", reason="as a worker read it")


def older(
    run: Runner, found: Damage, attempt: int, known: tuple[Damage, ...] = (), **data: Any
) -> ResumePlan:
    """What the driver does when the workers of `attempt` have reported `found`."""
    said: list[str] = []
    plan = plan_older_point(
        run.store, run.config(**data), run.prepared(**data), [found], known, attempt, said.append
    )
    assert any(found.file in line for line in said)
    return plan


def claim(run: Runner, plan: ResumePlan, **data: Any) -> Any:
    newest = newest_attempt(run.store)
    with attempt_claim.claimed(
        run.store, run.config(**data), run.prepared(**data), newest, looked=plan
    ) as (attempt, _):
        return attempt


def test_a_start_reads_no_more_of_a_part_than_its_header(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = runner.launch()
    path = part_of(runner.folder, newest)
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flipped(path)
    ends: list[int] = []
    plain = LocalStore.read

    def read(self: LocalStore, path: str, start: int, into: memoryview) -> int:
        found = plain(self, path, start, into)
        if "/state/" in path:
            ends.append(start)
        return found

    monkeypatch.setattr(LocalStore, "read", read)
    attempt = runner.begin()
    assert (attempt.parent, attempt.found.damages, attempt.found.verified_s) == (newest, (), None)
    assert ends
    assert max(ends) < header, "the workers read the rest"


class Counted(FarModelStore):
    """Counts how many reads of parts are under way at a time; each waits for another one, for a while."""

    def __init__(self, bucket: ModelBucket) -> None:
        super().__init__(bucket)
        self.lock, self.both = threading.Lock(), threading.Event()
        self.now = self.most = 0

    def read(self, path: str, start: int, into: memoryview) -> int:
        if "/state/" not in path:
            return super().read(path, start, into)
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if self.now > 1:
                self.both.set()
        self.both.wait(1.0)
        try:
            return super().read(path, start, into)
        finally:
            with self.lock:
                self.now -= 1


@pytest.mark.parametrize("fast", [True, False])
def test_headers_and_bytes_are_read_several_at_a_time_from_a_bucket(fast: bool) -> None:
    far = Counted(ModelBucket())
    store = RunStore(Storage.on(far))
    at = key(10)
    votes = [write_vote(store.storage, at, rank, world_size=4) for rank in range(4)]
    store.commit_point(votes, {}, {"rule": "none"}, None)
    assert store.verify_point(at.point_name, fast=fast) == []
    assert far.most > 1


def test_the_workers_damage_is_marked_and_the_next_attempt_of_the_start_continues_the_older_point(
    runner: Runner,
) -> None:
    first, second, third = runner.launch(), runner.launch(), runner.launch()
    damages = [flipped(part_of(runner.folder, at)) for at in (third, second)]
    failed, known = runner.begin(), ()
    assert failed.parent == third, "sizes and headers are right"
    for damage, left in zip(damages, [second, first], strict=True):
        plan = older(runner, damage, failed.number, known)
        assert plan.point == left.point_name
        assert [each.point for each in plan.damages] == [each.point for each in damages[: len(plan.damages)]]
        failed, known = claim(runner, plan), plan.damages
        assert failed.parent == left
        assert {damage.point for damage in failed.found.damages} >= {damage.point}
    assert runner.store.quarantined() == {third.point_name, second.point_name}
    assert [name for name in survey(runner.store).points] == [first.point_name], "the others left the history"
    assert runner.begin().parent == first, "a later start finds the same"
    assert runner.plan().point == first.point_name


def test_where_no_older_point_is_whole_the_start_stops(runner: Runner) -> None:
    only = runner.launch()
    failed = runner.begin()
    with raises(ResumePointError, "point.none_healthy", only.point_name):
        older(runner, flipped(part_of(runner.folder, only)), failed.number)


def test_a_point_that_was_asked_for_by_name_is_never_replaced_by_another(runner: Runner) -> None:
    runner.launch()
    wanted, _ = runner.launch(), runner.launch()
    by_name = {"resume": {"from": wanted.point_name}}
    damage = flipped(part_of(runner.folder, wanted))
    failed = runner.begin(**by_name)
    assert failed.parent == wanted
    config = runner.config(**by_name)
    journal = runner.journal(failed)
    note_beginning(journal, failed, config.flat())
    journal.close()
    with raises(WantedPointError, "point.damaged", damage.file):
        older(runner, damage, failed.number, **by_name)
    for again in (runner.begin, runner.plan):  # torchrun gives the same command again by itself
        with raises(WantedPointError, "point.damaged", damage.file):
            again(**by_name)


def test_what_only_a_worker_reads_wrong_is_no_damage(runner: Runner) -> None:
    runner.launch()
    newest = runner.launch()
    failed = runner.begin()
    path = part_of(runner.folder, newest)
    found = Damage(point=newest.point_name, file=f"state/{path.name}", reason="is missing")
    with pytest.raises(StorageError) as refused:
        older(runner, found, failed.number)
    assert refused.value.code == "point.read_differently"
    assert runner.store.quarantined() == frozenset()
    assert runner.plan().point == newest.point_name


def unreadable(store: RunStore) -> None:
    raise StorageError("the cable is gone")


def test_storage_that_cannot_be_read_is_no_reason_to_continue_an_older_point(
    runner: Runner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner.launch()
    newest = runner.launch()
    failed, damage = runner.begin(), flipped(part_of(runner.folder, newest))
    job, spec = runner.config(), runner.prepared()
    monkeypatch.setattr(LocalStore, "read", lambda *arguments: unreadable(runner.store))
    with pytest.raises(OrchestratorError) as refused:
        plan_older_point(runner.store, job, spec, [damage], (), failed.number, lambda text: None)
    assert isinstance(refused.value, StorageError)
    monkeypatch.undo()
    assert runner.store.quarantined() == frozenset()


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damaging", [gone, cut, other_header])
def test_what_sizes_and_headers_show_is_found_before_any_worker_is_started(
    runner: Runner,
    damaging: Callable[[Path], None],
) -> None:
    first, second = runner.launch(), runner.launch()
    for path in sorted((runner.folder / "points" / second.point_name / "state").iterdir()):
        whole = path.read_bytes()
        damaging(path)
        point, damages = choose_point(runner.store, survey(runner.store), "latest", fast=True)
        assert point is not None
        assert (point.key, [damage.file for damage in damages]) == (first, [f"state/{path.name}"])
        path.write_bytes(whole)
    assert runner.begin().parent == second


def test_a_stop_or_another_failure_is_no_damaged_load() -> None:
    damage = Damage(point="p", file="f", reason="r")
    status = RunStatus(
        version=1,
        attempt=1,
        generation=1,
        world_size=1,
        last_step=None,
        newest_point=None,
        committed=Cursor(),
        waiting_since=None,
        ended="failed",
        reason="",
        left_out=(),
        members=(),
        failures=(),
        damages=(damage,),
    )
    assert is_damaged_load(status)
    for other in (replace(status, stopping=True), replace(status, damages=()), replace(status, ended=None)):
        assert not is_damaged_load(other)


def test_a_long_reading_is_reported_with_bytes_done_and_total_at_most_every_five_seconds() -> None:
    said: list[str] = []
    seconds = iter(range(200))  # the first is when it begins
    progress = ReadingProgress(said.append, "point p", lambda: float(next(seconds)))
    progress.expect(100 << 30)
    for _ in range(100):
        progress.read(1 << 30)
    assert said[0] == "point p: 5.0 of 100.0 GiB read"
    assert len(said) == 19
    short: list[str] = []
    assert ReadAtOnce(Storage("/nowhere"), short.append, "point p")(lambda one: None, []) == []
    assert short == []


def test_a_claim_reads_a_marked_point_whole(runner: Runner) -> None:
    """Bytes decide: a mark alone excludes no point, and is lifted where every byte is right."""
    first, second = runner.launch(), runner.launch()
    path = part_of(runner.folder, second)
    whole, damage = path.read_bytes(), flipped(path)
    runner.store.note_reading(second.point_name, [damage], "me")
    assert runner.plan().point == first.point_name
    path.write_bytes(whole)
    attempt = runner.begin()
    assert (attempt.parent, attempt.found.lifted) == (second, True)
    assert attempt.found.verified_s is not None
