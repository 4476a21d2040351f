"""A program in a thread of its own that is let on one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0


class OverError(BaseException):
    """Nobody wants to know how this program goes on."""


class Stepped:
    """It stands where `hold` was called from within it, or is done; then `result` is what it returned."""

    def __init__(self) -> None:
        self._go, self._stands, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._word: Any = None
        self.is_done, self.result, self._failure = False, None, None

    def start(self, act: Callable[[], Any]) -> None:
        """Run `act` up to where it stands first. What it raises is raised where it is stepped."""
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()
        self._wait()

    def step(self, word: Any = None) -> None:
        """It goes on to where it stands next; `hold` returns `word` to it."""
        self._word = word
        self._go.release()
        self._wait()

    def stop(self) -> None:
        """It goes no further."""
        self._over = True
        self._go.release()
        self._thread.join(LIMIT_S)

    def hold(self) -> Any:
        """For the program: stand here until it is stepped."""
        self._stands.release()
        self._go.acquire()
        if self._over:
            raise OverError
        return self._word

    def _wait(self) -> None:
        assert self._stands.acquire(timeout=LIMIT_S), "a program hangs"
        if self._failure is not None:
            raise RuntimeError("a program failed") from self._failure

    def _run(self, act: Callable[[], Any]) -> None:
        try:
            self.result = act()
        except OverError:
            return
        except Exception as error:  # noqa: BLE001  it is raised where the program is stepped
            self._failure = error
        self.is_done = True
        self._stands.release()
