"""Facts about this machine: memory, shared memory, disk, processes, GPUs.

A figure that cannot be found is None. The memory of GPUs comes from NVIDIA's driver: this needs no torch, and
makes no context on the GPUs.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
