"""The coordinator of a group under torchrun, in a child process of rank 0, and the ranks' calls to it.

Training on rank 0 cannot starve it, and signals to the whole job do not end it. It reads a pipe of which
rank 0 holds the other end. Once that is closed it ends with the run: rank 0's connection ends too, which ends
a run that is not over (`LaunchMachine`, `fixed`). `LaunchWatch` shows each status, passes on requests of
signals, and reports the end.

Each rank calls over one TCP connection. Both ends prove that they know a random key before the first message
is read. A rank has many calls in flight: each has a number, and the answers come in any order. The connection
is not encrypted, as those of torchrun's store and of the collectives.

A frame is its length (8 bytes, big endian) and a pickled tuple: `(number, method, arguments)` from the rank,
`(number, worked, value)` to it. The first frame of a connection is the name of the member.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import os
import pickle
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from typing_extensions import override

from orchestrator.cluster.machine import process_state
from orchestrator.coordinator.coordinator_start import CoordinatorStart
from orchestrator.coordinator.process import CoordinatorProcess
from orchestrator.elastic.supervision.policy import StallWatch
from orchestrator.errors import CoordinatorSilentError, ElasticError, text_of
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.launch.member.coordinator_calls import Calls, UnansweredError
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.safe_output import let_go, output_never_waits, show_faults_as_data
from orchestrator.records.run_status import GroupMember, Held, RunStatus, Stall

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


# ------------------------------------------------------------------------------------------------------ calls
CONNECT_S = 60.0  # how long a rank tries to connect; the coordinator's process begins meanwhile
SILENT_S = 60.0  # the connection ends if the other machine acknowledges nothing for this long
SEND_S = 30.0  # the connection ends if the other process takes nothing for this long
_PROOF_S = 10.0  # how long a caller may take to prove that it knows the key
_NONCE_BYTES = _PROOF_BYTES = 32
_LENGTH = struct.Struct(">Q")
_GONE = "the connection to the coordinator has ended"


def new_key() -> bytes:
    """Returns a random key for one coordinator and its ranks."""
    return secrets.token_bytes(32)


def open_listener() -> socket.socket:
    """Returns a socket that accepts connections on a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    return socket.create_server(("", 0), backlog=4096)


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def _frame(message: tuple[Any, ...] | str) -> bytes:
    content = pickle.dumps(message)
    return _LENGTH.pack(len(content)) + content


def _watch_peer(connection: socket.socket) -> None:
    """Ends the connection if the other machine is gone, and sends small messages at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", int(SILENT_S / 2)),
        ("TCP_KEEPINTVL", int(SILENT_S / 12)),
        ("TCP_KEEPCNT", 6),
        ("TCP_USER_TIMEOUT", int(1000 * SILENT_S)),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class SocketCalls(Calls):
    """`launch.member.coordinator_calls.Calls` of the member `name` to the coordinator at `host`:`port`.

    Used by several threads. The end of the connection is final: each call raises `UnansweredError` then.
    """

    def __init__(
        self, host: str, port: int, key: bytes, name: str, connect_s: float = CONNECT_S
    ) -> None:
        self._at, self._key, self._name, self._connect_s = (host, port), key, name, connect_s
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._sending = threading.Lock()
        self._ended = threading.Event()
        self._socket: socket.socket | None = None

    def connect(self) -> None:
        """Connects. Raises `ElasticError` if the coordinator is not reached, or does not prove the key."""
        try:
            self._socket = socket.create_connection(self._at, timeout=self._connect_s)
            self._prove(self._socket)
        except (OSError, EOFError) as error:
            host, port = self._at
            raise ElasticError(
                f"the coordinator at {host}:{port} cannot be reached ({type(error).__name__}: {error}); it "
                "runs beside rank 0: check that no firewall keeps this machine from that port, then start "
                "the same command again",
                code="launch.coordinator_unreached",
            ) from error
        _watch_peer(self._socket)
        self._socket.settimeout(None)
        seconds = struct.pack("ll", int(SEND_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._socket.sendall(_frame(self._name))
        threading.Thread(target=self._listen, args=(self._socket,), name="answers", daemon=True).start()

    def _prove(self, connection: socket.socket) -> None:
        theirs, own = bytes(_received(connection, _NONCE_BYTES)), secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(own + _proof(self._key, b"rank", theirs + own))
        proof = _received(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._key, b"coordinator", theirs + own)):
            raise OSError("another program answers there")

    @property
    def has_ended(self) -> bool:
        """Whether the connection has ended: the coordinator's process is gone, or cannot be reached."""
        return self._ended.is_set()

    @property
    def own_address(self) -> str:
        """The address of this machine from which it has reached the coordinator."""
        assert self._socket is not None, "connect first"
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:")

    @override
    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        number, answer = next(self._numbers), Future[Any]()
        frame = _frame((number, method, tuple(arguments)))
        with self._sending:
            if self._ended.is_set() or self._socket is None:
                raise UnansweredError(_GONE)
            self._answers[number] = answer
            try:
                self._socket.sendall(frame)
            except OSError as error:
                self._end()
                raise UnansweredError(f"{_GONE} ({error})") from error
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            if answer.done():  # the call itself raised it
                raise
            self._answers.pop(number, None)
            raise UnansweredError(f"no answer to {method} within {limit_s:g} s") from error

    def close(self) -> None:
        """Ends the connection."""
        with self._sending:
            self._end()

    def _end(self) -> None:
        """The caller holds the lock, or no call can be added any more."""
        self._ended.set()
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        for number in [*self._answers]:
            if (answer := self._answers.pop(number, None)) is not None and not answer.done():
                answer.set_exception(UnansweredError(_GONE))

    def _listen(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
                number, worked, value = pickle.loads(_received(connection, length))  # noqa: S301  proved
                answer = self._answers.pop(number, None)
                if answer is None:
                    continue  # nothing waits for it any more
                if worked:
                    answer.set_result(value)
                else:
                    answer.set_exception(value)
        with self._sending:
            self._end()


def _received(connection: socket.socket, length: int) -> bytearray:
    """Returns exactly so many bytes. Raises `EOFError` at the end of the connection."""
    content = bytearray(length)
    view, done = memoryview(content), 0
    while done < length:
        received = connection.recv_into(view[done:])
        if not received:
            raise EOFError(_GONE)
        done += received
    return content


class CallServer:
    """Serves the connections of all members, on one event loop.

    `answer(method, arguments)` carries out a call. `ended(name)` is called when the connection of the member
    `name` has ended. Nothing of a caller is unpickled before it has proved that it knows the key.
    """

    def __init__(
        self,
        key: bytes,
        answer: Callable[[str, tuple[Any, ...]], Awaitable[Any]],
        ended: Callable[[str], Awaitable[None]],
    ) -> None:
        self._key, self._answer, self._on_end = key, answer, ended
        self._calls = set[asyncio.Task[None]]()
        self.members = set[str]()  # with a connection

    async def serve(self, listener: socket.socket) -> None:
        """Serves until it is cancelled."""
        async with await asyncio.start_server(self._connected, sock=listener) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name: str | None = None
        _watch_peer(writer.get_extra_info("socket"))
        try:
            async with asyncio.timeout(_PROOF_S):
                await self._check(reader, writer)
                name = str(pickle.loads(await _frame_of(reader)))  # noqa: S301  proved
            self.members.add(name)
            while True:
                number, method, arguments = pickle.loads(await _frame_of(reader))  # noqa: S301  proved
                call = asyncio.create_task(self._carry_out(writer, number, method, arguments))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
        except (OSError, EOFError, TimeoutError, PermissionError):
            pass  # the end of the connection
        finally:
            writer.transport.abort()
            if name is not None:
                self.members.discard(name)
                await self._on_end(name)

    async def _check(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = secrets.token_bytes(_NONCE_BYTES)
        writer.write(own)
        theirs = await reader.readexactly(_NONCE_BYTES)
        proof = await reader.readexactly(_PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(self._key, b"rank", own + theirs)):
            raise PermissionError("the caller does not know the key")
        writer.write(_proof(self._key, b"coordinator", own + theirs))

    async def _carry_out(
        self, writer: asyncio.StreamWriter, number: int, method: str, arguments: tuple[Any, ...]
    ) -> None:
        try:
            worked, value = True, await self._answer(method, arguments)
        except Exception as error:  # noqa: BLE001  the caller gets it
            worked, value = False, error
        try:
            frame = _frame((number, worked, value))
        except Exception as error:  # noqa: BLE001  an error of a library need not be one that pickles
            unsent = ElasticError(
                f"the answer to {method} cannot be sent: {text_of(error if worked else value)}",
                code="internal.answer_unsent",
            )
            frame = _frame((number, False, unsent))
        writer.write(frame)  # never blocks: what a stopped process does not take waits in memory


async def _frame_of(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


if __name__ == "__main__":
    _main()
