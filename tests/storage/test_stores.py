"""What every store promises, asked of each kind: a folder on disk, one on NFS that two machines use (a model
of their caches), and a prefix of a bucket, of S3, of Google Cloud Storage, and of Azure (where its emulator
is on the path); and of the model that stands for a bucket in searches.
"""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, StorageError
from orchestrator.storage import object_store
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.object_store import PART_BYTES, ObjectStore
from orchestrator.storage.store import Store
from tests.raising import raises
from tests.storage.azurite import azurite, connection_string, make_container
from tests.storage.model_store import ModelBucket, ModelStore
from tests.storage.nfs_client import FromTwoMachines
from tests.storage.servers import moto, new_bucket, proxy_before, reach

KINDS = ("local", "nfs", "model", "s3", "gs", "az")

_containers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture(scope="module")
def gs(s3: str) -> Iterator[str]:
    with proxy_before(s3, "gs") as proxy:
        yield proxy.url


@pytest.fixture(scope="module")
def az(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite(tmp_path_factory.mktemp("azurite")) as url:
        yield url


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def new_root(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Store]:
    """Makes a store with nothing in it."""
    numbers = itertools.count()
    if kind == "local":
        return lambda: LocalStore(str(tmp_path / f"runs{next(numbers)}" / "a"))
    if kind == "nfs":
        return lambda: FromTwoMachines(str(tmp_path / f"runs{next(numbers)}" / "a"))
    if kind == "model":
        model = ModelBucket()
        return lambda: ModelStore(model, f"s3://model/runs{next(numbers)}/a")
    url = request.getfixturevalue(kind)
    reach(monkeypatch, url, tmp_path)
    if kind == "az":
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(url))
        name = f"container{next(_containers)}"
        make_container(url, name)
        bucket = f"az://{name}"
    else:
        bucket = new_bucket(url, kind)
    return lambda: ObjectStore(f"{bucket}/runs{next(numbers)}/a")


@pytest.fixture
def store(new_root: Callable[[], Store]) -> Store:
    return new_root()


def put(store: Store, path: str, data: bytes, *, exclusive: bool = False) -> bool:
    return store.put(path, lambda: (data,), len(data), exclusive=exclusive)


def content(store: Store, path: str, start: int = 0, num_bytes: int = 1 << 20) -> bytes:
    into = bytearray(b"\xff" * num_bytes)
    found = store.read(path, start, memoryview(into))
    assert into[found:] == b"\xff" * (num_bytes - found), "nothing is written after what was found"
    return bytes(into[:found])


def names(store: Store, folder: str) -> list[str]:
    return [found.name for found in store.list(folder)]


def test_what_is_put_is_read_from_any_place_and_never_beyond_its_end(store: Store) -> None:
    data = bytes(range(256)) * 3
    assert put(store, "a/b/c", data)
    store.sync("a/b")
    assert store.facts("a/b/c").size == len(data)
    for start in (0, 1, 255, len(data) - 1, len(data), len(data) + 5):
        for num_bytes in (0, 1, 300, 5000):
            assert content(store, "a/b/c", start, num_bytes) == data[start : start + num_bytes]


def test_bytes_are_read_into_the_memory_they_are_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_READ_BYTES", 1000)  # several requests
    storage, numbers = Storage.on(store), array("I", range(2000))
    storage.put("a/b", lambda: (numbers[:7], numbers[7:]), 8000)
    into = array("I", [7] * 1500)
    assert storage.read_into("a/b", 400, memoryview(into)) == 6000
    assert into == numbers[100:1600]
    assert storage.read_into("a/b", 4000, memoryview(into)) == 4000
    assert into[:1000] == numbers[1000:]
    assert storage.read_into("a/b", 8000, memoryview(into)) == 0
    with pytest.raises(FileNotFoundError):
        storage.read_into("a/c", 0, memoryview(into))


def test_a_bucket_has_no_file_that_grows(store: Store) -> None:
    if not isinstance(store, LocalStore):
        with raises(StorageError, "storage.no_append", f"{store.root}/x"):
            Storage.on(store).append("x")
    else:
        Storage.on(store).append("x").write(b"grows")
        assert content(store, "x") == b"grows"


def test_an_empty_object_is_there(store: Store) -> None:
    assert put(store, "empty", b"")
    assert put(store, "created", b"", exclusive=True)
    for name in ("empty", "created"):
        assert (content(store, name), store.facts(name).size) == (b"", 0)


def test_many_pieces_of_any_kind_are_one_object(store: Store) -> None:
    pieces = [os.urandom(3 << 20), bytearray(b"x" * 5), memoryview(os.urandom(PART_BYTES)), b"", b"end"]
    whole = b"".join(pieces)
    assert store.put("large", lambda: iter(pieces), len(whole))
    assert content(store, "large", 0, len(whole) + 1) == whole
    assert content(store, "large", PART_BYTES - 3, 7) == whole[PART_BYTES - 3 : PART_BYTES + 4]


def test_pieces_are_bytes_whatever_their_items_are(store: Store) -> None:
    numbers = memoryview(bytes(range(16))).cast("I")
    assert store.put("numbers", lambda: (numbers, numbers), 32)
    assert content(store, "numbers") == bytes(range(16)) * 2


@pytest.mark.quick(
    "az--1-8388618-False",
    "local-1-10-True",
    "model--1-10-False",
    "nfs--1-10-True",
    "gs--1-10-False",
    "s3-1-10-False",
)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("size", [10, PART_BYTES + 10])
@pytest.mark.parametrize("announced", [-1, 1])
def test_content_of_another_size_is_refused_and_nothing_is_published(
    store: Store, exclusive: bool, size: int, announced: int
) -> None:
    with raises(StorageError, "storage.changed_while_read", f"{size + announced} bytes", "/x"):
        store.put("x", lambda: (b"a" * 5, b"b" * (size - 5)), size + announced, exclusive=exclusive)
    assert names(store, "") == []
    assert put(store, "x", b"later", exclusive=exclusive)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("first", [10, PART_BYTES + 10])
def test_an_exception_in_the_middle_is_raised_and_nothing_is_published(
    store: Store, exclusive: bool, first: int
) -> None:
    class MiddleError(Exception):
        pass

    def pieces() -> Iterator[bytes]:
        yield b"a" * first
        raise MiddleError

    with pytest.raises(MiddleError):
        store.put("x", pieces, first + 10, exclusive=exclusive)
    assert names(store, "") == []


def test_a_created_name_is_taken_for_all_and_keeps_its_content(store: Store) -> None:
    other = pickle.loads(pickle.dumps(store))
    assert put(store, "claims/0001", b"first", exclusive=True)
    for asking in (store, other):
        assert not put(asking, "claims/0001", b"second", exclusive=True)
        assert not put(asking, "claims/0001", b"first", exclusive=True), (
            "equal content makes it nobody else's"
        )
    assert content(other, "claims/0001") == b"first"
    assert names(other, "claims") == ["0001"]


def test_a_name_that_was_put_is_taken_for_those_who_create(store: Store) -> None:
    put(store, "x", b"put")
    assert not put(store, "x", b"created", exclusive=True)
    assert content(store, "x") == b"put"


def test_a_put_of_a_taken_name_is_refused_or_replaces_all_of_it(store: Store) -> None:
    put(store, "x", b"first, and longer")
    if store.traits.refuses_taken:
        with raises(StorageError, "storage.name_taken", f"{store.root}/x"):
            put(store, "x", b"second")
        assert content(store, "x") == b"first, and longer"
    else:
        assert put(store, "x", b"second")
        assert content(store, "x") == b"second"


def test_of_many_that_create_a_name_exactly_one_wins(store: Store) -> None:
    winners = race(store, num_claims=5, num_starters=8)
    for name, won in winners.items():
        assert len(won) == 1, name
        assert content(store, name) == won[0]


def race(store: Store, num_claims: int, num_starters: int) -> dict[str, list[bytes]]:
    """By name, the contents whose creation was said to have won; all starters try all names in one order."""
    won: dict[str, list[bytes]] = {f"claims/{claim:04d}": [] for claim in range(num_claims)}
    barrier = threading.Barrier(num_starters)

    def start(number: int) -> None:
        mine = pickle.loads(pickle.dumps(store))
        for name, winners in won.items():
            barrier.wait()
            if put(mine, name, b"%d" % number, exclusive=True):
                winners.append(b"%d" % number)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(num_starters)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def test_what_is_absent_is_surely_so(store: Store) -> None:
    put(store, "a/file", b"x")
    for path in ("nothing", "no/folder", "a/file/below", "a"):
        with pytest.raises(FileNotFoundError):
            store.facts(path)
        with pytest.raises(FileNotFoundError):
            content(store, path)
        with pytest.raises(FileNotFoundError):
            content(store, path, num_bytes=0)
    assert names(store, "nothing") == []


def test_a_folder_lists_its_own_names_in_order(store: Store) -> None:
    for path in ("b/2", "b/10", "b/1", "b/deep/er/x", "bb/x", "c"):
        put(store, path, path.encode())
    assert names(store, "b") == ["1", "10", "2", "deep"]
    assert names(store, "") == ["b", "bb", "c"]
    assert names(store, "b/deep") == ["er"]
    found = {listed.name: listed.facts for listed in store.list("b")}
    assert found["deep"] is None
    expected = store.facts("b/10") if store.traits.lists_facts else None
    assert found["10"] == expected


def test_a_tag_follows_the_content(store: Store) -> None:
    put(store, "x", b"one")
    before = store.facts("x")
    assert before == store.facts("x")
    store.delete(["x"])
    put(store, "x", b"two")
    assert (store.facts("x").tag != before.tag) is (before.tag != "")


def test_names_are_kept_whatever_stands_in_them(store: Store) -> None:
    odd = ["a b", "a#b", "a%20b", "a%b", "a+b", "a:b", "a=b&c", "a~b", "é", "日本", "a'b\"c", "[a]"]
    if not store.root.startswith("az://"):  # it takes a backslash for a slash
        odd.append("a\\b")
    for name in odd:
        assert put(store, f"odd/{name}", name.encode(), exclusive=True)
    assert names(store, "odd") == sorted(odd)
    for name in odd:
        assert content(store, f"odd/{name}") == name.encode()
    store.delete([f"odd/{name}" for name in odd])
    assert names(store, "odd") == []


def test_deleting_takes_what_is_named_and_does_not_mind_what_is_absent(store: Store) -> None:
    for number in range(4):
        put(store, f"a/{number}", b"x")
    store.delete(["a/0", "a/nothing", "no/folder", "a/2"])
    store.delete(["a/0"])
    store.delete([])
    assert names(store, "a") == ["1", "3"]
    assert put(store, "a/0", b"again", exclusive=True), "a name that was freed can be created"


def test_deleting_a_folder_takes_all_below_it_and_nothing_beside_it(store: Store) -> None:
    for path in ("p/1/x", "p/1/y/z", "p/10", "p/1-a", "q"):
        put(store, path, b"x")
    store.delete_folder("p/1")
    store.delete_folder("p/1")
    store.delete_folder("nothing")
    assert names(store, "p") == ["1-a", "10"]
    store.delete_folder("q")
    assert names(store, "") == ["p"]


def test_an_object_of_another_root_is_copied_and_stays_when_that_goes(store: Store) -> None:
    other = store.beside(f"{os.path.dirname(store.root)}/b")
    put(other, "a/b", b"content" * 1000)
    assert store.copy(other, "a/b", "c/d")
    with pytest.raises(FileNotFoundError):
        store.copy(other, "a/none", "c/none")
    other.delete_folder("a")
    assert content(store, "c/d") == b"content" * 1000
    assert names(store, "c") == ["d"]


def test_stores_of_two_kinds_copy_nothing_between_them(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(monkeypatch, s3, tmp_path)
    local, remote = LocalStore(str(tmp_path)), ObjectStore(new_bucket(s3))
    for here, there in ((local, remote), (remote, local), (remote, ObjectStore(new_bucket(s3)))):
        put(there, "x", b"x")
        assert not here.copy(there, "x", "y")
        assert "y" not in names(here, "")


def test_roots_side_by_side_see_nothing_of_each_other(store: Store) -> None:
    longer = store.beside(f"{store.root}b")
    put(longer, "x", b"x")
    assert names(store, "") == []
    with pytest.raises(FileNotFoundError):
        store.facts("x")


def test_a_name_that_went_with_a_folder_of_that_name_can_be_created_anew(store: Store) -> None:
    if isinstance(store, LocalStore):
        return  # there a folder is no file
    for _ in range(2):
        assert put(store, "a", b"1", exclusive=True)
        store.delete_folder("a")
        assert names(store, "") == []


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "create", "delete", "delete_folder"]),
        st.sampled_from(["a", "b/x", "b/y", "b/c/x"]),
        st.binary(max_size=3),
    ),
    max_size=12,
)


def test_any_order_of_calls_leaves_what_a_dictionary_would(new_root: Callable[[], Store]) -> None:
    @settings(max_examples=15)
    @given(ACTS)
    def follows(acts: list[tuple[str, str, bytes]]) -> None:
        store, model = new_root(), dict[str, bytes]()
        for act, path, data in acts:
            if act == "delete":
                store.delete([path])
                model.pop(path, None)
            elif act == "delete_folder":
                folder = path.partition("/")[0]
                store.delete_folder(folder)
                for name in [name for name in model if name.partition("/")[0] == folder]:
                    del model[name]
            elif act == "create":
                assert put(store, path, data, exclusive=True) is (path not in model)
                model.setdefault(path, data)
            elif path not in model:
                put(store, path, data)
                model[path] = data
        assert {path: content(store, path) for path in model} == model
        top = {path.partition("/")[0] for path in model}
        # a folder on disk stays, empty, when its last file is deleted
        assert top <= set(names(store, "")) <= top | {"b"}

    follows()


def test_roots_that_are_none_are_refused() -> None:
    for uri in ("runs", "/runs", "ftp://host/run", "s3://", "file:///runs"):
        with raises(ConfigError, "config.storage_uri", f"{uri} ", "s3://", "gs://", "az://"):
            ObjectStore(uri)
    for uri in ("s3://bucket/a/../b", "s3://bucket/a//b", "s3://bucket/./a"):
        with raises(ConfigError, "config.storage_uri", f"{uri}: ", "prefix"):
            ObjectStore(uri)
    assert ObjectStore("s3://bucket").root == "s3://bucket"
    assert ObjectStore("s3://bucket/runs/").root == "s3://bucket/runs"
