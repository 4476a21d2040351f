"""A package adds a kind of storage by an entry point, and a run lives there as in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ConfigError
from orchestrator.storage.open import above, is_bucket, open_storage, split
from tests.checkpoint.samples import key, write_point
from tests.raising import raises

PACKAGE = '''
from tests.storage.model_store import ModelBucket, ModelStore

BUCKET = ModelBucket()


class Shelf(ModelStore):
    def __init__(self, uri):
        super().__init__(BUCKET)
        self.place = uri.rstrip("/")

    @property
    def root(self):
        return self.place

    @root.setter
    def root(self, value):
        pass

    def beside(self, root):
        return Shelf(root)

    def within(self, limit_s):
        return self


def shelf(uri, sleep):
    return Shelf(uri)


def broken(uri, sleep):
    raise ValueError("no shelf here")


def nothing(uri, sleep):
    return 7
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "installed"
    about = folder / "shelves-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "shelves.py").write_text(PACKAGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
    kinds = "".join(f"{name} = shelves:{name}\n" for name in ("shelf", "broken", "nothing", "missing"))
    (about / "entry_points.txt").write_text(f"[orchestrator.storage]\n{kinds}")
    monkeypatch.syspath_prepend(str(folder))
    yield
    sys.modules.pop("shelves", None)


def test_a_run_lives_on_a_storage_that_a_package_adds(package: None) -> None:
    store = RunStore(open_storage("shelf://hall/runs/a"))
    assert store.storage.root == "shelf://hall/runs/a"
    assert store.storage.folder is None
    point = write_point(store, key(10))
    assert store.point_names() == [point.name]
    assert store.verify_point(point.name) == []
    assert store.storage.beside("shelf://hall/runs/b").root == "shelf://hall/runs/b"
    assert store.storage.beside("/tmp/c").folder is not None  # noqa: S108  only named
    assert is_bucket("shelf://hall/runs/a")
    assert split("shelf://hall/runs/a") == ("shelf://hall/runs", "a")
    assert above("shelf://hall/runs/a") == ("shelf://hall/runs", "shelf://hall")


@pytest.mark.parametrize(
    ("uri", "code", "value"),
    [
        ("broken://a/b", "user_code.storage_failed", "no shelf here"),
        ("missing://a/b", "user_code.storage_failed", "missing"),
        ("nothing://a/b", "user_code.no_storage", "put"),
        ("unknown://a/b", "config.storage_uri", "unknown://"),
    ],
)
def test_what_cannot_be_opened_is_named(package: None, uri: str, code: str, value: str) -> None:
    with raises(ConfigError, code, value):
        open_storage(uri)
