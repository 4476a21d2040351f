"""Tiny configurations of the causal language models of the installed transformers."""

from __future__ import annotations

from typing import Any

from tests.trainer import feed

VOCABULARY = 128
POSITIONS = "max_position_embeddings n_positions max_seq_len n_ctx"
_SIZES = {
    64: f"hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim lru_width {POSITIONS}",
    VOCABULARY: "vocab_size vocab_size_per_layer_input mamba_d_ssm",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads num_kv_heads "
    "num_experts_per_tok moe_topk top_k_experts linear_num_key_heads",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts linear_num_value_heads",
    16: "head_dim hidden_size_per_layer_input kv_lora_rank v_head_dim mamba_d_head linear_key_head_dim "
    "linear_value_head_dim",
    48: "moe_intermediate_size shared_expert_intermediate_size",
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
    32: "q_lora_rank",
    8: "qk_rope_head_dim qk_nope_head_dim state_size ssm_state_size mamba_d_state mamba_n_heads rotary_dim",
}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2},
    "ctrl": {"dff": 96},
    "roberta": {"is_decoder": True},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}  # fmt: skip


def all_types() -> list[str]:
    """The model types that transformers has a causal language model of."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return [kind for kind, settings in CONFIG_MAPPING.items() if settings in MODEL_FOR_CAUSAL_LM_MAPPING]


def tiny(kind: str) -> dict[str, Any]:
    """A `model.config` of the type with few parameters. Raises what transformers raises."""
    from transformers import CONFIG_MAPPING

    return {"model_type": kind, **small(CONFIG_MAPPING[kind]()), **_OF_TYPE.get(kind, {})}


def nested_types() -> list[str]:
    """Those of `all_types` that nest the configuration of their language model."""
    from transformers import CONFIG_MAPPING

    return [kind for kind in all_types() if "text_config" in getattr(CONFIG_MAPPING[kind], "sub_configs", {})]


def small(base: Any) -> dict[str, Any]:
    """What makes a default configuration, and each one inside it, small."""
    given, also = base.to_dict(), getattr(base, "attribute_map", {})
    always = {"num_key_value_heads", "head_dim"}
    shape: dict[str, Any] = {
        name: size
        for size, names in _SIZES.items()
        for name in names.split()
        if (key := also.get(name, name)) in given and (name in always or given[key] is not None)
    }
    if given.get("layer_types"):
        shape["layer_types"] = (list(dict.fromkeys(base.layer_types)) * 2)[:2]
    if (given.get("pad_token_id") or 0) >= VOCABULARY:
        shape["pad_token_id"] = 1
    inner = {name: getattr(base, name, None) for name in getattr(base, "sub_configs", {})}
    return shape | {
        name: {"model_type": each.model_type, **small(each)}
        for name, each in inner.items()
        if each is not None
    }


GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": feed.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
