"""Executes confirmed actions, each in its own thread, and keeps the results while the server runs."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.inspect.dashboard.actions import Tell, WrongFound

KEPT = 200  # actions that are remembered
MOST_AT_ONCE = 8  # of one kind: those that wait, a save perhaps for hours, delay no other
MOST_STOPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """One action of one run.

    `state` is running, done or failed. `text` is its message; while it runs, why it takes long ("": not
    known). `code` is that of the error that it failed with. `is_bad`: it was done, and found something wrong.
    """

    id: str
    run: str
    action: str
    state: str = "running"
    text: str = ""
    code: str | None = None
    is_bad: bool = False

    def to_json(self) -> dict[str, Any]:
        """The document."""
        found = {"id": self.id, "action": self.action, "state": self.state, "text": self.text}
        return {**found, "code": self.code, "is_bad": self.is_bad}


class Doings:
    """All actions that this server has begun. Safe to use from threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: OrderedDict[str, Doing] = OrderedDict()
        self._by_token: dict[str, str] = {}

    def known(self, token: str) -> Doing | None:
        """The action that was begun with a plan's token. A second confirmation begins nothing."""
        with self._lock:
            return self._by_id.get(self._by_token.get(token, ""))

    def begin(self, run: str, action: str, token: str, do: Callable[[Tell], str]) -> Doing | None:
        """Runs `do` in a thread; None if `MOST_AT_ONCE` of this action are running (`MOST_STOPS` of stop).

        `do` is called with a function that reports why it takes long.
        """
        with self._lock:
            if token in self._by_token and (begun := self._by_id.get(self._by_token[token])):
                return begun
            same = [each for each in self._by_id.values() if (each.state, each.action) == ("running", action)]
            if len(same) >= (MOST_STOPS if action == "stop" else MOST_AT_ONCE):
                return None
            begun = Doing(id=secrets.token_hex(8), run=run, action=action)
            self._by_id[begun.id], self._by_token[token] = begun, begun.id
            ended = [each.id for each in self._by_id.values() if each.state != "running"]
            for gone in ended[: max(0, len(self._by_id) - KEPT)]:
                del self._by_id[gone]
                self._by_token = {t: i for t, i in self._by_token.items() if i != gone}
        # it may wait long for a run's answer, and the server's end does not wait for it
        threading.Thread(target=self._do, args=(begun, do), name=f"action {action}", daemon=True).start()
        return begun

    def find(self, run: str, number: str) -> Doing | None:
        """Returns an action of a run by its number."""
        with self._lock:
            found = self._by_id.get(number)
        return found if found is not None and found.run == run else None

    def _say(self, begun: Doing, **fields: Any) -> None:
        with self._lock:
            if begun.id in self._by_id:
                self._by_id[begun.id] = replace(begun, **fields)

    def _do(self, begun: Doing, do: Callable[[Tell], str]) -> None:
        code: str | None = "internal.page"
        state, text = "failed", "a bug of the dashboard ended it; its standard error has the traceback"
        try:
            text = do(lambda said: self._say(begun, text=said))
            state, code = "done", None
        except OrchestratorError as error:
            text, code = str(error), error.code
        finally:
            self._say(begun, state=state, text=text, code=code, is_bad=isinstance(text, WrongFound))
