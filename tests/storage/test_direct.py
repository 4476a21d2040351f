"""Large files on a disk, written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import StorageError
from orchestrator.storage import local_store
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import write_direct
from tests.raising import raises
from tests.storage.crashfs import ModelDisk

BUFFER_BYTES = 4 * 4096


@dataclass
class BlockDisk(ModelDisk):
    """Refuses direct writes that do not begin and end at its blocks, as a system does, and takes of a write
    no more than `takes` says next.
    """

    block_bytes: int = 4096
    takes: tuple[int, ...] = ()
    is_direct: bool = False
    direct_bytes: int = 0

    def direct(self, handle: int, on: bool) -> bool:
        self.is_direct = on
        return on

    def write(self, handle: int, data: memoryview) -> int:
        node, _ = self.handles[handle]
        if self.is_direct and (len(data) % self.block_bytes or len(node.data) % self.block_bytes):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if self.takes:
            data, self.takes = data[: self.takes[0]], self.takes[1:]
        self.direct_bytes += len(data) if self.is_direct else 0
        return super().write(handle, data)


@pytest.fixture(scope="module", autouse=True)
def small_buffer():
    """Files of some KB are as large to the code as those of a save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_store, "_BUFFER_BYTES", BUFFER_BYTES)
        patch.setattr(local_store, "_DIRECT_FROM_BYTES", 1)
        yield


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3 * BUFFER_BYTES), max_size=5),
    block_bytes=st.sampled_from([512, 4096, 8192, 1 << 16]),
    takes=st.lists(st.integers(1, BUFFER_BYTES), max_size=3),
)
def test_whatever_the_blocks_are_and_however_little_is_taken_the_file_has_all_bytes_in_order(
    sizes: list[int], block_bytes: int, takes: list[int]
) -> None:
    disk = BlockDisk(block_bytes=block_bytes, takes=tuple(takes))
    pieces = [os.urandom(size) for size in sizes]
    handle = disk.create("/file")
    write_direct(disk, handle, map(memoryview, pieces))
    assert disk.files()["/file"] == b"".join(pieces)
    if block_bytes <= 4096 and not takes:
        assert disk.direct_bytes == sum(sizes) // 4096 * 4096, "whole blocks go past the cache"


def test_a_disk_that_knows_no_direct_writes_gets_the_file_as_any_other() -> None:
    class Buffered(BlockDisk):
        def direct(self, handle: int, on: bool) -> bool:
            return False

    disk, content = Buffered(), os.urandom(3 * BUFFER_BYTES + 5)
    write_direct(disk, disk.create("/file"), [memoryview(content)])
    assert disk.files()["/file"] == content


def test_a_large_file_on_the_real_disk_is_written_past_the_cache_and_reads_as_it_was(tmp_path: Path) -> None:
    modes: list[bool] = []

    class Watched(OsDisk):
        def write(self, handle: int, data: memoryview) -> int:
            modes.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT))
            return super().write(handle, data)

    probe = OsDisk().create(str(tmp_path / "probe"))
    takes = OsDisk().direct(probe, on=True)
    os.close(probe)
    content = os.urandom(5 * BUFFER_BYTES + 4096 + 77)
    # pieces that begin anywhere in memory and in the file
    pieces = [memoryview(content)[:1001], memoryview(content)[1001:]]
    Storage(str(tmp_path), Watched()).put("folder/large", lambda: pieces, len(content))
    assert (tmp_path / "folder/large").read_bytes() == content
    assert modes == [takes] * 6 + [False], "five buffers and a block, then what is behind it"


def test_a_large_file_goes_past_the_cache_where_append_and_direct_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: Linux refuses both flags together there (`nfs_check_flags`)."""
    both, direct_writes, real = os.O_APPEND | os.O_DIRECT, list[bool](), fcntl.fcntl

    def on_nfs(handle: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & both == both:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, command, flags)

    class Watched(OsDisk):
        def write(self, handle: int, data: memoryview) -> int:
            direct_writes.append(bool(real(handle, fcntl.F_GETFL) & os.O_DIRECT))
            return super().write(handle, data)

    handle = OsDisk().create(str(tmp_path / "probe"))
    real(handle, fcntl.F_SETFL, os.O_DIRECT)  # the test needs a folder that takes such writes
    os.close(handle)
    monkeypatch.setattr(fcntl, "fcntl", on_nfs)
    content = os.urandom(3 * BUFFER_BYTES + 5)
    Storage(str(tmp_path), Watched()).write("large", content)
    assert (tmp_path / "large").read_bytes() == content
    assert direct_writes == [True] * 3 + [False]


def test_a_disk_that_is_full_in_the_middle_of_a_large_file_leaves_none_of_it(tmp_path: Path) -> None:
    class Full(OsDisk):
        def write(self, handle: int, data: memoryview) -> int:
            if os.fstat(handle).st_size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(handle, data)

    content = bytes(3 * BUFFER_BYTES)
    with raises(StorageError, "storage.full", "ENOSPC"):
        Storage(str(tmp_path), Full()).put("large", lambda: [content], len(content))
    assert not (tmp_path / "large").exists()
