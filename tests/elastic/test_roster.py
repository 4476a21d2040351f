"""Who was lost, who came, how long nobody trained: the facts of what people read of a launch."""

from __future__ import annotations

from orchestrator.elastic.roster import Roster
from orchestrator.records.membership import JoinRequest
from orchestrator.records.run_status import GroupMember, Loss, MemberInfo


def request(member: str, pid: int, leaves: tuple[int, int] | None = None, idle_s: float = 0.0) -> JoinRequest:
    return JoinRequest(
        member=member,
        launch="launch",
        actor_id="",
        node_id="n",
        host="10.0.0.7",
        port=1,
        key=None,
        leaves=leaves,
        prepared=None,
        cursor=None,
        reason="Connection closed by peer" if leaves else "start",
        pid=pid,
        idle_s=idle_s,
    )


def named(rank: int | None, pid: int) -> GroupMember:
    return GroupMember(rank=rank, host="10.0.0.7", pid=pid)


def two() -> Roster:
    """A group of `a` and `b`, formed at 10 s."""
    roster = Roster(2)
    roster.came(request("a", 1), 8.0)
    roster.came(request("b", 2), 9.0)
    change = roster.formed(1, 1, ("a", "b"), 0, 0, 10.0)
    assert (change.joined, change.lost, change.paused_s) == ((named(0, 1), named(1, 2)), (), None)
    return roster


def test_a_lost_worker_is_named_by_the_rank_that_it_had_and_the_pause_counts_from_the_last_step() -> None:
    roster = two()
    roster.came(request("a", 1, leaves=(1, 1), idle_s=0.5), 20.0)
    roster.gone("b", "its process died")
    assert roster.losses == (Loss(worker=named(1, 2), reason="its process died"),)
    change = roster.formed(1, 2, ("a",), 411, 411, 20.25)
    assert change.lost == (Loss(worker=named(1, 2), reason="its process died"),)
    assert (change.joined, change.world_size, change.wanted, change.paused_s) == ((), 1, 2, 0.75)
    assert change.reason == "Connection closed by peer"
    assert roster.losses == ()


def test_where_nobody_finished_a_step_the_pause_counts_from_when_the_group_had_formed() -> None:
    roster = two()  # at 10 s; its workers' processes began long before
    roster.came(request("a", 1, leaves=(1, 1), idle_s=7.0), 11.0)
    roster.gone("b", "its process died")
    assert roster.formed(1, 2, ("a",), 0, 0, 11.25).paused_s == 1.25


def test_the_first_reason_stands_for_a_worker_that_failed_and_then_died() -> None:
    roster = two()
    roster.gone("b", "ValueError: no such thing")
    roster.gone("b", "its process died")
    assert [loss.reason for loss in roster.losses] == ["ValueError: no such thing"]


def test_a_worker_that_dies_while_it_joins_has_no_rank_and_one_that_nobody_knows_is_nobody() -> None:
    roster = two()
    roster.came(request("c", 3), 21.0)
    roster.gone("c", "its node died")
    roster.gone("never-seen", "its node died")
    assert roster.losses == (Loss(worker=named(None, 3), reason="its node died"),)


def test_one_that_was_left_out_and_comes_back_is_not_lost() -> None:
    roster = two()
    roster.came(request("a", 1, leaves=(1, 1)), 20.0)
    roster.gone("b", "it did not answer")
    roster.came(request("b", 2, leaves=(1, 1)), 21.0)
    change = roster.formed(1, 2, ("a", "b"), 5, 5, 22.0)
    assert (change.lost, change.joined) == ((), ())


def test_a_restarted_coordinator_knows_who_trained_before_it() -> None:
    before = tuple(
        MemberInfo(member=name, actor_id="", node_id="n", pid=pid, host="10.0.0.7")
        for pid, name in enumerate("abc")
    )
    roster = Roster(3, before)
    roster.came(request("a", 0, leaves=(1, 4)), 5.0)
    roster.came(request("c", 2, leaves=(1, 4)), 5.0)
    roster.gone("b", "its process died")
    change = roster.formed(2, 1, ("a", "c"), 30, 0, 5.5)
    assert change.restarted
    assert [loss.worker for loss in change.lost] == [named(1, 1)]
    assert change.joined == ()
    assert change.step_before == 30
    assert not roster.formed(2, 2, ("a", "c"), 31, 31, 9.0).restarted
