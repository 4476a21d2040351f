"""A question to the cluster that may never be answered: whoever asks goes on meanwhile.

It knows no cluster; the question is handed in.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Asked(Generic[Answer]):
    """Asked by a thread of its own, of which there is at most one: a question without an answer is not asked
    again. The threads end with the process. For one thread.
    """

    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._open: Future[Answer] | None = None
        self._since = 0.0

    @property
    def unanswered_s(self) -> float:
        """For how long the answer has been waited for; 0 if none is."""
        return 0.0 if self._open is None or self._open.done() else time.monotonic() - self._since

    def ask(self) -> bool:
        """Asks, unless an answer is waited for or has not been taken: then False. Never waits."""
        if self._open is not None:
            return False
        self._open, self._since = Future(), time.monotonic()
        threading.Thread(target=self._ask, args=(self._open,), name="asked", daemon=True).start()
        return True

    def answer(self, wait_s: float = 0.0) -> Answer | None:
        """The answer to what was asked, once, if it comes within `wait_s` seconds; None while it does not.
        Signals are heeded meanwhile. Raises what the question raised.
        """
        if self._open is None or not wait([self._open], wait_s).done:
            return None
        found, self._open = self._open, None
        return found.result()

    def _ask(self, to: Future[Answer]) -> None:
        try:
            to.set_result(self._question())
        except BaseException as error:  # noqa: BLE001  who asked hears of it
            to.set_exception(error)
