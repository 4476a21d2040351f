"""Content that is larger than what a process may hold of it: written from pieces and read into memory that is
there, in a folder and in a bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage
from tests.forked import FORKED
from tests.storage.servers import moto, new_bucket, reach

pytestmark = pytest.mark.xdist_group("forked")

PIECE = 4 << 20
NUM_PIECES = 40
# the parts under way to a bucket (4 of 8 MiB, and the one that is filled), and what the allocator keeps
ROOM = 100 << 20


def memory(field: str) -> int:
    """Bytes of this process's resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def pieces() -> Iterator[bytes]:
    for number in range(NUM_PIECES):
        yield bytes([number]) * PIECE


def write_and_read(root: str, environment: dict[str, str]) -> None:
    """In a process of its own, whose memory is measured."""
    os.environ.update(environment)
    storage = open_storage(root)
    storage.write("warm", b"x")
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    storage.put("large", pieces, NUM_PIECES * PIECE)
    grown = memory("VmHWM") - before
    assert grown < ROOM, f"writing took {grown >> 20} MiB"
    check(storage)


def check(storage: Storage) -> None:
    into = bytearray(NUM_PIECES * PIECE)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    assert storage.read_into("large", 0, memoryview(into)) == len(into)
    grown = memory("VmHWM") - before
    assert grown < ROOM, f"reading took {grown >> 20} MiB"
    for number in range(NUM_PIECES):
        assert into[number * PIECE : number * PIECE + 1] == bytes([number])
        assert into[(number + 1) * PIECE - 1 : (number + 1) * PIECE] == bytes([number])


def in_a_process(root: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = FORKED.Process(target=write_and_read, args=(root, environment))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_folder_takes_content_in_little_memory(tmp_path: Path) -> None:
    in_a_process(str(tmp_path / "run"))


@pytest.mark.chaos
def test_a_bucket_takes_content_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with moto() as url:
        reach(monkeypatch, url, tmp_path)
        in_a_process(f"{new_bucket(url)}/run")
