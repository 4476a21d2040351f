"""The memory that this process may use: the container's limit counts. Processes and their states."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cluster import machine
from orchestrator.cluster.machine import cgroup_limit_bytes, memory_bytes, process_state


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "700", "memory.max": "900"}, 700),
        ("0::/a/b\n", {"a/b/memory.max": "100\n", "a/memory.max": "700"}, 100),
        ("0::/../outside\n", {"memory.max": "500"}, 500),
        ("0::/\n", {}, None),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("7:cpu:/x\n4:memory:/x/y\n0::/\n", {"memory/x/y/memory.limit_in_bytes": "300"}, 300),
        ("4:memory,blkio:/unseen\n", {"memory/memory.limit_in_bytes": "400"}, 400),
        ("0::/a\n", {"unified/a/memory.max": "600"}, 600),
    ],
)
def test_the_smallest_limit_around_the_process_is_found(
    tmp_path: Path, membership: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert cgroup_limit_bytes(tmp_path / "membership", tmp_path / "mount") == limit


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limit_bytes(tmp_path / "nothing", tmp_path) is None


def test_this_machine_has_memory_and_no_more_than_is_built_in() -> None:
    found = memory_bytes()
    assert found is not None
    assert (64 << 20) < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_process_has_a_start_of_its_own_while_it_lives_and_none_when_it_has_ended() -> None:
    mine = machine.process_start(os.getpid())
    assert mine
    assert mine == machine.process_start(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert machine.process_start(child.pid) not in ("", None, mine)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert machine.process_start(child.pid) == "", "it has ended, although nobody has collected it"
    child.wait()
    assert machine.process_start(child.pid) == ""


def test_a_process_that_exists_but_is_hidden_is_not_known_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_PROC", Path("/nonexistent"))
    assert machine.process_start(os.getpid()) is None


def test_this_boot_of_this_machine_has_a_name() -> None:
    assert machine.machine_id() == machine.machine_id()
    assert len(machine.machine_id().split()) == 2


def test_a_process_is_seen_to_be_stopped_to_sleep_and_to_be_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process_state(child.pid) == "T"
    child.kill()
    child.communicate()
    assert process_state(child.pid) == ""
    assert process_state(os.getpid()) == "R"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "cpu.max": "900 100"}, 0.5),
        ("7:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "20000", "cpu/x/cpu.cfs_period_us": "80000"}, 0.25),
        ("7:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_smallest_share_of_cpus_around_the_process_is_found(
    tmp_path: Path, membership: str, files: dict[str, str], limit: float | None
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    cores = len(os.sched_getaffinity(0))
    assert machine.cpu_limit(tmp_path / "membership", tmp_path / "mount") == (limit or cores)


def test_a_process_has_a_limit_of_open_files() -> None:
    assert (machine.open_file_limit() or 1) > 0
