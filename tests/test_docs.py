"""Whatever README claims is run, or compared with what generates it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config import load_config, resume_table
from orchestrator.monitor import sentences
from orchestrator.monitor.view import RunView
from orchestrator.progress import Progress
from orchestrator.records import GroupChange, GroupMember, Held, Loss, Stall
from tests.elastic.test_stall import status

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_resume_table_is_the_generated_one() -> None:
    table = README.split("<!-- resume table: python -m orchestrator.config -->")[1].split(
        "<!-- end of resume table -->"
    )[0]
    assert table.strip() == resume_table().strip()


WORKER = GroupMember(rank=1, host="10.0.0.7", pid=23633)
LOST = GroupChange(
    attempt=1,
    generation=2,
    world_size=1,
    wanted=2,
    step=18,
    step_before=18,
    lost=(Loss(worker=WORKER, reason=sentences.NO_ERROR),),
    joined=(),
    paused_s=0.2,
    reason="",
    restarted=False,
)
NEW = replace(WORKER, pid=24020)
SAID = {
    "ready": [
        sentences.group_change(
            replace(LOST, world_size=2, step=0, step_before=0, lost=(), joined=(NEW,), paused_s=None)
        )
    ],
    "lost": [sentences.group_change(LOST)],
    "joined": [
        sentences.group_change(
            replace(LOST, world_size=2, step=42, step_before=42, lost=(), joined=(NEW,), paused_s=0.1)
        )
    ],
    "frozen": sentences.stall(
        Stall(quiet_s=5.2, median_s=0.1, held=(Held(worker=WORKER, state="T"), Held(worker=NEW, state="S")))
    ),
}


@pytest.mark.parametrize("event", SAID)
def test_the_sample_of_the_output_has_the_sentences_that_a_run_says(event: str) -> None:
    (line,) = SAID[event]
    if event == "frozen":  # README leaves out the end of this one
        line = line.split(" · ")[0]
    assert line in README


def test_the_sample_of_the_output_has_the_line_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    step = status(13).last_step
    assert step is not None
    step = replace(step, loss=7.0073, data_wait_s=0.003, lr=0.002)
    progress = Progress(0.0)
    progress._wanted, progress._total = 2, 150
    progress.show(status(13, last_step=step))
    progress.close()
    shown = capsys.readouterr().err.split(maxsplit=2)[2]
    assert shown.strip().replace("  0 tokens/s", "  3,017 tokens/s") in README


def test_the_keys_of_a_status_are_those_of_the_value() -> None:
    (row,) = [line for line in README.splitlines() if line.startswith("| `status` | object |")]
    assert re.findall(r"`(\w+)`", row)[1:] == list(RunView.__slots__)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_is_valid(path: Path) -> None:
    assert load_config(path).run.name


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^orchestrator ([a-z-]+)", README, re.MULTILINE))))
def test_every_command_of_the_readme_exists(command: str) -> None:
    line = [sys.executable, "-m", "orchestrator.cli", command, "--help"]
    made = subprocess.run(line, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr


def test_the_two_commands_stand_by_line_20_and_every_make_target_exists() -> None:
    head = "\n".join(README.splitlines()[:20])
    assert "make quickstart" in head
    assert "make test" in head
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)", README)) - {"it"} <= targets


def test_ci_calls_the_test_command_of_the_readme() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
