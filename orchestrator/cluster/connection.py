"""The driver's connection to a Ray cluster, and the resources of that cluster.

It connects to a cluster or starts one on this machine. It shuts down only what it started. The facts go to
`elastic.supervision.policy`, which decides. `auth`, `health_checks` and `ask` find Ray's settings in this
process's environment, and what answers at a cluster's address. They need no Ray. They neither read nor send
a token.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import socket
import stat
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from typing_extensions import override

from orchestrator.cluster import ray_inventory
from orchestrator.cluster.machine import gpu_memory_here, shared_memory_bytes
from orchestrator.cluster.private_ray import replace
from orchestrator.cluster.shield import killing, shielded
from orchestrator.errors import ElasticError, ResourceError
from orchestrator.storage.home import ensure_home

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # noqa: S105
_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
SLOW_START_S = 10.0  # a local Ray that takes longer to start is reported
_GPUS_S = 20.0  # how long the nodes may take to report their GPUs
SHUTDOWN_S = 20.0  # how long Ray may take to let this process go
_SHUTDOWN = "ray shutdown"  # the thread that waits for it
_KILLED_S = 2.0  # the rest of that time, once its processes are killed
# Ray calls a dead node dead after 13.6 s by default; with these after 2 to 3 s. They must be set where a node
# is started, so they hold for a cluster that we start ourselves; docs/howto/clusters.md has them for others.
HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
_HEALTH = {
    **HEALTH_CHECKS,
    # A local Ray has one node: a dead raylet refuses the check at once, and a busy one is waited for.
    "RAY_health_check_timeout_ms": "60000",
    # Workers at nice 0: tokenizers make themselves nicer than the training workers beside them.
    "RAY_worker_niceness": "0",
}
# Processes that do nothing for a Ray of our own: one hands workers' output to the driver (`log_to_driver`),
# one adds nodes, and the dashboard's server starts without a dashboard, too. Together they take 2 CPU
# seconds, and Ray waits for the last.
_HELPERS = (ray_inventory.LOG_MONITOR, ray_inventory.MONITOR, ray_inventory.API_SERVER)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A live node: its free resources now, and its total. Bytes are 0 if Ray does not report them. `grace_s`:
    the seconds until it is taken away (inf: when it is idle); None: it stays.
    """

    node_id: str
    host: str
    is_head: bool
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory_bytes: int
    object_store_bytes: int
    grace_s: float | None = None


def token_for_local_ray(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """The environment variables that let a local Ray start.

    `ray.init` wants a token in the user's home, and makes one. Where it cannot, because the home is
    read-only, this returns a new token; else nothing.
    """
    if any(name in environment for name in (AUTH_MODE, TOKEN, TOKEN_PATH)):
        return {}
    kept = home / ".ray" / "auth_token"
    nearest = next(path for path in (kept, *kept.parents) if path.exists())
    usable = os.access(nearest, os.R_OK if nearest == kept else os.W_OK)
    return {} if usable and nearest.is_relative_to(home) else {TOKEN: secrets.token_hex(16)}


class ClusterConnection:
    """A connection to Ray; as a context manager it ends what it began, and nothing else."""

    def __init__(
        self,
        config: JobConfig,
        num_cpus_needed: float,
        object_store_needed_bytes: int,
        heard: Callable[[str], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Connects to `cluster.address` or $RAY_ADDRESS, else uses the Ray that this process is connected to,
        else starts a local one.

        A local one gets as many logical CPUs as the job needs, if the machine has fewer cores: they are
        shares, not cores. `heard` receives what Ray would print meanwhile, and what a Ray other than the
        tested one lacks. `say` receives a message if a local one takes long to start.

        Raises `ResourceError` within seconds if nothing answers at the address, /dev/shm is too small for a
        local one, or a part that every run needs is missing. Raises `ElasticError` if a local one does not
        start.
        """
        import ray

        ray_inventory.check(heard or _log.warning)
        self.started = False
        self._heard = _RayHeard(heard) if heard is not None else None
        ensure_home()
        if ray.is_initialized():
            return
        address = address_of(config)
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        self.started = True
        if address:
            _check_reachable(address)
            try:
                with _without_its_handler():
                    ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ResourceError(
                    f"cluster.address={address} answers, but this process cannot join a Ray cluster there "
                    f"({error}); check that it is the port of the head's GCS (usually 6379), and that the "
                    "cluster has the same Ray version. A cluster that requires a token needs "
                    "RAY_AUTH_MODE=token, and the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token, on this "
                    "machine as well",
                    code="cluster.driver_refused",
                ) from error
            return
        os.environ.update({name: os.environ.get(name, value) for name, value in _HEALTH.items()})
        os.environ.update(token_for_local_ray(os.environ, Path.home()))
        store_bytes = _local_object_store(object_store_needed_bytes)
        try:
            with _starting(say), _without_helpers(), _without_its_handler(), shielded():
                ray.init(
                    # without the word it would join any cluster that runs on this machine
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, int(num_cpus_needed + 0.999)),
                    include_dashboard=False,
                    object_store_memory=store_bytes,
                    **quiet,
                )
        except ElasticError:
            self.close()
            raise

    def close(self) -> None:
        """Disconnects, within about `SHUTDOWN_S`. A Ray that was started here ends."""
        if self.started:
            _shut_down()
        if self._heard is not None:
            self._heard.end()

    def __enter__(self) -> ClusterConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _starting(say: Callable[[str], None]) -> Iterator[None]:
    """Wraps the start of a local Ray. It reports once if that takes long, and explains a failure in one
    sentence.

    Ray itself waits 30 s for its node, and raises errors of many kinds.
    """
    began = time.monotonic()
    slow = threading.Timer(
        SLOW_START_S,
        say,
        ["waiting for Ray, which is being started on this machine: it takes longer where that is busy"],
    )
    slow.daemon = True
    slow.start()
    try:
        yield
    except Exception as error:
        raise ElasticError(
            f"Ray did not start on this machine within {time.monotonic() - began:.0f} s "
            f"({' '.join(str(error).split())}); nothing was written: run the same command again, when the "
            "machine is less busy",
            code="cluster.ray_not_started",
        ) from error
    finally:
        slow.cancel()


def _shut_down() -> None:
    """Calls `ray.shutdown`, which waits as long as the cluster's GCS does not answer.

    If it takes too long, a Ray of our own is killed, and another one is left without a message. A Ray without
    the private parts for this is not touched.
    """
    import ray

    found = ray_inventory.SHUTTING_DOWN.found()
    if found is not None and found[0] is not None:
        node, _, kill = found
        node.kill_all_processes = killing(kill, node)
    ending = threading.Thread(target=ray.shutdown, name=_SHUTDOWN, daemon=True)
    ending.start()
    ending.join(SHUTDOWN_S)
    if not ending.is_alive() or found is None:
        return
    node, shutdown, _ = found
    if node is not None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        ending.join(_KILLED_S)
    if ending.is_alive():
        atexit.unregister(shutdown)  # it would wait at the interpreter's exit


@contextmanager
def leaving_ray_behind() -> Iterator[None]:
    """Wraps a whole command: its `sys.exit` ends the process at once if Ray still shuts down in a thread.

    The interpreter's own end would unload Ray's libraries while they are in use (SIGSEGV instead of the
    code). Standard streams must have been flushed.
    """
    try:
        yield
    except SystemExit as ended:
        if any(thread.name == _SHUTDOWN for thread in threading.enumerate()):
            os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


class _RayHeard(logging.Handler):
    """Passes Ray's messages to this process to a function, until `end`.

    These are errors of its cluster, which Ray 2.60 prints to stdout, and errors of its loggers.
    """

    def __init__(self, heard: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._heard = heard
        self._undo = replace(ray_inventory.PRINTING, [self._print_instead])
        self._logger = logging.getLogger("ray")
        self._handlers, self._propagates = self._logger.handlers, self._logger.propagate
        self._logger.handlers, self._logger.propagate = [self], False

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self._heard(self.format(record))

    def end(self) -> None:
        """Lets Ray print as before."""
        self._undo()
        self._logger.handlers, self._logger.propagate = self._handlers, self._propagates

    def _print_instead(self, data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._heard("\n".join(data.get("lines", ())))


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Within it Ray starts without `_HELPERS`. Ray's own methods are restored afterwards."""
    undo = [replace(helper, [lambda *_, **__: None]) for helper in _HELPERS]
    try:
        yield
    finally:
        for each in undo:
            each()


@contextmanager
def _without_its_handler() -> Iterator[None]:
    """Within it Ray does not replace the SIGTERM handler, so a launch that is stopped while it connects
    reports that.
    """
    undo = replace(ray_inventory.SIGTERM_HANDLER, [lambda _: None])
    try:
        yield
    finally:
        undo()


def starts_local_ray(config: JobConfig) -> bool:
    """Whether a connection would start a Ray of its own on this machine."""
    ray = sys.modules.get("ray")  # a process that has not imported it is not connected
    return not (ray is not None and ray.is_initialized()) and not address_of(config)


def nodes() -> tuple[ClusterNode, ...]:
    """The live nodes, the head first, then by id."""
    import ray

    head = ray_inventory.HEAD_NODE.found()
    draining = _draining()  # first: once a node is dead, Ray has no drain of it any more
    rows = [row for row in ray.nodes() if row["Alive"]]  # type: ignore[no-untyped-call]
    free = _free([(row["NodeID"], row["Resources"]) for row in rows])
    found = [
        ClusterNode(
            node_id=row["NodeID"],
            host=row["NodeManagerAddress"],
            is_head=head is not None and head[0] in row["Resources"],
            cpus=row["Resources"].get("CPU", 0.0),
            gpus=row["Resources"].get("GPU", 0.0),
            free_cpus=free.get(row["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(row["NodeID"], {}).get("GPU", 0.0),
            memory_bytes=int(row["Resources"].get("memory", 0)),
            object_store_bytes=int(row["Resources"].get("object_store_memory", 0)),
            grace_s=draining.get(row["NodeID"]),
        )
        for row in rows
    ]
    return tuple(sorted(found, key=lambda n: (not n.is_head, n.node_id)))


def gpu_memories(node_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Asks these nodes for the memory of their GPUs in bytes. Leaves out nodes that do not answer in time."""
    if not node_ids:
        return {}
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0, max_retries=0)(gpu_memory_here)
    there = {node_id: NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids}
    calls = {look.options(scheduling_strategy=there[node_id]).remote(): node_id for node_id in node_ids}
    done, late = ray.wait([*calls], num_returns=len(calls), timeout=_GPUS_S)
    found = {}
    for call in done:
        try:
            found[calls[call]] = ray.get(call)
        except ray.exceptions.RayError as error:
            _log.warning("the GPUs of node %s could not be queried: %s", calls[call], error)
    for call in late:
        ray.cancel(call, force=True)
    return found


def _draining() -> dict[str, float]:
    """The nodes that will be taken away, each with its remaining time (inf: until it is idle). The deadline
    is by the clock of the draining machine. It is compared with this machine's clock.
    """
    found = ray_inventory.DRAINING_NODES.found()
    deadlines: Mapping[str, int] = found[0]() if found is not None else {}
    return {
        node: max(0.0, deadline_ms / 1000 - time.time()) if deadline_ms else math.inf
        for node, deadline_ms in deadlines.items()
    }


def _free(nodes: list[tuple[str, Mapping[str, float]]]) -> Mapping[str, Mapping[str, float]]:
    """The free resources of each node (id, resources in all). Without Ray's private table, the smaller of the
    node's total and the cluster's free amount: exact for one node.
    """
    import ray

    per_node = ray_inventory.FREE_RESOURCES.found()
    if per_node is not None:
        free: Mapping[str, Mapping[str, float]] = per_node[0]()
        return free
    whole = ray.available_resources()  # type: ignore[no-untyped-call]
    return {
        node: {name: min(amount, whole.get(name, 0.0)) for name, amount in resources.items()}
        for node, resources in nodes
    }


def address_of(config: JobConfig) -> str:
    """The address of the cluster that a connection would join; empty if there is none."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS", "")


def _local_object_store(needed_bytes: int) -> int:
    """The object store of a local Ray. Token chunks are a few MB each and few are in flight, so 256 MiB is
    enough for most jobs. With less than that free in /dev/shm, Ray would be slow.
    """
    wanted, free = max(256 * 2**20, needed_bytes), shared_memory_bytes()
    if free is not None and free < wanted:
        raise ResourceError(
            f"the shared memory (/dev/shm) has {free / 2**20:.0f} MiB free, "
            f"a local Ray needs {wanted / 2**20:.0f} MiB; "
            "make it larger (in a container: --shm-size=1g), lower data.num_tokenizers, "
            "or use a cluster with cluster.address",
            code="machine.shared_memory",
        )
    return wanted


def _check_reachable(address: str) -> None:
    """Fails fast if nothing answers. Ray itself would wait for a minute or more."""
    if address in ("auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"no Ray cluster answers at cluster.address={address} ({error}); "
            "start one with `ray start --head`, correct the address (host:port of the head's GCS, usually "
            "port 6379), "
            "or leave it out to start a local Ray",
            code="cluster.unreachable",
        ) from error


# ------------------------------------------------------------------------------------- settings and addresses
ANSWER_S = 1.0  # how long a cluster's answer is waited for


def auth(environment: Mapping[str, str], home: Path | None) -> tuple[str, str, bool, int | None, str]:
    """(mode, where a token is, whether that is Ray's own place, its file's rights, why it cannot be read).

    Ray looks at the variable, then the file that is named, then ~/.ray/auth_token.
    """
    mode = environment.get(AUTH_MODE, "")
    if environment.get(TOKEN):
        return mode, f"${TOKEN}", False, None, ""
    named = environment.get(TOKEN_PATH)
    if named:
        path = Path(os.path.expanduser(named))
    elif home is not None:
        path = home / ".ray" / "auth_token"
    else:
        return mode, "", False, None, ""
    try:
        found = path.stat()
        with path.open("rb"):
            pass
    except OSError as error:
        return mode, "", False, None, f"{path}: {error.strerror}" if named else ""
    trouble = "" if found.st_size else f"{path} is empty"
    return mode, str(path), not named, stat.S_IMODE(found.st_mode), trouble


def health_checks(environment: Mapping[str, str]) -> dict[str, str]:
    """Those settings that are set."""
    return {name: environment[name] for name in HEALTH_CHECKS if name in environment}


def ask(address: str) -> tuple[str, float, str, bool]:
    """(why nothing answers, seconds until it did, Ray's version there, whether it wants a token).

    The version is known only of a job server (http://HOST:8265) that wants no token.
    """
    began = time.monotonic()
    if "://" not in address:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        except (OSError, ValueError) as error:
            return str(error), 0.0, "", False
        return "", time.monotonic() - began, "", False
    if urlsplit(address).scheme not in ("http", "https"):
        return "neither HOST:PORT nor http://HOST:PORT", 0.0, "", False
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address.rstrip('/')}/api/version", timeout=ANSWER_S) as answer:
            version = str(json.loads(answer.read()).get("ray_version", ""))
    except urllib.error.HTTPError as error:
        wants = error.code in (401, 403)
        trouble = "" if wants else f"no job server answers there (HTTP {error.code})"
        return trouble, time.monotonic() - began, "", wants
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error)), 0.0, "", False
    return "", time.monotonic() - began, version, False
