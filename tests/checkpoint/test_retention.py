"""Which points go: properties over every history of commits, verifications and pins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.checkpoint.commit.retention import spared, to_delete, to_verify
from tests.checkpoint.retention_cases import NAMES, keep, points, verified_sets

pin = st.sampled_from([None, *NAMES, "00000001-a0009-g0009"])


@given(points, keep, pin, verified_sets)
def test_the_newest_points_stay(names, keep_latest, pinned, verified) -> None:
    gone = to_delete(names, keep_latest, pinned, verified)
    assert not set(gone) & set(names[-keep_latest:])
    assert gone == [name for name in names if name in gone], "oldest first"


@given(points, keep, pin, verified_sets)
def test_the_pinned_point_goes_only_after_two_newer_ones_are_verified(
    names, keep_latest, pinned, verified
) -> None:
    if pinned in to_delete(names, keep_latest, pinned, verified):
        assert len([n for n in names if n > pinned and n in verified]) >= 2


@given(points, keep, pin, verified_sets)
def test_no_more_is_kept_than_needed(names, keep_latest, pinned, verified) -> None:
    left = set(names) - set(to_delete(names, keep_latest, pinned, verified))
    assert len(left) <= max(keep_latest, 2) + 1


@given(points, keep, pin)
def test_verifying_what_is_asked_for_releases_the_pinned_point(names, keep_latest, pinned) -> None:
    wanted = to_verify(names, keep_latest, pinned, set())
    assert set(wanted) <= set(names)
    after = to_delete(names, keep_latest, pinned, set(wanted))
    if wanted:
        assert pinned in after
        assert to_verify(names, keep_latest, pinned, set(wanted)) == []
    elif pinned in names:
        newer = [n for n in names if n > pinned]
        assert pinned in names[-keep_latest:] or len(newer) < 2


@given(st.integers(0, 7), keep, st.lists(st.booleans(), min_size=8, max_size=8))
def test_over_a_whole_attempt_the_number_of_points_stays_bounded(pinned_at, keep_latest, healthy) -> None:
    """Commits one by one, each followed by what the machine does: delete, verify, delete."""
    kept = NAMES[: pinned_at + 1]
    pinned = kept[-1]
    verified: set[str] = set()
    for name in NAMES[pinned_at + 1 :]:
        kept = [*kept, name]
        for _ in range(2):
            gone = to_delete(kept, keep_latest, pinned, verified)
            kept = [n for n in kept if n not in gone]
            verified |= {n for n in to_verify(kept, keep_latest, pinned, verified) if healthy[NAMES.index(n)]}
        assert name in kept
        assert pinned in kept or len(verified) >= 2
        assert len(kept) <= max(keep_latest, 2) + 1


def without_pins(names: list[str], keep_latest: int, pinned: str | None, verified: set[str]) -> list[str]:
    """Planted mistake: the newest claim's parent is a point as any other."""
    return names[:-keep_latest]


def test_the_properties_catch_a_retention_without_pins() -> None:
    names, pinned = NAMES[:3], NAMES[0]
    assert pinned in without_pins(names, 1, pinned, set())
    assert pinned not in to_delete(names, 1, pinned, set())


every = st.one_of(st.none(), st.integers(1, 4))
best = st.integers(0, 4)
losses = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(st.none(), st.floats(0, 9), st.just(float("nan"))), max_size=8
)


@given(points, keep, pin, verified_sets, every, best, losses)
def test_what_is_spared_stays_and_everything_else_goes_as_before(
    names, keep_latest, pinned, verified, every, best, losses
) -> None:
    also = spared(names, every, best, losses)
    gone = to_delete(names, keep_latest, pinned, verified, also)
    assert set(gone) == set(to_delete(names, keep_latest, pinned, verified)) - set(also)
    assert not set(gone) & set(names[-keep_latest:]), "never the newest"
    assert pinned not in gone or len([n for n in names if n > pinned and n in verified]) >= 2


@given(points, every, losses)
def test_every_nth_means_the_points_whose_step_is_a_multiple(names, every, losses) -> None:
    kept = spared(names, every, 0, losses)
    assert set(kept) == {n for n in names if every is not None and int(n.split("-")[0]) % every == 0}


@given(points, best, losses)
def test_the_best_are_those_with_the_lowest_finite_loss_and_never_more_than_asked_for(
    names, best, losses
) -> None:
    kept = spared(names, None, best, losses)
    known = {name: losses[name] for name in names if losses.get(name) is not None and losses[name] < 10}
    assert len(kept) == min(best, len(known))
    assert all(known[name] <= known[other] for name in kept for other in set(known) - set(kept))


def test_without_the_new_fields_nothing_is_spared() -> None:
    assert spared(NAMES, None, 0, dict.fromkeys(NAMES, 1.0)) == {}
