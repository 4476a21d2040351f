"""`monitor.dashboard`: the page is served while the run is supervised, and the run does not depend on it."""

from __future__ import annotations

import re
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.launch.process.progress import Progress, dashboard_beside


@pytest.fixture
def job(tiny_config: Any, tmp_path: Path) -> JobConfig:
    return parse_config(tiny_config({"monitor.dashboard": True, "run.storage": str(tmp_path)}))


class Shown:
    """What came to the screen, and what into the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress, self.screen, self.log = Progress(5.0), list[str](), list[str]()
        self._came = threading.Event()
        monkeypatch.setattr(self.progress, "_put", self._put)
        monkeypatch.setattr(self.progress._log, "write", self.log.append)

    def _put(self, text: str) -> None:
        self.screen.append(text)
        self._came.set()

    def wait(self) -> str:
        assert self._came.wait(60), "nothing is said"
        return self.screen[-1]


def test_the_link_is_shown_once_and_the_page_ends_with_the_run(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(monkeypatch)
    with dashboard_beside(job, tmp_path, shown.progress):
        said = shown.wait()
        found = re.fullmatch(r"dashboard: (http://127\.0\.0\.1:\d+/)#token=([\w-]+)", said)
        assert found, said
        with urllib.request.urlopen(found[1], timeout=60) as answer:
            assert b"<title>orchestrator</title>" in answer.read()
    with pytest.raises((urllib.error.URLError, ConnectionError)) as gone:
        urllib.request.urlopen(found[1], timeout=60)
    reason = getattr(gone.value, "reason", gone.value)
    assert isinstance(reason, ConnectionRefusedError | ConnectionResetError)
    assert len(shown.screen) == 1
    assert not any(found[2] in line for line in shown.log), "a log file is read by others"


@pytest.mark.usefixtures("begun_warm")
def test_a_page_that_cannot_be_served_is_a_warning(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, executable, why in (
        (tmp_path / "gone", sys.executable, "is no folder"),
        (tmp_path, str(tmp_path / "no-python"), "No such file"),
    ):
        shown = Shown(monkeypatch)
        monkeypatch.setattr(sys, "executable", executable)
        with dashboard_beside(job, folder, shown.progress):
            said = shown.wait()
        assert said.startswith("warning: the dashboard was not started: ")
        assert why in said
        assert "the run continues without it" in said


def test_nothing_is_served_unless_it_is_asked_for(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with dashboard_beside(parse_config(tiny_config()), tmp_path, shown.progress):
        pass
    assert shown.screen == []
