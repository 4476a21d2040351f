"""Access control: judges a request by its path, host, origin and token before anything else reads it.

Pure, except for the guard around the application, which answers refused requests and adds the headers of
every answer.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.inspect.dashboard.answers import Problem, error_response

MOST_BODY_BYTES = 64 << 10
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_NEW_LINK = "open the link that `orchestrator dashboard` has printed; each start of it makes a new one"


def new_token() -> str:
    """A secret for one server, 256 bits."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessRules:
    """The access rules of a server: `token` opens all but the `public` paths. `host` is the address that it
    is bound to.
    """

    token: str
    public: frozenset[str]
    host: str = "127.0.0.1"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    def admits_host(self, host: str) -> bool:
        """Whether a `Host` header names this server.

        A page of another site whose name was made to lead here (DNS rebinding) sends its own name. An address
        is no name. For a server that other machines can reach, it and the machine's names are accepted. The
        port is not checked: a tunnel has another.
        """
        name = _host_name(host)
        if is_loopback(name):
            return True
        return not self.is_local and (_is_address(name) or name in _own_names(self.host))


def refusal(door: AccessRules, path: str, headers: Mapping[str, str]) -> Problem | None:
    """Why a request is not answered; None if it is. `headers` have lower-case names."""
    host = headers.get("host", "")
    if not door.admits_host(host):
        return Problem(
            status=403,
            code="page.host",
            text=f"this server is not called {host[:100] or 'nothing'}",
            do="use the address in the link that `orchestrator dashboard` has printed",
        )
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return Problem(
            status=403,
            code="page.origin",
            text=f"the request comes from a page of {origin[:100]}, not from this server's",
            do=_NEW_LINK,
        )
    if path in door.public:
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not given:
        return Problem(status=401, code="page.no_token", text="the request has no token", do=_NEW_LINK)
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), door.token.encode()):
        text = "the token is not this server's"
        return Problem(status=401, code="page.wrong_token", text=text, do=_NEW_LINK)
    return None


def is_loopback(host: str) -> bool:
    """Whether an address or name can be reached only from this machine."""
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


class Guard:
    """The application behind the access rules. Every answer has the headers; a body beyond the limit is
    refused.
    """

    def __init__(self, app: ASGIApp, door: AccessRules) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # a websocket is closed without an answer

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = {name.lower(): value for name, value in Headers(scope=scope).items()}
        problem = refusal(self._door, scope["path"], headers)
        if problem is None:
            body, problem = await _body(headers, receive)
        if problem is not None:
            await error_response(problem)(scope, receive, with_headers)
            return
        await self._app(scope, _replayed(body, receive), with_headers)


async def _body(headers: Mapping[str, str], receive: Receive) -> tuple[bytes, Problem | None]:
    """Reads the body. Returns a problem if it is too large: then the rest of it is not read."""
    body, more = b"", "content-length" in headers or "transfer-encoding" in headers
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > MOST_BODY_BYTES:
            text = f"the body has more than {MOST_BODY_BYTES:,} bytes"
            return b"", Problem(status=413, code="page.body_too_large", text=text)
    return body, None


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def next_message() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message


def _host_name(host: str) -> str:
    """The host without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_names(host: str) -> frozenset[str]:
    return frozenset(name.lower() for name in (host, socket.gethostname(), socket.getfqdn()))
