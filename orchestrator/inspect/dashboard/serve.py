"""Serves the dashboard on a socket until it is interrupted.

Requests are not logged: nothing that a browser sends is written anywhere.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from orchestrator.data.common.user_code import reading_only
from orchestrator.errors import RefusedError
from orchestrator.inspect.dashboard.app import make_app
from orchestrator.inspect.dashboard.auth import new_token
from orchestrator.inspect.dashboard.stream import EVERY_S
from orchestrator.storage.open import open_storage

_END_S = 2.0  # how long the end waits for unfinished answers


class _Server(uvicorn.Server):
    """A server that ends its streams before its own end."""

    def __init__(self, config: uvicorn.Config, closing: threading.Event) -> None:
        super().__init__(config)
        self._closing = closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server on a signal."""
        self._closing.set()
        super().handle_exit(sig, frame)

    def end(self) -> None:
        """Ends the server from another thread."""
        self._closing.set()
        self.should_exit = True


def serve(
    storage: str,
    host: str,
    port: int,
    announce: Callable[[str], None],
    until_eof: bool = False,
    every_s: float = EVERY_S,
) -> None:
    """Serves `storage` until Ctrl-C or SIGTERM.

    With `until_eof` it also ends when standard input ends, which happens with the process that started this
    one. `announce` gets the link, once the socket listens. A run that a page shows is read every `every_s`
    seconds. Raises `RefusedError` if there is no such folder, or the address cannot be taken, and as
    `open_storage`.
    """
    where = open_storage(storage)
    if where.folder is not None and not where.list("") and not where.folder.is_dir():
        raise RefusedError(
            f"{storage} is no folder; give the storage in which runs lie (run.storage), or one run's folder",
            code="storage.not_found",
        )
    shown = where if where.folder is None else where.beside(str(where.folder.resolve()))
    listening = _listen(host, port)
    token, closing = new_token(), threading.Event()
    config = uvicorn.Config(
        make_app(shown, token, host, closing=closing, every_s=every_s),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=int(_END_S),
    )
    server = _Server(config, closing)
    if until_eof:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    try:
        announce(link(host, listening.getsockname()[1], token))
        with reading_only():
            server.run(sockets=[listening])
    except KeyboardInterrupt:
        return  # that is how it is ended
    finally:
        listening.close()


def link(host: str, port: int, token: str) -> str:
    """The address of the page. The fragment does not leave the browser."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # noqa: S104  the user has asked for it
        name = socket.gethostname()
    return f"http://{name}:{port}/#token={token}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise RefusedError(
            f"the dashboard cannot listen on {host} port {port}: {error.strerror or error}; give another "
            "--port (0 chooses a free one) or --host",
            code="page.cannot_listen",
        ) from error


def _end_with_input(server: _Server) -> None:
    while sys.stdin and sys.stdin.buffer.read(1 << 10):
        pass
    server.end()
