"""The process that writes a rank's part meets storage that fails, or stands still, at each of its calls in
turn: a save is committed whole or given up, and the next one is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from orchestrator.checkpoint.files import part_writer
from orchestrator.checkpoint.files.part_writer import (
    JobPart,
    PartCancelled,
    PartJob,
    PartWriter,
    PartWritten,
    perform,
)
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import StorageError
from orchestrator.planning.state.state_layout import Layout, flat_part, layout_of
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from tests.checkpoint.files.failing_writer import STANDS
from tests.checkpoint.files.samples import DTYPES, STATE, bytes_of, saved
from tests.checkpoint.samples import CONFIG, cursor, key
from tests.checkpoint.saves import read_state
from tests.storage.failing import How

LIMIT_S = 60.0
VICTIM = 1  # the rank whose writer's storage fails
HOWS = [how for how in How if how is not How.SLOW]
LAYOUTS = {"replicate": layout_of(2, 1), "shard": layout_of(3, None), "hsdp": layout_of(4, 2)}


def job_of(buffer: Path, layout: Layout, rank: int, at: StateKey) -> PartJob:
    """What a rank of this layout writes of the state of a step."""
    part = flat_part(list(STATE), layout, rank)
    memory = bytearray(part.num_bytes)
    for place in part.places:
        rows, width = place.rows, place.tensor.row_bytes
        data = bytes_of(place.tensor, at.step)[rows.start * width : rows.stop * width]
        memory[place.offset : place.offset + len(data)] = data
    buffer.write_bytes(memory)
    parts = [JobPart(place=each, dtype=DTYPES[each.tensor.itemsize]) for each in part.places if each.rows]
    return PartJob(point=at.point_name, layout=layout, rank=rank, parts=tuple(parts), buffer=str(buffer))


class Group:
    """Ranks that save; that of the victim has a process whose storage fails."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self.folder, self.layout = folder, layout
        self.store = RunStore(Storage(str(folder / "run")))
        self.writer = PartWriter(self.store.storage, lambda text: None, process_from_bytes=0)
        # while the victim's part is written; whether the save is wanted still
        self.meanwhile: Callable[[Future[PartWritten]], bool] = lambda done: True

    def save(self, at: StateKey) -> bool:
        """Whether it is committed; else it was given up, with a reason that says what to do."""
        written: list[PartWritten] = []
        for rank in range(self.layout.world_size):
            job = job_of(self.folder / f"buffer-{rank}", self.layout, rank, at)
            if rank != VICTIM:
                written.append(perform(self.store.storage, job))
                continue
            done = self.writer.write(job)
            wanted = self.meanwhile(done)
            error = done.exception(LIMIT_S)
            if not wanted:
                assert error is None or isinstance(error, PartCancelled), error
            elif error is None:
                written.append(done.result())
            else:
                assert isinstance(error, StorageError), error
                assert "; " in str(error), f"{error} does not say what to do"
        if len(written) < self.layout.world_size:
            return False
        votes = [self.vote(at, rank, part) for rank, part in enumerate(written)]
        return self.store.commit_point(votes, CONFIG, {"rule": "none"}, None).name == at.point_name

    def vote(self, at: StateKey, rank: int, part: PartWritten) -> Vote:
        return Vote(
            key=at,
            rank=rank,
            world_size=self.layout.world_size,
            cursor=cursor(at),
            optimizer_steps=at.step,
            files=(part.entry,),
            tensors=tuple(saved().values()) if rank == 0 else (),
            save_blocked_s=0.0,
            records=(),
            layout=(self.layout.num_shards, self.layout.num_replicas),
            sums=part.sums,
        )

    def require_sound(self, committed: list[StateKey]) -> None:
        names = self.store.point_names()
        assert names == [at.point_name for at in committed]
        for at in committed:
            assert self.store.verify_point(at.point_name) == []
            expected = {(each.group, each.name): bytes_of(each, at.step) for each in STATE}
            assert read_state(self.store, at.point_name) == expected


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(part_writer, "_WRITER", "tests.checkpoint.files.failing_writer")
    return monkeypatch


def save_twice(failing: pytest.MonkeyPatch, folder: Path, layout: Layout, call: int, how: How) -> bool:
    """A save in which that call fails, and one after it; whether there was such a call."""
    folder.mkdir()
    mark = folder / "mark"
    failing.setenv("FAILING_MARK", str(mark))
    failing.setenv("FAILING_CALL", str(call))
    failing.setenv("FAILING_HOW", how.name)
    group = Group(folder, layout)
    try:
        first = group.save(key(10))
        if not mark.exists():
            assert first, "a save is given up only where something failed"
            return False
        failing.setenv("FAILING_CALL", "0")
        assert group.save(key(20)), f"call {call}, {how.value}"
        group.require_sound([*([key(10)] if first else []), key(20)])
    finally:
        group.writer.close()
    return True


@pytest.mark.parametrize(
    ("layout", "hows"),
    [
        ("shard", [How.TORN, How.KILLS_TORN]),
        *(pytest.param(layout, HOWS, marks=pytest.mark.chaos) for layout in LAYOUTS),
    ],
)
def test_a_part_whose_storage_fails_at_any_call_is_given_up_and_the_next_one_is_whole(
    failing: pytest.MonkeyPatch, tmp_path: Path, layout: str, hows: list[How]
) -> None:
    for how in hows:
        call = 1
        while save_twice(failing, tmp_path / f"{how.name}-{call}", LAYOUTS[layout], call, how):
            call += 1
        assert call > 2, "the part is put, and its folder synced"


def save_slowly(
    failing: pytest.MonkeyPatch, folder: Path, layout: Layout, call: int, *, cancelled: bool
) -> bool:
    """A save in which the writer stands still in that call, is cancelled there or not, and goes on, and one
    after it; whether there was such a call.
    """
    folder.mkdir()
    for name in ("STANDS", "GO"):
        os.mkfifo(folder / name)
        failing.setenv(f"FAILING_{name}", str(folder / name))
    failing.setenv("FAILING_MARK", str(folder / "mark"))
    failing.setenv("FAILING_CALL", str(call))
    failing.setenv("FAILING_HOW", How.SLOW.name)
    group, stands = Group(folder, layout), os.open(folder / "STANDS", os.O_RDWR)
    slow = False

    def meanwhile(done: Future[PartWritten]) -> bool:
        nonlocal slow
        done.add_done_callback(lambda _: os.write(stands, b"done"))
        if slow or os.read(stands, 4) != STANDS:
            return True
        slow = True
        assert not done.done()
        assert group.store.point_names() == [], "nobody has heard of its part"
        if cancelled:
            group.writer.cancel()
        (folder / "GO").write_bytes(b"go")
        return not cancelled

    group.meanwhile = meanwhile
    try:
        first = group.save(key(10))
        assert first == (not (slow and cancelled))
        if slow:
            assert group.save(key(20)), f"call {call}"
            group.require_sound([*([key(10)] if first else []), key(20)])
    finally:
        group.writer.close()
        os.close(stands)
    return slow


@pytest.mark.parametrize(
    ("layout", "cancelled"),
    [
        ("hsdp", False),
        pytest.param("hsdp", True, marks=pytest.mark.chaos),
        *(
            pytest.param(layout, cancelled, marks=pytest.mark.chaos)
            for layout in ("replicate", "shard")
            for cancelled in (False, True)
        ),
    ],
)
def test_a_part_whose_storage_is_slow_at_any_call_is_whole_or_cancelled(
    failing: pytest.MonkeyPatch, tmp_path: Path, layout: str, cancelled: bool
) -> None:
    call = 1
    while save_slowly(failing, tmp_path / str(call), LAYOUTS[layout], call, cancelled=cancelled):
        call += 1
    assert call > 2, "the part is put, and its folder synced"
