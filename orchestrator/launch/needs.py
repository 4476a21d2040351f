"""The least that a job needs of memory, disk and Ray's object store, in bytes, by its configuration.

Lower bounds: what they call too much cannot work; what they let pass may still be too much. Pure, no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.planning.memory import ModelSize, WorkerMemory, memory_every_steps, worker_memory
from orchestrator.planning.state_layout import Layout, layout_of

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

# A process with Python, Ray and: torch and transformers; a tokenizer and the readers; neither.
_WORKER_BYTES, _TOKENIZER_BYTES, _FEEDER_BYTES = 1 << 30, 700 << 20, 300 << 20
_TOKENIZER_OBJECT_BYTES = 16 << 20
_POINT_COPIES = 3  # weights and AdamW's two moments
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


def needs_of(job: JobConfig, num_shards: int | None = 1, num_workers: int = 1) -> Needs:
    """The needs of a job whose state is cut into `num_shards` (see `layout_of`) among `num_workers`. With
    `cluster.use_gpu` the state lies on the GPUs, whose memory nobody looks at.
    """
    data, dtype_bytes = job.data, _weight_bytes(job)
    parameters = count_parameters(job.model.config or {})
    layout = layout_of(num_workers, num_shards)
    held = memory_in(job, layout)
    tokenizer = _TOKENIZER_BYTES + data.window_bytes
    of_state = ""
    if parameters and not job.cluster.use_gpu:
        of_state = f" + {parameters:,} parameters × {dtype_bytes} bytes × 4 for weights, gradients and AdamW"
        if layout.num_shards > 1:
            of_state += f" / {layout.num_shards} shards + {gib(held.gathered)} for gathered blocks"
    return Needs(
        worker_bytes=_WORKER_BYTES + (0 if job.cluster.use_gpu else held.training),
        feed_bytes=_FEEDER_BYTES + data.replay_bytes + data.num_tokenizers * tokenizer,
        point_bytes=parameters * dtype_bytes * _POINT_COPIES,
        object_store_bytes=(data.num_tokenizers + 2) * _TOKENIZER_OBJECT_BYTES,
        text=f"a worker takes {gib(_WORKER_BYTES)}{of_state}, the feeder {gib(_FEEDER_BYTES)} + "
        f"data.replay_bytes={data.replay_bytes}, each of {data.num_tokenizers} tokenizers "
        f"{gib(_TOKENIZER_BYTES)} + data.window_bytes={data.window_bytes}",
    )


def choose_shards(
    job: JobConfig, num_workers: int, machines: Sequence[tuple[str, int]], with_feed: bool = True
) -> int | None:
    """The number of shards of `train.parallel` (see `layout_of`). `auto`: one, unless `memory_problems` say
    that `num_workers` workers cannot hold the whole state each; then one for each worker.
    """
    if job.train.parallel != "auto":
        return job.train.num_shards
    if job.train.numerics == "invariant" or job.cluster.use_gpu:
        return 1
    return 1 if not memory_problems(needs_of(job), num_workers, machines, with_feed) else None


def memory_in(job: JobConfig, layout: Layout, before: Layout | None = None) -> WorkerMemory:
    """What a worker holds of the state, at least; all 0 where the model's size is not known."""
    weight_bytes = _weight_bytes(job)
    compute_bytes = 2 if job.train.precision == "bf16" else weight_bytes
    return worker_memory(model_size(job.model.config or {}), layout, weight_bytes, compute_bytes, before)


def memory_notes(job: JobConfig, num_shards: int | None) -> list[str]:
    """What `plan` says of a worker's memory, with the fewest and the most workers; nothing of a model whose
    size is not known.
    """
    cluster, found = job.cluster, []
    where = "on its GPU" if cluster.use_gpu else f"beside {gib(_WORKER_BYTES)} for the process"
    for world in sorted({cluster.start_workers, cluster.max_workers}):
        layout = layout_of(world, num_shards)
        held = memory_in(job, layout, before=layout_of(max(1, world - 1), num_shards))
        if not held.weights:
            return []
        parts = [
            f"weights {gib(held.weights)}",
            f"gradients {gib(held.gradients)}",
            f"AdamW {gib(held.moments)}",
        ]
        if layout.num_shards > 1:
            parts.append(f"gathered blocks {gib(held.gathered)}")
        reforming = ""
        if held.peak > held.training:
            reforming = f"; {gib(held.peak)} while workers come or go"
        copies = ""
        every = memory_every_steps(job.resume.memory_every_steps, sharded=layout.num_shards > 1)
        if every is not None and world > 1:
            copies = f", memory points in {gib(held.memory_points)}"
        found.append(
            f"memory of a worker of {world} ({layout_text(layout)}), at least: {', '.join(parts)} = "
            f"{gib(held.training)} {where}, activations not counted{reforming}; a save is staged in "
            f"{gib(held.staged)}{copies} of the machine's memory"
        )
    return found


def layout_text(layout: Layout) -> str:
    """A layout for people."""
    if layout.num_shards == 1:
        return "replicate: each holds the whole state"
    if layout.num_replicas == 1:
        return f"shard: the state in {layout.num_shards} parts"
    return f"{layout.num_replicas} times the state in {layout.num_shards} parts"


def _weight_bytes(job: JobConfig) -> int:
    return 2 if job.train.precision == "pure_bf16" else 4


def count_parameters(shape: Mapping[str, Any]) -> int:
    """How many parameters a model of this transformers configuration has at least: all but norms and biases;
    0 where the configuration does not say it.

    The LM head counts where it is not tied to the embeddings. Whether it is where `tie_word_embeddings` is
    left out, and how many heads there are of which size, is known by heart of a few types of model
    (`_GATED`); tests/trainer/test_model.py compares it with transformers.
    """
    return model_size(shape).parameters


def model_size(shape: Mapping[str, Any]) -> ModelSize:
    """As `count_parameters`, with a layer as a block."""
    kind = shape.get("model_type")
    if kind not in _GATED:
        return ModelSize()
    shape = {**_GATED[kind], **shape}
    hidden, vocab, layers = (
        _whole(shape, name) for name in ("hidden_size", "vocab_size", "num_hidden_layers")
    )
    heads = _whole(shape, "num_attention_heads")
    width = heads * _whole(shape, "head_dim") or hidden
    shared = _whole(shape, "num_key_value_heads") or heads
    keys = width * shared // heads if heads else 0
    layer = 2 * hidden * width + 2 * hidden * keys + 3 * hidden * _whole(shape, "intermediate_size")
    rest = (1 if shape.get("tie_word_embeddings") else 2) * vocab * hidden
    return ModelSize(parameters=rest + layers * layer, block=layer if layers else 0, rest=rest)


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
