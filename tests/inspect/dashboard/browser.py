"""A chromium and a served page, for tests: whatever the browser complains of is collected."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from orchestrator.inspect.dashboard.app import link, make_app
from orchestrator.inspect.dashboard.auth import new_token
from orchestrator.storage.files import Storage

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
ARGUMENTS = ["--headless", "--no-sandbox", "--no-first-run", *QUIET]
LIMIT_MS = 60_000
EVERY_S = 0.2
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
    """The link to a server of the folder, in a thread of this process (test_command has the command's own). A
    run that is shown is looked at more often than people need it.
    """
    token, closing = new_token(), threading.Event()
    app = make_app(Storage(str(storage.resolve())), token, closing=closing, every_s=EVERY_S)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield link("127.0.0.1", listening.getsockname()[1], token)
        finally:
            closing.set()
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


class Watched:
    """A page of its own context. `complaints` are all errors of scripts, console and policy, but those that
    have the text `allowed`.
    """

    def __init__(self, browser: Any, link: str, **context: Any) -> None:
        self.link, self.complaints, self.allowed = link, list[str](), ""
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
        self.page.evaluate("new Promise(done => setTimeout(() => setTimeout(done)))")  # the old view is gone
        self.page.wait_for_selector(".sk, .vt-row.load", state="detached")  # the policy forbids functions
        return self.page

    def again(self) -> None:
        """As if it had just been opened, but for what the browser keeps of files and of the tab's token."""
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.goto("about:blank")
        self.complaints, self.allowed = [], ""
        self.page.goto(self.link)

    def found(self) -> list[str]:
        """What the browser has complained of."""
        complaints = [*self.complaints, *self.page.evaluate("window.violations")]
        return [each for each in complaints if not self.allowed or self.allowed not in each]

    def close(self) -> None:
        """The page is gone."""
        self._context.close()
