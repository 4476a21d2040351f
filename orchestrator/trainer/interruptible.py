"""Waits for gloo that the end of a generation cuts short, whatever gloo does.

Where a connection breaks in the middle of a message, gloo forgets the operation whose message it was and
wakes nobody: whoever waits does so until the operation's time-out (`Pair::signalException` passes over `rx_`,
and over the unbound buffers in `tx_`; gloo in torch 2.13). A giver that dies while it sends a part of the
state would cost the receiver minutes. This knows neither ranks nor members.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from typing import Any

GRACE_S = 1.0  # for gloo, to fail by itself when its connections were shut, and to say which it was


class Interruptible:
    """The waits of one group. One that is cut short goes on in a thread of its own until gloo gives it up,
    and keeps alive what gloo still knows: the group, whose end would wait for it, and the message's memory.
    """

    def __init__(self) -> None:
        self._cut: Future[None] = Future()

    def cut(self) -> None:
        """Whatever waits, now or later, raises soon. From any thread, and again."""
        with suppress(InvalidStateError):
            self._cut.set_result(None)

    def end_of(self, work: Callable[[], Any]) -> Any:
        """What `work` gives, which waits for gloo. Raises what it raises, and `RuntimeError` if it goes on
        for longer than `GRACE_S` after `cut`.
        """
        ended: Future[Any] = Future()
        threading.Thread(target=_carry_out, args=(work, ended), name="collective", daemon=True).start()
        wait((ended, self._cut), return_when=FIRST_COMPLETED)
        wait((ended,), timeout=GRACE_S)
        if not ended.done():
            raise RuntimeError("the generation is over, and gloo goes on waiting")
        return ended.result()


def _carry_out(work: Callable[[], Any], ended: Future[Any]) -> None:
    try:
        ended.set_result(work())
    except BaseException as error:  # noqa: BLE001  whoever waits raises it
        ended.set_exception(error)
