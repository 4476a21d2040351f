"""Handles signals to a launch.

During the start they end it. During training they request a save, or a save and a stop. Sent twice, they stop
it at once.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from orchestrator.cluster.job_server import job_stop_s
from orchestrator.history.numbered_files import asker

# Assumed if the sender of SIGTERM gives no other time: Kubernetes, Slurm and torchrun send SIGKILL after 30
# s.
GRACE_S = 30.0
TO_END_S = 5.0  # the part of its grace time that a launch needs to end


class SignalledError(KeyboardInterrupt):
    """A signal ends the launch. `exit_code` is the one that a shell expects."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = 128 + number


class StoppedAtOnceError(SignalledError):
    """A second signal, after the one of number `first`: no save is waited for."""

    def __init__(self, number: int, first: int) -> None:
        name, before = signal.Signals(number).name, signal.Signals(first).name
        came = f"{name} came twice" if number == first else f"{before} came, and then {name}"
        super().__init__(
            number,
            f"{came}: stopped at once, without waiting for a save; the same command continues from the "
            "newest resume point",
        )


def told(interrupt: KeyboardInterrupt) -> KeyboardInterrupt:
    """The error to report for `interrupt`.

    It is the first `SignalledError` before it, if another signal has interrupted the end of a launch; else
    `interrupt` itself.
    """
    found, first = interrupt.__context__, interrupt
    while found is not None:
        if isinstance(found, SignalledError):
            first = found
        found = found.__context__
    return first


class _First:
    """The first error that a handler raised in the current launch."""

    error: SignalledError | None = None


def _noted(error: SignalledError) -> SignalledError:
    _First.error = _First.error or error
    return error


class _Grace:
    """When this process expects SIGKILL, in seconds of the monotonic clock. Global, because signals are per
    process.
    """

    until = math.inf


def grace_left_s() -> float:
    """How long optional work may still take.

    inf until SIGTERM has stopped the current launch; then the rest of `RAY_JOB_STOP_WAIT_TIME_S`, or of
    `GRACE_S` if that is not set.
    """
    return max(0.0, _Grace.until - time.monotonic())


def last_wait_s(limit_s: float) -> float:
    """How long a launch that has ended may wait for optional work: at most `limit_s`, and after SIGTERM at
    most the grace time that is left, less `TO_END_S`.
    """
    return min(limit_s, max(0.0, grace_left_s() - TO_END_S))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `SignalledError`, as Ctrl-C raises `KeyboardInterrupt`, so that everything
    started is ended.

    SIGUSR1 does nothing. For a launch as a whole; `stop_on_signals` replaces the handlers inside. Only works
    in a process's main thread; in another nothing changes.
    """

    def end(number: int, _: object) -> None:
        raise _noted(_before_training(number))

    _forget()
    with _handled({signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGUSR1: lambda *_: None}):
        try:
            yield
        except KeyboardInterrupt as last:
            # an error of a handler inside a call of Ray becomes a new KeyboardInterrupt
            if _First.error is not None and not isinstance(told(last), SignalledError):
                raise _First.error from last
            raise
        finally:
            _forget()


def _forget() -> None:
    """Forgets the signals of an earlier launch: a notebook's process, for example, launches several times."""
    _Grace.until, _First.error = math.inf, None


def _before_training(number: int) -> SignalledError:
    name = signal.Signals(number).name
    text = f"{name}: ended at once, for no worker was training; the same command starts or continues the run"
    return SignalledError(number, text)


@contextmanager
def _handled(handlers: Mapping[signal.Signals, Callable[[int, object], None]]) -> Iterator[None]:
    """Installs these handlers. SIGHUP stays ignored if `nohup` ignores it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = {n: h for n, h in handlers.items() if n != signal.SIGHUP or not ignored}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(
    stop: Callable[[str], None],
    save: Callable[[str], None],
    say: Callable[[str], None],
    trains: Callable[[], bool] = lambda: True,
    relayed_s: float = 0.0,
) -> Iterator[None]:
    """SIGTERM, Ctrl-C and a closed terminal (SIGHUP) save and stop.

    A second one raises `StoppedAtOnceError`, a `KeyboardInterrupt`. SIGUSR1 saves, and training continues.
    `stop` and `save` are called with the sender as far as it is known: the signal and this process's user and
    host. SIGHUP does not count as a second signal, because shells send it twice, and stays ignored if `nohup`
    ignores it. While no worker `trains`, there is nothing to save: the first signal raises `SignalledError`.
    The same signal again within `relayed_s` of the first counts as the first, passed on by the parent
    process, which received it, too. Only works in a process's main thread; in another nothing changes.
    """
    first, who = 0, asker()  # determined now: a handler must not wait
    relayed_until = math.inf

    def handle(number: int, _: object) -> None:
        nonlocal first, relayed_until
        if first and number == signal.SIGHUP:
            return
        if first == number and time.monotonic() < relayed_until:
            relayed_until = -math.inf
            return
        if first:
            raise _noted(StoppedAtOnceError(number, first))
        if not trains():
            raise _noted(_before_training(number))
        first, relayed_until = number, time.monotonic() + relayed_s
        if number == signal.SIGTERM:
            wait_s = job_stop_s()
            _Grace.until = time.monotonic() + (GRACE_S if math.isinf(wait_s) else wait_s)
        # first, because the sender of the signal may have ended the reader of the messages, too
        stop(f"{signal.Signals(number).name} to {who}")
        if number == signal.SIGHUP:
            say("SIGHUP, the terminal was closed: saving and stopping")
        else:
            say(f"{signal.Signals(number).name}: saving and stopping; once more to stop at once")

    def handle_save(number: int, _: object) -> None:
        if not first:
            save(f"{signal.Signals(number).name} to {who}")
            say(f"{signal.Signals(number).name}: saving after this step; training continues")

    stops = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), handle)
    with _handled({**stops, signal.SIGUSR1: handle_save}):
        yield
