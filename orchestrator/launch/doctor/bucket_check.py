"""Tests the capabilities of a bucket for runs below its prefix, and judges them.

It leaves nothing there. Clocks are not compared: no decision uses a bucket's clock, and a bucket whose clock
differs much from this machine's refuses every request with a message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.errors import NoConditionalCreateError
from orchestrator.launch.doctor.check import Check
from orchestrator.storage.buckets import no_conditional_create
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join

REQUEST_S = 0.5  # slower requests are reported
_CREATORS = 8
_CONTENT = b"x" * 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFacts:
    """The results of the tests below a URI.

    `exclusive`: of several creates of one name exactly one succeeded. `listed`: a list shows at once what was
    written. `reads`: it returns what was written. `deletes`: nothing is left. `request_s`: the slower of a
    write and a read of 4 KiB.
    """

    location: str
    exclusive: bool
    listed: bool
    reads: bool
    deletes: bool
    request_s: float


def try_bucket(storage: Storage) -> BucketFacts:
    """Runs the tests, with about 20 small requests. Raises `StorageError` with a remedy if one is refused."""
    name = f".doctor-{secrets.token_hex(4)}"
    tried, times = storage.beside(join(storage.root, name)), list[float]()
    try:
        began = time.monotonic()
        tried.write("written", _CONTENT)
        times.append(time.monotonic() - began)
        began = time.monotonic()
        reads = tried.read("written") == _CONTENT
        times.append(time.monotonic() - began)
        exclusive = _creates_once(tried, "claim")
        listed = tried.list("") == (["claim", "written"] if exclusive else ["written"])
    finally:
        storage.delete_folder(name)
    return BucketFacts(
        location=storage.root,
        exclusive=exclusive,
        listed=listed,
        reads=reads,
        deletes=tried.list("") == [],
        request_s=max(times),
    )


def _creates_once(storage: Storage, name: str) -> bool:
    """Whether exactly one of several concurrent creates of a name succeeds, and a later one does not."""
    try:
        with ThreadPoolExecutor(_CREATORS) as threads:
            texts = [b"%d" % number for number in range(_CREATORS)]
            created = list(threads.map(lambda text: storage.create(name, text), texts))
        if sum(created) == 1 and not storage.create(name, b"later"):
            return True
    except NoConditionalCreateError:
        pass
    storage.delete(name)
    return False


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
    return Check(
        name="exclusive create",
        state="ok" if found.exclusive else "bad",
        value=f"one of {_CREATORS} created it" if found.exclusive else "several created one name",
        limit="exactly one",
        advice="" if found.exclusive else f"no run starts there: {no_conditional_create(found.location)}",
    )
