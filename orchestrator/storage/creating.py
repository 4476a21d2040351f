"""Exclusive creates in a store that lets everybody write a name: `agreement`, carried out.

    attempts/0004.json                                       the object, put last
    attempts/.tmp-creates/0004.json/000001-<token>.asks      a ballot has begun; empty
    attempts/.tmp-creates/0004.json/000001-<token>.votes     its vote: an author's token, a newline, content

Entries stay as long as their object (two of them, where nobody else tried), for who comes later looks at
them. It knows a store's plain calls.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from orchestrator.errors import StorageError
from orchestrator.storage.agreement import ENDS, MOST_TRIES, Content, Creator, Stage
from orchestrator.storage.local_store import TEMPORARY
from orchestrator.storage.store import Store

ENTRIES = f"{TEMPORARY}creates"  # the folder; the name is none of a run's, also where its files are copied to
_LEAST_WAIT_S, _LONGEST_WAIT_S = 0.05, 10.0


def entries_of(path: str) -> str:
    """The folder of the entries about one name."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{ENTRIES}/{name}"


def create_by_agreement(
    store: Store, path: str, data: bytes, token: str, sleep: Callable[[float], None]
) -> bool:
    """`Store.put` of one exclusive object, by 6 plain calls where nobody else tries the name. `token`: of
    `0-9a-z`, never used before; `store.put` without `exclusive` must put whole objects, also over others.

    Raises `StorageError`: of the store, if its lists show later what was written, and if others try the same
    name at the same time again and again.
    """
    creator, folder, began = Creator.of(token, data), entries_of(path), time.monotonic()
    while creator.stage not in ENDS:
        if creator.stage is Stage.WAIT:
            sleep(_wait_s(creator.tries, time.monotonic() - began))
            creator, began = creator.done(), time.monotonic()
        else:
            creator = _next(creator, store, path, folder)
    if creator.stage is Stage.GIVEN_UP:
        raise StorageError(
            f"cannot create {store.root}/{path}: others tried to at the same time, {MOST_TRIES} times, and "
            "nobody has it yet; run again"
        )
    return creator.stage is Stage.CREATED


def _wait_s(tries: int, took_s: float) -> float:
    """For who met others in a try that took so long: at least as long, so that the one with the greatest
    ballot comes to its end meanwhile, which takes it about as many requests.
    """
    return min(_LONGEST_WAIT_S, max(_LEAST_WAIT_S, took_s) * random.uniform(1.0, 2.0**tries))  # noqa: S311


def _next(creator: Creator, store: Store, path: str, folder: str) -> Creator:
    match creator.stage:
        case Stage.LOOK:
            return creator.looked(_is_there(store, path))
        case Stage.LIST | Stage.LIST_AGAIN:
            return creator.listed([listed.name for listed in store.list(folder)])
        case Stage.READ:
            assert creator.adopts is not None, "a vote to read"
            return creator.read(Content.from_entry(_read(store, f"{folder}/{creator.adopts.votes}")))
        case Stage.BEGIN:
            _put(store, f"{folder}/{creator.ballot.asks}", b"")
        case Stage.VOTE:
            _put(store, f"{folder}/{creator.ballot.votes}", creator.content.to_entry())
        case Stage.PUBLISH:
            _put(store, path, creator.content.data)
    return creator.done()


def forget_entries(store: Store, paths: Sequence[str]) -> None:
    """For who deletes objects, before it does: the names may be created anew then. Not while somebody
    creates one of them: of two both might have.
    """
    folders = {path.rpartition("/")[0] for path in paths}
    for folder in folders:
        begun = {listed.name for listed in store.list(f"{folder}/{ENTRIES}" if folder else ENTRIES)}
        for path in paths:
            if path.rpartition("/")[0] == folder and path.rpartition("/")[2] in begun:
                store.delete_folder(entries_of(path))


def _put(store: Store, path: str, data: bytes) -> None:
    store.put(path, lambda: (data,), len(data))


def _read(store: Store, path: str) -> bytes:
    try:
        data = bytearray(store.facts(path).size)
        with memoryview(data) as view:
            store.read(path, 0, view)
    except FileNotFoundError as error:
        where = f"{store.root}/{path}"
        raise StorageError(f"{where} was deleted while its name was created; run again") from error
    return bytes(data)


def _is_there(store: Store, path: str) -> bool:
    try:
        store.facts(path)
    except FileNotFoundError:
        return False
    return True
