"""Facts about this machine: memory, shared memory, disk, processes, GPUs.

A figure that cannot be found is None. The memory of GPUs comes from NVIDIA's driver: this needs no torch, and
makes no context on the GPUs.

`Silence` and `starved_s` tell how long a process was silent although it could run and its judge could hear
it. A process on a busy host is late for everything and has failed at nothing. Linux counts for each thread
how long it ran and how long it waited for a CPU (`/proc/<pid>/task/<tid>/schedstat`), also under a CPU quota.
Where the system does not tell, only the judge's own delays are left out of the silence.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_PROC_CGROUP, _CGROUPS = _PROC / "self" / "cgroup", Path("/sys/fs/cgroup")


def memory_bytes() -> int | None:
    """The total memory that this process and its children may use, including memory in use: that of the
    machine, or the limit of a container (cgroup) around them if that is smaller.
    """
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    if machine <= 0:
        return None
    limit = cgroup_limit_bytes(_PROC_CGROUP, _CGROUPS)
    return machine if limit is None else min(machine, limit)


def memory_here() -> list[tuple[str, int]]:
    """(name, bytes of memory; 0: not known) of this machine, as a list of one."""
    return [(socket.gethostname(), memory_bytes() or 0)]


def cgroup_limit_bytes(membership: Path, mount: Path) -> int | None:
    """The smallest memory limit of the cgroups that the file `membership` (as /proc/self/cgroup) names, and
    of those around them, below `mount`; None without any. Version 1 and 2.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [*_limits(mount, path, "memory.max"), *_limits(mount / "unified", path, "memory.max")]
        elif "memory" in controllers.split(","):
            limits += _limits(mount / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def cpu_limit(membership: Path = _PROC_CGROUP, mount: Path = _CGROUPS) -> float:
    """The CPUs' time that this process and its children may take: the CPUs that it may run on, or the
    smallest quota of the cgroups around it if that is less. Version 1 and 2; see `cgroup_limit_bytes`.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return float(cores)
    shares = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            texts = (text.split() for text in _texts(mount, path, "cpu.max"))
            shares += [int(text[0]) / int(text[1]) for text in texts if text[0] != "max"]
        elif "cpu" in controllers.split(","):
            quotas, periods = (_texts(mount / "cpu", path, f"cpu.cfs_{w}_us") for w in ("quota", "period"))
            shares += [int(q) / int(p) for q, p in zip(quotas, periods, strict=False) if int(q) > 0]
    return min([float(cores), *shares])


def machine_id() -> str:
    """Identifies this boot of this machine and the table of processes seen here. A pid of another process
    means the same only where this id is equal. Empty if the system does not tell (no Linux).
    """
    try:
        boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self' / 'ns' / 'pid')}"
    except OSError:
        return ""


class Process(NamedTuple):
    """A process of one machine since its boot. It cannot be confused with another one; see `machine_id` and
    `process_start`.
    """

    machine: str
    pid: int
    start: str


def this_process() -> Process:
    """The calling process."""
    pid = os.getpid()
    return Process(machine_id(), pid, process_start(pid) or "")


def process_start(pid: int) -> str | None:
    """When a process of this machine began, by the system's count. A later process with the same pid has
    another value.

    Empty if there is none, or if it has ended and only waits to be collected. None if the system does not
    tell (no Linux, or it hides the processes of others).
    """
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    except (OSError, ValueError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return ""
        except PermissionError:
            pass
        return None
    return "" if state in "ZX" else fields[18]


def has_ended(machine: str, pid: int, pid_start: str) -> bool:
    """Whether this process has certainly ended.

    It was a process of this machine since its last boot, and its pid is now unused, or used by a later
    process. False if that cannot be determined.
    """
    if not (machine and pid_start) or machine != machine_id():
        return False
    found = process_start(pid)
    return found is not None and found != pid_start


def descendants(parents: Iterable[int]) -> list[Process]:
    """The processes of this machine that `parents` started, and those that these started, without `parents`.
    Empty if the system does not tell.
    """
    children: dict[int, list[Process]] = {}
    machine = machine_id()
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        with suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(") ")[2].split()
            children.setdefault(int(fields[1]), []).append(Process(machine, int(entry.name), fields[19]))
    found, todo = list[Process](), list(parents)
    while todo:
        new = children.pop(todo.pop(), [])
        found += new
        todo += [process.pid for process in new]
    return found


def _limits(root: Path, path: str, name: str) -> Iterator[int]:
    """The values in the files `name` from `path` up to `root`. `max`, and a cgroup that is not visible here,
    have no value.
    """
    for text in _texts(root, path, name):
        with suppress(ValueError):
            yield int(text)


def _texts(root: Path, path: str, name: str) -> Iterator[str]:
    """The files `name` from `path` up to `root` that are visible here."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        with suppress(OSError):
            yield root.joinpath(*parts[:depth], name).read_text()


def shared_memory_bytes() -> int | None:
    """Free bytes in /dev/shm of this machine; None if there is none (macOS)."""
    folder = "/dev/shm"  # noqa: S108  nothing is written there
    return shutil.disk_usage(folder).free if sys.platform == "linux" and os.path.isdir(folder) else None


def open_file_limit() -> int | None:
    """The number of files a process may have open; None if the system has no such limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def free_disk_bytes(folder: str) -> int:
    """Free bytes of the file system that will hold `folder` (of its nearest parent that exists)."""
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def process_state(pid: int) -> str:
    """The state of a process of this machine, as Linux reports it: `R` runs, `S` sleeps, `T` is stopped, `D`
    waits for a disk, `Z` is dead; "" if there is no such process, "?" if the system does not tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "?" if _exists(pid) else ""
    return stat.rpartition(")")[2].split()[0]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


_LIMIT_S = 5.0
_NONE = ("", "-1", "NoDevFiles")  # CUDA_VISIBLE_DEVICES where none are to be seen, or as Ray sets it


def gpu_rows(*fields: str) -> list[list[str]]:
    """These fields of `nvidia-smi --query-gpu` for each GPU, or for those in $CUDA_VISIBLE_DEVICES if it
    names some. Empty if there is no driver, or it does not answer within 5 s.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    chosen = [] if visible in _NONE else [f"--id={visible}"]
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *chosen]
    try:
        found = subprocess.run(  # noqa: S603  nothing of it is typed by anybody but who starts the process
            ["nvidia-smi", *query],  # noqa: S607  wherever the driver has put it
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rsplit(", ", len(fields) - 1) for line in found.stdout.splitlines() if line.strip()]


def gpu_memory_here() -> tuple[int, ...]:
    """Total bytes of each GPU, including memory in use; 0 if the driver does not report them (a part of a
    GPU).
    """
    return tuple(int(text) << 20 if text.isdecimal() else 0 for (text,) in gpu_rows("memory.total"))


# ------------------------------------------------------------------------------------------ silent or starved
_RUNS, _STOPPED = "R", "Tt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thread:
    """A thread's seconds on a CPU and in wait for one since it began, and its state (`R`, `S`, `T`, ...)."""

    ran_s: float
    waited_s: float
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLook:
    """A process at the time `at_s` (monotonic clock of its machine). `threads` by their ids; none if the
    process is gone.
    """

    at_s: float
    threads: Mapping[int, Thread] = field(default_factory=dict)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return bool(self.threads) and all(thread.state in _STOPPED for thread in self.threads.values())


def look_at_process(pid: int, now: float, root: Path = _PROC) -> ProcessLook | None:
    """The process at this moment; None if the system does not tell, or there is no `pid` (0)."""
    if not pid or not (root / "self" / "schedstat").exists():
        return None
    threads = dict[int, Thread]()
    with suppress(OSError):  # it has ended
        for folder in (root / str(pid) / "task").iterdir():
            with suppress(OSError, ValueError, IndexError):  # this thread has
                ran, waited, _ = (folder / "schedstat").read_text().split()
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                threads[int(folder.name)] = Thread(
                    ran_s=int(ran) / 1e9, waited_s=int(waited) / 1e9, state=state
                )
    return ProcessLook(at_s=now, threads=threads)


def ran_s(before: ProcessLook, after: ProcessLook) -> float:
    """The CPU time that the process used between two looks."""
    return sum(max(0.0, now.ran_s - then.ran_s) for then, now in _pairs(before, after))


def starved_share(before: ProcessLook, after: ProcessLook) -> float:
    """The share of the CPU time that the process wanted between two looks and did not get, from 0 to 1: so
    much of the time between them it could not run. 0 for one that wanted none.
    """
    passed_s = max(0.0, after.at_s - before.at_s)
    ran, waited = ran_s(before, after), 0.0
    for then, now in _pairs(before, after):
        never_ran = then.state == now.state == _RUNS and now.ran_s == then.ran_s
        # Linux adds a wait when it ends
        waited += passed_s if never_ran else max(0.0, now.waited_s - then.waited_s)
    if (before.is_stopped or after.is_stopped) and ran > 0:
        return 1.0  # it is stopped and continued repeatedly
    return waited / (ran + waited) if waited else 0.0


def starved_s(before: ProcessLook, after: ProcessLook) -> float:
    """For how long the process could not run between two looks; see `starved_share`."""
    return max(0.0, after.at_s - before.at_s) * starved_share(before, after)


def _pairs(before: ProcessLook, after: ProcessLook) -> list[tuple[Thread, Thread]]:
    new = Thread(ran_s=0.0, waited_s=0.0, state="")
    return [(before.threads.get(tid, new), thread) for tid, thread in after.threads.items()]


class Silence:
    """The silence of one process. `lasts_s` is its duration. `counted_s` leaves out the time in which the
    process was starved or the judge was late. All times are seconds of one monotonic clock.
    """

    def __init__(self, now: float, look_every_s: float, process: ProcessLook | None = None) -> None:
        """Starts the silence `now`. The judge means to look every `look_every_s` seconds; `process` is its
        first look.
        """
        self.counted_s = self.lasts_s = 0.0
        self._every_s, self._last = look_every_s, now
        self._newest = process
        self._idle_s = 0.0  # counted since the process was seen at work
        self._worked = False  # between the last two looks

    def look(self, now: float, process: ProcessLook | None = None) -> float:
        """Notes that the process is still silent. Returns `counted_s`."""
        passed_s, before = now - self._last, self._newest
        excused_s = max(0.0, passed_s - self._every_s)
        self._worked, is_first = False, before is None and process is not None
        if before is not None and process is not None:
            excused_s = max(excused_s, passed_s * starved_share(before, process))
            self._worked = ran_s(before, process) > 0 or _wants_cpu(process)
        counted_s = max(0.0, passed_s - excused_s)
        self.lasts_s += passed_s
        self.counted_s += counted_s
        # nobody has seen what it did before the first look
        self._idle_s = 0.0 if self._worked or is_first else self._idle_s + counted_s
        self._last, self._newest = now, process
        return self.counted_s

    @property
    def is_at_work(self) -> bool:
        """Returns whether the process used CPU time between the last two looks, or waits for a CPU. False if
        the system does not tell.
        """
        return self._worked

    def stands_still(self, frozen_s: float, hung_s: float) -> bool:
        """Returns whether the process must be ended: it could run for the last `frozen_s` and did not, or
        could answer for `hung_s` and did not. False for one that is gone.
        """
        if self._newest is not None and not self._newest.threads:
            return False
        return self._idle_s > frozen_s or self.counted_s > hung_s


def _wants_cpu(process: ProcessLook) -> bool:
    return any(thread.state == _RUNS for thread in process.threads.values())
