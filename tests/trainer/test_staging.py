"""The staging buffer: what was copied is what lies in it, its memory is reused, and the source is free again
when it is read and not before."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchestrator.errors import StorageError
from orchestrator.trainer.saving.staging import BriefThread, StagingBuffer
from orchestrator.trainer.weights.state_tensors import tensor_bytes
from tests.devices import CPU, DEVICES
from tests.raising import raises
from tests.trainer.staged import content, placed

LIMIT_S = 60.0


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where what is staged lies."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def buffer(device: torch.device) -> Iterator[StagingBuffer]:
    made = StagingBuffer(device)
    yield made
    made.close()


def nothing() -> None:
    """No fault."""


def waiting(event: threading.Event) -> Callable[[], None]:
    """What waits for it."""

    def wait() -> None:
        assert event.wait(LIMIT_S)

    return wait


def stage(buffer: StagingBuffer, tensors: list[Tensor]) -> None:
    copies = placed(tensors)
    buffer.reserve(copies[-1][0].offset + copies[-1][0].num_bytes)
    staging = buffer.stage(copies, nothing, nothing)
    staging.wait()
    staging.done.result(LIMIT_S)
    assert content(buffer, copies) == [bytes(tensor_bytes(tensor.cpu())) for tensor in tensors]


def test_every_type_and_form_is_copied_bit_by_bit(buffer: StagingBuffer, device: torch.device) -> None:
    torch.manual_seed(0)
    floats = torch.randn(7, 5)
    tensors = [
        floats,
        floats.to(torch.bfloat16),
        torch.tensor(12345),
        floats > 0,
        torch.arange(6, dtype=torch.uint8),
        torch.full((3,), float("nan")),
    ]
    stage(buffer, [*(tensor.to(device) for tensor in tensors), floats.to(device).t()])


def test_the_memory_is_the_same_for_every_save_and_grows_only_for_a_larger_part(
    buffer: StagingBuffer, device: torch.device
) -> None:
    path = buffer.path
    for seed in range(5):
        torch.manual_seed(seed)
        stage(buffer, [torch.randn(1000, device=device)])
        assert (buffer.path, buffer.num_bytes) == (path, 4000)
    stage(buffer, [torch.randn(10, device=device)])
    assert buffer.num_bytes == 4000
    stage(buffer, [torch.randn(3000, device=device), torch.randn(5, device=device)])
    assert buffer.num_bytes == 12_032 + 20
    assert Path(path).stat().st_size == buffer.num_bytes


def test_who_writes_to_the_source_waits_for_the_copy_and_not_for_what_follows(
    buffer: StagingBuffer, device: torch.device
) -> None:
    begins, goes_on = threading.Event(), threading.Event()
    source = torch.zeros(1000, device=device)
    copies = placed([source])
    buffer.reserve(4000)
    staging = buffer.stage(copies, waiting(begins), waiting(goes_on))

    def step() -> None:
        staging.wait()
        source.fill_(1.0)

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not staging.read.is_set(), "the copy has not begun"
    begins.set()
    stepping.join(LIMIT_S)
    assert float(source[0]) == 1.0
    assert not staging.done.done(), "what follows the copy has not ended"
    goes_on.set()
    staging.done.result(LIMIT_S)
    assert content(buffer, copies) == [bytes(4000)]


@contextmanager
def no_more_memory() -> Iterator[None]:
    """Nothing large can be mapped by this process any more."""
    (size,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmSize")]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(size.split()[1]) + (16 << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("device", [CPU])
def test_where_there_was_no_room_that_save_fails_and_the_next_one_has_it(buffer: StagingBuffer) -> None:
    stage(buffer, [torch.zeros(4)])
    large = [torch.ones(16 << 20)]
    copies = placed(large)
    with no_more_memory():
        buffer.reserve(64 << 20)
        staging = buffer.stage(copies, nothing, nothing)
        staging.wait()
        with raises(StorageError, "machine.shared_memory", "67108864 bytes"):
            staging.done.result(LIMIT_S)
    stage(buffer, large)


def test_a_copy_that_fails_says_so_and_keeps_nobody_waiting(buffer: StagingBuffer) -> None:
    class NoMemoryError(RuntimeError):
        pass

    def fail() -> None:
        raise NoMemoryError

    buffer.reserve(64)
    staging = buffer.stage(placed([torch.zeros(4)]), fail, nothing)
    staging.wait()
    with pytest.raises(NoMemoryError):
        staging.done.result(LIMIT_S)
    stage(buffer, [torch.ones(4)])


def test_calls_run_in_their_order_in_a_thread_that_ends_with_the_last_one() -> None:
    thread, found, may_end = BriefThread("brief"), list[int](), threading.Event()

    def waits() -> None:
        found.append(1)
        assert may_end.wait(LIMIT_S)

    def fails() -> None:
        found.append(2)
        raise ValueError("a call")

    first = thread.submit(waits)
    second, third = thread.submit(fails), thread.submit(found.append, 3)
    may_end.set()
    third.result(LIMIT_S)
    assert found == [1, 2, 3]
    assert first.result(LIMIT_S) is None
    assert isinstance(second.exception(LIMIT_S), ValueError)
    for each in threading.enumerate():
        if each.name == "brief":
            each.join(LIMIT_S)
            assert not each.is_alive()
    thread.submit(found.append, 4)
    thread.shutdown()
    assert found == [1, 2, 3, 4]
    with pytest.raises(RuntimeError):
        thread.submit(found.append, 5)
