"""The command `dashboard`: one line, a server until it is interrupted, and no part of other commands."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import commands as cli
from tests.inspect.dashboard.serving import Served

ROOT = Path(__file__).resolve().parents[3]
LINK = re.compile(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]{43})\n")


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, until the block ends."""
    program = [sys.executable, "-m", "orchestrator.cli.commands", "dashboard", *words]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, text=True, env=environment, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def asked(link: str, path: str, token: str | None = None) -> tuple[int, Any]:
    """Status and document."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(link.partition("#")[0] + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_it_prints_one_link_and_serves_until_it_is_interrupted(
    run: Served, end: signal.Signals, code: int
) -> None:
    with started(str(run.storage)) as process:
        assert process.stdout is not None
        link = process.stdout.readline()
        found = LINK.fullmatch(link)
        assert found, link
        assert asked(link, "api/runs")[0] == 401
        status, document = asked(link, "api/runs", found[2])
        assert (status, document["runs"][0]["name"]) == (200, "made")
        assert asked(link, f"api/runs/made/points?token={found[2]}")[0] == 401, (
            "a token in an address is none"
        )
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
        assert (out, err, process.returncode) == ("", "", code)


def test_it_ends_with_the_process_that_holds_its_input(run: Served) -> None:
    with started(str(run.storage / "made"), "--until-eof") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert LINK.fullmatch(process.stdout.readline())
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_refused(
    run: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["dashboard", *words])
        out, err = capsys.readouterr()
        assert (out, ended.value.code) == ("", 2)
        return err

    assert f"{tmp_path / 'nothing'} is no folder; give the storage" in refused(str(tmp_path / "nothing"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(str(run.storage), "--port", port)
    assert f"the dashboard cannot listen on 127.0.0.1 port {port}" in said
    assert "give another --port" in said


def test_other_commands_do_not_load_a_web_server() -> None:
    code = (
        "import sys, orchestrator.cli.commands, orchestrator.inspect.run, orchestrator.launch.api;"
        "print([m for m in ('fastapi', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
