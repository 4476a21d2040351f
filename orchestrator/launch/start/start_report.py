"""The messages of a start and its end: what it continues, what it found, and why it is done."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.launch.capacity.capacity import choice_note
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.schedule import Budgets
from orchestrator.records.steps import StepRecord


def announce(say: Callable[[str], None], job: JobConfig, attempt: Attempt, plan: ResumePlan) -> None:
    """Reports what this start continues, what it found damaged, and what differs."""
    for damage in attempt.found.damages:
        say(f"warning: {damage}; falling back to an older resume point")
    if attempt.point is None:
        say(f"attempt {attempt.number} of {job.run.run_uri}: starts from the beginning")
    else:
        say(
            f"attempt {attempt.number} of {job.run.run_uri}: resumes from {attempt.point.name} at sample "
            f"{plan.consumed_samples}, step label {plan.step_before} -> {plan.step_after}"
        )
    if attempt.found.lifted and attempt.point is not None:
        say(f"note: every byte of {attempt.point.name} is right again: it is quarantined no more")
    if plan.rewind:
        say(plan.rewind)
    for file in attempt.found.unreadable:
        say(f"warning: {file}")
    for left in attempt.found.leftovers:
        say(f"warning: {left}" if left.kept else f"note: {left}")
    for difference in plan.differences:
        say(f"  {difference}")
    if attempt.parallel is not None and (
        note := choice_note(job, attempt.found.parallel, attempt.parallel.num_shards)
    ):
        say(note)
    _announce_data(say, attempt, plan)


def _announce_data(say: Callable[[str], None], attempt: Attempt, plan: ResumePlan) -> None:
    """Reports what this start does with sources, samples and encoders."""
    if attempt.skip is not None:
        first = attempt.skip.begin.drawn_samples
        say(
            f"skipped {attempt.skip.samples:,} samples ({attempt.skip.tokens:,} tokens) after "
            f"{attempt.point.name if attempt.point else 'the point'}, from sample {first:,} on: they are not "
            f"trained ({attempt.skip.request}); the same setting skips them once"
        )
    for change in attempt.found.lists:
        say(f"  {change}")
    for note in filter(None, (plan.skip_note, plan.restart_note)):
        say(f"note: {note}")
    if attempt.encoders != plan.encoders:
        newest = attempt.encoders[-1]
        for source, (epoch, block, window, record) in newest.begins.items():
            say(
                f"  {newest.encoder} encodes from the next whole document on: source {source}, "
                f"epoch {epoch}, block {block}, window {window}, record {record}"
            )


def trained_again(attempt: Attempt) -> list[str]:
    """The steps that are trained again because newer points are damaged, as labelled by their points.

    Empty if none was damaged.
    """
    if attempt.point is None or not attempt.found.damages:
        return []
    step, keys = attempt.point.key.step, [parse_point_name(damage.point) for damage in attempt.found.damages]
    last = max(key.step for key in keys if key is not None)
    what = f"steps {step + 1} to {last} ({last - step} of them) are"
    if last == step + 1:
        what = f"step {last} is"
    elif last <= step:  # another batch size or seq_len has given the later point a lower label
        what = "the steps after it are"
    return [f"the newest whole resume point is {attempt.point.name}: {what} trained again"]


def why_done(job: JobConfig, budgets: Budgets, record: StepRecord | None) -> str:
    """Why a run is done: it has reached its stop, or the data have ended before it."""
    tokens, samples = (record.consumed_tokens, record.consumed_samples) if record else (0, 0)
    if budgets.stop_tokens is not None and tokens >= budgets.stop_tokens:
        return f"{tokens:,} tokens are trained, as many as were asked for"
    if budgets.stop_samples is not None and samples >= budgets.stop_samples:
        return f"{samples:,} samples are trained, as many as were asked for"
    return data_have_ended(job, already=record is None)


def data_have_ended(job: JobConfig, *, already: bool) -> str:
    """The message for data that ended before a stop, with ways to continue. `already`: they ended before this
    start.
    """
    data = job.data
    limits = [f"data.num_epochs={data.num_epochs}"]
    limits += [f"{s.name}: max_epochs={s.max_epochs}" for s in data.sources if s.max_epochs is not None]
    ways = "raise data.num_epochs" + (" or the source's max_epochs" if limits[1:] else "")
    weighted = all(source.weight is not None for source in data.sources)
    if len(data.sources) > 1 and (data.on_end == "stop" or (data.on_end is None and weighted)):
        limits.append("data.on_end=stop: with the first source that cannot fill a sample")
        ways += ", or set data.on_end=drop (go on with the others) or repeat (begin the source anew)"
    if already:
        what = "the data had ended before, at the resume point that it continued"
        return f"{what} ({', '.join(limits)}): to train on, {ways}"
    return f"the data have ended ({', '.join(limits)}); to go on, {ways}"
