"""Calls `train.callbacks` in a process of their own, beside rank 0, with what the history has.

The process has no access to weights, optimizer, random numbers or collectives, so callbacks can change
nothing that is trained, and no step waits for them.

`python -m orchestrator.trainer.callback_process IN OUT` is that process. It reads calls from one pipe
(inherited file descriptors) and writes the errors of each into the other. It ends when the pipe does.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.callbacks import HOOKS, GroupChanged, PointCommitted, Started
from orchestrator.errors import ConfigError, OrchestratorError, text_of
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.steps import EvalRecord, StateKey, StepRecord
from orchestrator.user_function import described, find_function

FIELD = "train.callbacks"
HELD = 100_000  # the calls that are kept while a callback is slow
CLOSE_S = 60.0  # how long the end of training waits for callbacks
FAILED_CLOSE_S = 5.0  # the same where the worker has failed, and others wait for it
REPORTED = 3  # errors of one method that are reported; the others are counted
Call = tuple[str, Any]  # a method and its argument


def require_callback(name: str) -> Callable[[], Any]:
    """Returns the class of `pkg.module:Class`. Raises `ConfigError` if it is no callback."""
    kind = find_function(FIELD, name, "callback.not_callable")
    hooks = {each for each in dir(kind) if each.startswith("on_")}
    if not isinstance(kind, type) or not hooks & set(HOOKS):
        raise ConfigError(
            f"{FIELD} names {name}, which is no class with one of the methods {', '.join(HOOKS)}; define one",
            code="callback.without_hook",
        )
    if unknown := sorted(hooks - set(HOOKS)):
        raise ConfigError(
            f"{FIELD} names {name}, which has the method {unknown[0]}, and nothing calls it; the methods are "
            f"{', '.join(HOOKS)}: rename it",
            code="callback.unknown_hook",
        )
    return kind


class Callbacks:
    """The callbacks of one member. They are called only while it is rank 0.

    Each method returns at once, except `end`. `on_error(text)` is called from any thread with each error
    that is to be reported.
    """

    def __init__(self, names: Sequence[str], run_uri: str, on_error: Callable[[str], None]) -> None:
        self._names, self._run_uri, self._on_error = tuple(names), run_uri, on_error
        self._process: _CallbackProcess | None = None
        self._off_history: set[StateKey] = set()
        self._point: StateKey | None = None
        self._is_first = False

    def enter(self, view: GenerationView, cursor: Cursor, records: Iterable[StepRecord]) -> None:
        """A generation begins at `cursor`. `records` are not acknowledged yet.

        Those behind the state that it continues will never be part of the history.
        """
        self._off_history = {
            record.key for record in records if view.parent is None or record.key > view.parent
        } | self._off_history
        if not self._names:
            return
        self._is_first = view.rank == 0
        if not self._is_first:
            return
        if self._process is None:
            self._process = _CallbackProcess(self._names, self._on_error)
            start = Started(
                run_uri=self._run_uri,
                attempt=view.attempt,
                step=view.step,
                consumed_samples=cursor.consumed_samples,
                consumed_tokens=cursor.consumed_tokens,
            )
            self._process.put("on_start", start)
        self._put(
            "on_group_change",
            GroupChanged(
                attempt=view.attempt,
                generation=view.generation,
                world_size=view.world_size,
                step=view.step,
            ),
        )

    def durable(self, records: Iterable[StepRecord]) -> None:
        """These steps are in the history, unless a generation has left them behind."""
        for record in records:
            if record.key in self._off_history:
                self._off_history.discard(record.key)
            else:
                self._put("on_step", record)

    def evaluated(self, records: Iterable[EvalRecord]) -> None:
        """The parts of the data were evaluated, and these records are in the journal."""
        for record in records:
            self._put("on_eval", record)

    def committed(self, key: StateKey | None) -> None:
        """`key` is the newest committed point that this member has saved. Called repeatedly."""
        if key is not None and key != self._point:
            self._point = key
            self._put("on_point", PointCommitted(name=key.point_name, step=key.step))

    def end(self, reason: str, limit_s: float = CLOSE_S) -> None:
        """Calls `on_end`, and waits at most `limit_s` until everything was called."""
        self._put("on_end", reason)
        process, self._process = self._process, None
        if process is not None:
            process.close(limit_s)

    def _put(self, method: str, argument: Any) -> None:
        if self._process is not None and self._is_first:
            self._process.put(method, argument)


class _CallbackProcess:
    """The process, and the thread that hands calls to it, one after the other."""

    def __init__(self, names: Sequence[str], on_error: Callable[[str], None]) -> None:
        self._on_error, self._names = on_error, names
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._errors: Counter[str] = Counter()
        self._is_over = False
        calls_in, calls_out = os.pipe()
        answers_in, answers_out = os.pipe()
        places = [*(path for path in sys.path if path), os.getcwd()]  # as Ray's workers search
        module = "orchestrator.trainer.callback_process"
        self._process = subprocess.Popen(  # noqa: S603  this Python, and this module
            [sys.executable, "-P", "-m", module, str(calls_in), str(answers_out)],
            stdin=subprocess.DEVNULL,
            pass_fds=(calls_in, answers_out),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        os.close(calls_in)
        os.close(answers_out)
        self._out, self._in = Connection(calls_out, readable=False), Connection(answers_in, writable=False)
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True)
        self._thread.start()

    def put(self, method: str, argument: Any) -> None:
        """Hands over a call. A process that is over, or too slow, gets no more of them."""
        if self._is_over:
            return
        self._calls.put((method, argument))
        if self._calls.qsize() > HELD:
            self._is_over = True
            self._on_error(
                f"{FIELD} have {HELD:,} calls to come, because they take longer than the steps; they are not "
                "called any more by this worker. The journal has every step"
            )

    def close(self, limit_s: float) -> None:
        """Waits until all calls are done and the process has ended, at most `limit_s`."""
        until = time.monotonic() + limit_s
        self._calls.put(None)
        self._thread.join(limit_s)
        is_late = self._thread.is_alive()
        self._is_over = True
        if not is_late:
            self._out.close()  # the process ends by itself, with what it has registered for that
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
        if self._process.poll() is None:
            left = self._calls.qsize()
            self._on_error(f"{FIELD} were ended after {limit_s:g} s, with {left:,} calls to come")
            self._process.kill()
        self._thread.join()
        self._process.wait()
        for pipe in (self._out, self._in):
            pipe.close()
        for method, number in self._errors.items():
            if number > REPORTED:
                self._on_error(f"{method} raised {number:,} times in all")

    def _run(self) -> None:
        try:
            self._out.send(self._names)
            self._report(self._in.recv())
            while (call := self._calls.get()) is not None:
                self._out.send(call)
                self._report(self._in.recv())
        except (EOFError, OSError):
            if not self._is_over:
                self._is_over = True
                self._on_error(
                    f"the process of {FIELD} ended with exit code {self._process.wait()}; this worker calls "
                    "them no more"
                )

    def _report(self, errors: Iterable[tuple[str, str]]) -> None:
        for method, text in errors:
            self._errors[method] += 1
            if self._errors[method] <= REPORTED:
                self._on_error(f"{method} raised {text}")


# ---------------------------------------------------------------------------------------- inside the process
def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker decides when this process ends
    with suppress(OSError):
        os.dup2(2, 1)  # what callbacks print goes to the worker's log
    calls, answers = (Connection(int(number)) for number in sys.argv[1:3])
    with suppress(EOFError, BrokenPipeError):
        callbacks, errors = _made(calls.recv())
        answers.send(errors)
        while True:
            method, argument = calls.recv()
            answers.send(_called(callbacks, method, argument))


def _made(names: Sequence[str]) -> tuple[list[tuple[str, Any]], list[tuple[str, str]]]:
    callbacks, errors = list[tuple[str, Any]](), list[tuple[str, str]]()
    for name in names:
        try:
            callbacks.append((name, require_callback(name)()))
        except BaseException as error:  # noqa: BLE001  the worker reports it
            errors.append((name, _text_of(error)))
    return callbacks, errors


def _called(callbacks: Iterable[tuple[str, Any]], method: str, argument: Any) -> list[tuple[str, str]]:
    errors = []
    for name, callback in callbacks:
        try:
            if (function := getattr(callback, method, None)) is not None:
                function(argument)
        except BaseException as error:  # noqa: BLE001  the worker reports it
            errors.append((f"{name}.{method}", _text_of(error)))
    return errors


def _text_of(error: BaseException) -> str:
    return text_of(error) if isinstance(error, OrchestratorError) else described(error)


if __name__ == "__main__":
    _main()
