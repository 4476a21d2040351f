"""Without a home, or with one that cannot be written, a cache is skipped and nothing ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.storage import open as storage_open
from orchestrator.storage.home import cache_folder, expanded, home
from tests.raising import raises

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2"
NOBODY = 54321  # a uid that the system's user database does not list

# what a command does that uses each cache: reads a run, encodes text, and keeps small files of a bucket
PROGRAM = """
import json, os, sys
from pathlib import Path
os.setreuid(int(sys.argv[2]), -1)  # the user that is looked up; files are read with the old rights
from orchestrator.storage.home import remembered
from orchestrator.history.numbered_files import asker
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.storage import open as storage_open
from orchestrator.storage.home import cache_folder, home
import orchestrator
choice = remembered(EncoderChoice, ["x"], lambda: EncoderChoice(name="n", version="1"))
kept = storage_open._kept({"a.json": b"{}"})
rows = orchestrator.open(sys.argv[1]).points()
print(json.dumps({
    "home": str(home()), "choice": choice.name, "kept": (kept / "a.json").read_text(),
    "points": len(rows), "asker": asker(),
}))
"""


def ran(uid: int, environment: Mapping[str, str]) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLE / "example"), str(uid)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


@pytest.mark.quick("environment0")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("environment", [{}, {"HOME": "/proc"}, {"XDG_CACHE_HOME": "/proc/x"}])
def test_a_uid_without_a_name_or_a_home_reads_runs_and_keeps_what_it_must_elsewhere(
    environment: dict[str, str],
) -> None:
    found = ran(NOBODY, environment)
    assert (found["choice"], found["kept"], found["points"]) == ("n", "{}", 4)
    assert str(NOBODY) in str(found["asker"])
    assert found["home"] == environment.get("HOME", "None")


def test_a_cache_that_cannot_be_written_is_replaced_by_a_folder_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    folder = storage_open._kept({"a.json": b"{}"})
    assert not folder.is_relative_to(tmp_path)
    assert storage_open._kept({"a.json": b"{}"}) == folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert storage_open._kept({"a.json": b"{}"}).is_relative_to(tmp_path / "cache")


def test_a_tilde_that_means_no_home_is_refused_and_never_a_folder_of_that_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with raises(ConfigError, "config.no_home", "run.storage=~no-such-user/runs", "'~no-such-user'"):
        expanded("~no-such-user/runs", "run.storage")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expanded("~/runs") == "/home/somebody/runs"
    assert expanded("./~/runs") == "./~/runs"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert home() == Path("/home/somebody")
    assert str(cache_folder()).startswith("/home/somebody/")
