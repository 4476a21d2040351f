"""A damaged journal costs what its lines said and nothing else: every damage is named, and no start, listing
or verification of a whole point is refused.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.attempt import note_beginning
from orchestrator.coordinator.attempt.survey import Survey, survey
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims import claim_files
from orchestrator.history.claims.claim_files import seal_starts
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.run import Run
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, start, write_vote
from tests.launch.runner import Runner

FLIPS = 150


def reformed_launch(runner: Runner) -> None:
    """A launch whose group was formed twice, with a point in its second generation alone, and a deletion."""
    attempt = runner.begin()
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    first = attempt.parent.step if attempt.parent else 0
    number = attempt.number
    journal.generation(start(1, attempt.parent, number))
    for step in (first + 1, first + 2):
        journal.step(record(key(step, attempt=number)))
    journal.generation(start(2, key(first + 2, attempt=number), number))
    for step in (first + 3, first + 4):
        journal.step(record(key(step, attempt=number, generation=2)))
    at = key(first + 4, attempt=number, generation=2)
    votes = [write_vote(runner.store.storage, at, rank) for rank in range(2)]
    journal.flush()
    seal_starts(runner.store.storage, journal.starts_up_to(at), attempt.run_id)
    flat = runner.config().flat()
    parent = key(first + 2, attempt=number)
    point = runner.store.commit_point(votes, flat, {"rule": "none"}, parent, run_id=attempt.run_id)
    note_committed(journal, point)
    oldest = runner.store.point_names()[0]
    journal.event(EventKind.DELETING_POINTS, points=[oldest])
    runner.store.delete_point(oldest)
    journal.event(EventKind.POINTS_DELETED, points=[oldest])
    journal.close()
    runner.store.write_end(number, "stopped", "asked to", attempt.run_id, "", journal.num_durable)


@pytest.fixture(scope="module")
def whole(tiny_config: Any) -> Runner:
    """A run of three launches, the last two with two generations each, whose first points are deleted."""
    runner = Runner(tiny_config({"train.max_steps": 1000}))
    runner.launch()
    reformed_launch(runner)
    reformed_launch(runner)
    assert len(runner.store.point_names()) == 1
    return runner


def history(seen: Survey) -> tuple[Any, ...]:
    return seen.points, seen.lineage.records, seen.journal.generations, seen.journal.events, seen.lost


def require_usable(runner: Runner, point: str) -> Survey:
    """What needs no line of the journal works: a plan, a start, the list of points, the page."""
    seen = survey(runner.store)
    assert (seen.points, seen.lost) == ((point,), ()), "the deleted points are not missed"
    plan = runner.plan()
    assert (plan.action, plan.point) == ("resume", point)
    assert bool(seen.damages) == any("nothing that a start needs is lost" in note for note in plan.notes)
    rows = orchestrator.open(runner.folder).list_points()
    assert [(row["name"], row["on_lineage"], row["healthy"]) for row in rows] == [(point, True, None)]
    views = RunViews(runner.store)
    views.refresh()
    assert views.unreadable is None
    assert bool(seen.damages) == any("journal" in piece for piece in views.summary()["missing"])
    assert bool(seen.damages) == Run(runner.folder).status(0).is_broken
    return seen


def journals(folder: Path) -> list[Path]:
    return sorted((folder / "journal").rglob("*.jsonl"))


def test_of_flipped_bits_none_goes_unnoticed_and_none_refuses_the_run(whole: Runner, tmp_path: Path) -> None:
    runner = whole.copied(tmp_path)
    (point,) = runner.store.point_names()
    good = history(require_usable(runner, point))
    chance = random.Random(1)
    paths = journals(runner.folder)
    for number in range(FLIPS):
        path = chance.choices(paths, [file.stat().st_size for file in paths])[0]
        data = path.read_bytes()
        bad = bytearray(data)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        seen = survey(runner.store) if number % 5 else require_usable(runner, point)
        assert seen.points == (point,)
        assert seen.damages, "noticed"
        assert {*seen.lineage.records} <= {*good[1]}, "no value is another one"
        path.write_bytes(data)


def zeros(data: bytes, chance: random.Random) -> bytes:
    """A page that was never written."""
    at = chance.randrange(0, len(data), 512)
    return data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]


def cut(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def rubbish(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(len(data))


@pytest.mark.parametrize("damage", [zeros, cut, rubbish, lambda data, chance: b"", None])
def test_no_loss_of_blocks_or_files_refuses_the_run(
    whole: Runner, tmp_path: Path, damage: Callable[[bytes, random.Random], bytes] | None
) -> None:
    chance = random.Random(2)
    for number in range(3):
        runner = whole.copied(tmp_path / str(number))
        (point,) = runner.store.point_names()
        for path in journals(runner.folder)[number:]:
            path.write_bytes(damage(path.read_bytes(), chance)) if damage else path.unlink()
        require_usable(runner, point)
        attempt = runner.begin()
        assert attempt.parent is not None
        assert attempt.parent.point_name == point
        assert any("journal" in str(file) for file in attempt.found.unreadable)


def test_a_start_needs_no_journal_and_names_its_loss(whole: Runner, tmp_path: Path) -> None:
    runner = whole.copied(tmp_path)
    shutil.rmtree(runner.folder / "journal")
    (point,) = runner.store.point_names()
    seen = require_usable(runner, point)
    assert {damage.path for damage in seen.damages} == {f"journal/a{n:04d}" for n in (1, 2, 3)}
    at = runner.launch()
    assert survey(runner.store).points == (point, at.point_name)


def test_a_sealed_copy_that_is_damaged_costs_nothing_while_the_journal_is_whole(
    whole: Runner, tmp_path: Path
) -> None:
    runner = whole.copied(tmp_path)
    (point,) = runner.store.point_names()
    for path in (runner.folder / claim_files.GENERATIONS).iterdir():
        path.write_bytes(b"rubbish")
    assert require_usable(runner, point).damages == ()


def test_a_lost_generation_without_a_point_takes_only_what_came_after_the_point_along(
    tiny_config: Any,
) -> None:
    runner = Runner(tiny_config({"train.max_steps": 1000}))
    at = runner.launch()
    attempt = runner.begin()
    journal = runner.journal(attempt)
    note_beginning(journal, attempt, runner.config().flat())
    journal.generation(start(1, attempt.parent, 2))
    journal.step(record(key(11, attempt=2)))
    journal.generation(start(2, key(11, attempt=2), 2))
    journal.step(record(key(12, attempt=2, generation=2)))
    journal.close()
    path = runner.folder / "journal/a0002/000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(at for at, line in enumerate(lines) if b'"kind":"generation"' in line)
    lines[number] = b"x" * 80 + b"\n"
    path.write_bytes(b"".join(lines))
    seen = survey(runner.store)
    assert seen.points == (at.point_name,)
    assert [record.step for record in seen.lineage.records] == [*range(1, 11)]
    assert seen.lineage.holes == (10,)
    assert any("has no known past" in gap for gap in seen.lineage.gaps)
    assert runner.plan().point == at.point_name


def test_an_audit_proves_nothing_of_steps_whose_lines_are_lost_and_names_them(
    whole: Runner, tmp_path: Path
) -> None:
    from orchestrator.inspect.audit.audit import _asked

    runner = whole.copied(tmp_path)
    path = runner.folder / "journal/a0002/000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    number = next(at for at, line in enumerate(lines) if b'"kind":"step"' in line)
    lines[number] = lines[number].replace(b'"loss"', b'"lose"')
    path.write_bytes(b"".join(lines))
    seen = survey(RunStore(Storage(str(runner.folder))))
    asked = _asked(seen, None, ())
    assert asked.lost
    assert asked.gap is not None
    assert f"000001.jsonl line {number + 1} is damaged" in asked.gap["reason"]
    assert not _asked(seen, "1:10", ()).lost
    assert _asked(seen, "10:13", ()).lost
    assert replace(asked, gap=None).lost is False


@pytest.mark.parametrize("flips", [120, 2000])
@pytest.mark.quick("120")
def test_no_flipped_bit_of_any_file_changes_in_silence_what_a_start_would_do(
    whole: Runner, tmp_path: Path, flips: int
) -> None:
    """Files of points have their own campaign (tests/checkpoint/test_random_damage.py)."""
    runner = whole.copied(tmp_path)
    folder = runner.folder
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    paths = [path for path in paths if path.relative_to(folder).parts[0] != "points"]
    good, plan = history(survey(runner.store)), runner.plan()
    chance = random.Random(3)
    outcomes = set()
    for _ in range(flips):
        path = chance.choice(paths)
        data = path.read_bytes()
        bad = bytearray(data)
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        refused, outcome = "", "refused"
        try:
            seen, now = survey(runner.store), runner.plan()
            outcome = "no difference" if (history(seen), now) == (good, plan) else "silent"
            outcome = "named" if seen.damages or seen.unreadable else outcome
        except OrchestratorError as error:
            refused = str(error)
        assert not refused or any(part in refused for part in path.relative_to(folder).parts), refused
        outcomes.add(outcome)
        path.write_bytes(data)
    assert outcomes == {"refused", "named", "no difference"}
