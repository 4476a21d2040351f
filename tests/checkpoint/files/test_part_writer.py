"""A rank's parts are written by a process beside it: real ones, which are killed, stopped and cancelled."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.checkpoint.files import part_writer
from orchestrator.checkpoint.files.part_writer import (
    MappedBuffer,
    PartCancelled,
    PartJob,
    PartWriter,
    perform,
    shared_path,
)
from orchestrator.errors import StorageError
from orchestrator.storage.files import Storage
from tests.checkpoint.files.samples import POINT, job_of
from tests.processes import ended
from tests.raising import raises

LIMIT_S = 60


class Rank:
    """A writer, what it said, and jobs for one point after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.jobs = folder, list[str](), 0
        self.storage = Storage(str(folder / "run"))
        self.writer = PartWriter(self.storage, self.said.append, process_from_bytes=0)

    def job(self) -> PartJob:
        self.jobs += 1
        return job_of(self.folder / "buffer", point=f"{self.jobs:08d}-a0001-g0001")

    def write(self) -> None:
        self.writer.write(self.job()).result(LIMIT_S)

    def signal(self, number: int) -> None:
        assert self.writer.process_id is not None
        os.kill(self.writer.process_id, number)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.writer.close()


def test_the_process_writes_what_a_thread_writes(rank: Rank, tmp_path: Path) -> None:
    job = rank.job()
    written = rank.writer.write(job).result(LIMIT_S)
    assert rank.writer.process_id not in (None, os.getpid())
    here = Storage(str(tmp_path / "here"))
    assert perform(here, job) == written
    path = f"points/{job.point}/{written.entry.path}"
    assert here.read(path) == rank.storage.read(path)


def test_who_writes_is_seen_to_get_on_and_who_is_done_is_not(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_thread = PartWriter(rank.storage, rank.said.append)
    before = in_thread.progress
    in_thread.write(rank.job()).result(LIMIT_S)
    assert in_thread.progress > before
    assert in_thread.progress == in_thread.progress
    in_thread.close()
    # a process that says so at each piece
    monkeypatch.setattr(part_writer, "_WRITER", "tests.checkpoint.files.talkative_writer")
    before = rank.writer.progress
    rank.write()
    assert rank.writer.progress > before


def test_a_buffer_without_a_name_is_read_by_the_process(rank: Rank) -> None:
    job = rank.job()
    handle = os.memfd_create("buffer")
    os.write(handle, Path(job.buffer).read_bytes())
    written = [
        rank.writer.write(
            PartJob(point=point, layout=job.layout, rank=0, parts=job.parts, buffer=buffer)
        ).result(LIMIT_S)
        for point, buffer in ((POINT, shared_path(handle)), (job.point, job.buffer))
    ]
    os.close(handle)
    assert written[0].sums == written[1].sums


def test_a_buffer_stays_mapped_until_it_has_grown_or_is_another_one(tmp_path: Path) -> None:
    buffer, other, kept = tmp_path / "buffer", tmp_path / "other", MappedBuffer()
    buffer.write_bytes(b"one")
    first = kept.of(str(buffer))
    with buffer.open("r+b") as file:
        file.write(b"two")
    assert kept.of(str(buffer)) is first
    assert first == b"two"
    with buffer.open("ab") as file:
        file.write(b"three")
    assert kept.of(str(buffer)) == b"twothree"
    other.write_bytes(b"as large")
    other.replace(buffer)
    assert kept.of(str(buffer)) == b"as large"


def test_a_killed_process_fails_the_save_and_another_one_is_started(rank: Rank) -> None:
    rank.write()
    first = rank.writer.process_id
    rank.signal(signal.SIGSTOP)  # so that it is killed with a job at hand, wherever the two are
    answer = rank.writer.write(rank.job())
    rank.signal(signal.SIGKILL)
    with raises(StorageError, "point.writer_died", "signal 9"):
        answer.result(LIMIT_S)
    rank.write()
    assert rank.writer.process_id not in (None, first)
    assert rank.said == []


def wrong(job: PartJob) -> PartJob:
    """A job that no caller gives: the process ends by it."""
    parts = tuple(dataclasses.replace(part, dtype="uint8") for part in job.parts)
    return dataclasses.replace(job, parts=parts)


def test_after_three_deaths_in_a_row_a_thread_writes_and_it_is_said_once(rank: Rank) -> None:
    def die() -> None:
        with raises(StorageError, "point.writer_died", "exit code 1"):
            rank.writer.write(wrong(rank.job())).result(LIMIT_S)

    for num_deaths in (2, 2, 3):  # a part was written in between: these are not three in a row
        rank.write()
        assert rank.writer.process_id is not None
        assert rank.said == []
        for _ in range(num_deaths):
            die()
    (said,) = rank.said
    assert "died 3 times in a row" in said
    rank.write()
    assert rank.writer.process_id is None
    with pytest.raises(AssertionError):
        rank.writer.write(wrong(rank.job())).result(LIMIT_S)
    rank.write()
    assert len(rank.said) == 1


@contextmanager
def no_more_files() -> Iterator[None]:
    """Nothing more can be opened by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_that_cannot_be_started_costs_the_save_and_the_next_one_starts_it(rank: Rank) -> None:
    job = rank.job()
    with no_more_files(), raises(StorageError, "point.writer_not_started", "Too many open files"):
        rank.writer.write(job).result(LIMIT_S)
    rank.write()
    assert rank.writer.process_id is not None
    assert rank.said == []


def test_what_cannot_be_written_is_said_and_is_no_death(rank: Rank) -> None:
    job = rank.job()
    rank.writer.write(job).result(LIMIT_S)
    process = rank.writer.process_id
    with raises(StorageError, "storage.name_taken", "EEXIST"):
        rank.writer.write(job).result(LIMIT_S)
    short = rank.job()
    os.truncate(short.buffer, 100)
    with raises(StorageError, "internal.short_buffer", short.buffer, "100 bytes"):
        rank.writer.write(short).result(LIMIT_S)
    with raises(StorageError, "machine.no_shared_memory", "/nowhere"):
        rank.writer.write(dataclasses.replace(rank.job(), buffer="/nowhere")).result(LIMIT_S)
    rank.write()
    assert rank.writer.process_id == process


def test_cancelled_parts_are_not_written_and_the_next_ones_are(rank: Rank) -> None:
    rank.write()
    rank.signal(signal.SIGSTOP)
    jobs = [rank.job() for _ in range(3)]
    answers = [rank.writer.write(job) for job in jobs]
    rank.writer.cancel()
    after = rank.writer.write(rank.job())
    rank.signal(signal.SIGCONT)
    for job, answer in zip(jobs, answers, strict=True):
        with raises(PartCancelled, "point.part_cancelled"):
            answer.result(LIMIT_S)
        assert rank.storage.list(f"points/{job.point}/state") == []
    after.result(LIMIT_S)


def test_closing_ends_the_process_and_what_is_left(rank: Rank) -> None:
    rank.write()
    process = rank.writer.process_id
    assert process is not None
    handle = os.pidfd_open(process)
    rank.signal(signal.SIGSTOP)
    answers = [rank.writer.write(rank.job()) for _ in range(2)]
    closing = threading.Thread(target=rank.writer.close)
    closing.start()
    os.kill(process, signal.SIGCONT)
    closing.join(LIMIT_S)
    rank.writer.close()
    assert ended(handle)
    for answer in answers:
        assert isinstance(answer.exception(LIMIT_S), PartCancelled) or answer.result()


def test_closing_does_not_wait_for_a_process_that_stands_still(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "_CLOSE_S", 0.2)
    rank.write()
    assert rank.writer.process_id is not None
    handle = os.pidfd_open(rank.writer.process_id)
    rank.signal(signal.SIGSTOP)
    answer = rank.writer.write(rank.job())
    rank.writer.close()
    assert ended(handle)
    assert isinstance(answer.exception(LIMIT_S), StorageError | PartCancelled)


RANK = """
import sys
from pathlib import Path
from tests.checkpoint.files.test_part_writer import Rank
rank = Rank(Path(sys.argv[1]))
rank.write()
print(rank.writer.process_id, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("standing_still", [False, True])
def test_a_killed_rank_takes_its_writer_with_it(tmp_path: Path, standing_still: bool) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with rank:
        assert rank.stdout is not None
        process = int(rank.stdout.readline())
        handle = os.pidfd_open(process)
        if standing_still:  # it cannot notice by itself that its input has ended
            os.kill(process, signal.SIGSTOP)
        rank.kill()
    assert ended(handle)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_is_for_the_rank_alone(rank: Rank, number: int) -> None:
    rank.write()
    process = rank.writer.process_id
    assert process is not None
    assert os.getpgid(process) != os.getpgrp(), "Ctrl-C reaches the terminal's group"
    rank.signal(number)
    rank.write()
    assert rank.writer.process_id == process


def test_a_small_part_needs_no_process(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.writer.close()
    writer = PartWriter(rank.storage, rank.said.append)
    writer.write(rank.job()).result(LIMIT_S)
    assert writer.process_id is None
    writer.close()
