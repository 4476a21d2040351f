"""Several requests at a time: bounded, whole in the end, and over when the reading is over."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from orchestrator.checkpoint.files import reading
from orchestrator.checkpoint.files.manifest import PartDamage
from orchestrator.checkpoint.files.reading import BytesTarget, FilePiece, PieceFetcher
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage
from tests.storage.servers import moto, new_bucket, proxy_before, reach

LIMIT_S = 120
FILE = "state/part"
CONTENT = bytes(range(1, 251)) * 40
AT_A_TIME = 3


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "REQUEST_BYTES", 400)
    monkeypatch.setattr(reading, "_DIRECT_BYTES", 100)


def pieces_of(storage: Storage, memory: bytearray) -> list[FilePiece]:
    """A file of pieces that come in many ways: several in one request, one in several, straight and not, with
    some bytes wanted and with none.
    """
    storage.put(f"run/{FILE}", lambda: iter([CONTENT]), len(CONTENT))
    found, start = [], 0
    for number in range(60):
        size = (50, 90, 1000, 10, 250, 0, 401)[number % 7]
        data = CONTENT[start : start + size]
        skip, length = [(0, size), (size // 3, size // 2), (0, 0)][number % 3]
        whole = FilePiece(
            file=FILE, tensor=("model", "w"), start=start, num_bytes=size, digest=blake3(data).hexdigest()
        )
        if length:
            target = BytesTarget(memoryview(memory)[start : start + size])
            whole = dataclasses.replace(whole, target=target, skip=skip, length=length, at=skip)
        found.append(whole)
        start += size
    return [piece for piece in found if piece.start + piece.num_bytes <= len(CONTENT)]


def expected_of(found: list[FilePiece]) -> bytes:
    memory = bytearray(len(CONTENT))
    for piece in found:
        begin = piece.start + piece.skip
        memory[begin : begin + piece.length] = CONTENT[begin : begin + piece.length]
    return bytes(memory)


def fetch(storage: Storage, found: list[FilePiece], at_a_time: int = AT_A_TIME) -> list[memoryview]:
    """The buffers that it took."""
    buffers: list[memoryview] = []

    def buffer(num_bytes: int) -> memoryview:
        buffers.append(reading.new_buffer(num_bytes))
        return buffers[-1]

    PieceFetcher(storage, "run", buffer, at_a_time).fetch(found)
    return buffers


@pytest.mark.parametrize("at_a_time", [1, 2, 3, 8])
def test_any_number_of_requests_gives_the_same_bytes_in_so_many_buffers(tmp_path, at_a_time):
    storage, memory = Storage(str(tmp_path)), bytearray(len(CONTENT))
    found = pieces_of(storage, memory)
    buffers = fetch(storage, found, at_a_time)
    assert memory == expected_of(found)
    assert 0 < len(buffers) <= at_a_time
    assert {len(buffer) for buffer in buffers} == {400}


@pytest.fixture
def proxied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Storage, object]]:
    with moto() as url, proxy_before(url) as proxy:
        reach(monkeypatch, proxy.url, tmp_path)
        yield open_storage(f"{new_bucket(url)}/runs"), proxy


def test_a_bucket_is_asked_so_many_things_at_a_time(proxied):
    storage, proxy = proxied
    memory = bytearray(len(CONTENT))
    found = pieces_of(storage, memory)
    # as many answers as may be under way wait for one another; the last ones are fewer
    together, running, most = threading.Barrier(AT_A_TIME), [0], [0]
    lock, met = threading.Lock(), threading.Event()

    def rule(method: str, path: str) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        if not met.is_set():
            together.wait(LIMIT_S)
            met.set()
        with lock:
            running[0] -= 1

    proxy.rule = rule
    fetch(storage, found)
    assert memory == expected_of(found)
    assert met.is_set()
    assert most[0] == AT_A_TIME


@pytest.mark.parametrize("number", [0, 7, 20])
def test_damage_is_found_whatever_else_is_under_way(tmp_path, number):
    storage, memory = Storage(str(tmp_path)), bytearray(len(CONTENT))
    found = pieces_of(storage, memory)
    found[number] = dataclasses.replace(found[number], digest="0" * 64)
    with pytest.raises(PartDamage) as damage:
        fetch(storage, found)
    assert damage.value.file == found[number].file
    for value in (" model/w ", f" byte {found[number].start} ", found[number].digest):
        assert value in damage.value.reason


class LateAnswers(Storage):
    """The first answer is a failure, and comes when another request is under way, whose answer is later."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.other_asked, self.failed, self.answered = (threading.Event() for _ in range(3))

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        if start == 0:
            assert self.other_asked.wait(LIMIT_S)
            self.failed.set()
            raise FileNotFoundError
        self.other_asked.set()
        assert self.failed.wait(LIMIT_S)
        done = super().read_into(path, start, into)
        self.answered.set()
        return done


def test_nothing_is_written_any_more_when_a_failure_is_told(tmp_path):
    storage, memory = LateAnswers(str(tmp_path)), bytearray(len(CONTENT))
    with pytest.raises(PartDamage) as missing:
        fetch(storage, pieces_of(storage, memory))
    assert isinstance(missing.value.__cause__, FileNotFoundError)
    assert storage.answered.is_set(), "the answer that was under way was waited for"
    assert not any(thread.name.startswith("reading") for thread in threading.enumerate())
