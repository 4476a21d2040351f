"""What a bucket holds, and a client of the page of its runs."""

from __future__ import annotations

from fastapi.testclient import TestClient

from orchestrator.inspect.dashboard.app import make_app
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

TOKEN, HOST = "t" * 43, "http://127.0.0.1"


def contents(storage: Storage, folder: str = "") -> dict[str, bytes]:
    found = {}
    for each in storage.listed(folder):
        path = f"{folder}/{each.name}" if folder else each.name
        if each.facts is None and storage.folder is None:
            found |= contents(storage, path)
        else:
            found[path] = storage.read(path)
    return found


def client_of(location: str) -> TestClient:
    app = make_app(open_storage(location), TOKEN, clock=lambda: 2e9)
    return TestClient(app, base_url=HOST, headers={"Authorization": f"Bearer {TOKEN}"})
