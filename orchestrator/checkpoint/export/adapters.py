"""Exports of adapters (`model.lora`): as the folder that `PeftModel.from_pretrained` opens, or merged.

peft names the tensors of a file like those of its model, without the name of the adapter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.records.points import SavedTensor
from orchestrator.storage.open import absolute

if TYPE_CHECKING:
    from orchestrator.config.sections import LoraConfig, ModelConfig

ADAPTERS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_ADAPTER = "default"  # as in `trainer.weights.lora`, without torch
_COPY, _OF_PEFT, _LORA = f".modules_to_save.{_ADAPTER}.", "base_model.model.", ".lora_"


class Tensors(Protocol):
    """The model's tensors of a point, see `export.PointTensors`."""

    name: str
    fixed: Mapping[str, str]
    entries: tuple[SavedTensor, ...]

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order."""


def adapter_name(name: str) -> str:
    """Returns the name in peft's file of a trained tensor of a model with adapters."""
    if _COPY in name:
        return _OF_PEFT + name.replace(_COPY, ".")
    path, _, leaf = name.rpartition(_LORA)
    kind, _, rest = leaf.partition(f".{_ADAPTER}")
    return f"{_OF_PEFT}{path}{_LORA}{kind}{rest}"


def settings_file(config: ModelConfig, lora: LoraConfig, names: Iterable[str]) -> bytes:
    """Returns the content of adapter_config.json, as peft writes it, for adapters of these names.

    Names of modules that peft chose (`target_modules` null or `all-linear`) are written out, so that another
    version of peft takes the same.
    """
    from orchestrator.trainer.weights.lora import peft_settings

    settings = peft_settings(lora, absolute(str(config.base)))
    if lora.target_modules is None or lora.target_modules == "all-linear":
        adapted = (name.rpartition(_LORA)[0] for name in names if _COPY not in name)
        settings.target_modules = list(dict.fromkeys(adapted))
    settings.inference_mode = True
    with tempfile.TemporaryDirectory() as folder:
        settings.save_pretrained(folder)
        return (Path(folder) / SETTINGS).read_bytes()


class MergedTensors:
    """The tensors of the whole model, with the adapters of a point merged into the weights by peft.

    Holds the model in memory. `entries` are ordered by name.
    """

    def __init__(self, point: Tensors, config: Mapping[str, Any], model: ModelConfig) -> None:
        """`config` is the point's, flat. Raises as `PointTensors.read` and `merged_tensors`."""
        from orchestrator.trainer.state.frozen_weights import merged_tensors

        trained = ((entry, point.read(entry)) for entry in point.entries)
        how = config["train.precision"], config["train.seed"]
        made = list(merged_tensors(model, *how, trained, point.name, point.fixed))
        self.name, self.fixed = point.name, point.fixed
        self.entries = tuple(entry for entry, _ in made)
        self._data = {entry.name: data for entry, data in made}

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order."""
        return bytearray(self._data[entry.name])
