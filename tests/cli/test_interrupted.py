"""Ctrl-C in the middle of a long command: one line, exit code 130, and nothing half made."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.commands import main
from tests.folders import contents


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """What a shell starts in the background begins with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(patch: pytest.MonkeyPatch, place: str, call: int) -> None:
    """Ctrl-C comes when `place` (module:name) is called for the n-th time, `call` counted from 0."""
    module, _, name = place.partition(":")
    *holders, name = name.split(".")
    holder: Any = importlib.import_module(module)
    for each in holders:
        holder = getattr(holder, each)
    real, calls = getattr(holder, name), count()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    patch.setattr(holder, name, interrupted)


@pytest.mark.parametrize(
    ("command", "place", "call", "line"),
    [
        (
            "verify example",
            "orchestrator.inspect.status.integrity:Verifying._row",
            0,
            ": `verify RUN --resume`",
        ),
        (
            "audit example",
            "orchestrator.inspect.audit.stream_recheck:PartWalk._difference",
            3,
            ": 3 of 12 steps, up to",
        ),
        ("export example out", "orchestrator.storage.files:Storage.create", 0, ""),
        (
            "replay example --step 9",
            "orchestrator.launch.replay.step_replay:StepReplayer._step",
            0,
            ": nothing of it is left",
        ),
        ("watch example", "orchestrator.inspect.run:Run._view", 0, ": the run is as it was"),
        ("watch example --json", "orchestrator.inspect.run:Run._view", 0, ": the run is as it was"),
        ("logs example -f", "orchestrator.inspect.logs:LogFollower.read", 1, ": the run is as it was"),
    ],
)
def test_ctrl_c_ends_a_long_command_with_a_line_and_130_and_leaves_nothing(
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    place: str,
    call: int,
    line: str,
) -> None:
    (example / "logs").mkdir()
    (example / "logs" / "0003-host.log").write_text("what a launch said\n")
    before = contents(example.parent)
    interrupt_at(monkeypatch, place, call)
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 130
    *rest, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"interrupted{line}")
    assert not any("Traceback" in each for each in rest)
    assert contents(example.parent) == before
