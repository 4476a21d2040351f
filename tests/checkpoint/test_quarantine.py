"""Marks on damaged points: who makes and lifts them, and what a quick look does with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    ClaimChecked,
    DeletePoints,
    GenerationFormed,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints, held_point, to_delete
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.records.points import Damage
from orchestrator.storage.files import Storage
from tests.checkpoint.commit_machines import committed, machine, run
from tests.checkpoint.retention_cases import NAMES, keep, points, verified_sets
from tests.checkpoint.samples import key, write_point
from tests.raising import raises

OLDER, NEWER = key(10).point_name, key(20).point_name


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run with two points."""
    made = RunStore(Storage(str(tmp_path)))
    for step in (10, 20):
        write_point(made, key(step))
    return made


def flip(store: RunStore, name: str) -> None:
    """Changes a bit of a point's tensors and back: no size shows it."""
    file = next(Path(store.storage.root, "points", name, "state").iterdir())
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def read(store: RunStore, name: str) -> bool:
    return store.note_reading(name, store.verify_point(name), "ann@host")


def test_a_quick_look_reads_all_bytes_of_a_marked_point_so_that_it_says_what_a_start_would(store) -> None:
    flip(store, NEWER)
    assert store.healthy_newest([OLDER, NEWER], fast=True)[0].name == NEWER, "sizes do not show it"
    assert read(store, NEWER)
    assert store.quarantined() == {NEWER}
    assert store.healthy_newest([OLDER, NEWER], fast=True) == store.healthy_newest([OLDER, NEWER])
    assert store.healthy_newest([OLDER, NEWER], fast=True)[0].name == OLDER
    flip(store, NEWER)  # restored
    assert store.healthy_newest([OLDER, NEWER], fast=True)[0].name == NEWER
    assert store.quarantined() == {NEWER}, "a look lifts nothing"


def test_a_mark_is_lifted_by_whoever_reads_every_byte_right(store) -> None:
    flip(store, NEWER)
    read(store, NEWER)
    flip(store, NEWER)  # restored
    assert read(store, NEWER)
    assert store.quarantined() == frozenset()
    assert not read(store, NEWER), "nothing is left to lift"


def test_a_mark_that_stands_keeps_saying_since_when(store) -> None:
    flip(store, NEWER)
    read(store, NEWER)
    before = store.read_mark(NEWER)
    assert not store.note_reading(NEWER, store.verify_point(NEWER), "bob@host")
    assert store.read_mark(NEWER) == before


@pytest.mark.parametrize("content", [b"", b"{}", b"rubbish", None])
def test_a_mark_that_is_not_as_it_was_written_is_one_nevertheless(store, content) -> None:
    flip(store, NEWER)
    read(store, NEWER)
    file = Path(store.storage.root, "quarantine", f"{NEWER}.json")
    file.write_bytes(file.read_bytes().replace(b"ann", b"bob") if content is None else content)
    mark = store.read_mark(NEWER)
    assert (mark.point, mark.by) == (NEWER, "")
    assert mark.damages[0].file == f"quarantine/{NEWER}.json"
    assert "with digest" in store.verify_point(NEWER, fast=True)[0].reason
    flip(store, NEWER)
    assert read(store, NEWER), "whoever finds it whole lifts it"
    assert store.read_mark(NEWER) is None


def test_a_mark_keeps_all_damages(store) -> None:
    damages = [Damage(point=NEWER, file=f"model/{n}", reason="is missing") for n in range(3)]
    store.note_reading(NEWER, damages, "ann@host")
    mark = store.read_mark(NEWER)
    assert (mark.point, mark.damages, mark.by) == (NEWER, tuple(damages), "ann@host")


def test_a_deleted_point_leaves_no_mark_and_one_without_commit_gets_none(store) -> None:
    flip(store, NEWER)
    read(store, NEWER)
    damages = store.verify_point(NEWER)
    store.delete_point(NEWER)
    assert not store.note_reading(NEWER, damages, "ann@host")
    assert store.quarantined() == frozenset()


def test_where_every_point_is_marked_a_quick_look_says_so(store) -> None:
    for name in (OLDER, NEWER):
        flip(store, name)
        read(store, name)
    with raises(ResumePointError, "point.none_healthy", " 2 ", OLDER, NEWER):
        store.healthy_newest([OLDER, NEWER], fast=True)


@given(points, keep, st.sampled_from([None, *NAMES]), verified_sets, points)
def test_retention_keeps_the_newest_whole_points_and_what_a_start_would_fall_back_to(
    names, keep_latest, pinned, verified, marked
) -> None:
    state = CommitMachine(
        attempt=1,
        kept=KeptPoints(
            keep_latest=keep_latest, names=tuple(names), pinned=pinned, verified=frozenset(verified)
        ),
        vote_limit_s=60,
    )
    state, _ = run(state, GenerationFormed(generation=1, parent=key(10)))
    asked = ClaimChecked(key=None, newer=False, quarantined=frozenset(marked))
    deletions = [action for action in run(state, asked)[1] if isinstance(action, DeletePoints)]
    gone = {name for action in deletions for name in action.names}
    whole = [name for name in names if name not in marked]
    assert not gone & {*marked}, "what is marked stays"
    assert not gone & {*whole[-keep_latest:]}, "and counts for nothing"
    if pinned in names:
        fallback = [name for name in whole if name <= pinned]
        if fallback and fallback[-1] in gone:
            assert len([n for n in whole if n > fallback[-1] and n in verified]) >= 2
    if not marked:
        assert sorted(gone) == to_delete(names, keep_latest, pinned, verified)


def test_the_older_point_is_held_while_the_parent_is_marked() -> None:
    assert held_point(NAMES, NAMES[3], {NAMES[3], NAMES[2]}) == NAMES[1]
    assert held_point(NAMES, NAMES[0], {NAMES[0]}) is None
    assert held_point(NAMES, None, set()) is None


def test_a_mark_made_while_the_run_trains_saves_the_older_whole_point() -> None:
    names = tuple(key(step, attempt=1).point_name for step in (1, 2))
    state = machine(keep_latest=1, points=names, pinned=None)
    plain, actions = committed(state, key(10))
    assert actions == [Acknowledge(key=key(10), ranks=(0, 1)), DeletePoints(names=names)]
    kept = dataclasses.replace(plain.kept, names=names, deleting=frozenset())
    marked = dataclasses.replace(plain, kept=kept)
    asked = ClaimChecked(key=None, newer=False, quarantined=frozenset(names[1:]))
    assert run(marked, asked)[1] == [], "the newest is marked, so that the older one is the newest whole one"
