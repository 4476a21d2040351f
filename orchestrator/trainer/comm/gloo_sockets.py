"""Closes the connections of gloo process groups, so that another thread can interrupt blocked collectives.

gloo offers no way to interrupt a collective. If a peer loses power, the collective waits until its timeout,
because a dead machine closes no connection. gloo does notice a connection that is shut down locally, and
treats it as closed by the peer.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FDS, _FACTS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


class GlooSockets:
    """The connections of the groups that were created inside `watched`.

    Guarantee: no other connection of the process is ever touched.

    A group's connections are found through the epolls that were created with the group and that also watch a
    listening socket. Works on Linux only. On other systems no connections are found, and collectives wait
    until their timeout.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}  # file descriptor (which can be reused) -> inode of the socket
        self._shut = False

    @property
    def num_known(self) -> int:
        """The number of connections that would be shut down."""
        return len(self._known)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wraps the creation of a process group, in one thread. Its connections exist when the block ends."""
        before = _epolls()
        yield
        found: dict[int, int] = {}
        for epoll in _epolls() - before:
            found |= _connections(epoll)
        with self._lock:
            self._known |= found
            if self._shut:
                self._shut_all()

    def shut(self) -> None:
        """Shuts the connections down: collectives that wait on them, now or later, fail at once, here and at
        live peers.

        Can be called from any thread, at any time, and repeatedly.
        """
        with self._lock:
            self._shut = True
            self._shut_all()

    def forget(self) -> None:
        """Stops tracking the connections, because their groups are about to be destroyed."""
        with self._lock:
            self._known = {}

    def _shut_all(self) -> None:
        for fd, inode in self._known.items():
            with _copied(fd) as connection:
                if connection is not None and _inode(connection) == inode:
                    with suppress(OSError):  # the peer closed it first
                        connection.shutdown(socket.SHUT_RDWR)


def _epolls() -> set[int]:
    found = set()
    with suppress(FileNotFoundError):
        for entry in _FDS.iterdir():
            with suppress(FileNotFoundError):
                if "eventpoll" in str(entry.readlink()):
                    found.add(int(entry.name))
    return found


def _connections(epoll: int) -> dict[int, int]:
    """Maps file descriptor to inode for each connection that `epoll` watches.

    Empty if it watches no listener.
    """
    listens, found = False, dict[int, int]()
    try:
        facts = (_FACTS / str(epoll)).read_text()
    except FileNotFoundError:
        return {}  # it belonged to another thread, which has closed it
    for fd in re.findall(r"^tfd:\s*(\d+)", facts, re.MULTILINE):
        with _copied(int(fd)) as one:
            if one is None:
                continue  # gloo also watches a pipe, to wake its thread
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listens = True
            else:
                found[int(fd)] = _inode(one)
    return found if listens else {}


@contextmanager
def _copied(fd: int) -> Iterator[socket.socket | None]:
    """Yields the socket behind `fd` under a new descriptor, or None if `fd` is not a socket.

    The socket behind the new descriptor cannot change between a check and an action.
    """
    try:
        own = os.dup(fd)
    except OSError:
        yield None
        return
    if not stat.S_ISSOCK(os.fstat(own).st_mode):
        os.close(own)
        yield None
        return
    with socket.socket(fileno=own) as found:
        yield found


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino
