"""A chromium and a served page, for tests: whatever the browser complains of is collected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
ARGUMENTS = ["--headless", "--no-sandbox", "--no-first-run", *QUIET]
LIMIT_MS = 60_000
WATCH_POLICY = (
    "window.violations = []; addEventListener('securitypolicyviolation', "
    "e => window.violations.push(e.violatedDirective + ' ' + e.blockedURI + ' ' + e.sourceFile))"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; skips the test where there is none."""
    if CHROMIUM is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def serving(storage: Path) -> Iterator[str]:
    """The link that `orchestrator dashboard` prints for a folder, while it serves."""
    command = [sys.executable, "-m", "orchestrator.cli.commands", "dashboard", str(storage)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0


class Watched:
    """A page of its own context. `complaints` are all errors of scripts, console and policy."""

    def __init__(self, browser: Any, link: str, **context: Any) -> None:
        self.link, self.complaints = link, list[str]()
        self._context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **context})
        self._context.add_init_script(WATCH_POLICY)
        self.page = self._context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.goto(link)

    def _note(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(f"{message.type}: {message.text}")

    def open(self, address: str) -> Any:
        """Another address of the page, and its main part when it is drawn."""
        self.page.goto(f"{self.link.split('#')[0]}#{address}")
        self.page.wait_for_selector(".sk, .vt-row.load", state="detached")  # the policy forbids functions
        return self.page

    def found(self) -> list[str]:
        """All that the browser has complained of."""
        return [*self.complaints, *self.page.evaluate("window.violations")]

    def close(self) -> None:
        """The page is gone."""
        self._context.close()
