"""The largest group in which all reach all."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.elastic.next_formation import largest_reaching

MEMBERS = "abcdefg"
pairs = st.sets(st.tuples(st.sampled_from(MEMBERS), st.sampled_from(MEMBERS)))


def is_whole(group: frozenset[str], failed: set[tuple[str, str]]) -> bool:
    return not any(a != b and a in group and b in group for a, b in failed)


@given(failed=pairs, holders=st.sets(st.sampled_from(MEMBERS), min_size=1))
def test_no_larger_set_exists(failed: set[tuple[str, str]], holders: set[str]):
    found = largest_reaching(MEMBERS, failed, [holders])
    assert is_whole(found, failed)
    assert found & holders
    larger = (frozenset(c) for n in range(len(found) + 1, 8) for c in combinations(MEMBERS, n))
    assert not any(is_whole(other, failed) and other & holders for other in larger)


def test_among_equals_the_first_stay_and_what_left_long_ago_does_not_count():
    assert largest_reaching("abc", [("a", "c"), ("c", "x")], ["abc"]) == {"a", "b"}
    assert largest_reaching("abc", [], ["b"]) == {"a", "b", "c"}


def test_many_failures_are_answered_in_time():
    names = [f"m{number}" for number in range(200)]
    failed = [(a, b) for a, b in combinations(names, 2) if (int(a[1:]) * 31 + int(b[1:])) % 7 == 0]
    assert is_whole(largest_reaching(names, failed, [names]), set(failed))
    broken = [("m0", other) for other in names[1:]]
    assert largest_reaching(names, broken, [names]) == set(names[1:])
