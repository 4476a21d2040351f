"""Rank 0's watch over the launch: shows each status, passes on requests of signals, and reports the end."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

from orchestrator.cluster.machine import process_state
from orchestrator.elastic.supervision.stall_detector import StallWatch
from orchestrator.errors import CoordinatorSilentError
from orchestrator.history import sentences
from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.launch.member.calls import UnansweredError
from orchestrator.launch.process.progress import Progress
from orchestrator.records.run_status import GroupMember, Held, RunStatus, Stall
from orchestrator.torchrun.transport import SocketCalls

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
