"""The lineage as text says what was continued, saved and set aside, and stays short over many restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.cli import commands as cli
from orchestrator.history.claims.claim_files import RESUME, START
from orchestrator.inspect.run import Run
from orchestrator.inspect.status.lineage import AttemptFacts, tree_lines
from tests.launch.runner import Runner, damage_weights
from tests.raising import exits


def test_a_rewind_a_fork_and_what_became_of_points_are_seen(
    runner: Runner,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = runner.launch(), runner.launch()
    run = Run(runner.folder)
    run.rewind(first.point_name)
    third = runner.launch()
    fork = run.fork(runner.folder.parent / "mine", first.point_name)
    damage_weights(runner.folder, third)
    pin = run._store.pins()[first.point_name]
    with exits(1):  # a point is damaged
        cli.main(["points", str(runner.folder), "--tree", "--verify"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [
        str(runner.folder),
        "├─ attempt 1  start: stopped, steps 1 to 10",
        "│    2 workers from step 1",
        f"│    ● {first.point_name}  pinned by {pin.by}: {pin.reason}",
        f"├─ attempt 2  resume from {first.point_name}: stopped, steps 11 to 20, off the history",
        f"│    ○ {second.point_name}  orphan",
        f"├─ attempt 3  rewind to {first.point_name}: stopped",
        f"├─ attempt 4  resume from {first.point_name}: stopped, steps 11 to 20",
    ]
    assert f"○ {third.point_name}  damaged: state/" in lines[-1]
    assert Run(fork.fork).tree() == [
        fork.fork,
        f"├─ attempt 1  fork of {runner.folder} at {first.point_name}: stopped",
        "│    ● 00000010-a0000-g0001",
    ]
    run.unpin(first.point_name)
    assert f"│    ● {first.point_name}  fork: {fork.fork}" in run.tree(), "its run.json says so, too"


def point(attempt: int, step: int, **what: Any) -> Mapping[str, Any]:
    name = f"{step:08}-a{attempt:04}-g0001"
    row = {"name": name, "on_lineage": True, "healthy": True, "reason": "", "away": "", "pin": None}
    return {**row, "forks": (), **what}


def facts(number: int, **what: Any) -> AttemptFacts:
    """An attempt of ten steps with two points and two workers."""
    step = 10 * (number - 1)
    known: dict[str, Any] = {
        "why": START if number == 1 else RESUME,
        "parent": f"{step:08}-a{number - 1:04}-g0001" if step else None,
        "forked_from": None,
        "outcome": "",
        "reason": "",
        "worlds": ((step + 1, 2),),
        "before": 2 if step else None,
        "first": step + 1,
        "last": step + 10,
        "kept": step + 10,
        "points": (point(number, step + 5), point(number, step + 10)),
    }
    return AttemptFacts(number=number, **{**known, **what})


def test_two_hundred_attempts_are_a_few_lines_and_nothing_special_is_folded() -> None:
    pinned = point(120, 1195, pin={"by": "me", "reason": ""})
    special = {
        50: {"worlds": ((491, 3), (495, 2)), "before": 2},
        120: {"points": (pinned,)},
        160: {"kept": 1595},
        161: {"outcome": "failed", "reason": "the disk is full"},
    }
    lines = tree_lines("runs/long", [facts(n, **special.get(n, {})) for n in range(1, 201)])
    text = "\n".join(lines)
    assert len(lines) < 25
    folded = "├─ attempts 2 to 49: 48 restarts, steps 11 to 490, 96 points, 00000015-a0002-g0001 to "
    assert f"{folded}00000490-a0049-g0001" in text
    assert "│    3 workers from step 491\n│    2 workers from step 495" in text
    assert "● 00001195-a0120-g0001  pinned by me" in text
    assert "├─ attempt 161  resume from 00001600-a0160-g0001: failed, the disk is full" in text
    assert "steps 1,591 to 1,600, off the history after 1,595" in text


def test_many_points_of_one_attempt_are_counted() -> None:
    many = tuple(point(1, step) for step in range(10, 1010, 10))
    lines = tree_lines("runs/one", [facts(1, points=many)])
    assert lines[-3:] == ["│    ● 00000010-a0001-g0001", "│    ⋮ 98 more", "│    ● 00001000-a0001-g0001"]


def test_a_point_that_this_machine_cannot_read_is_not_called_damaged() -> None:
    away = point(
        1, 10, healthy=None, away="resume point needs node gpu-7", reason="resume point needs node gpu-7"
    )
    lines = tree_lines("run", [facts(1, points=(away,))])
    assert [line for line in lines if "not looked at: resume point needs node gpu-7" in line]
    assert "damaged" not in "".join(lines)
