"""A plan's notes on what is trained for, what is evaluated, and which callbacks are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.planning.resume.data_progress import KnownEpochs
from orchestrator.planning.resume.identity import value_text

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import TrainConfig


def training_notes(config: JobConfig, epochs: KnownEpochs | None) -> Iterator[str]:
    """Yields the notes; none for settings that are left at their defaults.

    `epochs`: the length of an epoch of the job's only source, if it is known.
    """
    train = config.train
    if {"objective", "objective_args", "objective_units"} & train.model_dump(exclude_defaults=True).keys():
        yield _objective(train)
    if config.eval.is_wanted:
        yield f"eval: {_parts(config)} {_when(config)}, {_size(config, epochs)}"
    if train.callbacks:
        listed = ", ".join(train.callbacks)
        yield f"train.callbacks: {listed} (train.on_callback_error={train.on_callback_error})"


def _objective(train: TrainConfig) -> str:
    arguments = f" with {value_text(train.objective_args)}" if train.objective_args else ""
    return (
        f"train.objective: {train.objective}{arguments}, its loss divided by the units of the step "
        f"(train.objective_units={train.objective_units})"
    )


def _parts(config: JobConfig) -> str:
    names = []
    for name in config.eval.part_names:
        part = config.eval.parts.get(name)
        names.append(f"{name} ({_held_out(config)})" if part is None or part.holdout else name)
    return ", ".join(names)


def _held_out(config: JobConfig) -> str:
    """The share of the records that is held out, of each source if they differ."""
    shares = {name: f"{100 * share:g}%" for name, share in _shares(config).items()}
    if len(set(shares.values())) == 1:
        return f"{next(iter(shares.values()))} of the records"
    return ", ".join(f"{share} of source {name}" for name, share in shares.items())


def _shares(config: JobConfig) -> Mapping[str, float]:
    everywhere = config.data.holdout
    return {
        source.name: everywhere if source.holdout is None else source.holdout
        for source in config.data.sources
    }


def _when(config: JobConfig) -> str:
    asked, when = config.eval, []
    if asked.every_steps is not None:
        when.append("after each step" if asked.every_steps == 1 else f"every {asked.every_steps:,} steps")
    if asked.every_tokens is not None:
        when.append(f"every {asked.every_tokens:,} tokens")
    if asked.at_end:
        when.append("at the end")
    return " and ".join(when)


def _size(config: JobConfig, epochs: KnownEpochs | None) -> str:
    """How much one evaluation reads of each part."""
    most, batch = config.eval.max_samples, config.train.global_batch_size
    if most is not None:
        part = " of each part" if len(config.eval.part_names) > 1 else ""
        num = -(-most // batch)
        batches = f"up to {num:,} batches of {batch:,}" if num > 1 else "one batch"
        return f"the first {most:,} samples{part} in {batches}"
    text = f"all samples in batches of {batch:,}"
    if epochs is None or config.eval.parts:
        return text
    (share,) = _shares(config).values()  # the only source's
    held = epochs.tokens * share / (1 - share) / config.sample_len
    return f"{text}, about {max(1, round(held / batch)):,} each time"
