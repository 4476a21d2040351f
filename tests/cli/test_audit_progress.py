"""How far an audit is: a bar on a terminal, a line every ten seconds elsewhere, none for readers of JSON."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from orchestrator.cli.commands import main
from orchestrator.cli.progress import _AuditLines, show_audit_progress
from orchestrator.inspect.audit.audit_run import NoAuditProgress


def test_elsewhere_it_says_so_every_ten_seconds_with_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    lines = _AuditLines(lambda: now)
    lines.begin("comparing steps", "tokens", 400_000_000)
    for second in range(1, 25):
        now = float(second)
        lines.advance(10_000_000)
    lines.begin("reading the files", "bytes", 50)
    now += 9.0
    lines.advance(25)
    assert capsys.readouterr().err.splitlines() == [
        "comparing steps: 25 % (100.0 of 400.0 million tokens, 10.0 million a second), about 30 s left",
        "comparing steps: 50 % (200.0 of 400.0 million tokens, 10.0 million a second), about 20 s left",
    ]


def test_who_reads_json_reads_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with show_audit_progress(quiet=True) as progress:
        assert isinstance(progress, NoAuditProgress)
    with show_audit_progress() as progress:
        assert isinstance(progress, _AuditLines)


def test_a_terminal_shows_a_bar_of_each_half(
    example: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with show_audit_progress() as progress:
            progress.begin("comparing steps", "tokens", 2_000_000)
            progress.advance(1_000_000)
            progress.begin("reading the files", "bytes", 3_000_000)
        with pytest.raises(SystemExit) as ended:
            main(["audit", "example", "--json"])
        terminal.flush()
        drawn = os.read(master, 1 << 16).decode()
    os.close(master)
    assert ended.value.code in (0, None)
    assert "reading the files (3.0 million bytes)" in drawn
    assert '"exactly_once": true' in capfd.readouterr().out
