"""Who may not be left out: together they hold the newest state, however it is divided, and the rendezvous
takes them first.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.elastic.next_formation import ShardHolding, held_by_all, newest_complete
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.planning.state.copy_placement import neighbours
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey
from tests.elastic.builders import form, key, rendezvous, request, started
from tests.num_examples import examples

KEY = key(1, 7)
PRESENT = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 3), st.sampled_from(Source)), min_size=1, max_size=12
)


def holdings(present, num_shards):
    return [
        ShardHolding(member=m, key=KEY, shard=shard % num_shards, num_shards=num_shards, source=source)
        for m, shard, source in present
    ]


def among(held, members):
    """What is complete among some members."""
    return newest_complete([h for h in held if h.member in members], None)


@settings(max_examples=examples(100, chaos=300))
@given(PRESENT, st.integers(1, 4), st.permutations("abcdef"), st.integers(0, 6))
def test_a_cover_is_complete_small_and_takes_from_the_second_choice_only_what_the_first_lacks(
    present, num_shards, order, num_first
):
    held = holdings(present, num_shards)
    state = newest_complete(held, None)
    assume(state is not None)
    first, second = order[:num_first], order[num_first:]
    cover = state.cover(first, second)
    assert among(held, cover) is not None, f"{cover} do not hold all of {held}"
    assert len(cover) <= num_shards, "they fit into any group that held the state"
    assert len(set(cover)) == len(cover)
    if among(held, first) is not None and not any(h.source is Source.PREPARED for h in held):
        assert set(cover) <= set(first), "somebody of the second choice was taken without need"
    for member in set(cover) - set(first):
        assert any(member in of_one and not of_one & set(first) for of_one in state.needed), (
            f"{member} adds nothing that the first choice lacks"
        )


def slow_cover(needed, *choices):
    """As `cover` says it, one lacking shard after the other, with a look at all that is lacking each time."""
    lacking, chosen = list(needed), []
    while lacking:
        able = next(filter(None, ([m for m in choice if m in lacking[0]] for choice in choices)), [])
        found = max(able, key=lambda m: sum(m in of_one for of_one in lacking), default=None)
        chosen += [found] if found is not None else []
        lacking = [of_one for of_one in lacking[1:] if found not in of_one]
    return tuple(chosen)


@settings(max_examples=examples(100, chaos=300))
@given(PRESENT, st.integers(1, 4), st.permutations("abcdef"), st.integers(0, 6), st.integers(0, 2))
def test_a_cover_takes_who_adds_most_and_of_equal_ones_who_comes_first(
    present, num_shards, order, num_first, num_absent
):
    state = newest_complete(holdings(present, num_shards), None)
    assume(state is not None)
    choices = order[:num_first], order[num_first : len(order) - num_absent]
    assert state.cover(*choices) == slow_cover(state.needed, *choices)


@given(PRESENT, st.integers(1, 4))
def test_a_state_is_complete_among_whoever_meets_all_that_it_needs_and_nobody_else(present, num_shards):
    held = holdings(present, num_shards)
    state = newest_complete(held, None)
    assume(state is not None)
    for num in range(1, 7):
        for some in combinations("abcdef", num):
            meets = all(of_one & set(some) for of_one in state.needed)
            if meets:
                assert among(held, some) is not None
            elif not any(h.source is Source.PREPARED for h in held):
                assert among(held, some) is None


# ---- in the rendezvous
def holder(member: str, *held: HeldShard, leaves: int | None = 1, **other: object) -> JoinRequest:
    """A join that brings these shards; the live one says what the member trains."""
    live = next((h.key for h in held if h.source is Source.LIVE), None)
    return replace(request(member, live, leaves), holdings=held, **other)  # type: ignore[arg-type]


def shard(
    number: int, num_shards: int, source: Source = Source.LIVE, of: StateKey = KEY, known: bool = True
) -> HeldShard:
    """Shard `number` of `num_shards`, with the cursor that belongs to it where it is known."""
    cursor = Cursor(consumed_samples=of.step) if known else None
    return HeldShard(key=of, shard=number, num_shards=num_shards, source=source, cursor=cursor)


def fsdp2(machine: Rendezvous, members: str, left: str, live: int, staged: int) -> None:
    """All of `members` trained step `live`, the memory point of step `staged` is whole, and `left` join."""
    keepers = neighbours([f"n-{m}" for m in members])
    for member in members:
        if member not in left:
            machine.dead(member, 1.0)
    for number, member in enumerate(members):
        if member in left:
            kept = keepers.index(number)
            held = (
                shard(number, len(members), of=key(1, live)),
                shard(number, len(members), Source.STAGED, key(1, staged)),
                shard(kept, len(members), Source.NEIGHBOUR, key(1, staged)),
            )
            machine.join(holder(member, *held), 1.0)


def test_fsdp2_without_a_rank_goes_on_from_the_memory_point_with_every_shard_of_it():
    machine = started("abcd", high=4)
    fsdp2(machine, "abcd", left="abd", live=9, staged=7)
    made = form(machine, 1.0)
    assert (made.parent, made.step, made.point) == (key(1, 7), 7, None)
    assert made.cursor == Cursor(consumed_samples=7)
    assert made.keep == key(1, 7)
    view = machine.view_for("b")
    assert view is not None
    names = [[(made.members[s.rank], s.source.name) for s in of_one] for of_one in view.sources]
    # c's shard lies with its neighbour alone, the others' with themselves first
    assert names == [
        [("a", "STAGED"), ("b", "NEIGHBOUR")],
        [("b", "STAGED")],
        [("d", "NEIGHBOUR")],
        [("d", "STAGED"), ("a", "NEIGHBOUR")],
    ]
    assert view.source_rank == 0


def test_fsdp2_without_two_neighbours_goes_on_from_the_point():
    machine = started("abcd", high=4)
    machine.set_newest_point(key(1, 5), Cursor(consumed_samples=5), None)
    fsdp2(machine, "abcd", left="ad", live=9, staged=7)
    made = form(machine, 1.0)
    assert (made.parent, made.source, made.sources, made.keep) == (key(1, 5), None, (), None)


def test_without_a_loss_nothing_is_made_again_and_the_memory_point_is_kept():
    machine = started("abc")
    fsdp2(machine, "abc", left="abc", live=9, staged=7)
    made = form(machine, 1.0)
    assert (made.parent, made.keep) == (key(1, 9), key(1, 7))
    assert [[s.rank for s in of_one] for of_one in made.sources] == [[0], [1], [2]]


def test_a_point_newer_than_the_memory_point_makes_that_worthless():
    machine = started("abc")
    machine.set_newest_point(key(1, 8), Cursor(consumed_samples=8), None)
    fsdp2(machine, "abc", left="abc", live=9, staged=7)
    assert (form(machine, 1.0).parent, machine._states.formed[2].keep) == (key(1, 9), None)


def test_a_new_generation_keeps_the_memory_point_that_two_hold_until_it_has_its_own():
    """Of step 7 nobody has a neighbour's copy yet; losing any rank would lose it, but not step 5."""
    machine = started("abc")
    for number, member in enumerate("abc"):
        held = (
            shard(number, 3, of=key(1, 9)),
            shard(number, 3, Source.STAGED, key(1, 7)),
            shard(number, 3, Source.STAGED, key(1, 5)),
            shard((number - 1) % 3, 3, Source.NEIGHBOUR, key(1, 5)),
        )
        machine.join(holder(member, *held), 1.0)
    made = form(machine, 1.0)
    assert (made.parent, made.keep) == (key(1, 9), key(1, 5))


def test_a_prepared_step_is_done_where_one_shard_has_seen_its_summary():
    machine = started("ab")
    machine.join(holder("a", shard(0, 2, of=key(1, 4))), 1.0)
    behind = shard(1, 2, of=key(1, 3)), shard(1, 2, Source.PREPARED, key(1, 4), known=False)
    machine.join(holder("b", *behind), 1.0)
    machine.dead("c", 1.0)
    made = form(machine, 1.0)
    assert (made.parent, made.step) == (key(1, 4), 4)
    assert made.cursor == Cursor(consumed_samples=4)


def test_holders_of_all_shards_come_before_members_that_have_waited_longer():
    """HSDP of two replicas and a maximum of two: the newcomers that have waited are not let in instead of a
    shard.
    """
    machine = started("abcd", high=4)
    layout = Layout(num_shards=2, num_replicas=2)
    machine._max = 2
    machine.join(request("x"), 0.0)
    machine.join(request("y"), 0.0)
    for member in "abd":
        machine.dead(member, 1.0)
    machine.join(holder("c", shard(layout.shard_of(2), 2)), 1.0)
    machine.join(holder("b", shard(layout.shard_of(1), 2)), 2.0)  # it was cut off, and came
    made = form(machine, 2.0)
    assert set(made.members) == {"b", "c"}
    assert made.parent == KEY


@pytest.mark.parametrize(("num_shards", "members"), [(2, ("a", "b")), (1, ("a",))])
def test_a_blamed_newcomer_has_to_wait_unless_it_alone_holds_a_shard(num_shards, members):
    machine = rendezvous(expected=1)
    machine.join(request("a"), 0.0)
    form(machine)
    machine.join(request("b"), 0.5)
    machine.join(request("a", key(1, 3), leaves=1), 1.0)
    assert form(machine, 1.0).newcomers == ("b",)
    # both have agreed on the state, and the generation ends before its first step
    for number, member in enumerate("ab"):
        machine.join(holder(member, shard(number % num_shards, num_shards, of=key(2, 3)), leaves=2), 2.0)
    made = form(machine, 2.0)
    assert (made.members, made.parent) == (members, key(2, 3))


def test_the_next_generation_numbers_the_nodes_and_tells_each_its_own_host():
    machine = rendezvous(expected=3)
    for member, node in zip("abc", ("n1", "n2", "n1"), strict=True):
        machine.join(replace(request(member), node_id=node), 0.0)
    form(machine)
    views = [machine.view_for(member) for member in "abc"]
    assert [v and (v.nodes, v.own_host) for v in views] == [
        ((0, 1, 0), "host-a"),
        ((0, 1, 0), "host-b"),
        ((0, 1, 0), "host-c"),
    ]


@pytest.mark.parametrize("num_left", [1, 2, 3, 4])
def test_any_members_left_of_hsdp_go_on_from_the_newest_state_that_is_whole_among_them(num_left):
    """All groups of four in two replicas, all subsets: brute force against what is held."""
    layout = Layout(num_shards=2, num_replicas=2)
    for left in combinations("abcd", num_left):
        for reached in product((True, False), repeat=4):
            machine = started("abcd", high=4)
            there: list[JoinRequest] = []
            for number, member in enumerate("abcd"):
                if member not in left:
                    machine.dead(member, 1.0)
                    continue
                mine = layout.shard_of(number)
                held = [shard(mine, 2, of=key(1, 8 if reached[number] else 7))]
                if not reached[number]:
                    held.append(shard(mine, 2, Source.PREPARED, key(1, 8), known=False))
                there.append(holder(member, *held))
            for asked in there:
                machine.join(asked, 1.0)
            whole = {layout.shard_of("abcd".index(m)) for m in left} == {0, 1}
            summed = any(reached["abcd".index(m)] for m in left)
            made = form(machine, 1.0)
            assert made.parent == (key(1, 8 if summed else 7) if whole else None), (left, reached)
            assert (newest_complete(held_by_all(there), None) is not None) == whole
