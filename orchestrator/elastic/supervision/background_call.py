"""Runs a blocking call in a background thread, at most one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class BackgroundCall(Generic[Answer]):
    """Runs `question` in a background thread, at most one at a time.

    While a call has not returned, no other is started. The threads end with the process. The object is for
    use by one thread.
    """

    def __init__(self, question: Callable[[], Answer]) -> None:
        self._question = question
        self._open: Future[Answer] | None = None
        self._since = 0.0

    @property
    def unanswered_s(self) -> float:
        """How long the current call has been running; 0 if none is."""
        return 0.0 if self._open is None or self._open.done() else time.monotonic() - self._since

    def ask(self) -> bool:
        """Starts a call and returns True. Never waits.

        Returns False if a call is still running or its result has not been taken.
        """
        if self._open is not None:
            return False
        self._open, self._since = Future(), time.monotonic()
        threading.Thread(target=self._ask, args=(self._open,), name="asked", daemon=True).start()
        return True

    def answer(self, wait_s: float = 0.0) -> Answer | None:
        """Returns the result of the call, once, if it is available within `wait_s` seconds; else None.

        Signals are handled meanwhile. Raises what the call raised.
        """
        if self._open is None or not wait([self._open], wait_s).done:
            return None
        found, self._open = self._open, None
        return found.result()

    def _ask(self, to: Future[Answer]) -> None:
        try:
            to.set_result(self._question())
        except BaseException as error:  # noqa: BLE001  the asking thread raises it
            to.set_exception(error)
