"""Gives the processes of a test a share of the machine's CPU time: by a cgroup where this user may make one,
else by stopping and continuing them.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.cluster.machine import Process, process_start

_PERIOD_S = 0.1
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextmanager
def throttled(processes: Callable[[], Sequence[Process]], share: float) -> Iterator[str]:
    """Within, the processes and all that they start have `share` of this machine's CPU time together. Yields
    how that is done: `cgroup` or `signals`.
    """
    group = _cgroup(share)
    if group is not None:
        with _in_cgroup(group, processes()):
            yield "cgroup"
        return
    with _by_signals(processes, share):
        yield "signals"


def _cgroup(share: float) -> Path | None:
    """A new one with this share; None where this user cannot make one."""
    quota = str(int(share * (os.cpu_count() or 1) * _PERIOD_S * 1e6))
    period = str(int(_PERIOD_S * 1e6))
    name = f"throttled-{secrets.token_hex(4)}"
    settings = {
        _V1: {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota},
        _V2: {"cpu.max": f"{quota} {period}"},
    }
    for root, files in settings.items():
        folder = root / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, text in files.items():
                if not (folder / file).exists():
                    raise FileNotFoundError(file)  # the controller is not enabled here
                (folder / file).write_text(text)
        except OSError:
            folder.rmdir()
            continue
        return folder
    return None


@contextmanager
def _in_cgroup(group: Path, processes: Sequence[Process]) -> Iterator[None]:
    homes = {process.pid: _home(process.pid, group) for process in processes}
    for pid in homes:
        _move(group, pid)
    try:
        yield
    finally:
        while pids := (group / "cgroup.procs").read_text().split():
            for pid in pids:
                _move(homes.get(int(pid)) or group.parent, int(pid))
        group.rmdir()


def _home(pid: int, group: Path) -> Path:
    """The cgroup of a process, in the hierarchy of `group`."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            is_v1 = group.parent == _V1 and "cpu" in controllers.split(",")
            if is_v1 or (group.parent == _V2 and not controllers):
                return group.parent / path.lstrip("/")
    return group.parent


def _move(group: Path, pid: int) -> None:
    with suppress(OSError):  # it has ended
        (group / "cgroup.procs").write_text(str(pid))


@contextmanager
def _by_signals(processes: Callable[[], Sequence[Process]], share: float) -> Iterator[None]:
    over = threading.Event()

    def send(number: signal.Signals) -> None:
        for process in processes():
            if process_start(process.pid) == process.start:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def alternate() -> None:
        while not over.is_set():
            send(signal.SIGSTOP)
            over.wait((1 - share) * _PERIOD_S * 10)
            send(signal.SIGCONT)
            over.wait(share * _PERIOD_S * 10)

    thread = threading.Thread(target=alternate, name="throttle", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        send(signal.SIGCONT)
