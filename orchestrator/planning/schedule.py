"""Lengths in tokens and the learning rate as a function of consumed tokens.

A length that the user gives in steps or samples is converted to tokens once, at the batch size and seq_len it
was first given with. The claims store it from then on (data rule 17).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from orchestrator.errors import ConfigError
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

_BEYOND_STOP = "config.beyond_stop"


class RateSettings(Protocol):
    """The fields of `train` that the learning rate needs, as in `TrainConfig` and `Rate`."""

    @property
    def lr(self) -> float:
        """The highest learning rate."""

    @property
    def min_lr_ratio(self) -> float:
        """The share of `lr` at which a decay ends."""

    @property
    def schedule(self) -> str:
        """`constant`, `cosine` or `wsd`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The same fields as plain values, e.g. from the configuration that a resume point was made with."""

    lr: float
    min_lr_ratio: float
    schedule: str


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
    """The run's stops and the schedule's lengths. Of several stops the first that is reached ends the run."""

    max_steps: Length | None = None
    max_samples: Length | None = None
    max_tokens: Length | None = None
    warmup: Length | None = None
    decay: Length | None = None

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


def budgets_for(config: JobConfig, previous: Budgets | None, at: Cursor | None = None) -> Budgets:
    """Returns the budgets under `config` of a run with the budgets `previous` (None: a fresh start), at `at`.

    An unchanged number keeps its tokens, whatever batch size and seq_len are now. A changed number is
    converted again, at those of `config`. So is a stop in samples at another seq_len, because the samples
    still to come have that length. Raises `ConfigError` for a schedule that decays without a known end.
    Raises it also for a warm-up or decay that goes beyond the stop, unless the run already has these lengths.
    """
    before, here, train = previous or Budgets(), at or Cursor(), config.train

    def turned(given: int | None, unit: str, old: Length | None) -> Length | None:
        if given is None:
            return None
        batch, seq_len = train.global_batch_size, config.pack.seq_len
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
    )
    _check_decay(train.schedule, budgets)
    if budgets != before:
        _check_lengths(train.schedule, budgets)
    return budgets


def _check_lengths(schedule: str, budgets: Budgets) -> None:
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


def _check_decay(schedule: str, budgets: Budgets) -> None:
    if schedule != "constant" and budgets.total_tokens is None:
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

    It rises linearly to `lr` over the warm-up. Then `constant` stays there, `cosine` falls to `lr ·
    min_lr_ratio` at the total, and `wsd` stays until `decay` positions before the total and falls linearly to
    `lr · min_lr_ratio`. Past the total it keeps its final value.
    """
    warmup = budgets.warmup.tokens if budgets.warmup else 0
    if consumed_tokens < warmup:
        return train.lr * (consumed_tokens / warmup)
    if train.schedule == "constant":
        return train.lr
    _check_decay(train.schedule, budgets)
    total = budgets.total_tokens
    assert total is not None, "checked above"
    # A decay longer than what the warm-up leaves begins where the warm-up ends.
    begin = (
        warmup
        if train.schedule == "cosine" or not budgets.decay
        else max(warmup, total - budgets.decay.tokens)
    )
    done = min(1.0, max(0, consumed_tokens - begin) / max(1, total - begin))
    left = (1.0 + math.cos(math.pi * done)) / 2 if train.schedule == "cosine" else 1.0 - done
    return train.lr * (train.min_lr_ratio + (1.0 - train.min_lr_ratio) * left)
