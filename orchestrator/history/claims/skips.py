"""The skipped samples of a run's history: the skips of its claims, and the steps that follow them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from orchestrator.history.claims.claims import ClaimParent
from orchestrator.history.claims.lineage import Lineage
from orchestrator.planning.resume.skipping import Skip, SkipClaim
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipAt:
    """A skip on the history.

    `attempt` claimed it, after the point `parent`, before the history's record number `index`.
    """

    index: int
    attempt: int
    parent: StateKey
    skip: Skip


def skips_of(lineage: Lineage) -> tuple[SkipAt, ...]:
    """All skips on the history, in order.

    A claim's skip is on the history if one of the attempt's generations continues the claim's own parent.
    Other generations continue a state after that, which includes the skip.
    """
    ids = [(record.attempt, record.generation) for record in lineage.records]
    claims = {claim.attempt: claim for claim in lineage.attempts}
    found = []
    for segment in lineage.segments:
        claim = claims.get(segment.start.attempt)
        if claim is None or claim.skip is None or claim.parent is None:
            continue
        if segment.start.parent == claim.parent:
            index = sum(id_ < segment.start.id for id_ in ids)
            found.append(SkipAt(index=index, attempt=claim.attempt, parent=claim.parent, skip=claim.skip))
    return tuple(found)


def skip_claims(parents: Iterable[ClaimParent]) -> tuple[SkipClaim, ...]:
    """The claims of a run with a skip, also off its history."""
    return tuple(
        SkipClaim(attempt=claim.attempt, parent=claim.parent, request=claim.skip.request)
        for claim in parents
        if claim.skip is not None and claim.parent is not None
    )
