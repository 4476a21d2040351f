"""Samples that a resume leaves out on purpose (`resume.data: skip`), see data rule 23.

It determines what was requested, whether it is already done on a history, and what a claim stores. The caller
draws the samples and passes where they end. A skip moves the cursor of a resume point. It belongs to the
claim, so that everything that continues, reads or verifies the history uses the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.errors import Refusal
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

LATEST = "latest"
# The error code of a skip or restart that was carried out at another point than the one a start continues.
OTHER_POINT = "resume.request_at_another_point"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRequest:
    """A setting of a job: `resume.from` (a folder absolute), and samples or steps."""

    where: str
    samples: int | None = None
    steps: int | None = None

    def __str__(self) -> str:
        number = f"steps={self.steps}" if self.steps is not None else f"samples={self.samples}"
        return f"resume.from={self.where} resume.skip_{number}"

    def repeats(self, earlier: SkipRequest) -> bool:
        """Whether it may be the same request as an earlier one, left in the configuration.

        It has the same amount, and names no point or the same one. A request that names another point means
        that one.
        """
        as_much = (self.samples, self.steps) == (earlier.samples, earlier.steps)
        return as_much and self.where in (LATEST, earlier.where)

    def num_samples(self, global_batch_size: int) -> int:
        """Returns the exact number of samples for a point of this batch size."""
        if self.steps is not None:
            return self.steps * global_batch_size
        assert self.samples is not None, "a request names samples or steps"
        return self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Skip:
    """A skip as stored in a claim: attempts that continue the claim's parent continue at `end` instead of
    `begin`.

    `begin` is the parent's own cursor. Between are `samples` with `tokens` positions, drawn at the parent's
    `seq_len` and weights. `settings` are the fields of the mixture that they were drawn by, flat as a
    configuration is (empty: one source).
    """

    request: SkipRequest
    samples: int
    tokens: int
    global_batch_size: int
    seq_len: int
    begin: Cursor
    end: Cursor
    settings: dict[str, Any] = field(default_factory=dict)

    def carry(self, cursor: Cursor) -> Cursor:
        """Returns `cursor`, moved if it is where the skip begins. Moving it again has no effect."""
        place = (self.begin.consumed_samples, self.begin.skipped_samples)
        return self.end if (cursor.consumed_samples, cursor.skipped_samples) == place else cursor


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipClaim:
    """A claim of the run with a skip: its number, the point that it continues, and the request."""

    attempt: int
    parent: StateKey
    request: SkipRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipDecision:
    """The decision about a request: skip (`request`; None: not), why not (`note`), or refuse (`refusal`)."""

    request: SkipRequest | None = None
    note: str = ""
    refusal: Refusal | None = None


def skip_request(config: JobConfig, where: str) -> SkipRequest | None:
    """Returns what the job requests. `where` is its `resume.from`, with a folder as an absolute path."""
    resume = config.resume
    if resume.skip_samples is None and resume.skip_steps is None:
        return None
    return SkipRequest(where=where, samples=resume.skip_samples, steps=resume.skip_steps)


def decide_skip(
    request: SkipRequest | None, point: StateKey | None, claims: Iterable[SkipClaim], path: Collection[int]
) -> SkipDecision:
    """Decides whether a start that continues `point` skips.

    `claims` are all of the run with a skip. `path` are the attempts that led to the point.

    One request skips at one place, and once on a history: at the point at which it was first carried out. A
    start that continues that point again skips the same samples again, because nothing after them is kept.
    One that continues what was trained after them does not. Any other point was not meant: it is refused, and
    naming that point makes another request.
    """
    if request is None:
        return SkipDecision()
    if point is None:
        text = f"{request}, but the run has no resume point, and a skip begins at one; leave the skip out"
        return SkipDecision(refusal=Refusal("resume.skip_without_point", text))
    made = sorted((c for c in claims if request.repeats(c.request)), key=lambda claim: claim.attempt)
    if not made:
        return SkipDecision(request=request)
    for claim in made:
        if claim.attempt <= point.attempt and claim.attempt in path:
            return SkipDecision(
                note=f"{request} is done: attempt {claim.attempt} skipped these samples after "
                f"{claim.parent.point_name}, and they are not skipped twice; to skip as much once more, name "
                f"the point after which: resume.from={point.point_name}"
            )
    last = made[-1]
    if last.parent == point:
        return SkipDecision(request=request)
    text = (
        f"{request} was carried out after {last.parent.point_name} (attempt {last.attempt}), and this start "
        f"would continue {point.point_name}, which does not come from there: it would skip other samples. To "
        f"skip here, name the point: resume.from={point.point_name}; else leave the skip out, or name the "
        "point that it was meant for"
    )
    return SkipDecision(refusal=Refusal(OTHER_POINT, text))


def still_due(skip: Skip | None, parent: StateKey | None, point: StateKey | None) -> Skip | None:
    """Returns the skip for a later claim of the launch that claimed `skip` at `parent`.

    The later claim continues `point`. If that is the same point again, the skip must be repeated; a newer
    point contains it.
    """
    return skip if point is not None and point == parent else None
