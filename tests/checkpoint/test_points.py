"""What makes votes one save, what deleting spares, and what a point's digest of the weights is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.points import COMMIT, disagreement
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.json_form import seal, unseal
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import CONFIG, cursor, key, write_point, write_vote
from tests.raising import raises

AT = key(10)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(Storage(str(tmp_path / "run")))


def empty_vote(rank: int, world_size: int = 3, at: StateKey = AT) -> Vote:
    return Vote(
        key=at, rank=rank, world_size=world_size, cursor=cursor(at), optimizer_steps=10, files=(), tensors=(),
        save_blocked_s=0.0, records=(),
    )  # fmt: skip


def test_the_votes_of_all_ranks_are_one_save_in_any_order() -> None:
    assert disagreement([empty_vote(rank) for rank in (0, 1, 2)]) is None
    assert disagreement([empty_vote(rank) for rank in (2, 0, 1)]) is None


@pytest.mark.parametrize(
    "ranks", [(0,), (0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 2), (0, 1, 2, 3), (-1, 0, 1), (0, 2, 4)]
)
def test_every_rank_must_have_voted_exactly_once(store: RunStore, ranks: tuple[int, ...]) -> None:
    votes = [empty_vote(rank) for rank in ranks]
    assert disagreement(votes) == f"votes of ranks {sorted(ranks)}, but the world size is 3"
    with raises(ResumePointError, "point.votes_differ", AT.point_name, f"ranks {sorted(ranks)}", "size is 3"):
        store.commit_point(votes, CONFIG, {}, None)
    assert store.point_names() == []


def test_two_votes_of_one_rank_do_not_stand_for_two_ranks_parts(store: RunStore) -> None:
    first, again = (write_vote(store.storage, AT, rank) for rank in (0, 1))
    again = replace(again, rank=0)
    with raises(ResumePointError, "point.votes_differ", "ranks [0, 0]"):
        store.commit_point([first, again], CONFIG, {}, None)
    assert store.point_names() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("key", key(20)), ("world_size", 4), ("cursor", cursor(key(20))), ("optimizer_steps", 11)],
)
def test_votes_that_differ_are_not_one_save(field: str, value: object) -> None:
    votes = [empty_vote(rank) for rank in range(3)]
    changed = replace(votes[2], **{field: value})  # type: ignore[arg-type]
    assert f"rank 2 with {value}" in str(disagreement([*votes[:2], changed]))


def test_giving_up_a_save_leaves_a_committed_point_of_its_name_whole(store: RunStore) -> None:
    name = write_point(store, AT).name
    store.discard(name)
    assert store.point_names() == [name]
    assert store.verify_point(name) == []
    write_vote(store.storage, key(20), rank=0)
    store.discard(key(20).point_name)
    assert store.leftovers() == []


def test_a_weights_digest_that_is_not_that_of_the_sums_is_damage(store: RunStore, tmp_path: Path) -> None:
    name = write_point(store, AT).name
    path = tmp_path / "run" / "points" / name / COMMIT
    content = unseal(path.read_bytes())
    path.write_bytes(seal({**content, "weights_digest": "0" * 64}))
    for fast in (False, True):
        (damage,) = store.verify_point(name, fast=fast)
        assert damage.file == COMMIT
        assert damage.reason.startswith(f"has the weights digest {'0' * 64} and the sums")
