"""Checks which tokens a model attends to, on a small copy of the model with weights.

No logits may depend on later tokens. Packed documents must have the logits of each document alone. Which
tokens a model attends to does not depend on its sizes. So the copy has the same code and settings, smaller
sizes, and drawn weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from orchestrator.trainer.model.build_model import train_padding_rows
from orchestrator.trainer.model.model_call import call_model, flex_problem, not_by_document
from orchestrator.trainer.weights.transformers_model import FLEX, inner_settings, text_config, without_cache

NOT_CAUSAL, PADDING = "model.not_causal", "model.padding_id"
LENGTH = 24  # tokens; longer than the windows and chunks of `small_copies`
_STRIDE = 5  # tokens between the tested borders; the logits before and after each border are compared
_TOLERANCE = 1e-3  # relative to the largest expected change


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """A model and samples for it: `ids` produce `logits`; `others` are different ids."""

    model: nn.Module
    name: str
    ids: Tensor
    others: Tensor
    logits: Tensor


def require_attention(
    models: Iterable[nn.Module], name: str, seq_len: int, by_document: bool, flex: bool = False
) -> bool:
    """Checks the first of `models` that accepts a sample of `seq_len` tokens (at most `LENGTH`).

    Returns whether any model does. Raises `ConfigError` if the logits at a position depend on later tokens,
    or if a real token with the model's padding id gets no gradient. With `by_document` it also raises
    `ConfigError` if the logits of a packed document differ from those of the document alone; with `flex` also
    for flex attention, if the workers will use it. `name` identifies the model in messages.
    """
    trial = next(filter(None, (_tried(model, name, min(seq_len, LENGTH)) for model in models)), None)
    if trial is None:
        return False
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _require_causal(trial)
        if by_document:
            _require_documents(trial)
        if by_document and flex and flex_problem(trial.model) is None:
            with _flex_attention(trial.model):
                _require_documents(trial, "; with flex attention; set model.attn_implementation=sdpa")
    _require_gradient(trial)
    return True


def _tried(model: nn.Module, name: str, length: int) -> _Trial | None:
    """Returns None if the model cannot be called or its logits are not finite."""
    padding = _padding_id(model)
    for num_ids in (32, 5):  # some models have a small vocabulary
        usual = torch.tensor([number for number in range(2, num_ids) if number != padding])
        chosen = torch.randint(len(usual), (2, length), generator=torch.Generator().manual_seed(1))
        ids, others = usual[chosen], usual[(chosen + 1) % len(usual)]
        with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # user code
            logits = _logits(model.eval(), ids)
            _logits(model, ids[:, :1])
            if logits.isfinite().all():
                return _Trial(model=model, name=name, ids=ids, others=others, logits=logits)
    return None


def _padding_id(model: nn.Module) -> int | None:
    found = getattr(text_config(model), "pad_token_id", None)
    return found if isinstance(found, int) and found >= 0 else None


def _require_causal(trial: _Trial) -> None:
    for border in range(1, trial.ids.shape[1], _STRIDE):
        changed = torch.cat((trial.ids[:, :border], trial.others[:, border:]), 1)
        difference = (_logits(trial.model, changed) - trial.logits).abs()
        before, after = float(difference[:, :border].max()), float(difference[:, border:].max())
        if before > _TOLERANCE * max(after, 1e-3):
            raise ConfigError(
                f"{trial.name}: the logits at a position depend on later tokens, which are what training "
                "predicts; use a causal model (some types are causal with is_decoder: true)",
                code=NOT_CAUSAL,
            )


@contextmanager
def _flex_attention(model: Any) -> Iterator[None]:
    """Within the block the model uses flex attention, which a CPU computes only as it stands and forward."""
    before = model.config._attn_implementation
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        model.set_attn_implementation(FLEX)
        try:
            yield
        finally:
            model.set_attn_implementation(before)


def _require_documents(trial: _Trial, how: str = "") -> None:
    model, ids = trial.model, trial.ids
    first = max(1, ids.shape[1] * 2 // 5)
    spans = slice(0, first), slice(first, first + 1), slice(first + 1, ids.shape[1] * 5 // 6)
    documents = torch.full_like(ids, -1)  # the rest is padding
    for number, at in enumerate(spans):
        documents[:, at] = number
    packed = _logits(model, ids, documents)
    for at in spans:
        if not ids[:, at].numel():
            continue
        alone = _logits(model, ids[:, at])
        difference = float((packed[:, at] - alone).abs().max())
        if not difference <= _TOLERANCE * max(float(alone.abs().max()), 1e-3):
            raise not_by_document(
                f"{trial.name}: the logits of a packed document differ by {difference:.2g} from those of the "
                f"document alone{how}"
            )


def _require_gradient(trial: _Trial) -> None:
    """Raises `ConfigError` if a token with the padding id, or a later one, gets no gradient.

    The gradient is that of the input embedding.
    """
    model, padding, middle = trial.model, _padding_id(trial.model), trial.ids.shape[1] // 2
    try:
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return
    if padding is None or not isinstance(table, nn.Embedding) or padding >= table.num_embeddings:
        return
    train_padding_rows(model)
    rows: list[Tensor] = []
    handle = table.register_forward_hook(lambda module, args, row: rows.append(row))
    changed = trial.ids.clone()
    changed[:, middle] = padding
    try:
        with torch.random.fork_rng(devices=[]):
            logits = _logits(model, changed)
    finally:
        handle.remove()
    rows = [row for row in rows if row.shape[:2] == changed.shape and row.requires_grad]
    gradients = torch.autograd.grad(logits[:, middle:].square().sum(), rows, allow_unused=True)
    if rows and not any(each is not None and each[:, middle:].any(-1).all() for each in gradients):
        raise ConfigError(
            f"{trial.name}: tokens with the id {padding} (pad_token_id) are padding for the model, but may "
            "be real tokens of the data; set pad_token_id to null or to an id that the data never has",
            code=PADDING,
        )


def _logits(model: nn.Module, ids: Tensor, documents: Tensor | None = None) -> Tensor:
    output: Any = call_model(model, ids, documents, None)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float()


# ----------------------------------------------------------------------------------------------- a small copy
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
