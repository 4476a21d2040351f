"""A server of S3 for tests, and what stands before it: a proxy that loses requests and answers on purpose.

The server is moto's. The proxy passes each request on, or does to it what its rule says.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from orchestrator.storage.buckets import forget_buckets

# A number: refused with it. reset: the connection breaks before the request is heard. "... after": what was
# asked is done, and the answer is lost. cut: of the answer's body only a first part comes. silence: nothing
# comes. echo: refused as a signature would be, with a text that has all the headers.
Fault = Literal[
    "400",
    "403",
    "404",
    "409",
    "500",
    "501",
    "503",
    "reset",
    "silence",
    "echo",
    "cut",
    "500 after",
    "reset after",
    "silence after",
]
Rule = Callable[[str, str], Fault | None]
CLOUD = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "CLOUDSDK_")
_numbers = itertools.count()


FAULTS: tuple[Fault, ...] = ("500", "503", "reset", "500 after", "reset after")  # that are tried again


def no_fault(method: str, path: str) -> Fault | None:
    return None


@dataclass
class Proxy:
    """Where it listens, what it does next (method, path with its query -> fault), what it was asked, the
    headers of requests that it leaves out, and those that it does not know (501).
    """

    url: str = ""
    rule: Rule = no_fault
    asked: list[tuple[str, str]] = field(default_factory=list)
    forgets: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    over: threading.Event = field(default_factory=threading.Event)

    def one_in(self, fault: Fault, method: str, part: str = "", first: int = 1) -> None:
        """That fault meets the `first`-th request of this kind and no other; what was asked is forgotten."""
        seen = itertools.count(1)
        self.asked.clear()

        def rule(asked: str, path: str) -> Fault | None:
            return fault if asked == method and part in path and next(seen) == first else None

        self.rule = rule


class _Answering(MotoRequestHandler):
    # headers and body are written apart: the body would wait 40 ms for the client's acknowledgement
    disable_nagle_algorithm = True


@contextmanager
def moto() -> Iterator[str]:
    """The URL of a server of S3."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    # moto's own server lists a folder of its for every request, to find out that it is one for S3
    app, at_work = create_backend_app("s3"), threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Any:
        """moto looks whether there is an object, and creates it then: of two creates at once both succeed,
        which S3 rules out.
        """
        if length := environ.get("CONTENT_LENGTH"):  # a client may stand still while it sends
            environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
        with at_work:
            return app(environ, start_response)

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=_Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*server.server_address[:2])
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def proxy_before(url: str, speaks: Literal["s3", "gs"] = "s3") -> Iterator[Proxy]:
    """A proxy that passes all on until it is given a rule. `gs`: it speaks as
    Google Cloud Storage does.
    """
    proxy = Proxy()

    class Passing(_AsGoogle if speaks == "gs" else _Passing):  # type: ignore[misc]
        upstream, told = urlsplit(url).netloc, proxy

    class Server(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 512

        def handle_error(self, *_: object) -> None:
            """A client that went away, or was sent away."""

    with Server(("127.0.0.1", 0), Passing) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.over.set()
            server.shutdown()
            thread.join()


def reach(monkeypatch: pytest.MonkeyPatch, url: str, home: Path) -> None:
    """What a user sets to reach a server, and nothing of what this machine has."""
    for name in os.environ:
        if name.startswith(CLOUD):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    forget_buckets()


def bucket_name() -> str:
    """A name that no other bucket of this process has: all servers of `moto` share their buckets."""
    return f"bucket{next(_numbers)}"


def new_bucket(url: str, scheme: str = "s3") -> str:
    """The URI of a new bucket."""
    name = bucket_name()
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=30).close()
    return f"{scheme}://{name}"


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: str
    told: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.told.rule(self.command, self.path)
        self.told.asked.append((self.command, self.path))
        if any(name in self.headers for name in self.told.unknown):
            return self._refuse(501)
        if fault is not None and fault.isdecimal():
            return self._refuse(int(fault))
        if fault == "reset":
            return self._reset()
        if fault == "silence":
            return self._wait()
        if fault == "echo":
            return self._refuse(403, f"SignatureDoesNotMatch {self.path} {dict(self.headers.items())}")
        answer, data = self._ask(body)
        if fault == "500 after":
            return self._refuse(500)
        if fault == "reset after":
            return self._reset()
        if fault == "silence after":
            return self._wait()
        return self._answer(answer, data, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _ask(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        headers = {k: value for k, value in self.headers.items() if k.lower() not in self.told.forgets}
        return self._upstream(self.command, body, headers)

    def _upstream(self, method: str, body: bytes, headers: dict[str, str]) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(self.upstream, timeout=60)
        try:
            connection.request(method, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _answer(self, answer: HTTPResponse, data: bytes, cut: bool) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(self._name(name), value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self._reset()

    def _name(self, name: str) -> str:
        return name

    def _wait(self) -> None:
        self.told.over.wait()  # the client goes before
        self.close_connection = True

    def _refuse(self, status: int, message: str = "") -> None:
        data = f"<Error><Code>InternalError</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _reset(self) -> None:
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class _AsGoogle(_Passing):
    """The XML API of Google Cloud Storage, which is that of S3 under other names, but for what follows."""

    def _ask(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        headers = {name.lower().replace("x-goog-", "x-amz-"): value for name, value in self.headers.items()}
        if headers.pop("x-amz-if-generation-match", None) == "0":
            headers["if-none-match"] = "*"  # "generation 0" is an object that is not there
        if self.command == "DELETE" and "uploadId" not in self.path:
            found = self._upstream("HEAD", b"", {})
            if found[0].status == 404:  # it minds, where S3 does not
                return found
        return self._upstream(self.command, body, headers)

    def _name(self, name: str) -> str:
        return name.lower().replace("x-amz-", "x-goog-")
