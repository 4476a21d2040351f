"""The messages at the start and the end of a launch.

A start reports what it continues, and what it found. The end reports how the launch ended, where its results
are, and what to try next. It mentions only what still exists.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.elastic.supervision.background_call import BackgroundCall
from orchestrator.errors import OrchestratorError
from orchestrator.history import sentences
from orchestrator.launch.capacity.capacity import choice_note
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.stop_signals import last_wait_s
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.schedule import Budgets
from orchestrator.records.run_status import RunStatus
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
            f"{plan.consumed_samples}, {plan.label_text}"
        )
    if attempt.found.lifted and attempt.point is not None:
        say(f"note: {attempt.point.name} is intact again and no longer quarantined")
    if plan.rewind:
        say(plan.rewind)
    for file in attempt.found.unreadable:
        say(f"warning: {file}")
    for left in attempt.found.leftovers:
        say(f"warning: {left}" if left.kept else f"note: {left}")
    for change in plan.changes:
        say(f"  {change}")
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


SETTLE_LIMIT_S = 300.0  # how long a launch that has ended waits for points to be verified or deleted
_SETTLE_SLICE_S = 1.0  # a signal shortens the wait after this time


def wait_for_points(settle: Callable[[float], bool | None], say: Callable[[str], None]) -> None:
    """Waits until the coordinator has verified and deleted older points, so that the last launch of a run
    leaves none behind, on nodes' disks either.

    `settle(limit_s)` waits that long and returns whether nothing is left; None if the coordinator does not
    answer, which ends the wait. Waits at most `SETTLE_LIMIT_S`, and after SIGTERM only within the grace time.
    """
    began = time.monotonic()
    while (left_s := last_wait_s(began + SETTLE_LIMIT_S - time.monotonic())) > 0.0:
        settled = settle(min(left_s, _SETTLE_SLICE_S))
        if settled:
            return
        if settled is None:
            break
    waited_s = time.monotonic() - began
    say(
        f"warning: storage has not verified or deleted older points for {waited_s:.0f} s; the run ends "
        "without waiting for it. The next start deletes them; nothing that was committed is lost"
    )


END_LOOK_S = 5.0  # how long the end waits for a storage that may hang


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderAtEnd:
    """What exists at the end of a launch: whether its folder is still the run's, and has the newest resume
    point.
    """

    run: bool
    point: bool


def say_end(progress: Progress, job: JobConfig, status: RunStatus, store: RunStore, run_id: str) -> RunStatus:
    """Reports how the launch ended, where the results are, and what to try next.

    Returns the status, without a point that is missing. Waits at most `END_LOOK_S` for storage.
    """
    step = status.last_step
    how = sentences.ended(status.ended or "failed", status.reason)
    if status.ended == "failed":
        progress.say_at_length(how)
    else:
        ended, colon, why = how.partition(": ")
        progress.say(ended + (f", loss {sentences.loss(step.loss)}" if step else "") + colon + why)
    asked = BackgroundCall(partial(_look_at_end, store, run_id, status.newest_point))
    asked.ask()
    try:
        left = asked.answer(END_LOOK_S) or f"storage has not answered for {END_LOOK_S:.0f} s"
    except OrchestratorError as error:
        left = str(error)
    for line in end_lines(job, status, left):
        progress.say(line)
    return replace(status, newest_point=None) if isinstance(left, FolderAtEnd) and not left.point else status


def _look_at_end(store: RunStore, run_id: str, point: str | None) -> FolderAtEnd:
    run = store.read_run()
    commit = point is not None and store.storage.exists(f"points/{point}/COMMIT")
    return FolderAtEnd(
        run=run is not None and run.id == run_id, point=commit and (run is None or run.id == run_id)
    )


def end_lines(job: JobConfig, status: RunStatus, left: FolderAtEnd | str) -> list[str]:
    """Where the results are, and what to try next. `left`: what exists, or why that is not known."""
    point = f"{job.run.run_uri}/points/{status.newest_point}"
    if status.newest_point is None:
        where = "no resume point was written"
    elif isinstance(left, str):
        where = f"{point} (whether it is there is not known: {left})"
    else:
        where = point if left.point else f"none, {point} is gone"
    trained = status.last_step is not None or status.newest_point is not None
    lines = [f"newest resume point: {where}"]
    if trained and isinstance(left, FolderAtEnd) and left.run:
        lines += next_commands(job, status.ended, has_point=left.point)
    return lines


def say_done_before(say: Callable[[str], None], job: JobConfig, reason: str) -> None:
    """Reports a run that had reached its stop before this start, with its resume point, and what to try."""
    say(f"done: {reason}")
    for line in next_commands(job, "done", has_point=True):
        say(line)


def next_commands(job: JobConfig, outcome: str | None, *, has_point: bool) -> list[str]:
    """What to try next with a run that has trained. `has_point`: it has a resume point.

    A run that is done has its weights measured and exported. One that has stopped is continued.
    """
    if outcome == "failed":
        what = {"status": "what it trained, and its last faults", "logs": "what its workers printed"}
        return ["next:", *_commands(job, what)]
    what = {}
    if outcome == "done" and has_point:
        if _has_eval_data(job):
            what["evaluate"] = "the loss of its newest point on data that are not trained"
        what["export"] = _exported(job)
    what["points"] = "the resume points, with a digest of the weights of each"
    what["audit"] = "whether every token was trained exactly once"
    return ["next:" if outcome == "done" else "next (the same command continues it):", *_commands(job, what)]


def _commands(job: JobConfig, what: Mapping[str, str]) -> list[str]:
    """A line for each command, with what it shows."""
    uri = shlex.quote(job.run.run_uri)
    typed = [f"orchestrator {name} {uri}{' OUT' if name == 'export' else ''}" for name in what]
    width = max(map(len, typed))
    return [f"  {words:<{width}}     {text}" for words, text in zip(typed, what.values(), strict=True)]


def _has_eval_data(job: JobConfig) -> bool:
    """Whether `evaluate` needs no other data than the job has."""
    held_out = [job.data.holdout if at.holdout is None else at.holdout for at in job.data.sources]
    return bool(job.eval.parts) or any(held_out)


def _exported(job: JobConfig) -> str:
    if job.model.lora is not None:
        return "its adapters as a folder OUT that peft opens (--merged: the whole model)"
    if job.model.factory is not None:
        return "its weights as safetensors in a folder OUT"
    return "its weights as a folder OUT that transformers opens"
