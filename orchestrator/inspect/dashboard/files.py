"""The page's own files, read once, which a browser gets without a token. No request's path reaches a disk."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.responses import Response

_SHOWN = (".html", ".js", ".css", ".txt")
_YEAR = "public, max-age=31536000, immutable"  # a vendored file's name has its version


@dataclass(frozen=True, kw_only=True, slots=True)
class PageFile:
    """One file, plain and compressed; `tag` changes with its content."""

    kind: str
    plain: bytes
    packed: bytes
    tag: str
    cache: str


def page_files() -> Mapping[str, PageFile]:
    """All files of the page by the path under which they are served."""
    root = resources.files("orchestrator.inspect.dashboard") / "page"
    found = {f"/{name}": _read(name, file) for name, file in _walk(root, "")}
    return {**found, "/": found["/index.html"]}


def page_response(file: PageFile, headers: Headers) -> Response:
    """Answers with a file, or with the message that the browser's copy is current."""
    fixed = {"ETag": file.tag, "Cache-Control": file.cache, "Vary": "Accept-Encoding"}
    if file.tag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=fixed)
    if "gzip" in headers.get("accept-encoding", ""):
        fixed["Content-Encoding"] = "gzip"
        return Response(file.packed, media_type=file.kind, headers=fixed)
    return Response(file.plain, media_type=file.kind, headers=fixed)


def _walk(folder: Traversable, before: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _walk(entry, f"{before}{entry.name}/")
        elif entry.name.endswith(_SHOWN):
            found.append((before + entry.name, entry))
    return found


def _read(name: str, file: Traversable) -> PageFile:
    plain = file.read_bytes()
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return PageFile(
        kind="text/javascript" if name.endswith(".js") else kind,
        plain=plain,
        packed=gzip.compress(plain, 9, mtime=0),
        tag=f'"{hashlib.sha256(plain).hexdigest()[:16]}"',
        cache=_YEAR if name.startswith("vendor/") else "no-cache",
    )
