"""What a replay that was killed leaves beside the run, and who takes it away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli.commands import main
from orchestrator.history.claims.liveness import beating
from orchestrator.launch.branch import temporary_runs as scratches
from orchestrator.launch.start import attempt_claim
from orchestrator.storage.files import Storage
from tests.raising import exits

KILLED = """
import os, signal, orchestrator
from orchestrator.launch.replay import replay
replay.train_until = lambda *job: os.kill(os.getpid(), signal.SIGKILL)
orchestrator.open("example").replay(9, overrides=["cluster.num_workers=1"])
"""
HOLDS = """
import os, sys
from orchestrator.launch.branch.temporary_runs import scratch
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.storage.files import Storage
store = RunStore(Storage(os.path.abspath("example")))
with scratch(store, print) as folder:
    inner = RunStore(store.storage.beside(folder))
    inner.claim(1, "a launch", "start", "host")
    print(folder, flush=True)
    sys.stdin.read()
"""


def scratch_folders(run: Path) -> list[Path]:
    return sorted(run.parent.glob(".replay-*"))


def store_of(folder: Path) -> RunStore:
    return RunStore(Storage(str(folder)))


@contextmanager
def one_that_holds(run: Path) -> Iterator[Path]:
    """A process with a scratch folder, where its launch has claimed, killed at the end."""
    command, pipe = [sys.executable, "-c", HOLDS], subprocess.PIPE
    with subprocess.Popen(command, cwd=run.parent, stdin=pipe, stdout=pipe, text=True) as holder:
        try:
            assert holder.stdout is not None
            yield Path(holder.stdout.readline().strip())
        finally:
            holder.kill()


def errors_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with exits(0):
        main(command)
    return capsys.readouterr().err


def told(run: Path) -> list[str]:
    said = list[str]()
    scratches.remove_left(store_of(run), said.append)
    return said


def test_a_replay_that_was_killed_leaves_no_pin_and_a_folder_that_prune_removes(
    example: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=example.parent, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = scratch_folders(example)
    assert (left / "example" / "run.json").exists(), "it was killed when its launch began"
    assert store_of(example).pins() == {}, "nothing to give back"
    note = f"note: {left} is left of a replay that was killed; `points --prune` and `replay` remove it\n"
    for command in (["points"], ["points", "--json"], ["points", "--prune", "--dry-run"]):
        assert errors_of(command[0], str(example), *command[1:], capsys=capsys) == note
    removed = f"removed {left}, left of a replay that was killed\n"
    assert errors_of("points", str(example), "--prune", capsys=capsys) == removed
    assert scratch_folders(example) == []


def test_a_folder_goes_once_its_process_is_dead_and_its_launch_gives_no_sign_of_life(
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt_claim, "BUSY_WATCH_S", 1.0)
    with one_that_holds(example) as folder:
        assert told(example) == [], "it lives"
    with beating(store_of(folder).heartbeat(1), 0.1):  # its launch, for a while
        checking, kept = told(example)
    assert checking == f"{folder.parent}: checking for 1 s whether its launch still runs"
    assert kept == f"note: {folder.parent}, left by a killed replay, is kept because its launch still runs"
    assert folder.exists()
    assert told(example) == [checking, f"removed {folder.parent}, left of a replay that was killed"]
    assert scratch_folders(example) == []


@pytest.mark.parametrize("name", [".replay-example-0123456789ab-1-1-x", ".replay-example-x", ".replay-a b-x"])
def test_of_another_machines_folder_only_its_owner_knows_and_the_command_is_named(
    example: Path,
    name: str,
) -> None:
    folder = example.parent / name
    folder.mkdir()
    (note,) = told(example)
    assert note.startswith(f"note: {folder} belongs to a replay of another machine")
    command = note.rpartition("remove it: ")[2]
    assert folder.exists()
    subprocess.run(["sh", "-c", command], check=True)
    assert not folder.exists()
