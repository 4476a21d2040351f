"""A run at one moment: its newest attempt, group, step and resume point, and what is at risk or missing.

`status`, the page, its list of runs and notebooks are derived from one `RunSnapshot`, so they agree. Two
readers make it: `status_reader` from the newest part of the journal, within a bound, for a run of any length,
and `views.summary.run_snapshot` from the whole journal, which the page keeps in memory. `verdict` puts the
state of the run into one sentence, and `level` is its urgency: ok, warn, bad, or idle (nothing to do).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.history import sentences
from orchestrator.planning.batches import Remaining, remaining
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import EvalRecord
from orchestrator.text import count, span, steps

# the states of a run; `open`: it has not ended, and it was not watched long enough to tell if it is alive
NEW, STARTING, RUNNING, WAITING, OPEN = "new", "starting", "running", "waiting", "open"
DONE, STOPPED, FAILED, GONE, UNREADABLE = "done", "stopped", "failed", "gone", "unreadable"
OVER = (NEW, DONE, STOPPED, FAILED, GONE)  # nothing will change without a command
STILL_S = 5.0  # the least time without a step that is worth mentioning


@dataclass(frozen=True, kw_only=True, slots=True)
class Risk:
    """What would be trained again if everything died now: all since the newest resume point. While a start
    continues that point: all that is trained again. `seconds` is None if unknown.
    """

    steps: int
    tokens: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The state of a run. None, or empty, means unknown or not applicable.

    `reason`: of its end, or what is unreadable. `silent_s`: the time without a sign of life; `quiet_s`: the
    time without a step. `kept_s`: the time for which this machine keeps file sizes, so a shorter watch proves
    no death. `resumes`: the newest attempt is a start that continues the newest resume point, so that all
    that came after it is gone. `has_no_point`: it is known that no resume point was ever committed.
    `concerns`: what needs attention, in few words, the worst first; `is_bad`: one of them is bad.
    """

    state: str
    attempt: int | None = None
    reason: str = ""
    step: int | None = None
    total_steps: int | None = None
    workers: int | None = None
    workers_wanted: int | None = None
    there: str = ""
    quiet_s: float | None = None
    silent_s: float = 0.0
    kept_s: float = 0.0
    point: str | None = None
    has_no_point: bool = True
    risk: Risk | None = None
    resumes: bool = False
    missing: tuple[str, ...] = ()
    concerns: tuple[str, ...] = ()
    is_bad: bool = False


def verdict(at: Standing) -> str:
    """The sentence, without a capital or a full stop, because it follows the run's name. More sentences may
    follow after `. `.
    """
    text = _state_text(at)
    if at.state == GONE and at.risk is not None and at.risk.steps and at.point is not None and not at.missing:
        work = f"{steps(at.risk.steps)} ({count(at.risk.tokens)} tokens)"
        text += f"; {work} after it {_are(at.risk)} trained again"
    if at.state == STARTING and at.resumes and at.risk is not None and at.risk.steps:
        text += f". {_work(at.risk)} after {at.point or 'its beginning'} {_are(at.risk)} trained again"
    elif at.state in (STARTING, RUNNING, WAITING) and (risk := _risk_text(at)):
        text += f". {risk}"
    if at.concerns and at.state in (RUNNING, WAITING):
        text += f". Look at: {', '.join(at.concerns)}"
    return text + (f"; {missing_text(at.missing)}" if at.missing else "")


def missing_text(missing: Sequence[str]) -> str:
    """The sentence of a look about missing paths, and the commands that check more."""
    listed = ", ".join(missing)
    return (
        f"missing or damaged in its folder: {listed}; `orchestrator plan CONFIG` says what a start would do"
    )


def silence_s(watched_s: float, last: float | None, now: float) -> float:
    """How long a run that seems dead gave no sign of life: since the last known sign, or for the time of the
    watch. `last` and `now`: seconds by one clock, or by two that may differ.
    """
    return max(watched_s, now - last if last is not None else 0.0)


def there_text(there: int, needed: int) -> str:
    """Why a run waits for workers (`Standing.there`)."""
    return f"{there} of at least {needed} workers are there"


def level(at: Standing) -> str:
    """The urgency: ok, warn, bad or idle."""
    if at.state in (FAILED, GONE, UNREADABLE) or at.missing or at.is_bad:
        return "bad"
    if at.state in (NEW, DONE, STOPPED):
        return "idle"  # a slow phase of the past needs no attention
    return "warn" if at.state == WAITING or at.concerns else "ok"


def _state_text(at: Standing) -> str:
    where = f"step {at.step:,}" if at.step is not None else "no step yet"
    if at.step is not None and at.total_steps is not None:
        where += f" of {at.total_steps:,}"
    again = f"start the same command again: it continues from {at.point or 'the beginning'}"
    if at.point is None and not at.has_no_point:
        again = "no resume point is seen; `orchestrator plan CONFIG` says what a start would do"
    workers = f"{at.workers} of {at.workers_wanted or at.workers} workers"
    still = at.quiet_s is not None and at.quiet_s >= STILL_S
    quiet = f", but no step for {at.quiet_s:.0f} s" if still else ""
    dead = "no claim of an attempt is left of this run"
    if at.attempt is not None:
        dead = (
            f"not running: attempt {at.attempt} has no end record and gave no sign of life for "
            f"{_silence(at.silent_s)}, last at {where}" + ("" if at.missing else f"; {again}")
        )
    unknown = (
        f"unknown: last seen {_silence(at.silent_s)} ago at {where}; this machine keeps the sizes of files "
        f"for {at.kept_s:.0f} s, so a short watch does not show whether the run lives"
    )
    texts = {
        NEW: "no attempt of this run has begun yet",
        STARTING: f"starting attempt {at.attempt}: {where}",
        RUNNING: f"running: {where}, {workers}{quiet}",
        WAITING: f"waiting for workers at {where}: {at.there or f'{workers} are left'}",
        OPEN: f"not ended: {where}" if not at.kept_s else unknown,
        DONE: sentences.ended(DONE, at.reason),
        STOPPED: sentences.ended(STOPPED, at.reason),
        FAILED: sentences.ended(FAILED, at.reason),
        GONE: dead,
        UNREADABLE: f"unreadable: {at.reason}",
    }
    return texts[at.state]


def _silence(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else span(seconds)


def _risk_text(at: Standing) -> str:
    if at.risk is None:
        return ""
    if not at.risk.steps:
        return "If everything died now, nothing would be lost"
    return f"If everything died now, {_work(at.risk)} would be trained again"


def _are(risk: Risk) -> str:
    return "is" if risk.steps == 1 else "are"


def _work(risk: Risk) -> str:
    work = f", {span(risk.seconds)} of work" if risk.seconds is not None else ""
    return f"{steps(risk.steps)} ({count(risk.tokens)} tokens{work})"


# ----------------------------------------------------------------------------------------------- the snapshot
RECENT_STEPS = 50  # the speed is computed from these


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestGeneration:
    """The generation that trains, or trained last, as its first line says.

    `num_workers` is how many of its `world_size` members have neither left nor been lost. `num_shards` is
    None for journals of earlier versions.
    """

    attempt: int
    generation: int
    world_size: int
    num_workers: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_len: int
    num_shards: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestStep:
    """The newest step of the history. `loss` and `lr` are None if they are not finite, or there is none."""

    attempt: int
    generation: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    loss: float | None
    lr: float | None
    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedPart:
    """The evaluation of one part. `loss` and `perplexity` are None as in `records.steps.EvalRecord`."""

    part: str
    loss: float | None
    perplexity: float | None
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestEvaluation:
    """The newest state of the history that was evaluated, and its parts in order. `t`: of the last one."""

    step: int
    t: float
    parts: tuple[EvaluatedPart, ...]


_OF_EVAL = frozenset(each.name for each in fields(EvalRecord))


def eval_record(line: Mapping[str, Any]) -> EvalRecord:
    """The evaluation of a line of the journal. Raises `TypeError` if a field is missing."""
    return EvalRecord(**{name: value for name, value in line.items() if name in _OF_EVAL})


def newest_evaluation(records: Iterable[tuple[EvalRecord, float]]) -> NewestEvaluation | None:
    """Returns the evaluation of the newest state in the history's `records`, oldest first, each with its
    time. Of a part that was evaluated twice the last result counts.
    """
    found, newest = list(records), dict[str, tuple[EvalRecord, float]]()
    for record, t in found:
        if record.key == found[-1][0].key:
            newest.pop(record.part, None)
            newest[record.part] = record, t
    if not newest:
        return None
    names = [each.name for each in fields(EvaluatedPart)]
    parts = ({name: getattr(record, name) for name in names} for record, _ in newest.values())
    last, t = found[-1]
    return NewestEvaluation(step=last.step, t=t, parts=tuple(EvaluatedPart(**part) for part in parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """The run waits since `t`: `there` workers are ready, and it needs at least `needed`."""

    there: int
    needed: int
    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NewestFault:
    """The newest fault, as a sentence."""

    text: str
    t: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    """What is known of a run at one moment. None means unknown. Times are seconds since 1970.

    Of the claims: `number` is the newest attempt (None: no attempt was ever claimed), `outcome` and `reason`
    its end ("": it has not ended), `resumes` whether it continues `point`, `stop_tokens` and `stop_samples`
    the run's budgets (None: no limit). `alive` is whether the attempt gave a sign of life while it was
    watched for `watched_s` of the `watch_s` seconds that prove a death; None: that is not known, and if
    `kept_s` is above 0, because this machine keeps file sizes for that long.

    Of the points: `point` is the newest that is whole and on the history, `point_t` when it was committed,
    `cursor` its position in the data, `num_points` how many are committed, `has_no_point` whether it is
    known that the history never had one, `quarantined` those marked as damaged.

    Of the journal: `generation`, `step`, `wanted` (the number of workers that the job asks for), `shortage`,
    `tokens_per_s` over the newest `RECENT_STEPS` steps, `risk`, the newest `evaluation` of the history, the
    newest `fault`, `last_sign` (the newest line or sign of life) and `since` (when the run's state began).

    `missing` names what is seen to be gone of the run's folder (see `integrity.missing_pieces`).
    """

    number: int | None
    outcome: str = ""
    reason: str = ""
    resumes: bool = False
    stop_tokens: int | None = None
    stop_samples: int | None = None
    alive: bool | None = None
    watched_s: float = 0.0
    watch_s: float = 0.0
    kept_s: float = 0.0
    point: str | None = None
    point_t: float | None = None
    cursor: Cursor | None = None
    num_points: int = 0
    has_no_point: bool = True
    quarantined: tuple[str, ...] = ()
    generation: NewestGeneration | None = None
    step: NewestStep | None = None
    wanted: int | None = None
    shortage: Shortage | None = None
    tokens_per_s: float | None = None
    risk: Risk | None = None
    evaluation: NewestEvaluation | None = None
    fault: NewestFault | None = None
    last_sign: float | None = None
    since: float | None = None
    missing: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """One of the states from `NEW` to `UNREADABLE`."""
        if self.number is None:
            return GONE if self.missing else NEW
        if self.outcome:
            return self.outcome
        if self.alive is None:
            return OPEN
        if not self.alive:
            return GONE
        if not self.has_formed:
            return STARTING
        return RUNNING if self._is_staffed else WAITING

    @property
    def has_formed(self) -> bool:
        """Whether the newest attempt has formed a group."""
        return self.generation is not None and self.generation.attempt == self.number

    @property
    def _is_staffed(self) -> bool:
        """Whether the newest group has workers and waits for none."""
        return self.generation is not None and self.generation.num_workers > 0 and self.shortage is None

    @property
    def is_live(self) -> bool:
        """Whether the newest attempt trains, or may do so."""
        return self.state in (STARTING, RUNNING, WAITING, OPEN)

    @property
    def why(self) -> str:
        """Why the run is in its state; empty while it trains."""
        state = self.state
        if state == WAITING and self.shortage is not None:
            return there_text(self.shortage.there, self.shortage.needed)
        texts = {
            NEW: "no attempt has begun",
            STARTING: "workers are being started",
            OPEN: f"no end is written; watched for {self.watched_s:.0f} of {self.watch_s:.0f} s so far",
            GONE: "no end is written, and nothing has been written since",
            RUNNING: "",
            WAITING: "",
        }
        return texts.get(state, self.reason)

    @property
    def workers(self) -> int | None:
        """The number of workers that train, or wait for more; None while the newest attempt has no group."""
        if self.generation is None or not self.has_formed or not self.is_live:
            return None
        return self.generation.num_workers

    @property
    def left(self) -> Remaining | None:
        """What the newest generation has left to train; None without a generation or a budget."""
        begun, at = self.generation, self._position
        if begun is None or at is None:
            return None
        return remaining(
            at.consumed_samples,
            at.consumed_tokens,
            begun.global_batch_size,
            begun.seq_len,
            self.stop_tokens,
            self.stop_samples,
        )

    @property
    def total_steps(self) -> int | None:
        """The label of the last step that the run will train."""
        left, at = self.left, self._position
        return at.step + left.steps if left is not None and at is not None else None

    @property
    def eta_s(self) -> float | None:
        """How long the rest takes at the present speed; None unless the run trains, or may do so."""
        left, trains = self.left, self.has_formed and self.is_live and self._is_staffed
        return left.tokens / self.tokens_per_s if left and self.tokens_per_s and trains else None

    @property
    def _position(self) -> NewestStep | NewestGeneration | None:
        step, begun = self.step, self.generation
        if step is None or begun is None:
            return begun
        own = (step.attempt, step.generation) >= (begun.attempt, begun.generation)
        return step if own else begun

    def standing(
        self, now: float, quiet_s: float | None = None, concerns: Sequence[str] = (), is_bad: bool = False
    ) -> Standing:
        """Returns the input of the verdict; `now` is this machine's time. See `Standing`."""
        return Standing(
            state=self.state,
            attempt=self.number,
            reason=self.reason,
            step=self.step.step if self.step is not None else None,
            total_steps=self.total_steps if self.step is not None else None,
            workers=self.workers,
            workers_wanted=self.wanted,
            there=self.why if self.state == WAITING else "",
            quiet_s=quiet_s,
            silent_s=silence_s(self.watched_s, self.last_sign, now),
            kept_s=self.kept_s,
            point=self.point,
            has_no_point=self.has_no_point,
            risk=self.risk,
            resumes=self.resumes,
            missing=self.missing,
            concerns=tuple(concerns),
            is_bad=is_bad,
        )


def speed(tokens: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Returns tokens/s over steps of one generation, oldest first: `tokens` consumed after each, and how long
    each took. None for fewer than two steps.
    """
    total_s = sum(seconds[1:])
    return (tokens[-1] - tokens[0]) / total_s if total_s > 0 else None
