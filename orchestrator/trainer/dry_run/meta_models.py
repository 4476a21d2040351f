"""Builds a job's models on torch's meta device, where they have no weights, and measures them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from orchestrator.config.sections import BUILT_IN
from orchestrator.errors import ConfigError, StorageError
from orchestrator.planning.state.memory import ModelSize

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig, TrainConfig

# The largest size of a model's weights, and of its logits, for which a forward pass is run with weights
SMALL_BYTES = 512 << 20
# Errors that the code itself causes, not the machine
_MISTAKES = (TypeError, NameError, AttributeError, IndexError, ZeroDivisionError)


def model_on_meta(
    config: ModelConfig, device_type: str, invariant: bool, precision: str, by_document: bool
) -> tuple[Any, str]:
    """Builds a model on the meta device, and checks that its weights fit and that it can attend as required.

    Returns None and a note with the reason if it cannot be built here.
    """
    import torch

    from orchestrator.trainer.model import build_model as models
    from orchestrator.trainer.model.model_call import require_document_attention
    from orchestrator.trainer.weights.initial import named_state, require_fit
    from orchestrator.trainer.weights.transformers_model import (
        require_known_keys,
        shape_only,
        transformers_settings,
        without_cache,
    )

    note = ""
    if config.factory is None:
        with torch.device("meta"):
            settings, attention = transformers_settings(config, device_type, invariant)
            if config.config is not None:
                dtype = str(models.weights_dtype(precision)).removeprefix("torch.")
                require_known_keys(config.config, settings, dtype)
            model: Any = shape_only(config, settings, attention)
            without_cache(model)
    else:
        model, note = _from_factory(config, precision)
        if model is None:
            return None, note
    if by_document:
        require_document_attention(model)
    if config.init_from is not None:
        with torch.device("meta"):
            require_fit(config, named_state(model))
    return model, note


def _from_factory(config: ModelConfig, precision: str) -> tuple[Any, str]:
    """Builds the factory's model without its weights, or with them if it needs values.

    Returns None and a note with the reason if it cannot be built here.
    """
    import torch

    from orchestrator.trainer.model import build_model as models
    from orchestrator.trainer.model.factory_output import is_of_this_machine, refused, require_state

    name, function = model_name(config), models.find_factory(config)
    try:
        with torch.device("meta"):
            made = function(**config.factory_args)
    except Exception as error:  # noqa: BLE001  it may work on a real device
        reason = f"{type(error).__name__}: {error}"
        try:
            made = function(**config.factory_args)
        except Exception as again:
            if isinstance(again, _MISTAKES) and not is_of_this_machine(again):
                raise refused(f"{name} raises {type(again).__name__}: {again}; correct it") from again
            return None, (
                f"{name} does not work on torch's meta device ({reason}), nor on this machine's CPU "
                f"({type(again).__name__}: {again}): whether it gives a model shows when the workers call it"
            )
    model = models.made_by_factory(config, made)
    models.cast_state(model, models.weights_dtype(precision))
    require_state(model, name)
    return model, ""


def model_name(config: ModelConfig) -> str:
    """Returns the model's configuration field, for messages."""
    for field in ("factory", "pretrained"):
        if (value := getattr(config, field)) is not None:
            return f"model.{field}={value}"
    return f"model.config of type {(config.config or {}).get('model_type')}"


def require_export(config: ModelConfig, model: Any) -> None:
    """Raises `ConfigError` if the trained model could not be exported."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    from orchestrator.trainer.weights.saved_form import SavedForm, shapes_of

    if (settings := type(model.config)) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{model_name(config)} can be trained, but AutoModelForCausalLM of the installed transformers "
            f"does not open what would be exported: it has no model for {settings.__name__}; take another "
            "model or version",
            code="model.export",
        )
    try:
        SavedForm(config, shapes_of(model), None, {"bos_token_id": None, "eos_token_id": None})
    except StorageError:
        raise
    except Exception as error:  # transformers has no common base class for its errors
        raise ConfigError(
            f"{model_name(config)} can be trained, but not exported: {type(error).__name__}: {error}; the "
            "installed transformers has no form of it in files: take another model or version",
            code="model.export",
        ) from error


def require_teacher(model: Any, frozen: Mapping[str, Any], train: TrainConfig) -> None:
    """Raises `ConfigError` if the built-in objective's teacher has another vocabulary than the model."""
    from orchestrator.trainer.objective.logit_loss import require_same_vocabulary

    name = train.objective_args.get("teacher") if train.objective == BUILT_IN else None
    if name is not None and frozen[name] is not None:
        require_same_vocabulary(model, frozen[name], f"model.frozen.{name}")


def scalars_of(model: Any) -> tuple[str, ...]:
    """Returns the names of parameters without dimensions."""
    return tuple(name for name, parameter in model.named_parameters() if not parameter.dim())


def largest_table(model: Any) -> int | None:
    """Returns the rows of the largest `torch.nn.Embedding`; None if there is none."""
    from torch import nn

    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=None)


def num_embeddings(model: Any) -> int | None:
    """Returns the number of ids that the model embeds; None if it does not provide it."""
    try:
        found = model.get_input_embeddings().num_embeddings
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, int) else None


def size_of(model: Any, adapters: bool = False) -> ModelSize:
    """Returns the model's size, with the blocks that are gathered one after the other.

    With `adapters` points do not hold what is frozen.

    The width of the blocks and the number of logits are 0 if the model does not provide them.
    """
    from orchestrator.trainer.model.blocks import blocks_of
    from orchestrator.trainer.weights.transformers_model import text_config

    scalars = scalars_of(model)
    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(model)]
    parameters = list(model.parameters())
    num = sum(p.numel() for p in parameters)
    hidden, head = getattr(text_config(model), "hidden_size", 0), None
    with suppress(NotImplementedError, AttributeError):
        head = model.get_output_embeddings()
    frozen = sum(p.numel() for p in parameters if not p.requires_grad)
    return ModelSize(
        parameters=num,
        frozen=frozen,
        fixed=frozen if adapters else 0,
        block=max(blocks, default=0),
        rest=num - sum(blocks),
        num_blocks=len(blocks),
        hidden=hidden if isinstance(hidden, int) else 0,
        vocab=0 if head is None else head.weight.shape[0],
        scalar=scalars[0] if scalars else "",
    )


def frozen_on_meta(
    config: ModelConfig, device_type: str, invariant: bool, precision: str, by_document: bool
) -> dict[str, Any]:
    """Builds the frozen models on the meta device; None for one that cannot be built here."""
    from orchestrator.trainer.state.frozen_weights import naming_frozen

    found = dict[str, Any]()
    for name, frozen in config.frozen.items():
        with naming_frozen(name):
            made, _ = model_on_meta(frozen.as_model, device_type, invariant, precision, by_document)
        found[name] = None if made is None else made.eval().requires_grad_(False)
    return found


def frozen_small(config: ModelConfig, shapes: Mapping[str, Any], precision: str) -> dict[str, Any] | None:
    """Builds the frozen models with drawn weights; None if one is too large for that."""
    import torch

    from orchestrator.trainer.model.build_model import bare_model
    from orchestrator.trainer.state.frozen_weights import naming_frozen

    if any(size_of(shape).parameters * 4 > SMALL_BYTES for shape in shapes.values()):
        return None
    found = dict[str, Any]()
    for name, frozen in config.frozen.items():
        with naming_frozen(name):
            made = bare_model(frozen.as_model, precision, 0, torch.device("cpu"))
        found[name] = made.eval().requires_grad_(False)
    return found


def adapters_note(config: ModelConfig, size: ModelSize) -> tuple[str]:
    """Returns what `plan` says of adapters and their base."""
    return (
        f"model.lora: {size.parameters - size.frozen:,} parameters are trained; {size.frozen:,} of "
        f"{config.base} are not, and are not part of points",
    )


def frozen_note(name: str, model: Any) -> str:
    """Returns what `plan` says of a frozen model; None is one that cannot be built here."""
    if model is None:
        return f"note: model.frozen.{name} cannot be built here; the workers build it"
    num = size_of(model).parameters
    return f"model.frozen.{name}: {num:,} parameters, which are not trained and not part of points"
