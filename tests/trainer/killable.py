"""A launch whose coordinator has a process of its own, which is killed like any other: what it knew is gone,
and another one is started at once, as Ray does.

Who is killed where is scripted: members stand still at named places (`Plan.script`) until the test has done
what it came for.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.launch.member.coordinator_calls import UnansweredError
from tests.forked import FORKED
from tests.processes import say_where_it_stands
from tests.trainer.launch import WAIT_S, Launch

GONE = "gone"


def serve(link: Connection, start: CoordinatorStart, gone: tuple[str, ...]) -> None:
    """The life of a coordinator's process."""
    say_where_it_stands(start.storage, "coordinator")
    asyncio.run(_serve(link, start, set(gone)))


async def _serve(link: Connection, start: CoordinatorStart, gone: set[str]) -> None:
    loop, calls = asyncio.get_running_loop(), asyncio.Queue[tuple[int, str, tuple[Any, ...]]]()
    made = CoordinatorProcess(start, why_dead=lambda info: GONE if info.actor_id in gone else None)

    def listen() -> None:
        while True:
            try:
                message = link.recv()
            except (EOFError, OSError):
                os._exit(0)
            loop.call_soon_threadsafe(calls.put_nowait, message)

    async def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            worked, value = True, await getattr(made, method)(*arguments)
        except Exception as error:  # noqa: BLE001  whoever called gets it
            worked, value = False, error
        link.send((number, worked, value))

    threading.Thread(target=listen, daemon=True).start()
    running = set[asyncio.Task[None]]()
    while True:
        number, method, arguments = await calls.get()
        if method == GONE:
            gone.add(*arguments)
            continue
        task = loop.create_task(answer(number, method, arguments))
        running.add(task)
        task.add_done_callback(running.discard)


class CoordinatorLink:
    """A coordinator in a process of its own; its methods are called as those of one in this process, and
    raise `UnansweredError` when it dies. `died` hears of that, in a thread.
    """

    def __init__(
        self, start: CoordinatorStart, gone: tuple[str, ...], died: Callable[[CoordinatorLink], None]
    ) -> None:
        self._link, theirs = FORKED.Pipe()
        self.process = FORKED.Process(target=serve, args=(theirs, start, gone), daemon=True)
        self.process.start()
        theirs.close()
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._dead, self._died = False, died
        threading.Thread(target=self._listen, daemon=True).start()

    def __getattr__(self, method: str) -> Any:
        return partial(self._call, method)

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.wrap_future(self.send(method, *arguments))

    def send(self, method: str, *arguments: Any) -> Future[Any]:
        """A call, whose answer nobody has to wait for."""
        answer: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            try:
                if self._dead:
                    raise BrokenPipeError
                self._link.send((number, method, arguments))
            except OSError:
                del self._answers[number]
                answer.set_exception(UnansweredError("the coordinator is dead"))
        return answer

    def _listen(self) -> None:
        while True:
            try:
                number, worked, value = self._link.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                answer = self._answers.pop(number)
            if worked:
                answer.set_result(value)
            else:
                answer.set_exception(value)
        self.process.join(WAIT_S)
        with self._lock:
            self._dead, left = True, list(self._answers.values())
            self._answers.clear()
        for answer in left:
            answer.set_exception(UnansweredError("the coordinator died"))
        self._died(self)


class KillableLaunch(Launch):
    """See `Launch`; `fault_plan` is the coordinator's. `deaths`: how often it was killed. `sealed`: the step
    of the newest memory point of which a member knew that it is whole on all.
    """

    coordinator: Any

    def __init__(self, folder: Path, first_size: int, fault_plan: str = "", **settings: Any) -> None:
        self._fault_plan, self._closed, self._passes = fault_plan, False, False
        self.deaths, self.sealed = 0, -1
        super().__init__(folder, first_size, **settings)

    def _claimed(self, number: int, name: str | None, step: int | None) -> CoordinatorStart:
        return replace(super()._claimed(number, name, step), fault_plan=self._fault_plan)

    def _new_coordinator(self, storage: Any = None) -> Any:
        assert storage is None, "its storage is that of its own process"
        return CoordinatorLink(self._start, tuple(self._gone), self._on_death)

    def _on_death(self, dead: CoordinatorLink) -> None:
        with self.changed:
            if self._closed:
                return
            self.deaths += 1
            if dead.process.exitcode == -signal.SIGKILL:
                self.coordinator = self._new_coordinator()
            else:
                self.errors["coordinator"] = f"it ended with exit code {dead.process.exitcode}"
            self.changed.notify_all()

    def kill_coordinator(self) -> None:
        """Returns when another one was started; that has claimed nothing yet."""
        before = self.deaths
        os.kill(self.coordinator.process.pid, signal.SIGKILL)
        self.wait_for(lambda: self.deaths > before)

    def waits(self, name: str) -> bool:
        """It has joined, and rank 0 of the running generation knows that it is to meet somebody."""
        told = self._told.get((self.views[-1].attempt, self.views[-1].generation)) if self.views else None
        return any(joined == name for joined, _ in self.joins) and told is not None and told.reform

    def let_all_pass(self, names: set[str]) -> None:
        """Nobody stands still any more, and none of these, who do."""
        with self.changed:
            self._passes = True
            for name in names & self._held.keys():
                self.release(name)

    def close(self) -> None:
        """Ends the coordinator's process."""
        with self.changed:
            self._closed = True
            process = self.coordinator.process
        process.kill()
        process.join()

    # ---- of members
    def _on_gone(self, name: str) -> None:
        super()._on_gone(name)
        self.coordinator.send(GONE, name)

    def _on_hold(self, name: str, place: str) -> None:
        if self._passes:
            self._send(name, "release")
        else:
            super()._on_hold(name, place)

    def _on_sealed(self, name: str, step: int) -> None:
        del name
        self.sealed = max(self.sealed, step)
