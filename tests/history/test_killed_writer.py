"""A process that writes a journal to S3 is killed with SIGKILL at any of its requests, whether the server
carries that one out or not: what it was told to be durable is read back, in whole lines.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.storage.buckets import forget_buckets
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage
from tests.forked import FORKED
from tests.storage.servers import CLOUD, Fault, Proxy, new_bucket, no_fault, proxy_before, reach

pytestmark = pytest.mark.xdist_group("forked")

LINES = 8
SEGMENT_BYTES = 500  # about three lines
LIMIT_S = 60.0


def writing(uri: str, told: str, environment: dict[str, str]) -> None:
    """A line a flush; notes in `told` what is durable."""
    os.environ.update(environment)
    forget_buckets()
    journal = JournalWriter(open_storage(uri), 1, segment_bytes=SEGMENT_BYTES)
    with Path(told).open("ab", buffering=0) as file:
        for number in range(1, LINES + 1):
            journal.event(EventKind.LEFTOVER_REMOVED, point=f"{number:08d}-a0001-g0001")
            journal.flush()
            file.write(b"%d\n" % number)
    journal.close()


def killed_at(nth: int, fault: Fault | None, proxy: Proxy, uri: str, told: Path) -> bool:
    """A process that writes is killed when it asks for its `nth` change; the server hears of that one unless
    there is a `fault`. False: it came to its end before.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith((*CLOUD, "HOME"))}
    process = FORKED.Process(target=writing, args=(uri, str(told), environment))
    changes = itertools.count(1)

    def rule(method: str, path: str) -> Fault | None:
        if method in ("GET", "HEAD") or next(changes) != nth:
            return None
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        return fault

    proxy.rule = rule
    process.start()
    process.join(LIMIT_S)
    proxy.rule = no_fault
    assert process.exitcode in (0, -signal.SIGKILL), "it neither ended nor was killed"
    return process.exitcode != 0


def left(storage: Storage, told: Path) -> int:
    """How many lines are left, all of them whole, and no fewer than it was told."""
    for name in storage.list("journal/a0001"):
        assert storage.read(f"journal/a0001/{name}").endswith(b"}\n")
    found = read_journal(storage)
    points = [f"{number:08d}-a0001-g0001" for number in range(1, len(found.events) + 1)]
    assert [event.fields["point"] for event in found.events] == points
    assert found.torn == ()
    acknowledged = len(told.read_text().split()) if told.exists() else 0
    assert acknowledged <= len(points)
    return len(points)


@pytest.fixture
def proxy(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxy_before(s3_server) as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        yield proxy


@pytest.mark.quick("None-4")
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("fault", [None, "reset"])
def test_whatever_request_a_writer_dies_in_no_line_is_torn_and_none_lost(
    proxy: Proxy, tmp_path: Path, fault: Fault | None, every: int
) -> None:
    bucket, lines = new_bucket(proxy.url), list[int]()
    for nth in itertools.count(1, every):
        uri, told = f"{bucket}/{nth}/run", tmp_path / f"told{nth}"
        was_killed = killed_at(nth, fault, proxy, uri, told)
        lines.append(left(open_storage(uri), told))
        if not was_killed:
            break
    assert lines[-1] == LINES
    assert lines == sorted(lines)
    assert len(lines) > 12 / every
