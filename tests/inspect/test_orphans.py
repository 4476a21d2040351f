"""`points --prune` deletes what is off the history, and nothing else, whatever happens in the middle."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from orchestrator.checkpoint.points.points import COMMIT
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli import commands as cli
from orchestrator.coordinator.attempt.forking import describe, found_run
from orchestrator.errors import RefusedError, StorageError
from orchestrator.inspect import run as monitor
from orchestrator.inspect.run import Run
from orchestrator.inspect.status.lineage import Pruned
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.launch.runner import Runner, rewind
from tests.raising import exits, raises


@pytest.fixture
def rewound(runner: Runner) -> tuple[Runner, list[str], list[str]]:
    """A run that went back behind two of its points, with the names of its points, and of these two."""
    kept, *orphans = (runner.launch().point_name for _ in range(3))
    (to,) = (point.key for point in [runner.store.read_point(kept)])
    rewind(runner, to)
    newest = runner.launch().point_name
    return runner, [kept, newest], orphans


def test_orphans_are_deleted_and_the_history_stays(rewound: tuple[Runner, list[str], list[str]]) -> None:
    runner, history, orphans = rewound
    run = Run(runner.folder)
    assert run.prune(dry_run=True) == [Pruned(point=name) for name in orphans]
    assert {row["name"] for row in run.list_points()} == {*history, *orphans}
    assert run.prune() == [Pruned(point=name, deleted=True) for name in orphans]
    rows = run.list_points(verify=True)
    assert [(row["name"], row["on_lineage"], row["healthy"]) for row in rows] == [
        (name, True, True) for name in history
    ]
    assert run.prune() == []
    assert runner.plan().point == history[-1]
    assert run.status(0).missing == ()
    assert sorted(path.name for path in (runner.folder / "points").iterdir()) == sorted(history)


def test_a_pinned_orphan_stays_until_it_is_given_back(rewound: tuple[Runner, list[str], list[str]]) -> None:
    runner, _, (first, second) = rewound
    run = Run(runner.folder)
    pin = run.pin(second, "the loss was lower there")
    assert run.prune() == [
        Pruned(point=first, deleted=True),
        Pruned(point=second, kept=f"pinned by {pin.by}: the loss was lower there"),
    ]
    (row,) = (row for row in run.list_points() if row["name"] == second)
    assert {name: row["pin"][name] for name in ("by", "reason", "created")} == {
        "by": pin.by,
        "reason": pin.reason,
        "created": pin.created,
    }
    assert run.unpin(second) == pin
    with raises(RefusedError, "point.not_pinned", second, "none"):
        run.unpin(second)
    bare = run.pin(second)
    assert run.prune() == [Pruned(point=second, kept=f"pinned by {bare.by}")], "no reason, and no colon"
    run.unpin(second)
    assert run.prune() == [Pruned(point=second, deleted=True)]


def test_who_pins_a_pinned_point_hears_whose_pin_and_reason_hold(
    rewound: tuple[Runner, list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    runner, _, (_, second) = rewound
    pin = Run(runner.folder).pin(second, "figure 3")
    for why, said in (("figure 3", "is pinned by"), ("figure 4", "was pinned before, by")):
        with exits(0):
            cli.main(["pin", str(runner.folder), second, "--why", why])
        out = capsys.readouterr().out
        assert f"{second} {said} {pin.by}" in out
    assert "(figure 3): that pin and its reason hold" in out


def test_who_gives_back_the_pin_of_a_fork_hears_what_that_means_for_it(
    rewound: tuple[Runner, list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    runner, _, (_, second) = rewound
    run, fork = Run(runner.folder), runner.folder.parent / "mine"

    def unpin() -> str:
        with exits(0):
            cli.main(["unpin", str(runner.folder), second])
        return capsys.readouterr().out

    run.fork(fork, second)
    assert f"parent of fork {fork}, which has resume points of its own" in unpin()
    shutil.rmtree(fork)
    found_run(RunStore(Storage(str(fork))), "mine", describe(runner.store, second), "me")
    assert f"parent of fork {fork}, which has no resume point of its own yet" in unpin()
    shutil.rmtree(fork)
    run.pin(second, f"parent of fork {fork}")
    assert unpin() == f"{second} is no longer pinned\n"


class FailsAt(OsDisk):
    """From its `number`-th change on nothing can be changed, as after a kill."""

    def __init__(self, number: int) -> None:
        self.left = number

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise PermissionError(1, "killed")

    def create(self, path: str) -> int:
        self._change()
        return super().create(path)

    def link(self, old: str, new: str) -> None:
        self._change()
        super().link(old, new)

    def unlink(self, path: str) -> None:
        self._change()
        super().unlink(path)

    def remove_folder(self, path: str) -> None:
        self._change()
        super().remove_folder(path)


def pruning_is_cut_off(run: Runner, number: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Prunes; whether that has so many changes that it was killed at the `number`-th."""
    disk = FailsAt(number)
    with monkeypatch.context() as patch:
        patch.setattr(monitor, "open_storage", lambda root: Storage(root, disk, no_sleep))
        try:
            Run(run.folder).prune()
        except StorageError:
            return True
    return False


@pytest.mark.quick("3")
@pytest.mark.parametrize("every", [1, 3])
def test_after_a_kill_anywhere_the_same_command_goes_on(
    rewound: tuple[Runner, list[str], list[str]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    runner, history, orphans = rewound
    number, was_cut_off = 0, True
    while was_cut_off:
        copy = runner.copied(tmp_path / str(number))
        was_cut_off = pruning_is_cut_off(copy, number, monkeypatch)
        assert copy.plan().point == history[-1]
        found = {pruned.point for pruned in Run(copy.folder).prune() if pruned.deleted}
        assert found <= {*orphans}
        assert [row["name"] for row in Run(copy.folder).list_points()] == history
        assert sorted(path.name for path in (copy.folder / "points").iterdir()) == sorted(history)
        number += every
    assert number > 10


def test_a_point_of_another_run_is_left_alone(rewound: tuple[Runner, list[str], list[str]]) -> None:
    runner, _, (first, second) = rewound
    commit = runner.folder / "points" / first / COMMIT
    other = commit.read_bytes()
    content = json.loads(other)["content"]
    from orchestrator.json_form import seal

    commit.write_bytes(seal({**content, "run_id": "another"}))
    kept, deleted = Run(runner.folder).prune()
    assert (kept.point, kept.kept, deleted.point) == (first, "it belongs to another run", second)
    assert commit.exists()


def test_the_commands_say_what_they_did(
    rewound: tuple[Runner, list[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    runner, history, (first, second) = rewound

    def said(*words: str) -> str:
        with exits(0):
            cli.main([words[0], str(runner.folder), *words[1:]])
        return capsys.readouterr().out

    assert f"{history[0]} is pinned by " in said("pin", history[0], "--why", "a milestone")
    assert json.loads(said("points", "--json"))[0]["pin"]["reason"] == "a milestone"
    assert "healthy, pinned" in said("points", "--verify")
    why = "orphan: the history does not pass through generation 1 of attempt {}"
    assert said("points", "--prune", "--dry-run") == (
        f"{first}: would be deleted  ({why.format(2)})\n{second}: would be deleted  ({why.format(3)})\n"
    )
    assert [each["deleted"] for each in json.loads(said("points", "--prune", "--json"))] == [True, True]
    assert said("points", "--prune") == (
        "nothing may go: every resume point belongs to the history, and retention keeps it\n"
    )
    assert said("unpin", history[0]) == f"{history[0]} is no longer pinned\n"
    with exits(2):
        cli.main(["points", str(runner.folder), "--dry-run"])


def pruned(runner: Runner, dry_run: bool = False) -> dict[str, bool | str]:
    return {each.point: each.kept or each.deleted for each in Run(runner.folder).prune(dry_run)}


def test_what_retention_lets_go_is_deleted_and_missed_by_nobody(runner: Runner) -> None:
    names = [runner.launch().point_name for _ in range(4)]
    runner.launch(resume={"keep_latest": 2, "keep_every": 20})
    names = runner.store.point_names()
    assert len(names) == 5
    Run(runner.folder).pin(names[2], "mine")
    pin = f"pinned by {runner.store.pins()[names[2]].by}: mine"
    views = RunViews(runner.store)
    views.refresh()
    # the newest attempt's parent is names[3]; of the two newer ones that would release it there is one
    assert pruned(runner, dry_run=True) == {names[0]: False, names[2]: pin}
    assert runner.store.point_names() == names
    assert pruned(runner) == {names[0]: True, names[2]: pin}
    rows = Run(runner.folder).list_points(verify=True)
    assert [row["name"] for row in rows] == names[1:], "20 is a multiple of 20"
    assert all(row["healthy"] and row["on_lineage"] for row in rows)
    assert Run(runner.folder).status(0).missing == ()
    views.refresh()
    for shown in (views, RunViews(runner.store)):  # one who followed it, and one who comes later
        shown.refresh()
        table, document = shown.points(), shown.summary()
        assert [row["name"] for row in table["rows"][::-1]] == names[1:]
        assert table["counts"]["damaged"] == document["points"]["damaged"] == 0
        assert document["points"]["deleted"] == 1
        assert document["missing"] == []
    assert runner.plan().point == names[-1]
    assert not [note for note in runner.plan().notes if "warning" in note]
    assert pruned(runner) == {names[2]: pin}


def test_while_an_attempt_has_not_ended_retention_is_its_own_affair(runner: Runner) -> None:
    for _ in range(3):
        runner.launch(resume={"keep_latest": 1})
    names = runner.store.point_names()
    runner.begin()
    assert pruned(runner) == {names[0]: "the newest attempt has not ended: a launch may need it"}
    assert runner.store.point_names() == names


def test_a_damaged_point_counts_as_none_that_is_kept(runner: Runner) -> None:
    for _ in range(4):
        runner.launch(resume={"keep_latest": 1})
    names = runner.store.point_names()
    for name in names[2:]:
        weights = max((runner.folder / "points" / name / "state").iterdir())
        weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    assert pruned(runner) == {}, "the two whole ones are the newest two"
    assert runner.store.point_names() == names


def test_a_kill_while_retention_is_carried_out_loses_nothing(
    runner: Runner,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(4):
        runner.launch(resume={"keep_latest": 1})
    names, number, was_cut_off = runner.store.point_names(), 0, True
    while was_cut_off:
        copy = runner.copied(tmp_path / str(number))
        was_cut_off = pruning_is_cut_off(copy, number, monkeypatch)
        assert copy.plan().point == names[-1]
        assert all(row["healthy"] for row in Run(copy.folder).list_points(verify=True))
        assert Run(copy.folder).status(0).missing == ()
        Run(copy.folder).prune()
        assert [row["name"] for row in Run(copy.folder).list_points()] == names[2:]
        assert sorted(path.name for path in (copy.folder / "points").iterdir()) == names[2:]
        number += 3
    assert number > 10
