"""The effective history: the chain of parents, and nothing that a cut-off machine writes beside it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.claims import INCONSISTENT, Claim, ClaimParent, GenerationStart
from orchestrator.history.claims.lineage import Lineage, effective_chain, effective_history, require_sound
from orchestrator.json_form import decode, encode
from orchestrator.planning.resume.identity import Difference
from orchestrator.planning.schedule import Budgets, Length
from tests.history.histories import MOVES, claim, key, play, record, start
from tests.raising import raises


def parent_file(attempt, parent=None, *inherited):
    """The claim's parent file; the parent itself is always among the inherited points."""
    points = (*inherited, parent) if parent else inherited
    return ClaimParent(attempt=attempt, parent=parent, inherited=tuple(p.point_name for p in points))


def steps(attempt, generation, first, stop):
    return [record(attempt, generation, step) for step in range(first, stop)]


def names(lineage):
    return [r.key.point_name for r in lineage.records]


FIRST = [claim(1)], [parent_file(1)], [start(1, 1, None, 0)], steps(1, 1, 1, 6)


def test_a_fresh_run_is_one_open_segment():
    lineage = require_sound(effective_history(*FIRST))
    (segment,) = lineage.segments
    assert segment.open
    assert segment.steps == range(1, 6)
    assert [r.step for r in lineage.records] == [1, 2, 3, 4, 5]
    assert lineage.on_lineage(key(1, 1, 5))
    assert lineage.on_lineage(key(1, 1, 0))
    assert (lineage.attempt, lineage.orphans, lineage.gaps) == (1, 0, ())


def test_a_run_that_nobody_claimed_has_no_history():
    assert effective_history([], [], [], []) == Lineage(
        attempt=None, segments=(), records=(), attempts=(), orphans=0, gaps=(), errors=()
    )


def test_a_generation_that_goes_back_leaves_the_steps_after_its_parent_as_orphans():
    claims, parents, starts, records = FIRST
    lineage = effective_history(
        claims, parents, [*starts, start(1, 2, key(1, 1, 3), 3)], [*records, *steps(1, 2, 4, 6)]
    )
    assert not lineage.errors
    assert [s.steps for s in lineage.segments] == [range(1, 4), range(4, 6)]
    assert [(r.generation, r.step) for r in lineage.records] == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    assert lineage.orphans == 2
    assert lineage.on_lineage(key(1, 1, 3))
    assert "left generation 1 of attempt 1 after step 3" in lineage.why_orphan(key(1, 1, 4))


def test_a_generation_off_the_chain_is_an_orphan_with_all_its_points():
    claims, parents, starts, records = FIRST
    starts = [*starts, start(1, 2, key(1, 1, 5), 5), start(1, 3, key(1, 1, 4), 4)]
    lineage = effective_history(claims, parents, starts, [*records, *steps(1, 2, 6, 9)])
    assert not lineage.errors
    assert "does not pass through generation 2" in lineage.why_orphan(key(1, 2, 6))
    assert [r.step for r in lineage.records] == [1, 2, 3, 4]


def test_a_generation_without_a_step_joins_its_neighbours():
    claims, parents, starts, records = FIRST
    starts = [*starts, start(1, 2, key(1, 1, 5), 5), start(1, 3, key(1, 2, 5), 5)]
    lineage = effective_history(claims, parents, starts, [*records, *steps(1, 3, 6, 8)])
    assert not lineage.errors
    assert [list(s.steps) for s in lineage.segments] == [[1, 2, 3, 4, 5], [], [6, 7]]
    assert lineage.on_lineage(key(1, 2, 5))
    assert "began after step 5" in lineage.why_orphan(key(1, 2, 4))


def test_labels_may_be_rebased_between_a_state_and_the_generation_that_continues_it():
    claims, parents, starts, records = FIRST
    starts = [*starts, start(1, 2, key(1, 1, 5), 3, tokens=50, batch=20)]
    lineage = effective_history(claims, parents, starts, [*records, record(1, 2, 4, tokens=70)])
    assert not lineage.errors
    assert [s.steps for s in lineage.segments] == [range(1, 6), range(4, 5)]
    # the same label twice on one lineage: the key tells them apart
    assert lineage.on_lineage(key(1, 1, 4))
    assert lineage.on_lineage(key(1, 2, 4))


POINT = key(1, 1, 4)
TAKEN_OVER = [claim(1), claim(2, "two")], [parent_file(1), parent_file(2, POINT, key(1, 1, 2))]


def test_before_its_first_generation_a_claim_stands_at_its_parent():
    lineage = effective_history(*TAKEN_OVER, FIRST[2], FIRST[3])
    assert not lineage.errors
    assert [r.step for r in lineage.records] == [1, 2, 3, 4]
    assert lineage.attempt == 2
    assert [c.attempt for c in lineage.attempts] == [1, 2]


def test_a_cut_off_attempt_that_keeps_training_and_committing_never_enters_the_lineage():
    zombie_starts = [start(1, 2, key(1, 1, 5), 5)]
    zombie_records = [*steps(1, 1, 6, 20), *steps(1, 2, 6, 30)]
    starts = [*FIRST[2], *zombie_starts, start(2, 1, POINT, 4)]
    lineage = effective_history(*TAKEN_OVER, starts, [*FIRST[3], *zombie_records, *steps(2, 1, 5, 7)])
    assert not lineage.errors
    assert names(lineage) == [
        k.point_name for k in [*(key(1, 1, s) for s in range(1, 5)), key(2, 1, 5), key(2, 1, 6)]
    ]
    for late in (key(1, 1, 5), key(1, 1, 19), key(1, 2, 5), key(1, 2, 29)):
        assert not lineage.on_lineage(late)
    # a state that is on the history, but whose COMMIT came only after the claim had listed the points
    assert "attempt 2 did not inherit it" in lineage.why_orphan(key(1, 1, 3))
    assert lineage.on_lineage(POINT)
    assert lineage.on_lineage(key(1, 1, 2))


def test_a_claim_without_a_parent_file_changes_nothing():
    claims = [*FIRST[0], claim(2, "two")]
    lineage = effective_history(claims, *FIRST[1:])
    assert not lineage.errors
    assert lineage.attempt == 1
    assert names(lineage) == names(effective_history(*FIRST))


def test_a_restarted_coordinator_goes_on_with_the_state_that_its_members_hold():
    claims = [claim(1), claim(2)]
    starts = [*FIRST[2], start(2, 1, key(1, 1, 5), 5)]
    lineage = effective_history(claims, TAKEN_OVER[1], starts, [*FIRST[3], *steps(2, 1, 6, 8)])
    assert not lineage.errors
    assert [r.step for r in lineage.records] == [1, 2, 3, 4, 5, 6, 7]


def test_a_state_of_another_launch_is_no_parent_unless_the_claim_inherited_it():
    starts = [*FIRST[2], start(2, 1, key(1, 1, 5), 5)]
    lineage = effective_history(*TAKEN_OVER, starts, FIRST[3])
    assert "another launch" in lineage.errors[0]
    assert lineage.records == ()


def test_one_foreign_claim_between_two_of_a_launch_fences_its_members():
    claims = [claim(1), claim(2, "two"), claim(3)]
    parents = [parent_file(1), parent_file(3, POINT)]
    lineage = effective_history(claims, parents, [*FIRST[2], start(3, 1, key(1, 1, 5), 5)], FIRST[3])
    assert "another launch" in lineage.errors[0]


def test_a_rewind_inherits_only_what_lies_before_it():
    starts = [*FIRST[2], start(2, 1, POINT, 4), start(3, 1, key(1, 1, 2), 2)]
    claims = [*TAKEN_OVER[0], claim(3, "three")]
    parents = [*TAKEN_OVER[1], parent_file(3, key(1, 1, 2), POINT, key(2, 1, 6))]
    lineage = effective_history(claims, parents, starts, [*FIRST[3], *steps(2, 1, 5, 8), *steps(3, 1, 3, 5)])
    assert not lineage.errors
    assert [(r.attempt, r.step) for r in lineage.records] == [(1, 1), (1, 2), (3, 3), (3, 4)]
    assert [k for k in (key(1, 1, 2), POINT, key(2, 1, 6)) if lineage.on_lineage(k)] == [key(1, 1, 2)]


def test_equal_copies_of_a_record_count_once_and_timings_may_differ():
    claims, parents, starts, records = FIRST
    copies = [replace(r, step_s=9.0, data_wait_s=1.0, save_blocked_s=2.0, ended=3.0) for r in records]
    lineage = effective_history(claims * 2, parents * 2, starts * 2, [*records, *copies])
    assert not lineage.errors
    assert lineage.records == tuple(records)


def test_a_norm_that_is_no_number_equals_its_copy():
    odd = record(1, 1, 1, grad_norm=float("nan"))
    lineage = effective_history(*FIRST[:3], [odd, replace(odd, grad_norm=float("nan"))])
    assert not lineage.errors


@pytest.mark.parametrize(
    ("claims", "parents", "starts", "records", "text"),
    [
        ([claim(1), claim(1, "two")], [], [], [], "unequal copies of claim 1"),
        ([], [parent_file(2, key(1, 1, 1)), parent_file(2)], [], [], "unequal copies of parent file"),
        ([], [], [start(1, 1, None, 0, batch=9)], [], "unequal copies of start of generation (1, 1)"),
        ([], [], [], [record(1, 1, 3, loss=2.5)], "unequal records of step 00000003-a0001-g0001"),
        ([], [], [], [record(1, 1, 3, digest="ff")], "unequal records of step 00000003-a0001-g0001"),
        ([], [parent_file(7)], [], [], "attempt 7 has a parent file but no claim"),
        ([], [], [start(1, 3, key(1, 2, 5), 5)], [], "no start record"),
        (
            [],
            [],
            [start(1, 2, key(1, 1, 5), 5), start(1, 3, key(1, 2, 4), 4)],
            [],
            "began after step 5",
        ),
        ([claim(2)], [parent_file(2, POINT)], [start(2, 1, None, 0)], [], "begins from nothing"),
        ([], [], [start(1, 2, key(1, 1, 5), 5, tokens=49)], [], "begins at"),
        ([], [], [], [record(1, 1, 6, tokens=50)], "consumed_tokens=50"),
    ],
)
def test_what_no_honest_writer_leaves_is_an_error_and_refused(claims, parents, starts, records, text):
    first_claims, first_parents, first_starts, first_records = FIRST
    lineage = effective_history(
        [*first_claims, *claims],
        [*first_parents, *parents],
        [*first_starts, *starts],
        [*first_records, *records],
    )
    assert any(text in error for error in lineage.errors), lineage.errors
    with raises(OrchestratorError, "history.inconsistent", *lineage.errors):
        require_sound(lineage)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClaimParent(attempt=0, parent=None),
        lambda: ClaimParent(attempt=2, parent=POINT),
        lambda: ClaimParent(attempt=2, parent=POINT, inherited=(key(1, 1, 3).point_name,)),
        lambda: ClaimParent(attempt=1, parent=POINT, inherited=(POINT.point_name,)),
        lambda: parent_file(2, key(2, 1, 4)),
        lambda: replace(parent_file(2, POINT), inherited=()),
        lambda: start(1, 2, key(1, 3, 9), 9),
        lambda: start(1, 2, key(1, 2, 9), 9),
        lambda: start(1, 1, None, 1),
        lambda: decode(ClaimParent, {**encode(parent_file(2, POINT)), "inherited": []}),
    ],
)
def test_a_record_that_no_history_can_contain_cannot_be_made_or_read(make):
    with raises(OrchestratorError, INCONSISTENT):
        make()


KEYS = st.builds(key, st.integers(1, 3), st.integers(1, 2), st.integers(0, 5))


@settings(max_examples=300)
@given(st.integers(0, 3), st.none() | KEYS, st.lists(KEYS, max_size=3), st.booleans())
def test_a_claim_that_can_be_made_is_one_that_readers_accept(attempt, parent, inherited, hands_down):
    names = [each.point_name for each in (*inherited, *([parent] if parent and hands_down else []))]
    try:
        made = ClaimParent(attempt=attempt, parent=parent, inherited=tuple(names))
    except OrchestratorError:
        return
    claims = [claim(number) for number in range(1, attempt + 1)]
    began = [] if parent is None else [start(parent.attempt, parent.generation, None, 0)]
    before = [] if parent is None else [parent_file(parent.attempt)]
    read = decode(ClaimParent, encode(made))
    assert read == made
    for history in (effective_chain, lambda *records: effective_history(*records, [])):
        assert history(claims, [*before, read], began).errors == ()


def test_a_missing_record_of_the_history_is_named_as_a_gap():
    claims, parents, starts, records = FIRST
    lineage = effective_history(claims, parents, starts, [r for r in records if r.step != 3])
    assert not lineage.errors
    assert lineage.gaps == (
        "step 00000003-a0001-g0001 belongs to the history, but the journal has no record",
    )


def test_the_order_in_which_things_are_found_does_not_matter():
    world = play([(name, i) for i, name in enumerate([*MOVES, "train", "save"] * 3)])
    found = [world.claims, world.parents, world.starts, world.records]
    expected = effective_history(*found)
    assert expected.records
    mixed = random.Random(1)
    for _ in range(5):
        assert effective_history(*(mixed.sample(things, len(things)) for things in found)) == expected


MOVE = st.tuples(st.sampled_from([*MOVES, *("train", "save") * 3]), st.integers(0, 11))


def check_history(world, history=effective_history):
    """The property: steps and points on the lineage are those of the world's true history, no more, no
    fewer.
    """
    lineage = history(world.claims, world.parents, world.starts, world.records)
    assert not lineage.errors
    assert not lineage.gaps
    true_steps = [state.key for state in world.true_history() if state.trained]
    assert [r.key for r in lineage.records] == true_steps
    held = {state.key for state in world.true_points()}
    for state, _ in world.points.values():
        assert lineage.on_lineage(state.key) == (state.key in held), lineage.why_orphan(state.key)


@settings(max_examples=300)
@given(st.lists(MOVE, max_size=60))
def test_the_lineage_is_the_true_history_of_every_small_world(moves):
    check_history(play(moves))


@settings(max_examples=200)
@given(st.lists(MOVE, max_size=60))
def test_the_chain_alone_has_the_points_and_attempts_of_the_history(moves):
    world = play(moves)
    chain = effective_chain(world.claims, world.parents, world.starts)
    assert not chain.errors
    held = {state.key for state in world.true_points()}
    assert {state.key for state, _ in world.points.values() if chain.on_lineage(state.key)} == held
    whole = effective_history(world.claims, world.parents, world.starts, world.records)
    assert (chain.attempt, chain.attempts) == (whole.attempt, whole.attempts)
    assert [s.start for s in chain.segments] == [s.start for s in whole.segments]
    assert [s.steps for s in chain.segments if not s.open] == [s.steps for s in whole.segments if not s.open]


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ([start(1, 1, None, 0), start(1, 2, key(1, 1, 0), 0, tokens=1)], "begins at"),
        ([start(1, 1, None, 0), start(1, 3, key(1, 2, 5), 5)], "no start record"),
        ([start(1, 1, None, 0), start(2, 1, None, 0)], "has a journal but no claim"),
    ],
)
def test_the_chain_alone_finds_what_needs_no_step_record(starts, text):
    chain = effective_chain(FIRST[0], FIRST[1], starts)
    assert any(text in error for error in chain.errors), chain.errors


def points_without_inheritance(claims, parents, starts, records):
    """Planted: a point counts if its state lies on the chain, whenever it was committed."""
    lineage = effective_history(claims, parents, starts, records)
    return replace(lineage, attempts=())


def branches_not_cut(claims, parents, starts, records):
    """Planted: a generation on the chain counts whole."""
    lineage = effective_history(claims, parents, starts, records)
    return replace(lineage, segments=tuple(replace(s, open=True) for s in lineage.segments))


def step_alone(claims, parents, starts, records):
    """Planted: each label's newest record is the history."""
    newest = {r.step: r for r in sorted(records, key=lambda r: r.key)}
    lineage = effective_history(claims, parents, starts, records)
    return replace(lineage, records=tuple(newest[step] for step in sorted(newest)))


def newest_generation_anywhere(claims, parents, starts, records):
    """Planted: the newest generation found is the head, although a newer claim goes on from elsewhere."""
    last = max((s.attempt for s in starts), default=0)
    return effective_history(
        [c for c in claims if c.number <= last], [p for p in parents if p.attempt <= last], starts, records
    )


def claim_without_parent_counts(claims, parents, starts, records):
    """Planted: a claim whose parent file was never written continues nothing, and that counts."""
    told = {p.attempt for p in parents}
    invented = [ClaimParent(attempt=c.number, parent=None) for c in claims if c.number not in told]
    return effective_history(claims, [*parents, *invented], starts, records)


def parent_is_the_generation_before(claims, parents, starts, records):
    """Planted: every generation continues the last record of the one numbered before it."""
    changed = []
    for item in starts:
        before = [r.key for r in records if r.attempt == item.attempt and r.generation == item.generation - 1]
        changed.append(replace(item, parent=max(before)) if before else item)
    return effective_history(claims, parents, changed, records)


@pytest.mark.parametrize(
    "wrong",
    [
        points_without_inheritance,
        branches_not_cut,
        step_alone,
        newest_generation_anywhere,
        claim_without_parent_counts,
        parent_is_the_generation_before,
    ],
)
def test_planted_wrong_lineages_are_caught_by_the_same_property(wrong):
    chance = random.Random(5)
    often = [*MOVES, *("train", "save") * 4]
    worlds = [play([(chance.choice(often), chance.randrange(12)) for _ in range(40)]) for _ in range(80)]
    check_all(worlds, effective_history)
    with pytest.raises(AssertionError):
        check_all(worlds, wrong)


def check_all(worlds, history):
    for world in worlds:
        check_history(world, history)


def test_the_records_survive_their_json():
    length = Length(given=3, unit="steps", global_batch_size=2, seq_len=5, tokens=30)
    difference = Difference(field="train.lr", old=[0.1], new=None, rule="may_change")
    told = ClaimParent(
        attempt=2,
        parent=POINT,
        inherited=(POINT.point_name,),
        budgets=Budgets(max_steps=length),
        differences=(difference,),
    )
    for kind, value in (
        (Claim, claim(1)),
        (ClaimParent, told),
        (ClaimParent, parent_file(1)),
        (GenerationStart, start(2, 1, POINT, 4)),
    ):
        assert decode(kind, encode(value)) == value
