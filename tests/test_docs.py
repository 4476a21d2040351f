"""Whatever README claims is run, or compared with what generates it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.config import load_config, resume_table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_resume_table_is_the_generated_one() -> None:
    table = README.split("<!-- resume table: python -m orchestrator.config -->")[1].split(
        "<!-- end of resume table -->"
    )[0]
    assert table.strip() == resume_table().strip()


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
