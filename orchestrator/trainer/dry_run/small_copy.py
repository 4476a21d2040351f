"""Makes a small copy of a large model: same code and settings, smaller sizes, drawn weights.

Which tokens a model attends to does not depend on its sizes, so that such a copy can be tested instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from orchestrator.trainer.model.text_config import inner_settings, without_cache

VOCABULARY = 128
WINDOW = 8  # tokens, of a window or chunk that is shorter than a sample
MAX_PARAMETERS = 1 << 25
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "window_size")
_OF_ONE_LAYER = "per_layer_config"  # values of single layers, by layer number
_SHARING = "num_kv_shared_layers"  # the number of last layers that use keys and values of earlier ones
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
# The names of sizes in transformers' configurations, with the size that a copy uses
_SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (64, "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim lru_width"),
        (96, "intermediate_size ffn_dim n_inner ffn_hidden_size dff decoder_ffn_dim"),
        (2, "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk top_k_experts"),
        (2, "linear_num_key_heads"),
        (4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads"),
        (16, "head_dim kv_lora_rank v_head_dim mamba_d_head linear_key_head_dim linear_value_head_dim"),
        (48, "moe_intermediate_size shared_expert_intermediate_size"),
        (1, "n_group topk_group"),
        (32, "q_lora_rank"),
        (8, "qk_rope_head_dim qk_nope_head_dim state_size ssm_state_size mamba_d_state mamba_n_heads"),
    )
    for name in names.split()
}


def small_copies(settings: Any, attention: str | None, seq_len: int) -> Iterator[nn.Module]:
    """Yields small models of the transformers configuration `settings`, the smallest first.

    They are for samples of some tens of tokens. Yields nothing if no model can be made. A window shorter than
    `seq_len` is reduced to `WINDOW` tokens.
    """
    from transformers import AutoModelForCausalLM

    def windows(each: Any) -> dict[str, Any]:
        return {
            name: WINDOW
            for name in _WINDOWS
            if isinstance(value := getattr(each, name, None), int) and WINDOW < value < seq_len
        }

    def few(each: Any) -> dict[str, Any]:
        given = each.to_dict()
        return _few_layers(given) | _fewer_ids(given) | windows(each)

    def small(each: Any) -> dict[str, Any]:
        changes = few(each) | _smaller_sizes(each)
        of_one = {at: _smallest(values) for at, values in changes.get(_OF_ONE_LAYER, {}).items()}
        return changes | ({_OF_ONE_LAYER: of_one} if of_one else {})

    made: list[nn.Module] = []
    for changes in (windows, small, few):
        with suppress(Exception):  # these sizes do not fit the model type
            changed = type(settings)(**_changed(settings, changes))
            with torch.device("meta"):
                empty: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    copy.deepcopy(changed), attn_implementation=attention
                )
            limit = MAX_PARAMETERS >> 4 if changes is windows else MAX_PARAMETERS
            if sum(parameter.numel() for parameter in empty.parameters()) > limit:
                continue
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                changed, attn_implementation=attention, dtype=torch.float32
            )
            without_cache(model)
            draw_weights(model)
            made.append(model.eval())
        if made:
            yield made.pop()


def draw_weights(model: nn.Module) -> None:
    """Draws weights with which every part of the model changes the logits.

    Matrices preserve the scale of their inputs. Vectors of zeros, which may switch a part off, get small
    values.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.ndim > 1:
                scale = max(1, parameter[0].numel()) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _changed(settings: Any, changes: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Applies `changes` to the values of a configuration and of each configuration inside it."""
    inner = {name: _changed(each, changes) for name, each in inner_settings(settings).items()}
    return {**settings.to_dict(), **changes(settings), **inner}


def _smaller_sizes(settings: Any) -> dict[str, Any]:
    given = settings.to_dict()
    also: Mapping[str, str] = settings.attribute_map
    sizes = {
        name: size
        for name, size in _SIZES.items()
        if isinstance(value := given.get(also.get(name, name)), int) and value > size
    }
    if {"hidden_size", "expand", "num_heads", "head_dim"} <= sizes.keys() | given.keys():
        sizes["num_heads"] = int(_SIZES["hidden_size"] * given["expand"]) // _SIZES["head_dim"]  # of Mamba 2
    return sizes


def _smallest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces the sizes of one layer."""
    return {
        name: min(value, _SIZES.get(name, value)) if isinstance(value, int) else value
        for name, value in values.items()
    }


def _few_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the first layer of each kind, and at least two layers."""
    name = next((each for each in _LAYERS if isinstance(given.get(each), int)), None)
    if name is None:
        return {}
    num = given[name]
    by_layer = {
        key: value
        for key, value in given.items()
        if isinstance(value, list) and len(value) == num and len(set(map(repr, value))) < num
    }
    of_one = {int(layer): values for layer, values in (given.get(_OF_ONE_LAYER) or {}).items()}
    sharing = range(num - (given.get(_SHARING) or 0), num)
    kinds: dict[str, int] = {}
    for layer in range(num):
        kind = [*(value[layer] for value in by_layer.values()), of_one.get(layer), layer in sharing]
        kinds.setdefault(repr(kind), layer)
    kept = sorted(kinds.values())
    kept = sorted({*kept, *range(min(num, 2))}) if len(kept) == 1 else kept
    changes = {name: len(kept), **{key: [value[i] for i in kept] for key, value in by_layer.items()}}
    if of_one:
        changes[_OF_ONE_LAYER] = {at: of_one[layer] for at, layer in enumerate(kept) if layer in of_one}
    if sharing:
        changes[_SHARING] = sum(layer in sharing for layer in kept)
    return changes


def _fewer_ids(given: Mapping[str, Any]) -> dict[str, Any]:
    """Shrinks each vocabulary table, and moves special ids into the remaining rows."""
    numbers = {name: value for name, value in given.items() if isinstance(value, int) and value >= VOCABULARY}
    tables = {name: VOCABULARY for name in numbers if name.startswith("vocab_size")}
    special = {name: VOCABULARY - 1 for name in numbers if name.endswith("_token_id")}
    return tables | (special if "vocab_size" in tables else {})
