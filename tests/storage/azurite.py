"""A server of Azure for tests, where `azurite-blob` is on the path (`npm install -g azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_ANY = "application/octet-stream"


@contextmanager
def azurite(folder: Path) -> Iterator[str]:
    """The URL of a server without a container; skips the test where there is none."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not on the path")
    process = subprocess.Popen(
        [program, "--blobPort", "0", "--location", str(folder), "--skipApiVersionCheck"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "successfully listens on" in line)
        # it says each request, and stands still while nobody reads that
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield line.split()[-1]
    finally:
        process.kill()  # asked to end, it waits for connections that clients keep open
        process.wait()


def connection_string(url: str) -> str:
    """What a user sets as AZURE_STORAGE_CONNECTION_STRING."""
    return f"AccountName=devstoreaccount1;AccountKey={KEY};BlobEndpoint={url}/devstoreaccount1;"


def make_container(url: str, name: str) -> None:
    """A container, for which the library has no call."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    what = "PUT" + "\n" * 5 + _ANY + "\n" * 7
    what += "".join(f"{key}:{value}\n" for key, value in sorted(headers.items()))
    what += f"/devstoreaccount1/devstoreaccount1/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(KEY), what.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(signed).decode()}"
    headers["Content-Type"] = _ANY
    request = urllib.request.Request(
        f"{url}/devstoreaccount1/{name}?restype=container", b"", headers, method="PUT"
    )
    urllib.request.urlopen(request, timeout=30).close()
