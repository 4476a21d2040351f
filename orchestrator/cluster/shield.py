"""Keeps the stop signals of a launch away from the Ray that it starts.

It also keeps a launch's processes alive on another Ray that is ended by such signals.

A batch system, systemd or a container runtime sends SIGTERM to every process of a job at once. Ray's servers
end at once then, and with them the workers, which hold the state that the driver wants to save. A process
that starts with a signal blocked never receives it, and neither do the processes that it starts: the mask of
blocked signals survives fork and exec. A handler or an ignored signal does not (Ray's servers set handlers of
their own).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from orchestrator.cluster.machine import Process, descendants, process_start

# SIGINT is not among them: Ray blocks it itself.
SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})

ORPHANED_S = 300.0  # how long a process without its raylet may take to save
LOOK_S = 0.5


class _Shield(threading.local):
    is_up = False


_shield = _Shield()


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that this thread starts within the block, and all their descendants, never receive `SIGNALS`;
    this process does. It covers `subprocess.Popen` with a `preexec_fn`, with which Ray starts its servers.

    The terminal's SIGHUP is ignored there, too, if this is the main thread.
    """
    _forks_under_shield()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if is_main else None
    _shield.is_up = True
    try:
        yield
    finally:
        _shield.is_up = False
        if is_main:
            signal.signal(signal.SIGHUP, before)


@cache
def _forks_under_shield() -> None:
    os.register_at_fork(after_in_child=_block)


def _block() -> None:
    if _shield.is_up:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


@cache
def expose_forks() -> None:
    """Lets processes that this one forks later receive `SIGNALS` again: code of the user ends its own
    processes with SIGTERM (`multiprocessing.Pool`). Those of `subprocess` are not covered.
    """
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(after_in_child=unblock)


def outlive_sigterm() -> None:
    """Keeps SIGTERM from ending this process, which Ray started. A whole job's SIGTERM reaches the driver,
    too, and the driver lets the run save and stop.

    Processes that are started later are ended by it as before, unless this is called outside the main thread.
    """
    here = os.getpid()

    def handle(number: int, _: object) -> None:
        if os.getpid() != here:  # a forked child
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handle)
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGTERM, int(signal.SIG_IGN))


def end_without_raylet(is_done: Callable[[], bool], limit_s: float = ORPHANED_S) -> Callable[[], bool]:
    """Ends this process once the raylet that started it is gone and it `is_done`, or `limit_s` after the
    raylet: nobody else would end it. Returns a function that says whether the raylet is gone.
    """
    raylet = os.getppid()

    def watch() -> None:
        gone_at: float | None = None
        while True:
            time.sleep(LOOK_S)
            if os.getppid() == raylet:
                continue
            gone_at = time.monotonic() if gone_at is None else gone_at
            if is_done() or time.monotonic() - gone_at > limit_s:
                os._exit(1)

    threading.Thread(target=watch, name="raylet", daemon=True).start()
    return lambda: os.getppid() != raylet


def killing(kill: Callable[..., None], node: Any) -> Callable[..., None]:
    """Wraps `kill`, which ends the servers of a Ray `node` that was started under the shield. Servers that
    receive no SIGTERM are killed, and the processes they started are killed after them.
    """

    def killed(**how: Any) -> None:
        servers = [info.process.pid for infos in node.all_processes.values() for info in infos]
        started = descendants(servers)
        kill(node, **{**how, "allow_graceful": False})  # else each server is waited for a second
        _kill(started)

    return killed


def _kill(processes: list[Process]) -> None:
    for process in processes:
        if process_start(process.pid) == process.start:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
