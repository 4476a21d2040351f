"""A server that speaks what of the hub's protocol reading a dataset takes, as the hub itself answers:
commits, trees by pages, `resolve` with the headers of large and small files, ranges from a host of its own.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_BYTES = 2000  # larger files lie in the storage of large files
PAGE = 3


@dataclass
class Hub:
    """What the server holds. `pushed` are commits, by dataset and branch the newest last."""

    url: str = ""
    storage: str = ""
    token: str = ""  # a dataset is private where one is set
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    fail: list[str] = field(default_factory=list)  # what the next answers of the storage are

    def push(self, repo: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A commit with these files and no others."""
        commit = hashlib.sha1(repr((repo, sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[repo, branch] = commit
        return commit

    def asked(self, word: str) -> list[str]:
        """The requests that have this word in their path, by method and path."""
        return [f"{method} {path}" for method, path, _ in self.requests if word in path]


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], host: str) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://{host}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Answer(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet: the next one would wait for the first one's receipt

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, b"{}", X_Error_Code=code, X_Error_Message=code)

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path, dict(self.headers)))
        self.reply()

    do_HEAD = do_GET

    def reply(self) -> None:
        raise NotImplementedError


class Storage(Answer):
    def reply(self) -> None:
        data = next(
            data
            for files in self.hub.commits.values()
            for data in files.values()
            if hashlib.sha256(data).hexdigest() in self.path
        )
        if self.hub.fail:
            what = self.hub.fail.pop(0)
            if what == "cut off":
                self.send_response(206)
                self.send_header("Content-Length", "500")
                self.end_headers()
                self.wfile.write(b"x" * 100)
                self.close_connection = True
                return
            self.answer(int(what))
            return
        self.send_range(data)

    def send_range(self, data: bytes) -> None:
        wanted = self.headers.get("Range")
        if wanted is None:
            self.answer(200, data)
            return
        start, stop = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        part = data[start : stop + 1]
        self.answer(206, part, Content_Range=f"bytes {start}-{start + len(part) - 1}/{len(data)}")


class Site(Storage):
    def reply(self) -> None:
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "api":
            del parts[0]
        if parts[0] != "datasets" or len(parts) < 5:  # the client asks for other things, too
            self.answer(404)
            return
        repo, what, *rest = "/".join(parts[1:3]), *parts[3:]
        if not any(name == repo for name, _ in self.hub.branches):
            self.refuse(401, "")  # as for one that is private
        elif self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.refuse(401, "RepoNotFound")
        elif rest[0] not in self.hub.commits and (repo, rest[0]) not in self.hub.branches:
            self.refuse(404, "RevisionNotFound")
        else:
            commit = self.hub.branches.get((repo, rest[0]), rest[0])
            key = "/".join(rest[1:])
            {"revision": self.revision, "tree": self.tree, "resolve": self.resolve}[what](
                repo, commit, key, parse_qs(url.query)
            )

    def revision(self, repo: str, commit: str, key: str, query: dict[str, list[str]]) -> None:
        self.answer(200, json.dumps({"id": repo, "sha": commit}).encode())

    def tree(self, repo: str, commit: str, key: str, query: dict[str, list[str]]) -> None:
        begin = f"{key}/" if key else ""
        files = {name: data for name, data in self.hub.commits[commit].items() if name.startswith(begin)}
        if key and not files:
            self.refuse(404, "EntryNotFound")
            return
        entries: list[dict[str, Any]] = []
        folders = {name.rpartition("/")[0] for name in files if "/" in name}
        entries += [{"type": "directory", "oid": "0" * 40, "size": 0, "path": p} for p in sorted(folders)]
        for name, data in sorted(files.items()):
            large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            lfs = {"lfs": large} if len(data) > LARGE_BYTES else {}
            oid = blob_id(data) if not lfs else "1" * 40
            entries.append({"type": "file", "oid": oid, "size": len(data), "path": name, **lfs})
        start = int(query.get("cursor", ["0"])[0])
        more = {}
        if start + PAGE < len(entries):
            address = f"{self.hub.url}/api/datasets/{repo}/tree/{commit}"
            address += f"/{quote(key, safe='')}" if key else ""
            more["Link"] = f'<{address}?recursive=true&cursor={start + PAGE}>; rel="next"'
        self.answer(200, json.dumps(entries[start : start + PAGE]).encode(), **more)

    def resolve(self, repo: str, commit: str, key: str, query: dict[str, list[str]]) -> None:
        data = self.hub.commits[commit].get(key)
        if data is None:
            self.refuse(404, "EntryNotFound")
        elif len(data) > LARGE_BYTES:
            digest = hashlib.sha256(data).hexdigest()
            self.answer(
                302,
                Location=f"{self.hub.storage}/large/{digest}?signed=yes",
                X_Repo_Commit=commit,
                X_Linked_Etag=f'"{digest}"',
                X_Linked_Size=str(len(data)),
            )
        elif self.command == "HEAD":
            self.send_response(200)
            for name, value in (("Content-Length", str(len(data))), ("ETag", f'"{blob_id(data)}"')):
                self.send_header(name, value)
            self.send_header("X-Repo-Commit", commit)
            self.end_headers()
        else:
            self.send_range(data)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub without datasets, and the host of its large files: two names of one machine."""
    hub = Hub()
    with ExitStack() as stack:
        for name, answers, host in (("url", Site, "127.0.0.1"), ("storage", Storage, "localhost")):
            bound = type(answers.__name__, (answers,), {"hub": hub})
            setattr(hub, name, stack.enter_context(serving(bound, host)))
        yield hub
