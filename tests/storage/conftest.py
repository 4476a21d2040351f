"""A server of S3 behind a proxy in which requests fail as a test says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.servers import Proxy, moto, no_fault, proxy_before, reach


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with moto() as url, proxy_before(url) as proxy:
        yield proxy


@pytest.fixture
def proxy(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """That of the module, without faults, and how a user reaches it."""
    server.rule, server.forgets, server.unknown = no_fault, (), ()
    reach(monkeypatch, server.url, tmp_path)
    yield server
    server.rule, server.forgets, server.unknown = no_fault, (), ()
