"""Which state is continued: against the rule written the slow way, and what it promises to groups that lose
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.elastic.formation import NewestPoint
from orchestrator.elastic.next_formation import (
    CompleteState,
    ParentStateSelection,
    ShardHolding,
    newest_complete,
)
from orchestrator.planning.state.copy_placement import neighbours
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.membership import Source
from orchestrator.records.steps import StateKey
from tests.elastic.builders import key, request
from tests.num_examples import examples

Rule = Callable[[Iterable[ShardHolding], StateKey | None], CompleteState | None]
KEYS = [StateKey(attempt=a, generation=g, step=s) for a, g, s in product((1, 2), (1, 2), range(3))]
# replicate, FSDP2, HSDP: shards of one generation, of which members hold any
SIZES = st.fixed_dictionaries({(a, g): st.integers(1, 3) for a, g in product((1, 2), (1, 2))})


@st.composite
def held(draw):
    """What some members hold of the states of four generations, each with its own number of shards."""
    sizes, found = draw(SIZES), []
    for at in draw(st.lists(st.sampled_from(KEYS), max_size=14)):
        num_shards = sizes[at.attempt, at.generation]
        found.append(
            ShardHolding(
                member=draw(st.sampled_from("abcd")),
                key=at,
                shard=draw(st.integers(0, num_shards - 1)),
                num_shards=num_shards,
                source=draw(st.sampled_from(Source)),
            )
        )
    return found


ORDER = ("live", "received", "prepared", "staged", "neighbour")
FLOORS = st.one_of(st.none(), st.sampled_from(KEYS))


def naive(held_by_all, floor):
    """Every key from the oldest on, each shard looked for among everything: (key, who holds which shard)."""
    best = None
    for at in KEYS:
        can_give = {}
        for h in held_by_all:
            decided = any(o.key == at and o.source == Source.LIVE for o in held_by_all)
            if h.key == at and (h.source != Source.PREPARED or decided):
                can_give.setdefault(h.shard, []).append(h)
        sizes = {h.num_shards for h in held_by_all if h.key == at}
        complete = bool(sizes) and set(can_give) == set(range(max(sizes)))
        if complete and (floor is None or not floor > at):
            best = (at, can_give)
    return best


def check(held_by_all, floor, rule: Rule = newest_complete):
    """The rule's answer is the naive one's, and its holders are all that can give, in their order."""
    found, right = rule(held_by_all, floor), naive(held_by_all, floor)
    assert (found and found.key) == (right and right[0]), f"chose {found}, right is {right}"
    if found is None or right is None:
        return
    for shard, givers in enumerate(found.holders):
        assert sorted(givers, key=repr) == sorted(right[1][shard], key=repr), "other holders"
        order = [(ORDER.index(h.source.name.lower()), h.member) for h in givers]
        assert order == sorted(order), "copies come before what is live"


@settings(max_examples=examples(100, chaos=500))
@given(held(), FLOORS)
def test_the_newest_complete_state_is_that_of_the_naive_rule(held_by_all, floor):
    check(held_by_all, floor)


@given(held(), FLOORS, st.randoms())
def test_the_choice_does_not_depend_on_the_order_of_the_reports(held_by_all, floor, random):
    shuffled = list(held_by_all)
    random.shuffle(shuffled)
    assert newest_complete(shuffled, floor) == newest_complete(held_by_all, floor)


def test_nothing_is_held():
    assert newest_complete([], None) is None


def test_one_key_with_two_numbers_of_shards_is_our_own_mistake():
    one = ShardHolding(member="a", key=KEYS[0], shard=0, num_shards=1, source=Source.LIVE)
    with pytest.raises(AssertionError, match=r"\[1, 2\]"):
        newest_complete([one, replace(one, num_shards=2)], None)


# ---- what groups are promised
def of_rank(
    rank: int, layout: Layout, step: int, source: Source, shard_of: int | None = None
) -> ShardHolding:
    """What member `rank` of a generation has: its own shard, or the copy of rank `shard_of`'s."""
    return ShardHolding(
        member=f"m{rank}",
        key=key(1, step),
        shard=layout.shard_of(rank if shard_of is None else shard_of),
        num_shards=layout.num_shards,
        source=source,
    )


@st.composite
def losses(draw):
    """A layout; the ranks that a step's summary has reached; those that are left after a loss."""
    layout = Layout(num_shards=draw(st.integers(1, 4)), num_replicas=draw(st.integers(1, 3)))
    ranks = st.sets(st.integers(0, layout.world_size - 1))
    return layout, draw(ranks), sorted(draw(ranks))


@given(losses())
def test_a_group_with_a_holder_of_every_shard_left_loses_no_step(loss):
    """Replicate with a survivor, HSDP with a whole replica (of any members): step 8 if anyone left has seen
    its summary, else all drop it and stand at step 7.
    """
    layout, reached, left = loss
    assume({layout.shard_of(rank) for rank in left} == set(range(layout.num_shards)))
    there = [of_rank(r, layout, 8 if r in reached else 7, Source.LIVE) for r in left]
    there += [of_rank(r, layout, 8, Source.PREPARED) for r in left if r not in reached]
    found = newest_complete(there, None)
    assert found is not None
    # one survivor that has seen the summary is enough for all to apply the step
    if reached & set(left):
        assert found.key == key(1, 8)
    else:
        assert found.key == key(1, 7)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=8), st.data())
def test_fsdp2_that_loses_a_node_goes_back_to_the_memory_point_at_most(nodes, data):
    """Step 9 is live, the memory point of step 7 is sealed: every rank has its own and a neighbour's copy."""
    layout, lost = Layout(num_shards=len(nodes), num_replicas=1), data.draw(st.sampled_from(nodes))
    assume(2 * max(map(nodes.count, nodes)) <= len(nodes))  # else copies lie on their giver's node
    there = []
    for rank, keeper in enumerate(neighbours(nodes)):
        if nodes[rank] != lost:
            there += [of_rank(rank, layout, 9, Source.LIVE), of_rank(rank, layout, 7, Source.STAGED)]
        if nodes[keeper] != lost:
            there.append(of_rank(keeper, layout, 7, Source.NEIGHBOUR, rank))
    found = newest_complete(there, key(1, 5))
    assert found is not None
    assert found.key == key(1, 7)
    # a newer point is better than any memory
    assert newest_complete(there, key(1, 8)) is None


# ---- with one shard it is what the rendezvous always chose
def before_shards(requests, point):
    """Rule 1 as it stood before shards: the greatest key over members and the point, who loses if they are
    equal.
    """
    best = max((r.key for r in requests if r.key is not None), default=None)
    if point is not None and (best is None or point.key > best):
        return point.key, point
    return best, None


@settings(max_examples=examples(100, chaos=500))
@given(st.lists(st.one_of(st.none(), st.sampled_from(KEYS)), max_size=5), FLOORS)
def test_with_replicate_the_parent_is_the_greatest_key_as_it_was_before_shards(states, newest):
    requests = [request(member, state) for member, state in zip("abcde", states, strict=False)]
    selection = ParentStateSelection(2, 1, None)
    if newest is not None:
        selection.point = NewestPoint(key=newest, cursor=None, name=newest.point_name)
    assert selection.newest(requests) == before_shards(requests, selection.point)


@settings(max_examples=examples(100, chaos=500))
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=5), FLOORS)
def test_with_replicate_prepared_steps_change_no_choice(members, newest):
    """A member's prepared step is the next of its state; it is the parent only where another is there
    already.
    """
    states = [KEYS[step] if holds and step < 3 else None for holds, _, step in members]
    live = [
        ShardHolding(member=str(n), key=at, shard=0, num_shards=1, source=Source.LIVE)
        for n, at in enumerate(states)
        if at is not None
    ]
    prepared = [
        replace(h, key=replace(h.key, step=h.key.step + 1), source=Source.PREPARED)
        for h in live
        if members[int(h.member)][1]
    ]
    one = newest_complete(live, newest)
    other = newest_complete(live + prepared, newest)
    assert (one and one.key) == (other and other.key)


# ---- planted mistakes
def any_shard(held_by_all, floor):
    """Planted: the newest key, whether or not it is complete."""
    found = max((h.key for h in held_by_all), default=None)
    if found is None or (floor is not None and floor > found):
        return None
    return CompleteState(key=found, holders=())


def shards_joined(held_by_all, floor):
    """Planted: shards of all steps of a generation are joined."""
    newest = {(h.key.attempt, h.key.generation): h.key for h in sorted(held_by_all, key=lambda h: h.key)}
    renamed = [replace(h, key=newest[h.key.attempt, h.key.generation]) for h in held_by_all]
    return newest_complete(renamed, floor)


def prepared_counts(held_by_all, floor):
    """Planted: a prepared step counts although nobody has seen its summary."""
    changed = [replace(h, source=Source.STAGED) if h.source == Source.PREPARED else h for h in held_by_all]
    return newest_complete(changed, floor)


def prepared_never_counts(held_by_all, floor):
    """Planted: a prepared step never counts."""
    return newest_complete([h for h in held_by_all if h.source != Source.PREPARED], floor)


def received_needs_live(held_by_all, floor):
    """Planted: what was received counts only where somebody has heard that all have theirs."""
    changed = [replace(h, source=Source.PREPARED) if h.source == Source.RECEIVED else h for h in held_by_all]
    return newest_complete(changed, floor)


def point_forgotten(held_by_all, floor):
    """Planted: a newer point is forgotten while members hold anything."""
    del floor
    return newest_complete(held_by_all, None)


def point_first(held_by_all, floor):
    """Planted: of equal keys the point is loaded."""
    found = newest_complete(held_by_all, floor)
    return None if found is not None and found.key == floor else found


def by_step(held_by_all, floor):
    """Planted: a member that was cut off wins by its steps."""
    for at in sorted({h.key for h in held_by_all}, key=lambda k: k.step, reverse=True):
        found = newest_complete([h for h in held_by_all if h.key == at], floor)
        if found is not None:
            return found
    return None


def small_groups():
    """Every pair of keys, both sources, two shards of the one and the point, held by two members."""
    for first, second, source, floor in product(KEYS[:7], KEYS[:7], Source, (None, *KEYS[:7])):
        num = {first: 2, second: 2 if (first.generation == second.generation) else 1}
        yield (
            [
                ShardHolding(member="a", key=first, shard=0, num_shards=2, source=Source.LIVE),
                ShardHolding(member="b", key=first, shard=1, num_shards=2, source=source),
                ShardHolding(member="b", key=second, shard=0, num_shards=num[second], source=source),
            ],
            floor,
        )
        yield [ShardHolding(member="a", key=first, shard=0, num_shards=1, source=source)], floor


def check_small_groups(rule: Rule = newest_complete):
    for held_by_all, floor in small_groups():
        check(held_by_all, floor, rule)


def test_every_small_group_continues_what_the_naive_rule_says():
    check_small_groups()


@pytest.mark.parametrize(
    "wrong",
    [
        any_shard,
        shards_joined,
        prepared_counts,
        prepared_never_counts,
        received_needs_live,
        point_forgotten,
        point_first,
        by_step,
    ],
)
def test_wrong_rules_are_caught(wrong):
    with pytest.raises(AssertionError, match="chose|other holders"):
        check_small_groups(wrong)


SOME = [frozenset(some) for n in range(5) for some in combinations(range(4), n)]


@pytest.mark.parametrize("lost", range(4))
# nobody hears that all have received before it is so
@pytest.mark.parametrize(("heard", "received"), [(s, SOME[-1]) for s in SOME] + [(SOME[0], s) for s in SOME])
def test_a_replica_that_is_left_is_enough_whoever_has_heard_that_all_have_their_shards(heard, received, lost):
    """Three shards become two in two replicas. Who has heard that all received theirs has dropped the shard
    with which it came; of the others each that received its own has both, and the fourth came with none.
    """
    old, new = (StateKey(attempt=1, generation=g, step=5) for g in (1, 2))
    brought = []
    for rank in {0, 1, 2, 3} - {lost}:
        if rank in received:
            source = Source.LIVE if rank in heard else Source.RECEIVED
            brought.append(
                ShardHolding(member=str(rank), key=new, shard=rank % 2, num_shards=2, source=source)
            )
        if rank not in heard and rank < 3:
            brought.append(
                ShardHolding(member=str(rank), key=old, shard=rank, num_shards=3, source=Source.LIVE)
            )
    found = newest_complete(brought, None)
    if {rank % 2 for rank in received - {lost}} == {0, 1}:
        assert found is not None
        assert found.key == new
    elif lost == 3:
        assert found is not None
        assert found.key == old
    else:
        assert found is None, "of three shards one is gone, and so is one of the two new ones"
