"""Keeps the signals that mean a launch away from the Ray that the launch starts.

A batch system, systemd or a container runtime sends SIGTERM to every process of a job at once. Ray's servers
end at once then, and with them the workers, which hold the state that the driver wants to save. A process
that starts with a signal blocked never receives it, and neither do the processes that it starts: the mask of
blocked signals survives fork and exec, a handler or an ignored signal does not (Ray's servers set handlers
of their own).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

from orchestrator.cluster.machine import Process, descendants, process_start

# SIGINT is not among them: Ray blocks it itself.
SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})


class _Shield(threading.local):
    is_up = False


_shield = _Shield()


@contextmanager
def shielded() -> Iterator[None]:
    """Processes that this thread starts within the block, and all that those start, never receive `SIGNALS`;
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
    """Processes that this one forks from now on receive `SIGNALS` again: code of the user ends its own
    processes with SIGTERM (`multiprocessing.Pool`). Those of `subprocess` are not covered.
    """
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, SIGNALS)
    os.register_at_fork(after_in_child=unblock)


def killing(kill: Callable[..., None], node: Any) -> Callable[..., None]:
    """`kill`, which ends the servers of a Ray `node`, for one that was started under the shield: servers that
    receive no SIGTERM are killed, and what they started is killed after them.
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
