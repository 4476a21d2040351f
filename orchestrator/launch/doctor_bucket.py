"""What a bucket that would hold runs does and does not do: tried below its prefix, and judged.

It leaves nothing there. Clocks are not compared: nothing is decided by a bucket's, and one that is far from
this machine's refuses every request and says so.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.launch.doctor_check import Check, State
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join

REQUEST_S = 0.5  # a request that takes longer is said to be slow
_CREATORS = 8
_CONTENT = b"x" * 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFacts:
    """What was tried below a URI. `exclusive`: of several who create one name exactly one did; `refuses`: the
    server refuses the others, so that they need not agree; `listed`: a list shows at once what was written;
    `reads`: it gives back what was written; `deletes`: nothing of it is left; `request_s`: the slower of a
    write and a read of 4 KiB.
    """

    location: str
    exclusive: bool
    refuses: bool
    listed: bool
    reads: bool
    deletes: bool
    request_s: float


def try_bucket(storage: Storage) -> BucketFacts:
    """About 20 small requests; more where the server refuses no create. Raises `StorageError` with what to do
    if one is refused.
    """
    name = f".doctor-{secrets.token_hex(4)}"
    tried, times = storage.beside(join(storage.root, name)), list[float]()
    try:
        began = time.monotonic()
        tried.write("written", _CONTENT)
        times.append(time.monotonic() - began)
        began = time.monotonic()
        reads = tried.read("written") == _CONTENT
        times.append(time.monotonic() - began)
        with ThreadPoolExecutor(_CREATORS) as threads:
            texts = [b"%d" % number for number in range(_CREATORS)]
            created = list(threads.map(lambda text: tried.create("claim", text), texts))
        exclusive = sum(created) == 1 and not tried.create("claim", b"later")
        listed = tried.list("") == ["claim", "written"]
    finally:
        storage.delete_folder(name)
    return BucketFacts(
        location=storage.root,
        exclusive=exclusive,
        refuses=tried.creates_exclusively(),
        listed=listed,
        reads=reads,
        deletes=tried.list("") == [],
        request_s=max(times),
    )


def judge_bucket(found: BucketFacts) -> Iterator[Check]:
    """A check for each fact, in a fixed order."""
    yield Check(
        name="storage",
        state="ok" if found.reads else "bad",
        value=f"{found.location} can be written and read"
        if found.reads
        else f"{found.location} does not give back what was written",
        limit="writable",
        advice="" if found.reads else "take another store: a run could not be continued from it",
    )
    yield _judge_creates(found)
    yield Check(
        name="list after write",
        state="ok" if found.listed else "bad",
        value="shows what was written" if found.listed else "does not show what was written",
        limit="at once",
        advice=""
        if found.listed
        else "claims and points are found by lists, so a start could take an older one: take another store",
    )
    yield Check(
        name="delete",
        state="ok" if found.deletes else "warn",
        value="takes away" if found.deletes else "what was deleted is still listed",
        limit="at once",
        advice=""
        if found.deletes
        else "points that are let go would stay, and cost; allow deletion in the bucket's rules",
    )
    slow = found.request_s > REQUEST_S
    yield Check(
        name="request",
        state="warn" if slow else "ok",
        value=f"{found.request_s * 1000:.0f} ms",
        limit=f"at most {REQUEST_S * 1000:.0f} ms",
        advice="every claim and every flush of the journal takes some: take a bucket in this region"
        if slow
        else "",
    )


def _judge_creates(found: BucketFacts) -> Check:
    value, advice = "one of 8 created it", ""
    state: State = "ok"
    if not found.exclusive:
        value, state = "several created one name", "bad"
        advice = (
            "the store does not heed If-None-Match, and its lists come late, so two launches could work on "
            "one run: none is started there; take one that does, or a folder"
        )
    elif not found.refuses:
        value, state = "one of 8 created it, by agreement", "warn"
        advice = (
            "the store does not heed If-None-Match, so who claims a name first is agreed on by plain writes "
            "and lists: six requests instead of one, and safe as long as its lists show at once what was "
            "written"
        )
    return Check(name="exclusive create", state=state, value=value, limit="exactly one", advice=advice)
