"""Copies of memory points over sockets of their own: to the rank that keeps this one's, from the rank whose
copies are kept here. One link for each generation, two threads. Where both are on one machine nothing is sent
but where the copy lies: it is lent (`lending`).

It knows bytes and headers; which buffer a copy goes to, and what a failure means, its owner knows.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from xxhash import xxh3_128

from orchestrator.json_form import decode, encode
from orchestrator.records.membership import HeldShard
from orchestrator.records.steps import StateKey
from orchestrator.trainer.lending import Lender, LentCopy, Offer

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("!I")
_BORROWS, _RECEIVES = b"b", b"r"  # what a keeper answers to an offer
_TOKEN_BYTES, _DIGEST_BYTES = 16, 16
_PIECE = 4 << 20  # bytes of one send or receive, during which the GIL is free
CONNECT_LIMIT_S = 60.0  # how long a neighbour is tried to be reached
_TRY_S = 5.0  # each try
_LOOK_S = 0.2  # how often a thread that waits for a connection looks whether the link is closed


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyHeader:
    """What goes before the bytes of a copy. `keep`: the memory point that the sender knows to be whole on
    every rank; the receiver may not have heard of it yet, and must not overwrite it. `buffer` and `mark` say
    where a copy lies that is lent; no bytes come after it then.
    """

    copy: HeldShard
    keep: StateKey | None
    num_bytes: int
    buffer: int
    mark: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a rank listens, and what whoever connects says first: a stranger does not know it."""

    host: str
    port: int
    token: str

    def to_json(self) -> str:
        """For the group's store."""
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> Address:
        """What `to_json` gave."""
        return decode(cls, json.loads(text))


class Receiver(Protocol):
    """What a link does with what comes; called in its thread."""

    def room(self, header: CopyHeader) -> memoryview:
        """Memory for the bytes of a copy, which is nobody's from now on."""

    def arrived(self, header: CopyHeader) -> None:
        """All bytes are there, and their digest is the sender's."""

    def lent(self, header: CopyHeader, copy: LentCopy) -> None:
        """The copy lies in its owner's buffer, whole; it is the receiver's to close."""


class NeighbourLink:
    """Sends this rank's copies to `keeper` and receives those of one other, until `close`. `failure` says
    what went wrong: after it nothing arrives any more. `offer`: where a keeper on this machine finds the
    buffers that the copies lie in (None: it is on another). A keeper that cannot open them is sent the bytes.

    Each copy that is sent is followed by the xxh3_128 of its bytes, which both sides compute: a check against
    accidents.
    """

    def __init__(
        self,
        listener: socket.socket,
        own: Address,
        keeper: Address,
        receiver: Receiver,
        half_sent: Callable[[CopyHeader], None],
        offer: Offer | None = None,
    ) -> None:
        self.failure = ""
        self._offer = offer
        self._listener, self._own, self._keeper = listener, own, keeper
        self._receiver, self._half_sent = receiver, half_sent
        self._jobs: queue.SimpleQueue[tuple[CopyHeader, memoryview] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        targets = {"memory point out": self._send_all, "memory point in": self._receive_all}
        self._threads: list[threading.Thread] = []
        try:
            for name, target in targets.items():
                thread = threading.Thread(target=self._guarded, args=(name, target), daemon=True, name=name)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the machine lets this process have no more threads
            self.close()
            raise

    def send(self, header: CopyHeader, data: memoryview) -> None:
        """Hands a copy to the sending thread; `data` stays as it is until the next copy was sent, or
        `close`.
        """
        self._jobs.put((header, data))

    def close(self) -> None:
        """Ends both threads, wherever they are. Afterwards nothing is read or written by them."""
        with self._lock:
            self._closed.set()
            sockets = list(self._sockets)
        self._jobs.put(None)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes a thread that blocks in it
        for thread in self._threads:
            thread.join()
        for each in sockets:
            each.close()

    # ------------------------------------------------------------------------------ the two threads
    def _guarded(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001  the owner hears of it in `failure`
            if not self._closed.is_set():
                self.failure = self.failure or f"{name}: {type(error).__name__}: {error}"
            with self._lock:
                for each in self._sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)  # the neighbours hear of it, too

    def _opened(self, made: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(made)
            if self._closed.is_set():
                raise ConnectionError("the link was closed")
        made.settimeout(None)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _connected(self) -> socket.socket:
        end = time.monotonic() + CONNECT_LIMIT_S
        while True:
            try:
                return socket.create_connection((self._keeper.host, self._keeper.port), timeout=_TRY_S)
            except TimeoutError:
                if self._closed.is_set() or time.monotonic() > end:
                    raise

    def _send_all(self) -> None:
        out = self._opened(self._connected())
        out.sendall(bytes.fromhex(self._keeper.token))
        _put(out, None if self._offer is None else encode(self._offer))
        lends = _read(out, len(_BORROWS)) == _BORROWS
        while (job := self._jobs.get()) is not None:
            header, data = job
            if lends:
                self._half_sent(header)
                _put(out, encode(header))
            else:
                self._send(out, header, data)

    def _send(self, out: socket.socket, header: CopyHeader, data: memoryview) -> None:
        digest = xxh3_128()
        _put(out, encode(header))
        for at in range(0, len(data), _PIECE):
            if at <= len(data) // 2 < at + _PIECE:
                self._half_sent(header)
            piece = data[at : at + _PIECE]
            digest.update(piece)
            out.sendall(piece)
        out.sendall(digest.digest())

    def _receive_all(self) -> None:
        came = self._accepted()
        offer = _take(came)
        lender = None if offer is None else _lender(decode(Offer, offer))
        try:
            came.sendall(_RECEIVES if lender is None else _BORROWS)
            while True:
                header = decode(CopyHeader, _take(came))
                if lender is None:
                    self._receive(came, header)
                else:
                    self._receiver.lent(header, lender.copy(header.buffer, header.mark, header.num_bytes))
        finally:
            if lender is not None:
                lender.close()

    def _receive(self, came: socket.socket, header: CopyHeader) -> None:
        view, digest, at = self._receiver.room(header), xxh3_128(), 0
        while at < header.num_bytes:
            count = came.recv_into(view[at : min(at + _PIECE, header.num_bytes)])
            if count == 0:
                raise ConnectionError("the neighbour closed the connection")
            digest.update(view[at : at + count])
            at += count
        sent = _read(came, _DIGEST_BYTES)
        if digest.digest() != sent:
            raise ConnectionError(
                f"shard {header.copy.shard} of {header.copy.key} came with digest {digest.hexdigest()}, "
                f"it was sent with {sent.hex()}"
            )
        self._receiver.arrived(header)

    def _accepted(self) -> socket.socket:
        """The neighbour's connection; one that does not know the token, as of an older generation, is
        closed.
        """
        token = bytes.fromhex(self._own.token)
        while True:
            self._listener.settimeout(_LOOK_S)
            try:
                came, _ = self._listener.accept()
            except TimeoutError:
                if self._closed.is_set():
                    raise
                continue
            self._opened(came).settimeout(CONNECT_LIMIT_S)  # `close` wakes the reading
            with suppress(OSError):
                if secrets.compare_digest(_read(came, _TOKEN_BYTES), token):
                    came.settimeout(None)
                    return came
            with self._lock:
                self._sockets.remove(came)
            came.close()


def new_token() -> str:
    """A token for one generation of one rank."""
    return secrets.token_hex(_TOKEN_BYTES)


def _lender(offer: Offer) -> Lender | None:
    """None: its buffers cannot be opened here, as from another container of the machine."""
    try:
        return Lender(offer)
    except OSError as error:
        _log.info("memory points of a process of this machine are sent to this one: %s", error)
        return None


def _put(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _take(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return json.loads(_read(connection, length))


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        got = connection.recv(count - len(data))
        if not got:
            raise ConnectionError("the neighbour closed the connection")
        data += got
    return bytes(data)
