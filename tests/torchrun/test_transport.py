"""Calls over a real socket: many at a time, the errors of both sides, and who is let in."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from orchestrator.errors import ElasticError, FencedError
from orchestrator.launch.member.coordinator_calls import UnansweredError
from orchestrator.torchrun import coordinator_process
from orchestrator.torchrun.coordinator_process import CallServer, SocketCalls, new_key, open_listener
from tests.raising import raises

LIMIT_S = 60.0
KEY = new_key()


class Served:
    """A server on an event loop of its own. A call of `wait` is answered when the test says so."""

    def __init__(self) -> None:
        self.gone = list[str]()
        self.changed = threading.Condition()
        self.waiting = dict[int, asyncio.Future[int]]()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        listener = open_listener()
        self.port: int = listener.getsockname()[1]
        self.server = CallServer(KEY, self._answer, self._ended)
        self._serving = asyncio.run_coroutine_threadsafe(self.server.serve(listener), self.loop)

    async def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "echo": self._echo,
            "fail": self._fail,
            "wait": self._wait,
            "lock": self._lock,
        }
        return await answers[method](*arguments)

    async def _echo(self, what: Any) -> Any:
        return what

    async def _fail(self, error: Exception) -> None:
        raise error

    async def _wait(self, number: int) -> int:
        with self.changed:
            self.waiting[number] = self.loop.create_future()
            self.changed.notify_all()
        return await self.waiting[number]

    async def _lock(self) -> Any:
        return threading.Lock()  # which cannot be sent

    async def _ended(self, name: str) -> None:
        with self.changed:
            self.gone.append(name)
            self.changed.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, LIMIT_S)

    def release(self, number: int) -> None:
        self.loop.call_soon_threadsafe(self.waiting[number].set_result, number)

    def end(self) -> None:
        """Nothing of it is left, as when its process ends."""

        async def drop_all() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(drop_all(), self.loop).result(LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LIMIT_S)
        self.loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    if not made.loop.is_closed():
        made.end()


@contextmanager
def connected(served: Served, name: str = "a") -> Iterator[SocketCalls]:
    calls = SocketCalls("localhost", served.port, KEY, name)
    calls.connect()
    try:
        yield calls
    finally:
        calls.close()


def test_many_calls_are_open_at_a_time_and_answered_in_any_order(served: Served) -> None:
    with connected(served) as calls, ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(calls.call, "wait", (number,), LIMIT_S) for number in range(20)]
        served.wait_for(lambda: len(served.waiting) == 20)
        for number in reversed(range(20)):
            served.release(number)
        assert [answer.result(LIMIT_S) for answer in answers] == list(range(20))


def test_a_large_argument_arrives_whole(served: Served) -> None:
    large = bytes(range(256)) * (1 << 16)
    with connected(served) as calls:
        assert calls.call("echo", (large,), LIMIT_S) == large


def test_what_a_call_raises_is_raised_with_its_class_text_and_code(served: Served) -> None:
    with connected(served) as calls:
        with raises(FencedError, "run.fenced", "attempt 2"):
            calls.call("fail", (FencedError("attempt 2 exists"),), LIMIT_S)
        with pytest.raises(ValueError, match="no such thing"):
            calls.call("fail", (ValueError("no such thing"),), LIMIT_S)
        with raises(ElasticError, "internal.answer_unsent", "lock"):
            calls.call("lock", (), LIMIT_S)
        assert calls.call("echo", (1,), LIMIT_S) == 1


def test_a_call_without_an_answer_ends_at_its_limit_and_the_next_one_is_answered(served: Served) -> None:
    with connected(served) as calls:
        with pytest.raises(UnansweredError):
            calls.call("wait", (1,), 0.1)
        served.wait_for(lambda: 1 in served.waiting)
        served.release(1)  # too late, and for nobody
        assert calls.call("echo", (2,), LIMIT_S) == 2
        assert not calls.has_ended


def test_the_end_of_the_server_ends_open_calls_and_later_ones(served: Served) -> None:
    with connected(served) as calls, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(calls.call, "wait", (1,), LIMIT_S)
        served.wait_for(lambda: 1 in served.waiting)
        served.end()
        with pytest.raises(UnansweredError):
            answer.result(LIMIT_S)
        assert calls.has_ended
        with pytest.raises(UnansweredError):
            calls.call("echo", (1,), LIMIT_S)


def test_the_server_hears_who_is_gone(served: Served) -> None:
    with connected(served, "a") as first, connected(served, "b") as second:
        for calls in (first, second):
            calls.call("echo", (1,), LIMIT_S)
        assert served.server.members == {"a", "b"}
        first.close()
        served.wait_for(lambda: served.gone == ["a"])
        assert second.call("echo", (1,), LIMIT_S) == 1
        assert served.server.members == {"b"}


def test_a_member_that_takes_no_answers_keeps_nobody_else_waiting(served: Served) -> None:
    large = bytes(1 << 26)  # more than the buffers of a connection hold
    with socket.create_connection(("localhost", served.port), LIMIT_S) as stopped, connected(served) as other:
        theirs, own = stopped.recv(32, socket.MSG_WAITALL), bytes(32)
        stopped.sendall(own + coordinator_process._proof(KEY, b"rank", theirs + own))
        for message in ("stopped", (0, "echo", (large,))):
            stopped.sendall(coordinator_process._frame(message))  # type: ignore[arg-type]
        assert other.call("echo", (large,), LIMIT_S) == large
        assert served.server.members == {"a", "stopped"}


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(64)])
def test_who_does_not_know_the_key_is_not_listened_to(served: Served, said: bytes) -> None:
    with socket.create_connection(("localhost", served.port), LIMIT_S) as stranger:
        assert len(stranger.recv(64)) == 32, "what it is to prove with the key"
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        assert not stranger.recv(1), "nothing is answered"
    with raises(ElasticError, "launch.coordinator_unreached", f"localhost:{served.port}"):
        SocketCalls("localhost", served.port, new_key(), "a").connect()
    assert served.server.members == set()
    assert served.gone == []
    with connected(served) as calls:
        assert calls.call("echo", (1,), LIMIT_S) == 1


def test_a_program_that_does_not_know_the_key_is_not_taken_for_the_coordinator() -> None:
    with socket.create_server(("localhost", 0)) as impostor:

        def answer() -> None:
            link, _ = impostor.accept()
            with link:
                link.sendall(bytes(32))
                link.recv(64, socket.MSG_WAITALL)
                link.sendall(bytes(32))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with raises(ElasticError, "launch.coordinator_unreached", "another program answers there"):
            SocketCalls("localhost", impostor.getsockname()[1], KEY, "a").connect()
        thread.join(LIMIT_S)


def test_a_coordinator_that_is_not_there_is_named_with_its_address() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    with raises(ElasticError, "launch.coordinator_unreached", f"localhost:{port}", "ConnectionRefusedError"):
        SocketCalls("localhost", port, KEY, "a").connect()
