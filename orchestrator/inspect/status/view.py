"""The state of a run in one view: whether it is alive, its progress, its last fault, and its expected end.

It makes one value and one sentence from facts that were read before, so that the command, the notebook and a
dashboard agree. It reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.inspect.status.tail import Tail
from orchestrator.inspect.status.verdict import (
    FAILED,
    GONE,
    NEW,
    OPEN,
    OVER,
    RUNNING,
    STARTING,
    WAITING,
    Risk,
    Standing,
    silence_s,
    there_text,
    verdict,
)
from orchestrator.planning.batches import Remaining, remaining
from orchestrator.planning.state.parallel_choice import layout_text
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.records.cursor import Cursor

LeftOut = Mapping[str, Mapping[str, int]]  # by source: `filtered`, `held_out`, `long`, `unpacked`


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFacts:
    """What the claims say. `number` is the newest attempt, None if there is none; `outcome` and `reason` are
    its end, "" without one. `point` is the newest resume point of the history, `points` how many there are.
    `stop_tokens` and `stop_samples` are the run's budgets, None where there is no limit. `alive`: whether the
    attempt gave a sign of life while it was watched for `watched_s`; None: nobody watched. `skipped` counts
    the documents that were skipped up to that point, by source; None if that is not known. `left_out` counts
    those that transforms dropped (`filtered`), that are held out (`held_out`), too long (`long`) or without a
    target (`unpacked`). `missing` is what is seen to be gone of the run's folder. `has_no_point`: whether it
    is known that none was ever committed. `quarantined`: the points that are marked as damaged, of which none
    is `point`. `resumes`: the attempt was claimed by a start that continues that point. `point_tokens`: what
    was consumed up to `point`; None if that is not known, or if not all that came after it was trained.
    `kept_s`: `alive` is None because this machine keeps sizes of files for so long, which is longer than it
    watched.
    """

    number: int | None
    outcome: str
    reason: str
    point: str | None
    points: int
    stop_tokens: int | None
    stop_samples: int | None
    alive: bool | None
    watched_s: float
    skipped: Mapping[str, int] | None = None
    left_out: LeftOut | None = None
    missing: tuple[str, ...] = ()
    has_no_point: bool = True
    quarantined: tuple[str, ...] = ()
    resumes: bool = False
    point_tokens: int | None = None
    kept_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run at a glance; None is what is not known. Times are UTC by the clock of who wrote them, ages by
    this machine's: for people, nothing is decided by them. `quiet_s`: for how long `watch` has seen no new
    step. `layout`: how the newest group holds the state. `skipped_documents` and `left_out_documents`
    (`filtered` by transforms, `held_out`, too `long`, `unpacked`: without a target) are those up to
    `newest_point`, by source. `missing` names what is seen to be gone of the run's folder
    (`monitor.missing`); `quarantined` are the points that are marked as damaged, of which none counts as
    `newest_point`.
    """

    run: str
    state: str
    verdict: str
    alive: bool | None
    attempt: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    lr: float | None
    tokens_per_s: float | None
    consumed_samples: int
    consumed_tokens: int
    workers: int | None
    workers_wanted: int | None
    layout: str | None
    last_step_at: str | None
    last_step_age_s: float | None
    quiet_s: float | None
    eta_s: float | None
    newest_point: str | None
    newest_point_at: str | None
    newest_point_age_s: float | None
    num_points: int
    last_fault: str | None
    last_fault_at: str | None
    reason: str
    skipped_documents: Mapping[str, int] | None
    left_out_documents: LeftOut | None
    missing: tuple[str, ...]
    quarantined: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more without a command."""
        return self.state in OVER

    @property
    def is_broken(self) -> bool:
        """Whether the run needs attention: it failed, its processes are gone without an end, or a part of its
        folder is missing.
        """
        return self.state in (FAILED, GONE) or bool(self.missing)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


Quiet = Callable[[RunView, int | None], float | None]  # with the number of the newest generation


def not_watched(view: RunView, generation: int | None) -> float | None:
    """The `quiet_s` of a single look."""
    del view, generation
    return None


def view_of(
    run: str, facts: AttemptFacts, tail: Tail, now: datetime, quiet_s: Quiet = not_watched
) -> RunView:
    """Makes the view of a run. `quiet_s` returns the field of this name. It is called with the view before
    its sentence is made, and with the newest generation.
    """
    newest = _newest(tail)
    rate = _tokens_per_s(tail.steps)
    left = _left(facts, tail, newest)
    state = _state(facts, tail)
    fault = tail.fault
    point = _point(facts, tail)
    view = RunView(
        run=run,
        state=state,
        verdict="",
        alive=facts.alive,
        attempt=facts.number,
        step=newest["step"] if newest else None,
        total_steps=left[0] + left[1].steps if left is not None and newest is not None else None,
        loss=_float(newest["loss"]) if newest and newest["loss"] is not None else None,
        lr=_float(newest["lr"]) if newest else None,
        tokens_per_s=rate,
        consumed_samples=newest["consumed_samples"] if newest else 0,
        consumed_tokens=newest["consumed_tokens"] if newest else 0,
        workers=tail.workers if state in (RUNNING, WAITING, OPEN) else None,
        workers_wanted=tail.wanted,
        layout=_layout(tail),
        last_step_at=newest["time"] if newest else None,
        last_step_age_s=_age(newest["time"], now) if newest else None,
        quiet_s=None,
        eta_s=left[1].tokens / rate if left is not None and rate and state == RUNNING else None,
        newest_point=facts.point,
        newest_point_at=point["time"] if point else None,
        newest_point_age_s=_age(point["time"], now) if point else None,
        num_points=facts.points,
        last_fault=fault.text if fault else None,
        last_fault_at=fault.time if fault else None,
        reason=facts.reason,
        skipped_documents=facts.skipped,
        left_out_documents=facts.left_out,
        missing=facts.missing,
        quarantined=facts.quarantined,
    )
    generation = tail.generation["generation"] if tail.generation is not None else None
    view = replace(view, quiet_s=quiet_s(view, generation))
    last = None if tail.wrote is None else datetime.fromisoformat(tail.wrote).timestamp()
    silent_s = silence_s(facts.watched_s, last, now.timestamp())
    standing = _standing(view, facts, tail, at_risk(facts, tail), silent_s)
    return replace(view, verdict=verdict(standing))


def _newest(tail: Tail) -> dict[str, Any] | None:
    return max(tail.steps, key=lambda s: (s["attempt"], s["generation"], s["step"]), default=None)


def _point(facts: AttemptFacts, tail: Tail) -> dict[str, Any] | None:
    """The line of the newest resume point; None if the tail does not have it."""
    return tail.point if tail.point is not None and tail.point["point"] == facts.point else None


def _state(facts: AttemptFacts, tail: Tail) -> str:
    if facts.number is None:
        return GONE if facts.missing else NEW
    if facts.outcome:
        return facts.outcome
    if facts.alive is None:
        return OPEN
    if not facts.alive:
        return GONE
    generation = tail.generation
    if generation is None or generation["attempt"] != facts.number:
        return STARTING
    return RUNNING if tail.workers and tail.waiting is None else WAITING


def _standing(view: RunView, facts: AttemptFacts, tail: Tail, risk: Risk | None, silent_s: float) -> Standing:
    waits = tail.waiting
    return Standing(
        state=view.state,
        attempt=view.attempt,
        reason=view.reason,
        step=view.step,
        total_steps=view.total_steps,
        workers=view.workers,
        workers_wanted=view.workers_wanted,
        there=there_text(waits["there"], waits["needed"]) if waits is not None else "",
        quiet_s=view.quiet_s,
        silent_s=silent_s,
        kept_s=facts.kept_s,
        point=view.newest_point,
        has_no_point=facts.has_no_point,
        risk=risk,
        resumes=facts.resumes,
        missing=view.missing,
    )


def at_risk(facts: AttemptFacts, tail: Tail) -> Risk | None:
    """What would be trained again if everything died now; None if a quick look cannot tell."""
    newest, point = _newest(tail), _point(facts, tail)
    return _risk(point, newest) or _since_resumed(facts, tail, newest) or _all(facts, newest)


def _risk(point: dict[str, Any] | None, newest: dict[str, Any] | None) -> Risk | None:
    """What came after the newest point. None if a quick look cannot tell: another attempt may have labelled
    its steps anew.
    """
    key = parse_point_name(point["point"]) if point is not None else None
    if point is None or newest is None or key is None or key.attempt != newest["attempt"]:
        return None
    tokens = newest["consumed_tokens"] - point["cursor"]["consumed_tokens"]
    return Risk(steps=max(0, newest["step"] - key.step), tokens=max(0, tokens))


def _since_resumed(facts: AttemptFacts, tail: Tail, newest: dict[str, Any] | None) -> Risk | None:
    """What came after a point of an older attempt, which the newest one continues. Its steps may be labelled
    anew, so they are counted by their tokens: all but the last step of a run are of one size.
    """
    begun = tail.generation
    if newest is None or begun is None or facts.point is None or facts.point_tokens is None:
        return None
    if not newest["attempt"] == begun["attempt"] == facts.number:
        return None
    tokens = max(0, newest["consumed_tokens"] - facts.point_tokens)
    return Risk(steps=-(-tokens // (begun["global_batch_size"] * begun["seq_len"])), tokens=tokens)


def _all(facts: AttemptFacts, newest: dict[str, Any] | None) -> Risk | None:
    """What would be lost before the first point of an attempt that began from nothing."""
    if newest is None or newest["attempt"] != facts.number or facts.points or facts.missing:
        return None
    return Risk(steps=newest["step"], tokens=newest["consumed_tokens"]) if facts.has_no_point else None


def skipped_lines(skipped: Mapping[str, int] | None, before: str = "") -> list[str]:
    """The number of skipped documents of each source, a line each, which begins with `before`. Sources that
    skipped none have no line.
    """
    return [
        f"{before}{number:,} document{'' if number == 1 else 's'} of source {source} "
        f"{'was' if number == 1 else 'were'} skipped (data.on_bad_document=skip)"
        for source, number in (skipped or {}).items()
        if number
    ]


def left_out(cursor: Cursor) -> dict[str, dict[str, int]]:
    """What transforms dropped, what is held out, and what no sample of whole documents holds because it is
    too long or has no target, up to a cursor.
    """
    return {
        name: {
            "filtered": at.filtered_documents,
            "held_out": at.held_out_documents,
            "long": at.long_documents,
            "unpacked": at.unpacked_documents,
        }
        for name, at in cursor.sources.items()
    }


def left_out_lines(left_out: LeftOut | None, before: str = "") -> list[str]:
    """The same for documents that are left out for another reason than being bad."""
    words = {
        "filtered": "dropped by data.transforms",
        "held_out": "held out (data.holdout)",
        "long": "longer than a sample holds and skipped (pack.long_document=skip)",
        "unpacked": "without a target and in no sample",
    }
    return [
        f"{before}{number:,} document{'' if number == 1 else 's'} of source {source} "
        f"{'was' if number == 1 else 'were'} {words[kind]}"
        for source, counts in (left_out or {}).items()
        for kind, number in counts.items()
        if number
    ]


def _tokens_per_s(steps: Sequence[dict[str, Any]]) -> float | None:
    """The speed over the newest steps of one generation, `steps` newest first."""
    if not steps:
        return None
    newest = (steps[0]["attempt"], steps[0]["generation"])
    same = [step for step in steps if (step["attempt"], step["generation"]) == newest]
    seconds = sum(_float(s["step_s"]) or 0.0 for s in same[:-1])
    tokens = int(same[0]["consumed_tokens"]) - int(same[-1]["consumed_tokens"])
    return tokens / seconds if seconds > 0 else None


def _left(facts: AttemptFacts, tail: Tail, newest: dict[str, Any] | None) -> tuple[int, Remaining] | None:
    """The label of the newest generation's current step, and what it has left to train. None if no stop is
    known, or no generation.
    """
    begun = tail.generation
    if begun is None:
        return None
    own = newest is not None and (newest["attempt"], newest["generation"]) >= (
        begun["attempt"],
        begun["generation"],
    )
    at = newest if own and newest is not None else begun
    left = remaining(
        int(at["consumed_samples"]),
        int(at["consumed_tokens"]),
        int(begun["global_batch_size"]),
        int(begun["seq_len"]),
        facts.stop_tokens,
        facts.stop_samples,
    )
    return None if left is None else (int(at["step"]), left)


def _layout(tail: Tail) -> str | None:
    begun = tail.generation or {}
    shards, world = begun.get("num_shards"), begun.get("world_size")
    return layout_text(layout_of(world, shards)) if shards and world else None


def _age(time: str, now: datetime) -> float | None:
    """Seconds since then; None if this machine's clock is behind the writer's."""
    age = (now - datetime.fromisoformat(time)).total_seconds()
    return age if age >= 0 else None


def _float(value: Any) -> float | None:
    """None for what is not finite: JSON cannot express it."""
    number = float(value)
    return number if math.isfinite(number) else None
