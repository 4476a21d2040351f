"""Sends copies of memory points between neighbours, over their own sockets or in shared memory.

A link sends this rank's copies to its keeper, and receives the copies that are kept here for another rank.
There is one link per generation, with two threads. If both ranks are on one machine, only the location of the
copy is sent: the copy is lent, and stays in its owner's shared memory. The memory outlives the owner while
another process has it open.

Lending copies nothing. Before an owner writes to a buffer again, it changes the buffer's mark, which is also
in shared memory. A lent copy is valid as long as the mark is unchanged.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from xxhash import xxh3_128

from orchestrator.checkpoint.files.part_writer import shared_path
from orchestrator.json_form import decode, encode
from orchestrator.records.membership import HeldShard
from orchestrator.records.steps import StateKey

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("!I")
_BORROWS, _RECEIVES = b"b", b"r"  # a keeper's reply to an offer
_TOKEN_BYTES, _DIGEST_BYTES = 16, 16
_PIECE = 4 << 20  # bytes of one send or receive; the GIL is released meanwhile
CONNECT_LIMIT_S = 60.0  # total time to connect to a neighbour
_TRY_S = 5.0  # timeout of each attempt
_LOOK_S = 0.2  # interval in which a thread that waits for a connection checks whether the link is closed


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyHeader:
    """The header that precedes the bytes of a copy.

    `keep` is the memory point that the sender knows to be whole on every rank. The receiver may not know this
    yet, and must not overwrite it. `buffer` and `mark` locate a copy that is lent; no bytes follow then.
    """

    copy: HeldShard
    keep: StateKey | None
    num_bytes: int
    buffer: int
    mark: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """The address that a rank listens on, and the token that a peer must send first."""

    host: str
    port: int
    token: str

    def to_json(self) -> str:
        """Encodes the address for the group's store."""
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> Address:
        """Decodes the output of `to_json`."""
        return decode(cls, json.loads(text))


class Receiver(Protocol):
    """Handles the copies that a link receives. Called in the link's thread."""

    def room(self, header: CopyHeader) -> memoryview:
        """Returns memory for the bytes of a copy. Its old contents are given up."""

    def arrived(self, header: CopyHeader) -> None:
        """All bytes have arrived, and their digest equals the sender's."""

    def lent(self, header: CopyHeader, copy: LentCopy) -> None:
        """The whole copy is in its owner's buffer. The receiver must close it."""


class NeighbourLink:
    """Sends this rank's copies to `keeper` and receives those of one other rank, until `close`.

    After a failure nothing arrives any more; `failure` has the reason. `offer` describes the buffers that the
    copies are in, for a keeper on this machine (None: it is on another). If the keeper cannot open them, the
    bytes are sent.

    Each sent copy is followed by the xxh3_128 digest of its bytes. Both sides compute it, to detect
    accidental corruption.
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
        except RuntimeError:  # this process may start no more threads
            self.close()
            raise

    def send(self, header: CopyHeader, data: memoryview) -> None:
        """Queues a copy for sending. `data` must not change until the next copy was sent, or `close`."""
        self._jobs.put((header, data))

    def close(self) -> None:
        """Ends both threads, at any point. Afterwards they read and write nothing."""
        with self._lock:
            self._closed.set()
            sockets = list(self._sockets)
        self._jobs.put(None)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes a thread that blocks on the socket
        for thread in self._threads:
            thread.join()
        for each in sockets:
            each.close()

    # ------------------------------------------------------------------------------ the two threads
    def _guarded(self, name: str, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001  the owner reads it in `failure`
            if not self._closed.is_set():
                self.failure = self.failure or f"{name}: {type(error).__name__}: {error}"
            with self._lock:
                for each in self._sockets:
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)  # the neighbours detect it, too

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
        """Accepts the neighbour's connection.

        Connections without the token, such as those of an older generation, are closed.
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
            self._opened(came).settimeout(CONNECT_LIMIT_S)  # `close` wakes a blocked read
            with suppress(OSError):
                if secrets.compare_digest(_read(came, _TOKEN_BYTES), token):
                    came.settimeout(None)
                    return came
            with self._lock:
                self._sockets.remove(came)
            came.close()


def new_token() -> str:
    """Creates a token for one generation of one rank."""
    return secrets.token_hex(_TOKEN_BYTES)


def _lender(offer: Offer) -> Lender | None:
    """Opens the buffers of `offer`.

    None if that fails, for example from another container of the machine.
    """
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


# ----------------------------------------------------------------------------------------------- lent buffers
_LENDER_TOKEN_BYTES = 16
_MARK = struct.Struct("=Q")
_LENT_PIECE = 64 << 20  # bytes of one read; the GIL is released meanwhile


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The paths under which another process opens the marks and buffers of a process.

    Both processes have the same user and machine. `token` is the first bytes of the marks. It distinguishes
    them from another process's file of the same name.
    """

    marks: str
    buffers: tuple[str, ...]
    token: str


class Marks:
    """The owner's side: one number per buffer, in shared memory."""

    def __init__(self, buffers: Sequence[str]) -> None:
        self._handle = os.memfd_create("orchestrator-marks", os.MFD_CLOEXEC)
        token = secrets.token_hex(_LENDER_TOKEN_BYTES)
        os.pwrite(self._handle, bytes.fromhex(token) + bytes(_MARK.size * len(buffers)), 0)
        self.offer = Offer(marks=shared_path(self._handle), buffers=tuple(buffers), token=token)

    def renew(self, number: int) -> int:
        """Changes the mark of a buffer and returns the new one. Must be called before the buffer is written
        to.

        From then on, copies that were lent from the buffer are invalid in every process. The new mark
        identifies what is written next.
        """
        mark = _mark(self._handle, number) + 1
        os.pwrite(self._handle, _MARK.pack(mark), _place(number))
        return mark

    def close(self) -> None:
        """Closes the marks. Processes that have them open can still use lent copies."""
        os.close(self._handle)


class Lender:
    """A process of this machine that lends its buffers.

    Raises `OSError` if the buffers cannot be opened, or belong to another process.
    """

    def __init__(self, offer: Offer) -> None:
        self._handles: list[int] = []
        try:
            for path in (offer.marks, *offer.buffers):
                self._handles.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            if os.pread(self._handles[0], _LENDER_TOKEN_BYTES, 0) != bytes.fromhex(offer.token):
                raise OSError(f"{offer.marks} is not the file that was offered: it begins in another way")
        except OSError:
            self.close()
            raise

    def copy(self, number: int, mark: int, num_bytes: int) -> LentCopy:
        """Returns the copy that one of its buffers holds under this mark."""
        marks, buffer = self._handles[0], self._handles[1 + number]
        return LentCopy(os.dup(marks), os.dup(buffer), number, mark, num_bytes)

    def close(self) -> None:
        """Closes the handles. Copies stay valid."""
        while self._handles:
            os.close(self._handles.pop())


class LentCopy:
    """A copy in another process's buffer.

    It exists until that process writes to the buffer. If that process ends, the copy stays until `close`.
    """

    def __init__(self, marks: int, buffer: int, number: int, mark: int, num_bytes: int) -> None:
        self._marks, self._buffer = marks, buffer
        self._number, self._mark, self._num_bytes = number, mark, num_bytes

    @property
    def is_there(self) -> bool:
        """Whether its owner has not begun to overwrite it."""
        return _mark(self._marks, self._number) == self._mark

    def taken(self) -> Tensor | None:
        """Reads the copy into memory of this process, flat uint8.

        Returns None if the owner has begun to overwrite it, even during the read.
        """
        data = torch.empty(self._num_bytes, dtype=torch.uint8)
        view, at = memoryview(data.numpy()), 0  # type: ignore[arg-type]
        while at < self._num_bytes:
            count = os.preadv(self._buffer, [view[at : at + _LENT_PIECE]], at)
            if count == 0:
                return None  # the buffer is shorter than any lent copy
            at += count
        return data if self.is_there else None

    def close(self) -> None:
        """Closes its handles."""
        for handle in (self._marks, self._buffer):
            with suppress(OSError):
                os.close(handle)


def _place(number: int) -> int:
    return _LENDER_TOKEN_BYTES + _MARK.size * number


def _mark(handle: int, number: int) -> int:
    (found,) = _MARK.unpack(os.pread(handle, _MARK.size, _place(number)))
    return int(found)
