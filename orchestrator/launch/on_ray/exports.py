"""Weights-only copies of points while a run trains (`resume.export_every`): `exports/<point>/`.

They are made from committed files, by a process that the launch's driver starts (under torchrun: rank 0). So
no step waits, and a failure ends nothing. Decisions use only the names in storage.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from orchestrator.checkpoint.export.export import write_export
from orchestrator.checkpoint.export.export_files import EXPORTS, find_exports
from orchestrator.checkpoint.node_local.node_storage import NodeStorage, run_storage
from orchestrator.checkpoint.node_local.remote_nodes import ReachedNodes
from orchestrator.checkpoint.points.points import newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError, StorageError, text_of
from orchestrator.history.journal.journal_reader import read_outline
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch.process.stop_signals import last_wait_s

LOOK_EVERY_S = 1.0
_REFUSED = 3  # exit code of an export whose last line is the reason
LAST_LIMIT_S = 600.0  # how long the end of a launch waits for a running export


@contextmanager
def exporting(store: RunStore, attempt: int, every: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Exports every `every`-th committed point while the block runs; None: none. `say` receives failures.

    Leaving the block waits for a running export, at most `LAST_LIMIT_S`, and after SIGTERM only within this
    process's grace time. An exception waits for nothing.
    """
    if every is None:
        yield
        return
    exports = Exports(store, attempt, every, say)
    thread = threading.Thread(target=exports.run, name="exports", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        exports.cut_off()
        raise
    exports.over.set()
    limit_s = last_wait_s(LAST_LIMIT_S)
    thread.join(limit_s)
    if thread.is_alive():
        exports.cut_off()
        say(
            f"warning: the last export was not done within {limit_s:.0f} s and is left incomplete; "
            "`orchestrator export` makes it by hand"
        )


def due(committed: Sequence[str], every: int, since: int) -> tuple[list[str], int]:
    """Which of newly committed points, oldest first, are exported, and how many have come since the last of
    these.

    `since` had come before.
    """
    chosen = []
    for name in committed:
        since += 1
        if since >= every:
            chosen.append(name)
            since = 0
    return chosen, since


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """The known points, and how many of them were committed after the newest exported one."""

    points: set[str]
    since: int


class Exports:
    """The exports of one launch. `run` is for a thread. `over`: look once more, and end."""

    def __init__(self, store: RunStore, attempt: int, every: int, say: Callable[[str], None]) -> None:
        self._store, self._attempt, self._every, self._say = store, attempt, every, say
        self._process: subprocess.Popen[str] | None = None
        self._cut_off = False
        self.over = threading.Event()

    def run(self) -> None:
        """Looks for new points until the launch is over. Failures are reported, never raised."""
        seen: _Seen | None = None
        try:
            while True:
                last = self.over.wait(LOOK_EVERY_S)
                with suppress(StorageError):  # the next look may work
                    seen = self._look(seen if seen is not None else self._begin())
                if last or self._cut_off:
                    return
        except Exception as error:  # noqa: BLE001  reported here; training must continue
            self._say(f"warning: no more points of this launch are exported: {text_of(error)}")

    def cut_off(self) -> None:
        """Kills the running export. Its output is incomplete, and the next launch makes it again."""
        self._cut_off = True
        self.over.set()
        if self._process is not None:
            self._process.kill()

    # ------------------------------------------------------------------------------------------------ inside
    def _begin(self) -> _Seen:
        """The state before this launch.

        Incomplete exports of an older launch are made again, or deleted if their point is missing.
        """
        storage, there = self._store.storage, self._store.point_names()
        for name in find_exports(storage)[1]:
            storage.delete_folder(f"{EXPORTS}/{name}")
            if name in there and not self._cut_off:
                self._export(name)
        whole, _ = find_exports(storage)
        events = read_outline(storage).events
        names = {event.fields["point"] for event in events if event.kind == EventKind.POINT_COMMITTED}
        older = {name for name in (*names, *there) if self._is_older(name)}
        order = newest_first({*older, *whole})
        return _Seen(points=older, since=order.index(whole[-1]) if whole else len(order))

    def _is_older(self, point: str) -> bool:
        key = parse_point_name(point)
        return key is not None and key.attempt < self._attempt

    def _look(self, seen: _Seen) -> _Seen:
        there = self._store.point_names()
        chosen, since = due([name for name in there if name not in seen.points], self._every, seen.since)
        for name in chosen:
            if not self._cut_off:
                self._export(name)
        return _Seen(points=seen.points | {*there}, since=since)

    def _export(self, name: str) -> None:
        began = time.monotonic()
        if problem := self._in_a_process(name):
            if not self._cut_off:
                self._say(f"warning: {name} is not exported: {problem}. Training continues")
            return
        self._say(f"exported {EXPORTS}/{name} in {time.monotonic() - began:.1f} s")

    def _where(self, name: str) -> dict[str, str]:
        """The run's storage, and the Ray on whose nodes parts of the point are, if there are any."""
        storage, address = self._store.storage, ""
        if (
            isinstance(storage, NodeStorage)
            and isinstance(storage.reached, ReachedNodes)
            and storage.nodes_of(name)
        ):
            import ray

            address = ray.get_runtime_context().gcs_address
        return {"storage": storage.root, "ray": address}

    def _in_a_process(self, name: str) -> str:
        """Runs the export in a process. Returns why it failed; empty if it did not."""
        # the child searches this process's path and the current folder
        places = [*(path for path in sys.path if path), os.getcwd()]
        self._process = subprocess.Popen(  # noqa: S603  this Python, and a module of ours
            [sys.executable, "-P", "-m", "orchestrator.launch.on_ray.exports"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        process = self._process
        assert process.stdin is not None, "there is a pipe"
        try:
            # kept open: its end shows the process that its result is no longer needed
            process.stdin.write(json.dumps({**self._where(name), "point": name}) + "\n")
            process.stdin.flush()
            assert process.stdout is not None, "there is a pipe"
            said = process.stdout.read()
            code = process.wait()
        except OSError as error:
            return f"its process ended at once: {error}"
        finally:
            process.stdin.close()
            process.wait()
        if code == 0:
            return ""
        last = said.strip().rpartition("\n")[2]
        return str(json.loads(last)) if code == _REFUSED else f"its process ended with {code}: {last}"


def _reached(location: str, address: str) -> NodeStorage:
    """The run's storage. `address`: the Ray on whose nodes parts of its points are, "" for none."""
    storage = run_storage(location)
    if address:
        import ray

        from orchestrator.launch.on_ray.node_disks import NodeDisks

        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        NodeDisks(None).reached_by(storage)
    return storage


def _main() -> None:
    """The process of one export: a task as a line on stdin, the reason of a failure as the last line on
    stdout.
    """
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = RunStore(_reached(task["storage"], task["ray"]))
    try:
        write_export(store, task["point"], store.storage, f"{EXPORTS}/{task['point']}")
    except OrchestratorError as error:
        sys.stdout.write("\n" + json.dumps(str(error)) + "\n")
        sys.exit(_REFUSED)


def _end_with_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


if __name__ == "__main__":
    _main()
