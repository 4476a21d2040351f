"""The connections of gloo process groups, so that another thread can end what waits on them.

gloo has no way to be woken: a collective whose peer lost its power waits out its time-out, because a dead
machine closes no connection. It does notice a connection that is closed here, as if the peer had closed it.
It knows neither ranks nor members.
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
    """Those of the groups that were made inside `watched`. Guarantee: no other connection of the process is
    ever touched.

    A group's connections are those that an epoll watches which came with the group and watches a listening
    socket, too. Linux only: elsewhere none are found, and what waits keeps its time-out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}  # file descriptor (which may be used again): the socket's inode
        self._shut = False

    @property
    def num_known(self) -> int:
        """How many connections would be shut."""
        return len(self._known)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around the making of a process group, in one thread; its connections stand when it returns."""
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
        """Whatever waits on them, now or later, fails at once; so it does at the peers that live. May be
        called from any thread, at any time, and again.
        """
        with self._lock:
            self._shut = True
            self._shut_all()

    def forget(self) -> None:
        """The groups are about to be destroyed: their connections are nobody's business any more."""
        with self._lock:
            self._known = {}

    def _shut_all(self) -> None:
        for fd, inode in self._known.items():
            with _copied(fd) as connection:
                if connection is not None and _inode(connection) == inode:
                    with suppress(OSError):  # the peer was quicker
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
    """File descriptor and inode of each connection that `epoll` watches; none if it watches no listener."""
    listens, found = False, dict[int, int]()
    try:
        facts = (_FACTS / str(epoll)).read_text()
    except FileNotFoundError:
        return {}  # another thread's, and closed by now
    for fd in re.findall(r"^tfd:\s*(\d+)", facts, re.MULTILINE):
        with _copied(int(fd)) as one:
            if one is None:
                continue  # gloo also wakes its thread through a pipe
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listens = True
            else:
                found[int(fd)] = _inode(one)
    return found if listens else {}


@contextmanager
def _copied(fd: int) -> Iterator[socket.socket | None]:
    """The socket behind `fd`, None if it is none, under a descriptor of our own: what that leads to cannot
    change between a look and an act.
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
