"""Whatever starts from a run's folder runs no code that the run names: not the page, no command that reads,
no `Run` of a notebook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.data.code_process import CodeProcessError, call
from orchestrator.data.common import user_code
from orchestrator.errors import ConfigError, RefusedError

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tests" / "examples" / "format2"


def test_no_reading_runs_code_that_a_run_names(tmp_path: Path) -> None:
    (tmp_path / "corpus").symlink_to(EXAMPLE / "corpus")
    # `-m` without `-P`: the current folder, where the attacker's modules lie, is the first on Python's path
    ended = subprocess.run(
        [sys.executable, "-m", "tests.inspect.reads_only", str(EXAMPLE / "example")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(found["routes"]) >= 13
    assert found["seen"] == []
    assert found["foreign"] == []
    assert found["pwned"] == []
    assert not found["audited_here"]
    assert found["foreign_then"] == []
    assert any("evil.py" in each for each in found["planted_seen"]), "the watcher sees it"
    assert "evil" in found["planted_foreign"]
    assert found["planted_pwned"]


def test_a_plan_runs_the_code_of_its_own_configuration_in_another_process(
    tmp_path: Path, tiny_config: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    says = "\nimport os, pathlib\npathlib.Path('ran').open('a').write(f'{os.getpid()} ')\n"
    (tmp_path / "my_code.py").write_text(
        f"{says}def kept(document, seed):\n    return document\n"
        "def records():\n    return [{'text': 'one'}]\n"
    )
    monkeypatch.chdir(tmp_path)
    source = {"name": "made", "path": "my_code:records", "format": "python"}
    planned = orchestrator.plan(tiny_config({"data.sources": [source], "data.transforms": ["my_code:kept"]}))
    assert planned.action == "start"
    ran = {int(word) for word in (tmp_path / "ran").read_text().split()}
    assert ran
    assert os.getpid() not in ran
    assert "my_code" not in sys.modules


def test_a_process_that_only_reads_loads_no_function_in_any_thread() -> None:
    refusals = list[RefusedError]()

    def load() -> None:
        try:
            user_code.load("tests.data.made_transforms:half", "here")
        except RefusedError as error:
            refusals.append(error)

    with user_code.reading_only():
        assert os.getcwd() not in sys.path
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        load()
    load()
    assert [error.code for error in refusals] == ["user_code.reading_only"] * 2


def ended_at_once() -> None:
    os._exit(7)


def refused() -> None:
    raise ConfigError("no", code="some.code")


def process_id() -> int:
    return os.getpid()


def test_a_call_in_a_process_of_its_own_gives_its_result_and_its_errors() -> None:
    assert call(False, process_id) == os.getpid()
    assert call(True, process_id) != os.getpid()
    with pytest.raises(ConfigError) as error:
        call(True, refused)
    assert error.value.code == "some.code"
    with pytest.raises(CodeProcessError):
        call(True, ended_at_once)
