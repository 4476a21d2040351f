"""The Ray that a launch starts on its own machine, where no cluster is named."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private import worker
from ray._private.node import Node

from orchestrator.cluster.connection import ClusterConnection
from orchestrator.cluster.machine import process_start
from orchestrator.config.loading import load_config

pytestmark = pytest.mark.system
QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
UNUSED = ("start_log_monitor", "start_monitor", "start_api_server")


@pytest.mark.chaos
def test_a_ray_of_our_own_has_no_process_without_use_and_the_next_one_is_rays_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rays_own = [getattr(Node, name) for name in UNUSED]
    with ClusterConnection(load_config(QUICKSTART), num_cpus_needed=3, object_store_needed_bytes=0):
        assert set(worker._global_node.all_processes) == {"gcs_server", "raylet"}
        assert ray.get(ray.remote(lambda: 7).remote()) == 7
    assert [getattr(Node, name) for name in UNUSED] == rays_own
    assert not ray.is_initialized()


FROZEN = """
import os, signal, sys
from ray._private import worker
from orchestrator.cluster import connection
from orchestrator.config.loading import load_config

connection.SHUTDOWN_S = 3.0
with connection.leaving_ray_behind():
    with connection.ClusterConnection(load_config(sys.argv[1]), 3, 0):
        (gcs,) = worker._global_node.all_processes["gcs_server"]
        os.kill(gcs.process.pid, signal.SIGSTOP)
    sys.exit(7)
"""


@pytest.mark.chaos
def test_a_gcs_that_stands_still_does_not_keep_a_launch_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = [sys.executable, "-c", FROZEN, str(QUICKSTART)]
    assert subprocess.run(line, check=False, timeout=280).returncode == 7


CLOSED = """
import os, signal, sys
import ray
from orchestrator.cluster import connection
from orchestrator.config.loading import load_config
from orchestrator.launch.process.stop_signals import stop_on_signals

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may have it ignored
heard = []
with connection.ClusterConnection(load_config(sys.argv[1]), 3, 0):
    with stop_on_signals(lambda by: heard.append("stop"), lambda by: None, heard.append):
        for _ in range(2):  # as bash does
            os.killpg(os.getpgrp(), signal.SIGHUP)
        assert ray.get(ray.remote(lambda: heard).remote()) == heard
print(heard)
"""


@pytest.mark.chaos
def test_a_closed_terminal_stops_a_launch_whose_ray_lives_on_until_it_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = [sys.executable, "-c", CLOSED, str(QUICKSTART)]
    ended = subprocess.run(
        line, start_new_session=True, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "['stop', 'SIGHUP, the terminal was closed: saving and stopping']\n"


TERMINATED = """
import json, os, signal, sys
import ray
from orchestrator.cluster import connection
from orchestrator.cluster.machine import descendants
from orchestrator.config.loading import load_config
from orchestrator.launch.process.stop_signals import stop_on_signals

heard = []

def forked():
    import multiprocessing
    from orchestrator.cluster.shield import expose_forks

    expose_forks()
    def wait(begun):
        begun.send(True)
        while True:  # a signal just before `signal.pause()` would be handled after it alone
            os.sched_yield()
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=wait, args=(theirs,))
    child.start()
    ours.recv()
    child.terminate()
    child.join()
    return child.exitcode

with connection.ClusterConnection(load_config(sys.argv[1]), 3, 0):
    with stop_on_signals(lambda by: heard.append("stop"), lambda by: heard.append("save"), lambda text: None):
        ray.get(ray.remote(lambda: None).remote())
        started = descendants([os.getpid()])
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for process in (*started, os.getpid()):
                os.kill(getattr(process, "pid", process), number)
        exit_code = ray.get(ray.remote(forked).remote())
        alive = ray.get(ray.remote(lambda: heard).remote()) == heard
print(json.dumps([heard, alive, exit_code, [[p.pid, p.start] for p in started]]))
"""


@pytest.mark.chaos
def test_signals_to_every_process_of_a_launch_reach_its_driver_alone_and_nothing_is_left_of_its_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = [sys.executable, "-c", TERMINATED, str(QUICKSTART)]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    heard, alive, exit_code, started = json.loads(ended.stdout)
    assert heard == ["save", "stop"]
    assert alive
    assert exit_code in (1, -signal.SIGTERM), "what user code forks is reached, be it by Ray's handler"
    assert len(started) > 3, "GCS, raylet, agents, workers"
    assert [pid for pid, start in started if process_start(pid) == start] == []
