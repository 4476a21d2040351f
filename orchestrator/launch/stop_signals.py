"""Signals that ask a launch to save and stop, and, sent twice, to stop at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.history.request_files import asker


class StoppedAtOnceError(KeyboardInterrupt):
    """A second signal, after the one of number `first`: no save is waited for. `exit_code` is what a shell
    expects of a process that it ended.
    """

    def __init__(self, number: int, first: int) -> None:
        name, before = signal.Signals(number).name, signal.Signals(first).name
        came = f"{name} came twice" if number == first else f"{before} came, and then {name}"
        super().__init__(
            f"{came}: stopped at once, without waiting for a save; the same command continues from the "
            "newest resume point"
        )
        self.exit_code = 128 + number


def told(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """What to tell of `interrupt`: the `StoppedAtOnceError` that it came after, where a third signal has cut
    short what a launch does when it ends; else itself.
    """
    found: BaseException | None = interrupt
    while found is not None and not isinstance(found, StoppedAtOnceError):
        found = found.__context__
    return found or interrupt


@contextmanager
def stop_on_signals(stop: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, Ctrl-C and a closed terminal (SIGHUP) save and stop; a second one raises `StoppedAtOnceError`,
    a `KeyboardInterrupt`. `stop` is given who sent it, as far as that is known: the signal and this process's
    user and host. SIGHUP is no second one, for shells send it twice, and stays ignored where `nohup`
    had it ignored. Only a process's main thread can do this; in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first, who = 0, asker()  # looked up now: a handler waits for nothing

    def handle(number: int, _: object) -> None:
        nonlocal first
        if first and number == signal.SIGHUP:
            return
        if first:
            raise StoppedAtOnceError(number, first)
        first = number
        # first: whoever sent the signal may have ended the reader of what is said, too
        stop(f"{signal.Signals(number).name} to {who}")
        if number == signal.SIGHUP:
            say("SIGHUP, the terminal was closed: saving and stopping")
        else:
            say(f"{signal.Signals(number).name}: saving and stopping; once more to stop at once")

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
