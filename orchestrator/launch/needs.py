"""The least that a job needs of memory, disk and Ray's object store, in bytes, by its configuration.

Lower bounds: what they call too much cannot work; what they let pass may still be too much. Pure, no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

# A process with Python, Ray and: torch and transformers; a tokenizer and the readers; neither.
_WORKER_BYTES, _TOKENIZER_BYTES, _FEEDER_BYTES = 1 << 30, 700 << 20, 300 << 20
_TOKENIZER_OBJECT_BYTES = 16 << 20
# Weights, gradients and AdamW's two moments while training; all but the gradients in a point.
_COPIES, _POINT_COPIES = 4, 3
# Dense models with the three matrices of a gated feed-forward in every layer, and what transformers takes for
# each where a configuration leaves it out, as far as it is not: an LM head of its own, heads of hidden_size /
# num_attention_heads, no heads shared.
_GATED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """`worker_bytes` is one worker's memory, `feed_bytes` that of feeder and tokenizers, `text` how both come
    about, `point_bytes` what a resume point takes, `object_store_bytes` what tokens in flight take.
    """

    worker_bytes: int
    feed_bytes: int
    point_bytes: int
    object_store_bytes: int
    text: str


def needs_of(job: JobConfig) -> Needs:
    """The needs of a job. With `cluster.use_gpu` the state lies on the GPUs, whose memory nobody looks at."""
    data, dtype_bytes = job.data, 2 if job.train.precision == "pure_bf16" else 4
    parameters = count_parameters(job.model.config or {})
    state = 0 if job.cluster.use_gpu else parameters * dtype_bytes * _COPIES
    tokenizer = _TOKENIZER_BYTES + data.window_bytes
    of_state = (
        f" + {parameters:,} parameters × {dtype_bytes} bytes × {_COPIES} for weights, gradients and AdamW"
        if state
        else ""
    )
    return Needs(
        worker_bytes=_WORKER_BYTES + state,
        feed_bytes=_FEEDER_BYTES + data.replay_bytes + data.num_tokenizers * tokenizer,
        point_bytes=parameters * dtype_bytes * _POINT_COPIES,
        object_store_bytes=(data.num_tokenizers + 2) * _TOKENIZER_OBJECT_BYTES,
        text=f"a worker takes {gib(_WORKER_BYTES)}{of_state}, the feeder {gib(_FEEDER_BYTES)} + "
        f"data.replay_bytes={data.replay_bytes}, each of {data.num_tokenizers} tokenizers "
        f"{gib(_TOKENIZER_BYTES)} + data.window_bytes={data.window_bytes}",
    )


def count_parameters(shape: Mapping[str, Any]) -> int:
    """How many parameters a model of this transformers configuration has at least: all but norms and biases;
    0 where the configuration does not say it.

    The LM head counts where it is not tied to the embeddings. Whether it is where `tie_word_embeddings` is
    left out, and how many heads there are of which size, is known by heart of a few types of model
    (`_GATED`); tests/trainer/test_model.py compares it with transformers.
    """
    kind = shape.get("model_type")
    if kind not in _GATED:
        return 0
    shape = {**_GATED[kind], **shape}
    hidden, vocab, layers = (
        _whole(shape, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    heads = _whole(shape, "num_attention_heads")
    width = heads * _whole(shape, "head_dim") or hidden
    shared = _whole(shape, "num_key_value_heads") or heads
    keys = width * shared // heads if heads else 0
    layer = 2 * hidden * width + 2 * hidden * keys + 3 * hidden * _whole(shape, "intermediate_size")
    tables = 1 if shape.get("tie_word_embeddings") else 2
    return tables * vocab * hidden + layers * layer


def memory_problems(
    needs: Needs, num_workers: int, machines: Sequence[tuple[str, int]], with_feed: bool = True
) -> list[str]:
    """Why `num_workers` workers (and the feed) cannot have their memory on these machines (host, bytes in
    all): what is needed and what is there; empty if they can, or where a machine does not say (0).
    """
    if not machines or not all(num_bytes for _, num_bytes in machines):
        return []
    there, largest = sum(n for _, n in machines), max(n for _, n in machines)
    needed = num_workers * needs.worker_bytes + (needs.feed_bytes if with_feed else 0)
    if needed <= there and needs.worker_bytes <= largest:
        return []
    listed = ", ".join(f"{host}: {gib(num_bytes)}" for host, num_bytes in machines)
    return [
        f"{gib(needed)} of memory are needed for {num_workers} workers"
        f"{' and the feed' if with_feed else ''} ({needs.text}), {gib(there)} are there ({listed}), and no "
        "worker may be larger than its machine; lower the number of workers, data.num_tokenizers or "
        "data.replay_bytes, take a smaller model, or add memory"
    ]


def gib(num_bytes: int) -> str:
    """A number of bytes for people."""
    return f"{num_bytes / 2**30:,.1f} GiB"


def _whole(shape: Mapping[str, Any], name: str) -> int:
    value = shape.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
