"""Calls of the ranks to the coordinator's process, over one TCP connection for each rank.

Both ends prove that they know a random key before the first message is read. A rank has many calls in flight:
each has a number, and the answers come in any order. The connection is not encrypted, as those of torchrun's
store and of the collectives.

A frame is its length (8 bytes, big endian) and a pickled tuple: `(number, method, arguments)` from the rank,
`(number, worked, value)` to it. The first frame of a connection is the name of the member.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from typing_extensions import override

from orchestrator.errors import ElasticError, text_of
from orchestrator.launch.member.coordinator_calls import Calls, UnansweredError

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
