"""Goes back to an older resume point: what that sets aside, and the claim that does it.

A rewind is an attempt whose parent is the older point, like `train resume.from=POINT`. It ends at once, so
that the next start continues from there. Nothing is deleted.

`rewound` goes back within a launch command, and leaves out the samples up to a step that a policy about
losses has refused (`rewind_and_skip` of `train.on_nonfinite` and `train.on_spike`). It is the start that
`resume.from=POINT resume.skip_samples=N` makes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import as_job, parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt, note_beginning, write_down_end
from orchestrator.coordinator.attempt.forking import point_info
from orchestrator.coordinator.attempt.resume_point_choice import choose_point, up_to
from orchestrator.coordinator.attempt.survey import (
    Survey,
    decided,
    older_journals,
    require_journals,
    require_listed,
)
from orchestrator.errors import RefusedError, TrainingError, WantedPointError
from orchestrator.history.claims.claim_files import REWIND
from orchestrator.history.claims.claims import Claim, ClaimParent
from orchestrator.history.claims.lineage import skips_of
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import asker
from orchestrator.history.sentences import count
from orchestrator.launch.branch.point_query import PointMatch, PointPlan, PointQuery, find, place, planned
from orchestrator.launch.start import attempt_claim
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.attempt_claim import LaunchContext
from orchestrator.launch.start.preview import look_ahead
from orchestrator.launch.start.run_preparation import prepare
from orchestrator.planning.batches import ceil_div, next_range
from orchestrator.planning.loss_policy import BUDGET_SPENT, policy_of
from orchestrator.planning.resume.identity import with_defaults
from orchestrator.planning.schedule import budgets_for
from orchestrator.records.run_status import RunStatus
from orchestrator.records.steps import sample_len_of

END_WRITTEN_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewindPlan(PointPlan):
    """What a rewind goes back to, and what leaves the history by it.

    `orphans` are the points that leave the history: they are kept, and `points --prune` deletes them.
    `attempt` is the newest attempt that the plan was made from. `stands_there`: the run already ends at the
    point, so that nothing is to be done. `done`: the run is rewound, or was before.
    """

    attempt: int
    steps_aside: int
    first_step_aside: int | None
    last_step_aside: int | None
    tokens_aside: int
    orphans: tuple[str, ...]
    stands_there: bool
    done: bool = False

    def lines(self) -> list[str]:
        """The plan as text: where it would go back to, what that sets aside, and how to continue."""
        lines = self.point_lines(f"{self.run}: would go back to {self.point}")
        if self.stands_there:
            return [*lines, "  the run is at this point already: nothing to do"]
        if self.steps_aside:
            steps = count(self.steps_aside, "step")
            span = f"{self.first_step_aside:,} to {self.last_step_aside:,}"
            lines.append(f"  would set aside {steps}, {span} ({self.tokens_aside:,} tokens)")
        else:
            lines.append("  would set aside no step")
        lines += [f"  would leave the history, and be kept: {name}" for name in self.orphans]
        if self.orphans:
            lines.append(
                f"  `orchestrator points {shlex.quote(self.run)} --prune` deletes what is off the history"
            )
        return [*lines, "  afterwards the command that trained the run continues it from there"]

    def outcome(self) -> str:
        """The result as text."""
        aside = count(self.steps_aside, "step") if self.steps_aside else "no step"
        return f"rewound: {self.run} ends at {self.point} now (step {self.step:,}); {aside} set aside"

    def sets_aside(self) -> tuple[object, ...]:
        """The values that must be the same at execution as when the user agreed."""
        return self.point, self.steps_aside, self.last_step_aside, self.tokens_aside, self.orphans


def rewind_plan(run: str, seen: Survey, found: PointMatch, wanted: PointQuery, ended: bool) -> RewindPlan:
    """The plan to go back to `found` in the history `seen`. `ended`: whether the newest attempt recorded its
    end.
    """
    point = found.point
    aside = [record for record in seen.lineage.records if record.key > point.key]
    there = (*seen.points, *seen.lost)
    orphans = tuple(name for name in there if name not in up_to(there, point))
    return RewindPlan(
        **planned(run, found, wanted),
        attempt=seen.lineage.attempt or 0,
        steps_aside=len(aside),
        first_step_aside=aside[0].step if aside else None,
        last_step_aside=aside[-1].step if aside else None,
        tokens_aside=aside[-1].consumed_tokens - place(point).tokens if aside else 0,
        orphans=orphans,
        stands_there=ended and not aside and not orphans,
    )


def look(store: RunStore, wanted: PointQuery, run: str = "") -> RewindPlan:
    """The plan for the run in storage. The point's sizes and headers are compared.

    Raises as `point_query.find` and `PinFiles.require_kept`.
    """
    return _look(store, wanted, run)[0]


def _look(store: RunStore, wanted: PointQuery, run: str) -> tuple[RewindPlan, int]:
    """The plan, and the newest attempt if that had ended before the run was read (else 0)."""
    newest = store.newest_claim()
    ended = newest.number if newest is not None and store.read_end(newest.number) is not None else 0
    seen, found = decided(store, lambda seen: (seen, _find(store, seen, wanted)))
    plan = rewind_plan(run or store.storage.root, seen, found, wanted, bool(ended))
    if not plan.stands_there:
        store.require_kept(plan.point)
    return plan, ended


def _find(store: RunStore, seen: Survey, wanted: PointQuery) -> PointMatch:
    require_journals(store, seen)
    found = find(store, seen, wanted, fast=True)
    require_listed(seen, found.point)
    return found


def rewind(
    store: RunStore,
    wanted: PointQuery,
    by: str,
    agree: Callable[[RewindPlan], bool],
    say: Callable[[str], None] = lambda text: None,
    run: str = "",
) -> RewindPlan:
    """Shows the plan to `agree`, and executes it if that returns True. Returns the plan, with its result.

    Raises `BusyError` while a launch is active on the run (watched as by a start, at most 10 s if an attempt
    recorded no end), `RefusedError` and `ResumePointError` as `point_query.find`, and `RefusedError` if the
    run has changed since `agree` was called.
    """
    plan, ended = _look(store, wanted, run)  # first: an impossible request needs no watch
    with attempt_claim.watching(store, say) as watched:
        newest = watched()
    if newest != ended:  # a launch that ended during the watch has trained until then
        plan, _ = _look(store, wanted, run)
    if not agree(plan):
        return plan
    if not plan.stands_there:
        carry_out(store, plan, newest, by, say)
    return replace(plan, done=True)


def carry_out(
    store: RunStore, plan: RewindPlan, newest: int, by: str, say: Callable[[str], None] = lambda text: None
) -> None:
    """Claims the attempt after `newest` with the plan's point as its parent, and ends it.

    No launch may be active on `newest` any more. All bytes of the point are compared between the two. The run
    is rewound as soon as the parent file is durable. A kill before that leaves it unchanged; after it, only
    the end record is missing. Raises as `rewind`.
    """
    run = starting.find_run(store)
    if run is None:
        raise RefusedError(
            f"{store.storage.root}: there is no run (no run.json), so nothing to rewind", code="run.unknown"
        )
    with attempt_claim.claiming(store, run.id, newest + 1, REWIND) as claim:
        attempt, config = _begin(store, claim, run, plan, say)
        end_at_once(store, attempt, run, config, f"rewound to {plan.point} by {by}")


def _begin(
    store: RunStore,
    claim: Claim,
    run: RunFile,
    plan: RewindPlan,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Attempt, dict[str, Any]]:
    """Writes what the claim inherits: the history up to the point."""
    store.require_kept(plan.point)
    wanted = PointQuery(point=plan.point)
    seen, found = decided(store, lambda seen: (seen, _find(store, seen, wanted)))
    now = rewind_plan(plan.run, seen, found, wanted, False)
    if now.sets_aside() != plan.sets_aside():
        raise RefusedError(
            f"{plan.run}: the run has changed since the plan was made: the rewind would have set aside "
            f"{count(plan.steps_aside, 'step')}, now {now.steps_aside}; nothing is changed. Give the command "
            "again",
            code="run.changed_since_plan",
        )
    _require_whole(store, claim, plan, say)
    config = newest_config(seen, found.point)
    info = point_info(store, found.point)
    parent = ClaimParent(
        attempt=claim.number,
        parent=found.point.key,
        inherited=up_to(seen.points, found.point),
        budgets=budgets_for(
            parse_config(nested(config)), info.budgets, info.cursor, with_defaults(found.point.config)
        ),
        encoders=info.encoders,
        sources=info.sources,
        journals=older_journals(seen),
    )
    store.write_parent(parent)
    return Attempt.claimed(claim, parent, found.point, found.point.key.step, run.id), config


def _require_whole(store: RunStore, claim: Claim, plan: RewindPlan, say: Callable[[str], None]) -> None:
    """Compares all bytes of the plan's point. Raises `WantedPointError`, and marks the point, if one
    differs.
    """
    read = ReadAtOnce(store.storage, say, f"resume point {plan.point}")
    if damages := store.verify_point(plan.point, each=read):
        store.note_reading(plan.point, damages, f"attempt {claim.number}")
        listed = "; ".join(map(str, damages))
        raise WantedPointError(
            f"{plan.run}: nothing is changed: the point to go back to is damaged ({listed}); restore the "
            "file, or go back to another point",
            code="point.damaged",
        )


def end_at_once(
    store: RunStore, attempt: Attempt, run: RunFile, config: Mapping[str, Any], reason: str
) -> None:
    """Journals that the attempt begins and ends, and writes its end record. It trains nothing itself."""
    journal = JournalWriter(store.storage, attempt.number, run.name, run_id=run.id)
    note_beginning(journal, attempt, config)
    write_down_end(store, journal, attempt, "stopped", reason, asker(), END_WRITTEN_S)
    journal.close()


def newest_config(seen: Survey, point: Point) -> dict[str, Any]:
    """The flat configuration of the newest attempt that began, in today's fields; else the point's.

    The next start is compared with it.
    """
    begun = [event.fields["config"] for event in seen.journal.events if event.kind == EventKind.ATTEMPT]
    return in_todays_fields(begun[-1] if begun else point.config)


# -------------------------------------------------------------------------------------------- rewind and skip
def is_rewind(job: JobConfig, status: RunStatus) -> bool:
    """Whether the attempt ended so that the launch goes back, without a request to stop."""
    has_policy = policy_of(job.train, status.code or "") is not None
    return status.ended == "failed" and has_policy and not status.stopping


def rewound(at: LaunchContext, status: RunStatus, num_before: int) -> LaunchContext:
    """Returns the context of the next attempt, whose job names the point and the number of samples.

    `num_before`: how often this launch has gone back. Raises `TrainingError` with the attempt's reason if the
    policy's budget is spent, or the run has no resume point. Raises as `look_ahead`, and the plan's refusal.
    """
    policy = policy_of(at.job.train, status.code or "")
    assert policy is not None, "see `is_rewind`"
    field, budget = policy
    if num_before >= budget:
        raise TrainingError(
            f"{status.reason}. This launch has gone back {num_before} times, and the budget of {field} is "
            f"{budget}; look at these steps, or raise {field}.budget",
            code=BUDGET_SPENT,
        )
    point, num = _point_and_samples(at, status)
    at.progress.say(f"attempt {status.attempt} ends: {status.reason}")
    at.progress.say(
        f"{field}: going back to {point}; {count(num, 'sample')} after it, up to this step, are left out"
    )
    given = (f"resume.from={point}", f"resume.skip_samples={num}")
    unset = ("resume.skip_steps=null", "resume.data=continue", "resume.restart_sources=[]")
    job = as_job(at.job, [*given, *unset])
    spec = prepare(job, at.storage, freeze=False)  # of a new run: frozen by the attempt before
    plan = look_ahead(at.store, job, spec, draw=True, known=at.plan.damages)
    if plan.action == "refuse":
        raise plan.refusal
    return replace(at, job=job, spec=spec, plan=replace(plan, damages=at.plan.damages))


def _point_and_samples(at: LaunchContext, status: RunStatus) -> tuple[str, int]:
    """Returns the newest resume point, and the samples of its seq_len after it up to the refused step."""
    store = at.store
    seen, (point, _) = decided(store, lambda seen: (seen, choose_point(store, seen, "latest", fast=True)))
    if point is None:
        raise TrainingError(
            f"{status.reason}. The run has no resume point to go back to; save earlier (resume.every_steps), "
            "or choose skip_step",
            code=status.code,
        )
    train, budgets, cursor = at.job.train, at.plan.budgets, point.cursor
    behind = [r for r in seen.lineage.records if r.consumed_tokens > cursor.consumed_tokens]
    newest = behind[-1] if behind else cursor
    step = next_range(
        *(newest.consumed_samples, newest.consumed_tokens, train.global_batch_size, at.job.sample_len),
        *(budgets.stop_tokens, budgets.stop_samples),
    )
    assert step is not None, "a step was refused"
    tokens = newest.consumed_tokens + step.num_tokens - cursor.consumed_tokens
    before = sum(each.skip.samples for each in skips_of(seen.lineage) if each.parent == point.key)
    return point.name, before + ceil_div(tokens, sample_len_of(point.config))
