"""The coordinator of a group under torchrun, in a child process of rank 0, and the watch of rank 0 over it.

Training on rank 0 cannot starve it, and signals to the whole job do not end it. It reads a pipe of which
rank 0 holds the other end. Once that is closed it ends with the run: rank 0's connection ends too, which ends
a run that is not over (`LaunchMachine`, `fixed`).

`LaunchWatch` shows each status, passes on requests of signals, and reports the end.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.cluster.machine import process_state
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.elastic.supervision.stall_detector import StallWatch
from orchestrator.errors import CoordinatorSilentError, ElasticError
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch.member.coordinator_calls import UnansweredError
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.safe_output import let_go, output_never_waits, show_faults_as_data
from orchestrator.records.run_status import GroupMember, Held, RunStatus, Stall
from orchestrator.torchrun.transport import CallServer, SocketCalls, new_key, open_listener

ORPHANED_S = 60.0  # how long the process may need to end the run when rank 0 is gone
END_S = 5.0  # how long rank 0 waits for the process to end
MEMBER_GONE = "its process ended"
_LOOK_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class HostedCoordinator:
    """Rank 0's side: starts the process, and ends it with the run.

    `port` and `key` are what a rank needs to connect.
    """

    def __init__(self, start: CoordinatorStart) -> None:
        """Starts the process. Connections are accepted from now on, and served once it has begun."""
        self.key = new_key()
        with open_listener() as listener:
            self.port: int = listener.getsockname()[1]
            theirs, ours = os.pipe()
            try:
                self._process = _started(theirs, listener.fileno())
            except OSError as error:
                os.close(ours)
                raise ElasticError(
                    f"the coordinator's process could not be started: {error.strerror or error}; see the "
                    "limits of processes and open files here, and whether memory runs out",
                    code="launch.coordinator_not_started",
                ) from error
            finally:
                os.close(theirs)
        self._pipe = Connection(ours, readable=False)
        with suppress(OSError):  # a process that has died shows at the first call
            self._pipe.send((start, self.key))

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def close(self, limit_s: float = END_S) -> None:
        """Lets the process end when the run is over, and waits up to `limit_s` for that."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):  # it still answers other ranks, and ends by itself
            self._process.wait(limit_s)


def _started(pipe: int, listener: int) -> subprocess.Popen[bytes]:
    # it imports what this process can import, and from the current folder
    places = [*(path for path in sys.path if path), os.getcwd()]
    program = [sys.executable, "-P", "-m", "orchestrator.torchrun.coordinator_process"]
    # signals wait until the process has its own handlers
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603  this Python, and this module
            [*program, str(pipe), str(listener)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=(pipe, listener),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            start_new_session=True,  # Ctrl-C is for the ranks, which save once more
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def _serve(pipe: Connection[Any, Any], listener: socket.socket) -> None:
    """Serves until rank 0 has closed its end of the pipe and the run has ended."""
    start, key = pipe.recv()
    # no member is looked for: the end of its connection shows that it is gone
    coordinator = CoordinatorProcess(start, why_dead=lambda info: None)  # noqa: ARG005

    async def answer(method: str, arguments: tuple[Any, ...]) -> Any:
        assert not method.startswith("_"), method
        return await getattr(coordinator, method)(*arguments)

    async def ended(name: str) -> None:
        await coordinator.died(name, MEMBER_GONE)

    server = CallServer(key, answer, ended)
    serving = asyncio.create_task(server.serve(listener))
    loop = asyncio.get_running_loop()
    rank_zero_ended = loop.create_future()

    def note_end() -> None:
        loop.remove_reader(pipe.fileno())
        rank_zero_ended.set_result(None)

    loop.add_reader(pipe.fileno(), note_end)
    await asyncio.wait([serving, rank_zero_ended], return_when=asyncio.FIRST_COMPLETED)
    deadline = time.monotonic() + ORPHANED_S
    while not serving.done() and time.monotonic() < deadline:
        is_over = coordinator.has_ended or not coordinator.was_called
        if is_over and not server.members:
            break
        await asyncio.sleep(_LOOK_S)
    if serving.done():
        serving.result()  # raises why it has ended
    serving.cancel()


def _main() -> None:
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored: processes that it starts receive them
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    pipe, listener = Connection(int(sys.argv[1]), writable=False), socket.socket(fileno=int(sys.argv[2]))
    show_faults_as_data()
    code = 0
    with output_never_waits():
        try:
            asyncio.run(_serve(pipe, listener))
        except EOFError:
            pass  # rank 0 has died at once
        except Exception:  # noqa: BLE001  the end of its connections shows it to the ranks
            traceback.print_exc()
            code = 1
        let_go(sys.stderr)
    os._exit(code)  # at once, even if a thread waits for storage


if __name__ == "__main__":
    _main()


# --------------------------------------------------------------------------------------------- rank 0's watch
STATUS_WAIT_S = 0.25  # a request of a signal waits at most this long
ANSWER_S = 30.0  # a live coordinator answers sooner
JOIN_LIMIT_S = 1800.0  # how long the ranks may take to join, with their models made


class LaunchWatch:
    """Polls the coordinator's status in a thread, from `__enter__` to `__exit__`.

    `ask_stop` and `ask_save` may be called from a signal handler.
    """

    def __init__(self, calls: SocketCalls, progress: Progress) -> None:
        self._calls, self._progress = calls, progress
        self._requests: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._status: RunStatus | None = None
        self._stall_watch = StallWatch()
        self._failures = set[tuple[int, str]]()
        self._left = threading.Event()
        self._began_at = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> LaunchWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()

    def ask_stop(self, by: str) -> None:
        """Requests a save and stop at the next step boundary; `by` is the origin."""
        self._requests.put(("stop", by))

    def ask_save(self, by: str) -> None:
        """Requests a save at the next step boundary; `by` is the origin."""
        self._requests.put(("save", by))

    def end(self) -> RunStatus:
        """Waits until the run has ended, and its end is written as far as possible; returns its last status.

        Raises `CoordinatorSilentError` if the coordinator's process has ended before.
        """
        self._thread.join()
        if self._status is None or self._status.ended is None:
            raise CoordinatorSilentError(
                "the coordinator's process has ended before it had written the run's end; start the same "
                "command again: it continues from the newest resume point"
            )
        return self._status

    # ---- in the thread
    def _watch(self) -> None:
        seen = (-1, -1)
        while not self._left.is_set() and (self._status is None or self._status.ended is None):
            try:
                self._pass_on_requests()
                status: RunStatus = self._calls.call("status", (seen, STATUS_WAIT_S), ANSWER_S)
            except UnansweredError:
                if self._calls.has_ended:
                    return
                continue
            if (status.attempt, status.version) != seen:
                self._show(status)
            seen, self._status = (status.attempt, status.version), status
            with suppress(UnansweredError):
                self._look(status)

    def _pass_on_requests(self) -> None:
        with suppress(queue.Empty):
            while True:
                method, by = request = self._requests.get_nowait()
                try:
                    self._calls.call(method, (by,), ANSWER_S)
                except UnansweredError:
                    self._requests.put(request)
                    raise

    def _show(self, status: RunStatus) -> None:
        for change in status.changes:
            self._progress.say(sentences.group_change(change))
        for step, what in set(status.failures) - self._failures:
            self._progress.note(f"failure after step {step}: {what}")
        self._failures.update(status.failures)
        self._progress.show(status)

    def _look(self, status: RunStatus) -> None:
        """Reports ranks that stand still, and ends a run that never begins."""
        now = time.monotonic()
        if status.ended is None and not status.generation and now - self._began_at > JOIN_LIMIT_S:
            reason = f"not all ranks have joined the group within {JOIN_LIMIT_S:.0f} s"
            self._calls.call("end", ("failed", reason, "launch.ranks_not_met"), ANSWER_S)
        self._stall_watch.saw(status, now)
        quiet_s = self._stall_watch.due(now)
        if quiet_s is None:
            return
        doing, here, held = dict(status.doing), socket.gethostname(), []
        for rank, info in enumerate(status.members):
            named = GroupMember(rank=rank, host=info.node_id, pid=info.pid)
            state = process_state(info.pid) if info.node_id == here else "?"
            held.append(Held(worker=named, state=state, doing=doing.get(info.member)))
        stall = Stall(
            quiet_s=quiet_s,
            median_s=self._stall_watch.median_s,
            held=tuple(held),
            stopping=status.stopping,
        )
        for line in sentences.stall(stall):
            self._progress.say(line)
            self._calls.call("note", (EventKind.UNRESPONSIVE, {"reason": line}), ANSWER_S)
