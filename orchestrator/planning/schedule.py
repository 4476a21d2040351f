"""Lengths in tokens and the learning rate as a function of consumed tokens.

A length that the user gives in steps or samples is converted to tokens once, at the batch size and seq_len it
was first given with. The claims store it from then on (data rule 17).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.errors import ConfigError
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import sample_len_of

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

_BEYOND_STOP = "config.beyond_stop"
# Schedules that fall towards the run's end, and so need a stop.
DECAYING = ("linear", "cosine", "wsd", "power")
Points = Sequence[Sequence[float]]  # of a schedule by points: [tokens, factor] each


class RateSettings(Protocol):
    """The fields of `train` that the learning rate needs, as in `TrainConfig` and `Rate`."""

    @property
    def lr(self) -> float:
        """The highest learning rate."""

    @property
    def min_lr_ratio(self) -> float:
        """The share of `lr` at which a decay ends."""

    @property
    def schedule(self) -> str | Points:
        """`constant`, one of `DECAYING`, or points."""

    @property
    def decay_power(self) -> float | None:
        """The exponent of `power`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The same fields as plain values, e.g. from the configuration that a resume point was made with."""

    lr: float
    min_lr_ratio: float
    schedule: str | Points
    decay_power: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Length:
    """A length as it was given (`given` in `unit`: steps, samples or tokens), and its value in positions.

    `global_batch_size` and `seq_len` are those it was first given with. `tokens` counts from the start of the
    run, except for a decay, where it is the length itself.
    """

    given: int
    unit: str
    global_batch_size: int
    seq_len: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """The run's stops and the schedule's lengths. Of several stops the first that is reached ends the run.

    `lr_factor_squared`: the square, as (numerator, denominator) in lowest terms, of the factor by which
    changes of the batch have scaled `train.lr` (`train.lr_on_batch_change`). None: they have not.
    """

    max_steps: Length | None = None
    max_samples: Length | None = None
    max_tokens: Length | None = None
    warmup: Length | None = None
    decay: Length | None = None
    lr_factor_squared: tuple[int, int] | None = None

    @property
    def lr_factor(self) -> float:
        """The factor by which changes of the batch have scaled `train.lr`."""
        if self.lr_factor_squared is None:
            return 1.0
        above, below = self.lr_factor_squared
        roots = math.isqrt(above), math.isqrt(below)
        is_exact = roots[0] ** 2 == above and roots[1] ** 2 == below
        return roots[0] / roots[1] if is_exact else math.sqrt(above / below)

    @property
    def stop_tokens(self) -> int | None:
        """The stop in positions (`max_steps` and `max_tokens`), for `batches.next_range`; None: there is
        none.
        """
        return min((limit.tokens for limit in (self.max_steps, self.max_tokens) if limit), default=None)

    @property
    def stop_samples(self) -> int | None:
        """The stop in samples, counted as they are trained, whatever their seq_len; None: there is none."""
        return self.max_samples.given if self.max_samples else None

    @property
    def total_tokens(self) -> int | None:
        """Where the schedule ends: the first stop, in positions; None: there is no stop."""
        limits = (self.max_steps, self.max_samples, self.max_tokens)
        return min((limit.tokens for limit in limits if limit), default=None)


def budgets_for(
    config: JobConfig,
    previous: Budgets | None,
    at: Cursor | None = None,
    old: Mapping[str, Any] | None = None,
) -> Budgets:
    """Returns the budgets under `config` of a run with the budgets `previous` (None: a fresh start), at `at`.

    An unchanged number keeps its tokens, whatever batch size and seq_len are now. A changed number is
    converted again, at those of `config`. So is a stop in samples at another seq_len, because the samples
    still to come have that length. `old`: the flat configuration that trained up to `at`, from which
    `train.lr_on_batch_change` scales the learning rate.

    Raises `ConfigError` for a schedule that decays without a known end. Raises it also for a warm-up or decay
    that goes beyond the stop, unless the run already has these lengths.
    """
    before, here, train = previous or Budgets(), at or Cursor(), config.train

    def turned(given: int | None, unit: str, old: Length | None) -> Length | None:
        if given is None:
            return None
        batch, seq_len = train.global_batch_size, config.sample_len
        if old is not None and old.given == given and (unit != "samples" or old.seq_len == seq_len):
            return old
        tokens = {
            "tokens": given,
            "steps": given * batch * seq_len,
            # earlier samples may have had another seq_len; only those to come are counted at this one
            "samples": here.consumed_tokens + (given - here.consumed_samples) * seq_len,
        }[unit]
        return Length(given=given, unit=unit, global_batch_size=batch, seq_len=seq_len, tokens=tokens)

    budgets = Budgets(
        max_steps=turned(train.max_steps, "steps", before.max_steps),
        max_samples=turned(train.max_samples, "samples", before.max_samples),
        max_tokens=turned(train.max_tokens, "tokens", before.max_tokens),
        warmup=turned(train.warmup_steps, "steps", before.warmup),
        decay=turned(train.decay_steps, "steps", before.decay),
        lr_factor_squared=before.lr_factor_squared,
    )
    _check_decay(train.schedule, budgets)
    if budgets != before:
        _check_lengths(train.schedule, budgets)
    return budgets if old is None else replace(budgets, lr_factor_squared=_scaled(config, before, old))


def _scaled(config: JobConfig, before: Budgets, old: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns `Budgets.lr_factor_squared` for a start of `config` that continues what `old` has trained.

    The batch is counted in tokens: a step's samples times seq_len. A rate that the user changes is the one
    for the new batch, so the factor begins at 1 again.
    """
    train = config.train
    if old["train.lr"] != train.lr:
        return None
    factor = Fraction(*(before.lr_factor_squared or (1, 1)))
    batch = train.global_batch_size * config.sample_len
    ratio = Fraction(batch, old["train.global_batch_size"] * sample_len_of(old))
    factor *= {"keep": Fraction(1), "linear": ratio**2, "sqrt": ratio}[train.lr_on_batch_change]
    return None if factor == 1 else (factor.numerator, factor.denominator)


def _check_lengths(schedule: str | Points, budgets: Budgets) -> None:
    """Raises `ConfigError` for lengths that do not fit before the stop.

    A warm-up that the stop cuts short never reaches `lr`. A decay that is too long begins before the run, and
    one that does not fit after the warm-up is shorter than given.
    """
    stops = {name: getattr(budgets, name) for name in ("max_steps", "max_samples", "max_tokens")}
    stop = min((name for name in stops if stops[name]), key=lambda name: stops[name].tokens, default=None)
    for name in ("warmup", "decay"):
        length: Length | None = getattr(budgets, name)
        if stop is None or length is None or length.tokens <= stops[stop].tokens:
            continue
        raise ConfigError(
            f"train.{name}_steps={length.given} ({length.tokens:,} tokens) goes beyond "
            f"train.{stop}={stops[stop].given} ({stops[stop].tokens:,} tokens), where the run ends; "
            f"lower train.{name}_steps, or raise train.{stop}",
            code=_BEYOND_STOP,
        )
    warmup, decay = budgets.warmup, budgets.decay
    if schedule != "wsd" or stop is None or warmup is None or decay is None:
        return
    if warmup.tokens + decay.tokens > stops[stop].tokens:
        raise ConfigError(
            f"train.warmup_steps={warmup.given} and train.decay_steps={decay.given} "
            f"({warmup.tokens + decay.tokens:,} tokens together) go beyond train.{stop}={stops[stop].given} "
            f"({stops[stop].tokens:,} tokens), where the run ends: the decay would be shorter than given; "
            f"lower one of them, or raise train.{stop}",
            code=_BEYOND_STOP,
        )


def _check_decay(schedule: str | Points, budgets: Budgets) -> None:
    if schedule in DECAYING and budgets.total_tokens is None:
        raise ConfigError(
            f"train.schedule={schedule} decays, but max_steps, max_samples and max_tokens are all null; "
            "set one of them, or train.schedule=constant",
            code="config.no_stop",
        )
    if schedule == "wsd" and budgets.decay is None:
        raise ConfigError(
            "train.schedule=wsd, but train.decay_steps is null; set the number of steps that the decay takes",
            code="config.missing_key",
        )


def learning_rate(train: RateSettings, budgets: Budgets, consumed_tokens: int) -> float:
    """Returns the learning rate of the step after which the run has consumed `consumed_tokens` positions.

    The peak is `lr`, scaled by the changes of the batch (`Budgets.lr_factor`). The rate rises linearly to the
    peak over the warm-up. Then `constant` stays there. With t from 0 (end of the warm-up) to 1 (the total),
    `linear` falls by 1 − t, `cosine` by (1 + cos πt) / 2 (Loshchilov and Hutter 2017), and `power` by
    (1 − t)^`decay_power`, each to `min_lr_ratio` of the peak. `wsd` stays until `decay` positions before the
    total and falls linearly to the same end. Past the total the rate keeps its final value.

    Points [tokens, factor] give the factor of the peak, linear between two points, and constant before the
    first and after the last. Where two points have the same tokens, the step that ends there has the first
    one's factor, and later steps begin at the second one's.
    """
    peak = train.lr * budgets.lr_factor
    if not isinstance(train.schedule, str):
        return peak * _between_points(train.schedule, consumed_tokens)
    warmup = budgets.warmup.tokens if budgets.warmup else 0
    if consumed_tokens < warmup:
        return peak * (consumed_tokens / warmup)
    if train.schedule == "constant":
        return peak
    _check_decay(train.schedule, budgets)
    total = budgets.total_tokens
    assert total is not None, "checked above"
    # A decay longer than what the warm-up leaves begins where the warm-up ends.
    begin = (
        max(warmup, total - budgets.decay.tokens) if train.schedule == "wsd" and budgets.decay else warmup
    )
    done = min(1.0, max(0, consumed_tokens - begin) / max(1, total - begin))
    left = 1.0 - done
    if train.schedule == "cosine":
        left = (1.0 + math.cos(math.pi * done)) / 2
    elif train.schedule == "power":
        assert train.decay_power is not None, "the configuration was checked"
        left = left**train.decay_power
    return peak * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left)


def _between_points(points: Points, consumed_tokens: int) -> float:
    """Interpolates the factor at `consumed_tokens`, see `learning_rate`."""
    before = points[0]
    for point in points:
        tokens, factor = point
        if consumed_tokens <= tokens:
            if consumed_tokens == tokens or point is points[0]:
                return factor
            share = (consumed_tokens - before[0]) / (tokens - before[0])
            return before[1] + (factor - before[1]) * share
        before = point
    return before[1]
