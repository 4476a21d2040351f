"""Goes back to a resume point and leaves out the samples up to a step that a policy about losses has refused.

`rewind_and_skip` of `train.on_nonfinite` and `train.on_spike`. It is the start that
`resume.from=POINT resume.skip_samples=N` makes, within the same launch command.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.config.loading import as_job
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.resume_point_choice import choose_point
from orchestrator.coordinator.attempt.survey import decided
from orchestrator.errors import TrainingError
from orchestrator.history.claims.lineage import skips_of
from orchestrator.history.sentences import count
from orchestrator.launch.start.attempt_claim import LaunchContext
from orchestrator.launch.start.preview import look_ahead
from orchestrator.launch.start.run_preparation import prepare
from orchestrator.planning.batches import ceil_div, next_range
from orchestrator.planning.loss_policy import BUDGET_SPENT, policy_of
from orchestrator.records.run_status import RunStatus
from orchestrator.records.samples import sample_len_of


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
