"""Chooses the objective of a job, and the units by which a step's loss is divided."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from orchestrator.config.sections import BUILT_IN, TrainConfig
from orchestrator.records.steps import BatchSlice
from orchestrator.trainer.objective.causal_lm import CausalLM
from orchestrator.trainer.objective.micro_batches import NO_MODELS, Objective
from orchestrator.trainer.objective.plug_in import PlugIn


def objective_of(
    train: TrainConfig,
    by_document: bool,
    seq_len: int,
    frozen: Mapping[str, nn.Module] = NO_MODELS,
    rows_per_sample: int = 1,
) -> Objective:
    """Returns the objective of `train`, not prepared for a model.

    `by_document`: tokens attend only to their own document. `seq_len`: the positions of a row. `frozen`: the
    models of `model.frozen`; the mapping may get other modules in each generation. Raises `ConfigError` if
    the function of a plug-in cannot be called.
    """
    seed, precision, arguments = train.seed, train.precision, train.objective_args
    if train.objective == BUILT_IN:
        num_positions = train.micro_batch_size * seq_len
        return CausalLM(seed, precision, by_document, num_positions, arguments, frozen)
    of_model = (train.objective, arguments, seed, precision, by_document, seq_len)
    return PlugIn(*of_model, frozen, rows_per_sample)


def step_units(train: TrainConfig, batch: BatchSlice) -> float:
    """Returns what the loss of the whole step is divided by (`train.objective_units`)."""
    if train.objective_units == "samples":
        return batch.step.num_samples
    if train.objective_units == "targets":
        return batch.step_targets
    assert batch.step_units is not None, "the feed counts the units of a plug-in"
    return batch.step_units
