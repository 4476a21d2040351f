"""Weights-only copies beside the points: of every n-th committed one, whole or not there, and never in the
way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from orchestrator.checkpoint.commit.store_actions import note_committed
from orchestrator.checkpoint.export.export_files import find_exports, read_marker
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.launch.on_ray.exports import due, exporting
from orchestrator.records.steps import StateKey
from tests.checkpoint.exports import FACTORY, commit, job, state_of, store_at

Save = Callable[..., Point]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return store_at(tmp_path / "run")


@pytest.fixture
def save(store: RunStore) -> Save:
    journals: dict[int, JournalWriter] = {}
    config = job(FACTORY)
    state = state_of(config)

    def saved(step: int, attempt: int = 1) -> Point:
        if attempt not in journals:
            journals[attempt] = JournalWriter(store.storage, attempt, "run")
        journal = journals[attempt]
        point = commit(store, config, state, step, attempt=attempt)
        note_committed(journal, point)
        journal.flush()
        return point

    return saved


def name(step: int, attempt: int = 1) -> str:
    return StateKey(attempt=attempt, generation=1, step=step).point_name


def whole(store: RunStore) -> list[str]:
    found, incomplete = find_exports(store.storage)
    assert incomplete == []
    return found


def test_every_nth_committed_point_is_due_however_they_come_together() -> None:
    assert due(["1", "2", "3", "4", "5"], 2, 0) == (["2", "4"], 1)
    assert due(["1", "2"], 2, 1) == (["1"], 1)
    assert due([], 1, 0) == ([], 0)
    one_by_one, since = [], 0
    for number in "123456789":
        chosen, since = due([number], 3, since)
        one_by_one += chosen
    assert (one_by_one, since) == due(list("123456789"), 3, 0) == (["3", "6", "9"], 0)


@pytest.mark.usefixtures("begun_warm")
def test_points_that_are_committed_meanwhile_are_exported_and_counted_over_launches(
    store: RunStore, save: Save
) -> None:
    said: list[str] = []
    save(1)
    with exporting(store, 2, 2, said.append):
        point = save(2, attempt=2)
        save(3, attempt=2)
    assert whole(store) == [name(2, 2)]
    marker = read_marker(store.storage, f"exports/{name(2, 2)}")
    assert marker is not None
    assert (marker.point, marker.weights_digest) == (name(2, 2), point.commit.weights_digest)
    assert load_file(Path(store.storage.root) / "exports" / name(2, 2) / "model.safetensors")
    with exporting(store, 3, 2, said.append):
        save(4, attempt=3)
    assert whole(store) == [name(2, 2), name(4, 3)]
    assert [line.partition(" in ")[0] for line in said] == [
        f"exported exports/{each}" for each in whole(store)
    ]
    with exporting(store, 3, None, said.append):
        save(5, attempt=3)
        save(6, attempt=3)
    assert whole(store) == [name(2, 2), name(4, 3)]


@pytest.mark.usefixtures("begun_warm")
def test_an_export_that_fails_is_said_and_the_next_is_made(store: RunStore, save: Save) -> None:
    said: list[str] = []
    with exporting(store, 1, 1, said.append):
        point = save(1)
        (Path(store.storage.root) / "points" / point.name / "parts.json").write_bytes(b"{}")
        save(2)
    assert f"exports/{name(2)}" in said[-1]
    assert said[0].startswith(
        f"warning: {name(1)} is not exported: resume point {name(1)}: parts.json has 2 bytes"
    )
    assert said[0].endswith("Training continues")
    assert find_exports(store.storage)[0] == [name(2)]


def test_an_export_that_was_cut_off_is_never_whole_and_is_made_again(store: RunStore, save: Save) -> None:
    class LaunchEndedError(Exception):
        pass

    point = save(1)
    file = Path(store.storage.root) / "points" / point.name / "state" / "00000-of-00002.safetensors"
    data = file.read_bytes()
    file.unlink()
    os.mkfifo(file)  # whoever reads it stands still

    def train() -> None:
        with exporting(store, 1, 1, lambda text: None):
            os.close(os.open(file, os.O_WRONLY | os.O_CLOEXEC))  # when the export has come so far
            os.mkdir(gone)
            raise LaunchEndedError

    gone = Path(store.storage.root) / "exports" / name(7)
    with pytest.raises(LaunchEndedError):
        train()
    assert find_exports(store.storage) == ([], [name(1), name(7)])
    file.unlink()
    file.write_bytes(data)
    with exporting(store, 2, 9, lambda text: None):
        pass
    assert whole(store) == [name(1)]
