"""No control character of a run's texts reaches a terminal, whatever shows it, and JSON loses none."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.errors import RefusedError
from orchestrator.launch.process.progress import Progress, RunLog
from orchestrator.launch.process.safe_output import Screen
from orchestrator.storage.files import Storage
from orchestrator.text import visible, visible_json, visible_lines
from tests.data.making import write_corpus
from tests.inspect.dashboard.serving import client, make_hostile, served
from tests.inspect.trained_run import TrainedRun

# What a terminal or a reader's eye takes for more than a letter, without the two that only move on.
CONTROLS = [
    *range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F,
    *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xE0001, 0xE0041,
]  # fmt: skip
EVIL = (
    "\x1b]52;c;Y3VybA==\x07\x1b[2K\r\x1b[1A\x9b31m\x85\x7f\u2028\u202e\u2066\u200f all is fine\nrefused: no"
)


def controls_in(text: str) -> list[str]:
    found = {chr(code) for code in CONTROLS}
    return [repr(char) for char in text if char in found or "\ud800" <= char <= "\udfff"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., dict[str, Any]]) -> Path:
    """`made`: its journal says EVIL everywhere. `read`: its documents and the names of its files do. Both lie
    in a folder with such a name.
    """
    folder = tmp_path_factory.mktemp("storage") / "runs\x1b[31m\u202e\x9b"
    hostile = served(folder)
    make_hostile(hostile.made, EVIL)
    (folder / "made" / "logs").mkdir()
    (folder / "made" / "logs" / "0001-host.log").write_text(f"worker failed: {EVIL}\n")
    write_corpus(folder / "data", [f"{EVIL} {number} " * 30 for number in range(40)], "jsonl")
    for path in (folder / "data").glob("*.jsonl"):
        path.rename(path.with_name(f"\x1b[2J\u202e{path.name}"))
    source = {"name": "made", "path": str(folder / "data"), "format": "jsonl"}
    changes = {"data.sources": [source], "run.storage": str(folder), "run.name": "read"}
    trained = TrainedRun(tiny_config(changes))
    trained.attempt(6)
    trained.attempt(2, wrong=8)
    return folder


COMMANDS = [
    ["status", "{made}"], ["points", "{made}"], ["points", "{made}", "--tree"], ["verify", "{made}"],
    ["points", "{made}", "--prune", "--dry-run"], ["logs", "{made}"], ["watch", "{made}"],
    ["rewind", "{made}", "--step", "50"], ["rewind", "{made}", "--to", EVIL], ["unpin", "{made}", EVIL],
    ["pin", "{made}", "{point}", "--why", EVIL], ["fork", "{made}", "{fork}", "--at", "{point}", "--yes"],
    ["export", "{made}", "{fork}-export"], ["save", "{made}", "--no-wait"], ["stop", "{made}", "--no-wait"],
    ["audit", "{read}"], ["samples", "{read}", "--step", "3", "--text"], ["status", "{read}"],
    ["samples", "{read}", "--step", EVIL], ["replay", "{read}", "--step", "3"], ["plan", "{read}"],
    ["status", "{made}", EVIL],
    ["status", EVIL], [EVIL], ["samples", "{read}", "--step", "8"], ["audit", "{read}", "--steps", EVIL],
    ["dashboard", "{read}" + EVIL],
]  # fmt: skip


QUIET = {"points", "verify", "audit", "replay"}  # here they repeat no text of the run


def id_of(words: list[str]) -> str:
    return " ".join(word for word in words if word != EVIL) or "none"


@pytest.mark.parametrize("words", COMMANDS, ids=id_of)
def test_no_command_writes_a_control_character(
    words: list[str], runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.inspect.run.WATCH_S", 0.0)
    point = orchestrator.open(runs / "made").list_points()[-1]["name"]
    fork = str(runs / "".join(filter(str.isalnum, words[0])))
    named = {"made": str(runs / "made"), "read": str(runs / "read"), "point": point, "fork": fork}
    asked = [word.format(**named) if word != EVIL else word for word in words]
    with pytest.raises(SystemExit):
        main(asked)
    shown = capsys.readouterr()
    assert controls_in(shown.out + shown.err) == []
    if words[0] not in QUIET:
        assert r"\x1b" in shown.out + shown.err, "and says that it was there"


@pytest.mark.parametrize(
    "words",
    [
        ["status", "{made}"],
        ["points", "{made}"],
        ["samples", "{read}", "--step", "3", "--text"],
        ["status", EVIL],
    ],
    ids=lambda words: words[0],
)
def test_json_escapes_what_it_says_and_loses_nothing(
    words: list[str], runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.inspect.run.WATCH_S", 0.0)
    named = {"made": str(runs / "made"), "read": str(runs / "read")}
    with pytest.raises(SystemExit):
        main([*(word.format(**named) if word != EVIL else word for word in words), "--json"])
    text = capsys.readouterr().out
    assert controls_in(text) == []
    found = json.loads(text)
    if words[0] == "samples":
        assert "\x1b" in "".join(texts_in(found))


def test_the_page_says_nothing_with_control_characters(runs: Path) -> None:
    asking = client(runs)
    for path in ("", "/made", "/made/attempts", "/made/events?level=fault,change,point,data", "/made/points"):
        answer = asking.get(f"/api/runs{path}")
        assert answer.status_code == 200, answer.text
        said = json.dumps(answer.json(), ensure_ascii=False)
        assert r"\\x1b" in said
        assert controls_in("".join(texts_in(answer.json()))) == []


def texts_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in texts_in(each)]
    if isinstance(value, list):
        return [text for each in value for text in texts_in(each)]
    return [value] if isinstance(value, str) else []


def test_a_driver_shows_the_errors_of_workers_as_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(0.0)
    progress.begin(Storage(str(tmp_path)), 1, 2, None)
    progress.say(f"rank 1 failed: {EVIL}")
    progress.foreign("Ray", f"(worker) {EVIL}")
    progress.say_at_length(f"the run ends: {EVIL}")
    progress.close()
    written = (tmp_path / "logs").glob("*.log")
    shown = capsys.readouterr().err + "".join(path.read_text() for path in written)
    assert shown.count(r"\x1b[2K") >= 5
    assert controls_in(shown) == []


def test_an_error_of_ours_says_it_as_data_wherever_it_is_printed() -> None:
    assert controls_in(str(RefusedError(f"no point {EVIL}"))) == []
    assert controls_in(logging.Formatter().format(logging.makeLogRecord({"msg": RefusedError(EVIL)}))) == []


PROGRAM = """
import logging, sys, threading
from orchestrator.launch.process.safe_output import let_go, show_faults_as_data
show_faults_as_data()
logging.getLogger("uvicorn.error").error("fault: %s", sys.argv[1])
thread = threading.Thread(target=lambda: {}[sys.argv[1]] if sys.argv[2] else None)
thread.start()
thread.join()
def raises():
    raise ValueError(sys.argv[1])
thread = threading.Thread(target=raises)
thread.start()
thread.join()
let_go(sys.stderr)
"""


def test_what_is_logged_and_what_ends_a_thread_is_data_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, EVIL.replace("\x00", ""), "x"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr.count(r"\x1b[2K") >= 2
    assert "ValueError" in ended.stderr
    assert controls_in(ended.stderr) == []


@given(st.text(st.one_of(st.characters(), st.sampled_from([chr(code) for code in CONTROLS]))))
def test_visible_text_has_no_control_character_and_all_else(text: str) -> None:
    found = visible(text)
    assert controls_in(found) == []
    assert visible(found) == found
    assert [char for char in text if not controls_in(char)] == [char for char in found] or controls_in(text)
    stream = StringIO()
    Screen(stream).say(text)
    assert stream.getvalue() == found + "\n"


@given(st.lists(st.text()))
def test_a_line_feed_of_a_text_begins_no_line_of_ours(lines: list[str]) -> None:
    shown = visible_lines(lines).split("\n")[:-1]
    assert sum(not line.startswith("    ") for line in shown) <= len(lines)


@given(st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from([chr(code) for code in CONTROLS]))))
def test_a_json_document_means_the_same(text: str) -> None:
    document = visible_json(json.dumps({"text": text}, ensure_ascii=False))
    assert controls_in(document) == []
    assert json.loads(document) == {"text": text}


def test_the_log_file_is_safe_to_read(tmp_path: Path) -> None:
    log = RunLog(lambda text: None)
    log.open(Storage(str(tmp_path)), 1)
    log.write(EVIL)
    log.close()
    (path,) = (tmp_path / "logs").iterdir()
    assert controls_in(path.read_text()) == []
