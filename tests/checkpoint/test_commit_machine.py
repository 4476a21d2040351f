"""The commit machine, rule by rule: each row of events gives exactly these actions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    Deleted,
    DeletePoints,
    DiscardSave,
    Event,
    Failed,
    Fence,
    FlushJournal,
    GenerationFormed,
    GiveUp,
    JournalDurable,
    PartFailed,
    Tick,
    Verified,
    VerifyPoint,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.checkpoint.commit.commit_machine import CommitMachine
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.records.points import FileEntry, SavedTensor
from tests.checkpoint.commit_machines import cast, committed, machine, run, vote
from tests.checkpoint.samples import key, record
from tests.counted_lines import counted_lines

P = key(10)


def test_a_save_is_flushed_checked_committed_checked_and_only_then_acknowledged() -> None:
    state = machine()
    state, actions = run(state, cast(P, 0))
    assert actions == []
    state, actions = run(state, cast(P, 1, now_s=2.0))
    assert actions == [FlushJournal(key=P, records=(record(P),))]
    state, actions = run(state, JournalDurable(key=P))
    assert actions == [CheckNewerClaim(key=P)]
    state, actions = run(state, ClaimChecked(key=P, newer=False))
    assert actions == [WriteCommit(key=P, votes=(vote(P, 0), vote(P, 1)), parent=None, started_s=1.0)]
    state, actions = run(state, CommitWritten(key=P))
    assert actions == [CheckNewerClaim(key=P)]
    state, actions = run(state, ClaimChecked(key=P, newer=False))
    assert actions == [Acknowledge(key=P, ranks=(0, 1))]
    assert state.kept.names == (P.point_name,)


@pytest.mark.parametrize("written", [False, True])
def test_a_newer_claim_before_or_after_commit_ends_everything(written) -> None:
    state, _ = run(machine(), cast(P, 0), cast(P, 1), JournalDurable(key=P))
    if written:
        state, _ = run(state, ClaimChecked(key=P, newer=False), CommitWritten(key=P))
    state, actions = run(state, ClaimChecked(key=P, newer=True))
    assert actions == [Fence(reason="attempt 2 of this run exists: another launch has taken it over")]
    for event in (cast(key(20), 0), CommitWritten(key=P), Tick(now_s=1e9), ClaimChecked(key=P, newer=False)):
        assert run(state, event) == (state, [])


def test_a_folder_that_is_not_the_runs_any_more_ends_everything_too() -> None:
    for asked in (P, None):
        state, _ = run(machine(), cast(P, 0), cast(P, 1), JournalDurable(key=P))
        state, (fence,) = run(state, ClaimChecked(key=asked, newer=False, lost="run.json is gone"))
        assert isinstance(fence, Fence)
        assert fence.reason.startswith("run.json is gone: the run's folder was deleted, moved or replaced")
        assert run(state, ClaimChecked(key=P, newer=False)) == (state, [])


def test_repeated_votes_change_nothing_and_are_answered_again_once_decided() -> None:
    state, _ = run(machine(), cast(P, 0))
    assert run(state, cast(P, 0)) == (state, [])
    state, _ = committed(state, P)
    assert run(state, cast(P, 1))[1] == [Acknowledge(key=P, ranks=(1,), late=True)]
    state, _ = run(state, cast(key(20), 0), VoterGone(generation=1, rank=1))
    again = run(state, cast(key(20), 0))[1]
    reason = "rank 1 ended before it had saved its part"
    assert again == [GiveUp(key=key(20), ranks=(0,), reason=reason, late=True)]


def test_a_save_whose_missing_voter_is_gone_is_given_up() -> None:
    _, actions = run(machine(), cast(P, 0), VoterGone(generation=1, rank=1))
    assert actions == [
        GiveUp(key=P, ranks=(0,), reason="rank 1 ended before it had saved its part"),
        DiscardSave(name=P.point_name),
    ]
    _, actions = run(machine(), VoterGone(generation=1, rank=1), cast(P, 0))
    assert [type(a) for a in actions] == [GiveUp, DiscardSave]


def test_a_voter_that_is_gone_after_its_vote_does_not_stop_the_save() -> None:
    _, actions = run(machine(), cast(P, 1), VoterGone(generation=1, rank=1), cast(P, 0))
    assert [type(a) for a in actions] == [FlushJournal]


def test_three_ranks_save_and_the_files_stay_until_each_has_stopped_writing_them() -> None:
    state, actions = run(machine(), cast(P, 0, world_size=3), VoterGone(generation=1, rank=2))
    assert actions == [GiveUp(key=P, ranks=(0,), reason="rank 2 ended before it had saved its part")]
    late, actions = run(state, cast(P, 1, world_size=3))
    assert [type(a) for a in actions] == [GiveUp, DiscardSave], "rank 1 has written its part now"
    assert run(late, VoterGone(generation=1, rank=1))[1] == [], "and they are discarded once"
    assert run(state, VoterGone(generation=1, rank=1))[1] == [DiscardSave(name=P.point_name)]


@pytest.mark.parametrize(
    "last",
    [
        cast(P, 1),
        PartFailed(key=P, rank=1, world_size=2, reason="cancelled", now_s=2.0),
        VoterGone(generation=1, rank=1),
    ],
    ids=["its vote", "its report", "its death"],
)
def test_the_files_stay_while_a_member_that_joined_anew_writes_them_whatever_is_formed(last: Event) -> None:
    joined = [VoterGone(generation=1, rank=rank, saving=P) for rank in (0, 1)]
    state, actions = run(machine(), cast(P, 0), *joined)
    assert actions == []
    state, actions = run(state, GenerationFormed(generation=2, parent=key(8)))
    assert [type(a) for a in actions] == [GiveUp]
    state, actions = run(state, VoterGone(generation=2, rank=1, saving=P))
    assert actions == [], "it joins again, and writes still"
    _, actions = run(state, last)
    assert actions[-1] == DiscardSave(name=P.point_name)


def test_a_member_that_is_left_out_after_it_joined_may_still_be_writing() -> None:
    joined, left_out = (
        VoterGone(generation=1, rank=1, saving=P),
        VoterGone(generation=1, rank=1, writing=True),
    )
    state, actions = run(machine(), cast(P, 0), joined, left_out)
    assert [type(a) for a in actions] == [GiveUp]
    assert run(state, VoterGone(generation=1, rank=1))[1] == [DiscardSave(name=P.point_name)]


def test_a_save_that_becomes_due_while_one_is_undecided_waits_for_it_and_loses_nothing() -> None:
    second = key(20)
    state, actions = run(machine(), cast(P, 0), cast(second, 0), cast(second, 1))
    assert actions == []
    for decides, first in (
        (cast(P, 1), FlushJournal(key=P, records=(record(P),))),
        (VoterGone(generation=1, rank=1), GiveUp),
        (PartFailed(key=P, rank=1, world_size=2, reason="disk", now_s=1.0), GiveUp),
        (Tick(now_s=62.0), GiveUp),
    ):
        after, actions = run(state, decides)
        assert actions[0] == first or type(actions[0]) is first
        if first is GiveUp:
            assert FlushJournal(key=second, records=(record(second),)) in actions
    no = ClaimChecked(key=P, newer=False)
    after, _ = run(state, cast(P, 1), JournalDurable(key=P), no, CommitWritten(key=P))
    _, actions = run(after, no)
    assert actions == [
        Acknowledge(key=P, ranks=(0, 1)),
        FlushJournal(key=second, records=(record(second),)),
    ]


def test_two_thousand_votes_joins_and_deaths_cost_each_what_the_first_one_does() -> None:
    ranks = 2_000
    votes = [cast(P, rank, world_size=ranks) for rank in range(ranks)]
    joins = [VoterGone(generation=1, rank=rank, saving=P) for rank in range(1, ranks)]
    deaths = [VoterGone(generation=1, rank=rank) for rank in range(1, ranks)]
    for events, last in ((votes, FlushJournal), ([votes[0], *joins, *deaths], DiscardSave)):
        with counted_lines() as lines:
            _, actions = run(machine(), *events)
        assert type(actions[-1]) is last
        # each event looks at a fixed number of things, not at all events before it
        assert lines.count < 600 * len(events)


def test_the_files_stay_while_a_member_that_was_left_out_may_be_writing_them() -> None:
    state, actions = run(machine(), cast(P, 0), VoterGone(generation=1, rank=1, writing=True))
    assert [type(a) for a in actions] == [GiveUp]
    assert run(state, VoterGone(generation=1, rank=1))[1] == [DiscardSave(name=P.point_name)], "it is dead"


def test_a_member_that_joins_anew_casts_no_vote_but_the_one_that_is_under_way() -> None:
    joined = VoterGone(generation=1, rank=1, saving=P)
    state, actions = run(machine(), cast(P, 0), joined)
    assert actions == []
    assert [type(a) for a in run(state, cast(P, 1))[1]] == [FlushJournal]
    assert [type(a) for a in run(state, VoterGone(generation=1, rank=1))[1]] == [GiveUp, DiscardSave]
    _, actions = run(machine(), cast(key(20), 0), joined)
    assert [type(a) for a in actions] == [GiveUp, DiscardSave], "it did not save that step"


def test_a_part_that_could_not_be_written_gives_the_save_up_whoever_is_first() -> None:
    failed = PartFailed(key=P, rank=1, world_size=2, reason="no space", now_s=1.0)
    state, actions = run(machine(), cast(P, 0), failed)
    reason = "rank 1 could not save its part: no space"
    given_up = GiveUp(key=P, ranks=(0,), reason=reason, by_storage=True)
    assert actions == [given_up, DiscardSave(name=P.point_name)]
    assert run(state, failed)[1] == []
    state, actions = run(machine(), failed)
    assert [type(a) for a in actions] == [GiveUp]
    late = GiveUp(key=P, ranks=(0,), reason=reason, late=True)
    assert run(state, cast(P, 0))[1] == [late, DiscardSave(name=P.point_name)]


def test_votes_count_after_their_generation_ended_if_the_next_continues_their_state() -> None:
    state, actions = run(machine(), cast(P, 0), GenerationFormed(generation=2, parent=key(12)))
    assert actions == []
    _, actions = run(state, cast(P, 1))
    assert [type(a) for a in actions] == [FlushJournal]


@pytest.mark.parametrize("parent", [None, key(9), key(9, attempt=0)])
def test_a_save_that_is_not_on_the_new_generations_path_is_given_up(parent) -> None:
    state, actions = run(machine(), cast(P, 0), GenerationFormed(generation=2, parent=parent))
    assert [type(a) for a in actions] == [GiveUp]
    assert run(state, VoterGone(generation=1, rank=1))[1] == [DiscardSave(name=P.point_name)]
    late = run(state, cast(key(11), 1))[1]
    assert [type(a) for a in late] == [GiveUp], "so is one whose first vote comes late"


def test_no_generation_is_formed_while_a_commit_is_under_way() -> None:
    state, _ = run(machine(), cast(P, 0), cast(P, 1), JournalDurable(key=P), ClaimChecked(key=P, newer=False))
    with pytest.raises(AssertionError, match="under way"):
        state.on(GenerationFormed(generation=2, parent=P))
    state, actions = run(state, CommitWritten(key=P), ClaimChecked(key=P, newer=False))
    assert actions == [Acknowledge(key=P, ranks=(0, 1))]
    assert state.outdates(2, key(9)), "a parent before the point that was just committed would lose it"
    assert not state.outdates(2, P)


def test_a_failure_gives_the_save_up_but_keeps_files_that_a_commit_may_list() -> None:
    state, _ = run(machine(), cast(P, 0), cast(P, 1))
    assert [type(a) for a in run(state, Failed(key=P, reason="disk"))[1]] == [GiveUp, DiscardSave]
    state, _ = run(state, JournalDurable(key=P), ClaimChecked(key=P, newer=False))
    given_up = GiveUp(key=P, ranks=(0, 1), reason="disk", by_storage=True)
    assert run(state, Failed(key=P, reason="disk"))[1] == [given_up]


def test_votes_that_disagree_are_no_save() -> None:
    other = replace(vote(P, 1), optimizer_steps=99)
    tensor = SavedTensor(name="w", group="model", dtype="uint8", shape=(6,), sharded=True)
    listing = replace(vote(P, 1), tensors=(tensor,))
    file = FileEntry(path="state/00000-of-00002.safetensors", bytes=0, digest="")
    of_another = replace(vote(P, 1), files=(file,))
    for wrong, words in (
        (other, "optimizer_steps"),
        (replace(vote(P, 1), layout=(2, 1)), "layout"),
        (listing, "rank 1 lists tensors, which rank 0 does"),
        (of_another, "rank 1 votes for the files"),
        (replace(vote(P, 1), sums={"model": 1}), "of which rank 0 lists no tensors"),
    ):
        _, actions = run(machine(), cast(P, 0), VoteCast(vote=wrong, now_s=1.0))
        assert isinstance(actions[0], GiveUp)
        assert words in actions[0].reason


def test_votes_of_unknown_generations_and_attempts_are_sent_away() -> None:
    for at in (key(10, generation=7), key(10, attempt=2)):
        state, actions = run(machine(), cast(at, 0))
        assert [type(a) for a in actions] == [GiveUp]
        assert not state.saves


def test_a_save_does_not_wait_for_ever() -> None:
    state, _ = run(machine(), cast(P, 0, now_s=1.0), Tick(now_s=60.0))
    assert P in state.saves
    _, actions = run(state, Tick(now_s=62.0))
    reason = "1 of 2 ranks had saved their part, and the others wrote nothing for 60 s"
    assert actions[0] == GiveUp(key=P, ranks=(0,), reason=reason)


def test_a_newer_claim_is_looked_for_every_five_seconds() -> None:
    state = machine()
    asked = []
    for second in range(1, 21):
        state, actions = run(state, Tick(now_s=float(second)))
        asked += [second for a in actions if a == CheckNewerClaim(key=None)]
    assert asked == [5, 10, 15, 20]


def test_old_points_go_after_the_answer_and_the_pinned_one_after_two_verified() -> None:
    pinned = key(5, attempt=0).point_name
    state = machine(keep_latest=1, points=(pinned,), pinned=pinned)
    state, actions = committed(state, key(10))
    assert actions == [Acknowledge(key=key(10), ranks=(0, 1))]
    state, actions = committed(state, key(20))
    names = key(10).point_name, key(20).point_name
    assert actions[1:] == [VerifyPoint(name=names[0]), VerifyPoint(name=names[1])]
    state, actions = run(state, Verified(name=names[0], healthy=True))
    assert actions == [CheckNewerClaim(key=None)], "reading back takes long, so it asks again"
    state, _ = run(state, ClaimChecked(key=None, newer=False), Verified(name=names[1], healthy=True))
    state, actions = run(state, ClaimChecked(key=None, newer=False))
    assert actions == [DeletePoints(names=(pinned, names[0]))]
    state, actions = run(state, Tick(now_s=50.0), ClaimChecked(key=None, newer=False))
    assert actions == [], "what is being deleted is not deleted twice"
    state, _ = run(state, Deleted(names=(pinned,), failed=(names[0],)))
    assert state.kept.names == names
    assert run(state, ClaimChecked(key=None, newer=False))[1] == [DeletePoints(names=(names[0],))]


def test_a_point_is_read_back_once_at_a_time_and_not_deleted_meanwhile() -> None:
    pinned = key(5, attempt=0).point_name
    state = machine(keep_latest=1, points=(pinned,), pinned=pinned)
    for step in (10, 20):
        state, _ = committed(state, key(step))
    assert run(state, ClaimChecked(key=None, newer=False))[1] == [], "asked already"
    state, actions = committed(state, key(30))
    assert actions[1:] == [VerifyPoint(name=key(30).point_name)], "10 is not needed, but still being read"
    state, _ = run(state, Verified(name=key(10).point_name, healthy=False))
    assert run(state, ClaimChecked(key=None, newer=False))[1] == [DeletePoints(names=(key(10).point_name,))]


def test_while_the_marks_of_damage_cannot_be_listed_saves_are_committed_and_nothing_is_deleted() -> None:
    state = machine(keep_latest=1)
    unknown = ClaimChecked(key=None, newer=False, quarantined=None)
    for step in (10, 20):
        at = key(step)
        votes = (cast(at, 0), cast(at, 1), JournalDurable(key=at))
        asked = replace(unknown, key=at)
        state, actions = run(state, *votes, asked, CommitWritten(key=at), asked)
        assert actions == [Acknowledge(key=at, ranks=(0, 1))]
    assert run(state, unknown)[1] == []
    known = ClaimChecked(key=None, newer=False)
    assert run(state, known)[1] == [DeletePoints(names=(key(10).point_name,))], "what waited goes later"


def test_a_damaged_point_does_not_release_the_pinned_one() -> None:
    pinned = key(5, attempt=0).point_name
    state = machine(keep_latest=1, points=(pinned,), pinned=pinned)
    for step in (10, 20):
        state, _ = committed(state, key(step))
    state, actions = run(state, Verified(name=key(20).point_name, healthy=False))
    assert actions == []
    assert pinned in state.kept.names


def test_points_that_the_group_went_back_behind_are_counted_no_more() -> None:
    old = [key(step, attempt=1) for step in (5, 10, 15)]
    state = CommitMachine(
        attempt=2,
        kept=KeptPoints(keep_latest=1, names=tuple(at.point_name for at in old)),
        vote_limit_s=60,
    )
    state, _ = run(state, GenerationFormed(generation=1, parent=key(12, attempt=1)))
    assert state.kept.names == (old[0].point_name, old[1].point_name), "members brought step 12, not 15"
    state, _ = run(state, GenerationFormed(generation=2, parent=old[0]))
    assert state.kept.names == (old[0].point_name,), "all members were lost, and 10 could not be read"
    state, _ = run(state, GenerationFormed(generation=3, parent=None))
    assert state.kept.names == ()
