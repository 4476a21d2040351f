"""Chooses the members of the next generation, and decides whether to interrupt the running one.

Pure functions of what is known about the members. They have no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.elastic.failure.connectivity import largest_reaching
from orchestrator.elastic.failure_backoff import FailureBackoff
from orchestrator.elastic.formation import Generation
from orchestrator.elastic.held_shards import CompleteState, held_by_all, newest_complete
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.elastic.state_selection import ParentStateSelection
from orchestrator.records.membership import JoinRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The chosen `members`. `unreached` would be among them, but some of the others did not reach them (rule
    18).
    """

    members: tuple[JoinRequest, ...]
    unreached: tuple[JoinRequest, ...] = ()


def choose(
    requests: Sequence[JoinRequest],
    group: MembershipState,
    states: ParentStateSelection,
    backoff: FailureBackoff,
    *,
    max_workers: int,
    now: float,
) -> Choice:
    """Chooses members from `requests`: none that has to wait, and at most the maximum.

    Members that together hold the newest state come first, then the members of the current generation, then
    the others in the order of their arrival.
    """
    allowed = [r for r in requests if group.is_trusted(r.member) or backoff.not_before(r.node_id) <= now]
    newest = newest_complete(held_by_all(requests), None)
    state = newest_complete(held_by_all(allowed), None) if len(allowed) < len(requests) else newest
    if newest and (not state or states.origin(state.key) != states.origin(newest.key)):
        state = newest  # a member that alone holds a shard of the newest state is never left out
    names = dict.fromkeys(r.member for r in allowed)
    cover = frozenset(state.cover([*names], [r.member for r in requests])) if state else frozenset()
    allowed += [r for r in requests if r.member in cover and r.member not in names]
    allowed.sort(
        key=lambda r: (
            r.member not in cover,
            not group.is_inside(r.member),
            group.waiting[r.member].since,
            r.member,
        )
    )
    kept = _reaching(allowed, state)
    return Choice(
        members=tuple(r for r in allowed if r.member in kept)[:max_workers],
        unreached=tuple(r for r in allowed if r.member not in kept),
    )


def worth_interrupting(
    current: Generation,
    group: MembershipState,
    arrivals: Sequence[JoinRequest],
    backoff: FailureBackoff,
    *,
    max_workers: int,
    debounce_s: float,
    now: float,
) -> bool:
    """Whether to re-form the running generation for `arrivals`.

    There must be room for one that need not wait. In addition, either no other member has arrived for
    `debounce_s`, or one of them has waited five times as long.
    """
    joiners = [group.waiting[r.member].since for r in arrivals if backoff.not_before(r.node_id) <= now]
    if not joiners or len(current.members) - len(group.gone) >= max_workers:
        return False
    return now - max(joiners) >= debounce_s or now - min(joiners) >= 5 * debounce_s


def too_few(
    num_chosen: int, requests: Sequence[JoinRequest], backoff: FailureBackoff, *, min_workers: int, now: float
) -> str:
    """Returns the reason why fewer than the minimum are chosen, as text for people."""
    reason = f"{num_chosen} of at least {min_workers} members are there"
    later = {r.member: backoff.not_before(r.node_id) for r in requests}
    waits = [f"{member} for {until - now:.0f} s" for member, until in sorted(later.items()) if until > now]
    if waits:
        reason += f"; waiting after a generation that failed before its first step: {', '.join(waits)}"
    return reason


def _reaching(requests: Sequence[JoinRequest], state: CompleteState | None) -> frozenset[str]:
    """Returns members that reach each other, as far as they have tried (rule 18).

    Together they hold `state` if that is possible.
    """
    names = [r.member for r in requests]
    failed = [(r.member, other) for r in requests for other in r.unreached]
    if not failed:
        return frozenset(names)
    needed = state.needed if state else [names]
    return largest_reaching(names, failed, needed) or largest_reaching(names, failed, [names])
