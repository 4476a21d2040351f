"""A run at one moment: its newest attempt, group, step and resume point, and what is at risk or missing.

`status`, the page, its list of runs and notebooks are derived from one `RunSnapshot`, so they agree. Two
readers make it: `status_reader` from the newest part of the journal, within a bound, for a run of any length,
and `views.summary.run_snapshot` from the whole journal, which the page keeps in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.inspect.status.verdict import (
    GONE,
    NEW,
    OPEN,
    RUNNING,
    STARTING,
    WAITING,
    Risk,
    Standing,
    silence_s,
    there_text,
)
from orchestrator.planning.batches import Remaining, remaining
from orchestrator.records.cursor import Cursor

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
    `tokens_per_s` over the newest `RECENT_STEPS` steps, `risk`, the newest `fault`, `last_sign` (the newest
    line or sign of life) and `since` (when the run's state began).

    `missing` names what is seen to be gone of the run's folder (see `status.missing`).
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
    fault: NewestFault | None = None
    last_sign: float | None = None
    since: float | None = None
    missing: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """One of the states of `status.verdict`."""
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
