"""Decides whether a member that asks to join may wait for the next generation (membership rule 20).

The decision uses the numbers of the attempt's formed generations.
"""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.elastic.formation import Refused
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.errors import FencedError
from orchestrator.records.membership import JoinRequest

NONE = (0, 0)  # older than every generation


def refusal(request: JoinRequest, *, attempt: int, launch: str, formed: Collection[int]) -> Refused | None:
    """Returns why this member has no place in `attempt` of `launch`; None if it may join.

    `formed` are the generations that the attempt has formed. Raises `FencedError` if the member knows a newer
    attempt.
    """
    who, named = f"member {request.member}", {request.leaves or NONE, *_generations_of(request)}
    if request.launch != launch:
        return Refused(reason=f"{who} is of launch {request.launch}, the run is now {launch}; it exits")
    newest = max(its_attempt for its_attempt, _ in named)
    if newest > attempt:
        raise FencedError(f"{who} knows attempt {newest}, this coordinator is attempt {attempt}; it ends")
    if any(its_attempt == attempt and number not in formed for its_attempt, number in named):
        known = f"attempt {attempt} has formed {max(formed, default=0)} generations"
        return Refused(
            reason=f"{who} leaves generation {request.leaves} with {request.key}, but {known}; it exits"
        )
    return None


def newest_left(member: str, attempt: int, group: MembershipState) -> tuple[int, int]:
    """Returns the newest generation that `member` is known to have been in. It cannot leave an older one any
    more.
    """
    waiting, current = group.waiting.get(member), group.current
    newest = (waiting.request.leaves or NONE) if waiting else NONE
    if current is not None and current.attempt == attempt and member in current.ranks:
        newest = max(newest, current.identity)
    return newest


def _generations_of(request: JoinRequest) -> set[tuple[int, int]]:
    """Returns the generations whose states a member has."""
    keys = [request.key, *(h.key for h in request.holdings)]
    return {(key.attempt, key.generation) for key in keys if key is not None}
