"""What a start needs of this machine besides the run: the user's functions, and weights that no point holds.

A new run's model is tried (`model_dry_run`), which shows both. Of a run that exists only this is looked at.
Importing this module does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.config.sections import BUILT_IN
from orchestrator.trainer.weights.weight_files import holds_model, holds_weights

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig, TrainConfig


def names_functions(model: ModelConfig, train: TrainConfig) -> bool:
    """Whether the configuration names functions of the user that training calls."""
    named = [train.objective, train.objective_units, train.optimizer, *train.callbacks]
    factories = [model.factory, *(frozen.factory for frozen in model.frozen.values())]
    return any(":" in name for name in named) or any(factories)


def import_functions(model: ModelConfig, train: TrainConfig) -> None:
    """Imports the functions of model, objective and optimizer. This loads torch.

    Raises `ConfigError` as a trial of the model does if one cannot be imported or does not take its
    arguments.
    """
    from orchestrator.trainer.model.build_model import find_factory
    from orchestrator.trainer.objective.objective import objective_of
    from orchestrator.trainer.optimizer.built_in import kind_of
    from orchestrator.trainer.state.frozen_models import naming_frozen

    if model.factory is not None:
        find_factory(model)
    for name, frozen in model.frozen.items():
        if frozen.factory is not None:
            with naming_frozen(name):
                find_factory(frozen.as_model)
    kind_of(train.optimizer, train)
    if train.objective != BUILT_IN:
        objective_of(train, by_document=False, seq_len=1)


def lacks_weights(model: ModelConfig) -> bool:
    """Whether files are away that the workers of every start read, also of one that continues a point.

    These are the weights of frozen models, the weights beside adapters, and `model.pretrained`, which says
    what the model is. Only names are looked at. Raises `StorageError`, and `ConfigError` for a URI of another
    kind.
    """
    adapted = model.lora is not None
    read = [model if adapted else model.model_copy(update={"init_from": None})]
    read += [frozen.as_model for frozen in model.frozen.values()]
    return any(map(_is_away, read))


def _is_away(model: ModelConfig) -> bool:
    if model.pretrained is not None and not holds_model(model.pretrained):
        return True
    return model.init_from is not None and not holds_weights(model.init_from)
