"""The minimum memory, disk and object store that a job needs, in bytes, from its configuration.

These are lower bounds: a job that exceeds them cannot work; a job within them may still be too large. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.planning.state.memory import (
    ModelSize,
    OptimizerSize,
    WorkerMemory,
    layout_text,
    memory_every_steps,
    optimizer_size,
    worker_memory,
)
from orchestrator.planning.state.state_layout import Layout, chunk_rows, layout_of

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

# A process with Python, Ray and: torch and transformers; a tokenizer and the readers; neither.
_WORKER_BYTES, _TOKENIZER_BYTES, _FEEDER_BYTES = 1 << 30, 700 << 20, 300 << 20
_AVERAGE_BYTES = 4  # of a number of `train.ema`, which is float32
_CUDA_BYTES = 256 << 20  # the minimum that CUDA and its libraries take of a GPU for one process
_TOKENIZER_OBJECT_BYTES = 16 << 20
_TOKEN_BYTES = 4  # of a token that the feeder holds
# Dense models with the three matrices of a gated feed-forward in every layer, and transformers' defaults for
# each model, as far as they differ from: a separate LM head, heads of hidden_size / num_attention_heads, no
# shared heads.
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
_MEASURED = "measured size"  # not a key of transformers
_GPT2 = {"n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
_GPT2_NAMES = {  # alternative names in transformers
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceEstimate:
    """The memory needs of a job.

    `worker_bytes` is one worker's memory, `feed_bytes` that of feeder and tokenizers, `text` explains both.
    `point_bytes` is the size of a resume point, `object_store_bytes` that of tokens in flight. `gpu_bytes` is
    what a worker takes of its GPU, `gpu_text` explains it (0: nothing, or not known). `memory_point_bytes` is
    the part of a worker's memory for memory points.
    """

    worker_bytes: int
    feed_bytes: int
    point_bytes: int
    object_store_bytes: int
    text: str
    gpu_bytes: int = 0
    gpu_text: str = ""
    memory_point_bytes: int = 0


def needs_of(
    job: JobConfig, num_shards: int | None = 1, num_workers: int = 1, one_machine: bool = False
) -> ResourceEstimate:
    """The needs of a job whose state is cut into `num_shards` (see `layout_of`) among `num_workers`.

    The workers may all be on `one_machine`; otherwise each is assumed to have its neighbour on another
    machine. With `cluster.use_gpu` the state is on the GPUs, and its copies in the machines' memory.
    """
    data, dtype_bytes, on_gpu = job.data, _weight_bytes(job), job.cluster.use_gpu
    size = model_size(job.model.config or {})
    parameters = size.parameters
    layout = layout_of(num_workers, num_shards)
    held = memory_in(job, layout)
    points = _memory_points(job, layout, held, one_machine)
    copies = held.staged + points
    of_state = _state_text(job, size, layout, held) if parameters else ""
    in_memory = f" + {of_state}" if of_state and not on_gpu else ""
    in_memory += f" + {gib(copies)} for copies that are saved, and memory points" if copies else ""
    tokenizer = _TOKENIZER_BYTES + data.window_bytes
    return ResourceEstimate(
        worker_bytes=_WORKER_BYTES + copies + (0 if on_gpu else held.training),
        feed_bytes=_FEEDER_BYTES + data.replay_bytes + data.num_tokenizers * tokenizer,
        point_bytes=(parameters - size.fixed + _optimizer_size(job, size).state) * dtype_bytes,
        object_store_bytes=(data.num_tokenizers + 2) * _TOKENIZER_OBJECT_BYTES,
        text=f"a worker takes {gib(_WORKER_BYTES)}{in_memory}, the feeder {gib(_FEEDER_BYTES)} + "
        f"data.replay_bytes={data.replay_bytes}, each of {data.num_tokenizers} tokenizers "
        f"{gib(_TOKENIZER_BYTES)} + data.window_bytes={data.window_bytes}",
        gpu_bytes=_CUDA_BYTES + held.training if on_gpu and parameters else 0,
        gpu_text=f"{gib(_CUDA_BYTES)} for CUDA + {of_state}" if on_gpu and parameters else "",
        memory_point_bytes=points,
    )


def _state_text(job: JobConfig, size: ModelSize, layout: Layout, held: WorkerMemory) -> str:
    dtype_bytes, trained = _weight_bytes(job), size.parameters - size.frozen
    text, state = f"{trained:,} parameters × {dtype_bytes} bytes", _optimizer_size(job, size).state
    if state == 2 * trained and job.train.ema is None:
        text += f" × 4 for weights, gradients and {_optimizer_label(job)}"
    else:
        text += " × 2 for weights and gradients"
        text += f" + {gib(state * dtype_bytes)} for {_optimizer_label(job)}" if state else ""
    text += f" + {size.frozen:,} frozen × {dtype_bytes}" if size.frozen else ""
    if layout.num_shards > 1:
        text += f" / {layout.num_shards} shards + {gib(held.gathered)} for gathered blocks"
    if held.updates > held.gathered:
        text += f" + {gib(held.updates - held.gathered)} more for a step that is not applied yet"
    text += f" + {gib(held.beside)} for frozen models" if held.beside else ""
    at_the_loss = held.activations + held.gathered // 2 - held.gradients - max(held.gathered, held.updates)
    if at_the_loss > 0:
        text += f" + {gib(at_the_loss)} more while a micro-batch's loss is computed"
    return text


def _memory_points(job: JobConfig, layout: Layout, held: WorkerMemory, one_machine: bool) -> int:
    """Bytes of a worker's memory points; 0 if there are none."""
    every = memory_every_steps(job.resume.memory_every_steps, sharded=layout.num_shards > 1)
    return held.memory_points(lent=one_machine) if every is not None and layout.world_size > 1 else 0


def memory_in(job: JobConfig, layout: Layout, before: Layout | None = None) -> WorkerMemory:
    """The minimum that a worker holds of the state; all 0 if the model's size is not known."""
    train, weight_bytes = job.train, _weight_bytes(job)
    compute_bytes = 2 if train.precision == "bf16" else weight_bytes
    num_tokens = min(train.micro_batch_size, train.global_batch_size) * job.sample_len
    size = model_size(job.model.config or {})
    optimizer = _optimizer_size(job, size)
    held = worker_memory(size, layout, weight_bytes, compute_bytes, before, num_tokens, optimizer)
    return replace(held, beside=_frozen_bytes(job, layout, compute_bytes)) if held.weights else held


def _frozen_bytes(job: JobConfig, layout: Layout, compute_bytes: int) -> int:
    """The minimum that a worker holds of `model.frozen`; models of unknown size are not counted."""
    total = 0
    for frozen in job.model.frozen.values():
        size = model_size(frozen.config or {})
        weight_bytes = {"float32": 4, "bfloat16": 2}.get(frozen.dtype or "", _weight_bytes(job))
        total += chunk_rows(size.parameters, layout.num_shards) * weight_bytes
        if layout.num_shards > 1:
            total += (size.rest + size.block) * min(compute_bytes, weight_bytes)
    return total


def _optimizers(job: JobConfig) -> list[str]:
    """The optimizers that parameters may have, that of `train.optimizer` first."""
    of_groups = [group.optimizer for group in job.train.param_groups if group.optimizer is not None]
    return list(dict.fromkeys([job.train.optimizer, *of_groups]))


def _optimizer_size(job: JobConfig, size: ModelSize) -> OptimizerSize:
    """With averaged weights (`train.ema`), as numbers of the weights' type."""
    found = optimizer_size(size, _optimizers(job), bool(job.train.optimizer_args.get("momentum")))
    if job.train.ema is None:
        return found
    averages = (size.parameters - size.frozen) * _AVERAGE_BYTES // _weight_bytes(job)
    return replace(found, state=found.state + averages)


def _optimizer_label(job: JobConfig) -> str:
    """What keeps state that is counted, as messages name it; empty if that is only a plug-in."""
    names = [{"adamw": "AdamW"}.get(each, each) for each in _optimizers(job)]
    names = [name for name in names if ":" not in name]
    return " and ".join(names if job.train.ema is None else [*names, "averaged weights"])


def _uncounted(job: JobConfig) -> str:
    """The plug-in optimizers, whose state no estimate has; empty if there are none."""
    return " and ".join(name for name in _optimizers(job) if ":" in name)


def memory_notes(job: JobConfig, num_shards: int | None, one_machine: bool = False) -> list[str]:
    """`plan`'s notes on a worker's memory, with the fewest and the most workers; none for a model of unknown
    size.

    `one_machine`: see `needs_of`.
    """
    cluster, label, found = job.cluster, _optimizer_label(job), []
    where = "on its GPU" if cluster.use_gpu else f"beside {gib(_WORKER_BYTES)} for the process"
    for world in sorted({cluster.start_workers, cluster.max_workers}):
        layout = layout_of(world, num_shards)
        held = memory_in(job, layout, before=layout_of(max(1, world - 1), num_shards))
        if not held.weights:
            return []
        parts = [
            f"weights {gib(held.weights)}",
            f"gradients {gib(held.gradients)}",
            *([f"{label} {gib(held.moments)}" if held.moments else label] if label else []),
        ]
        if layout.num_shards > 1:
            parts.append(f"gathered blocks {gib(held.gathered)}")
        if held.updates:
            parts.append(f"a step that is not applied yet {gib(held.updates)}")
        if held.activations:
            parts.append(f"activations of a micro-batch {gib(held.activations)}")
        if held.beside:
            parts.append(f"frozen models {gib(held.beside)}")
        reforming = ""
        if held.peak > held.training:
            reforming = f"; {gib(held.peak)} while workers come or go"
        whole = num_shards is None or world % num_shards == 0
        why = "" if whole else f", for {num_shards} shards do not divide {world} workers: one shard each"
        plug_ins = _uncounted(job)
        uncounted = f", and beside the state of {plug_ins}, which is not in this sum" if plug_ins else ""
        points = _memory_points(job, layout, held, one_machine)
        copies = f", memory points in {gib(points)}" if points else ""
        found.append(
            f"memory of a worker of {world} ({layout_text(layout)}{why}), at least: {', '.join(parts)}; "
            f"{gib(held.training)} of it at once {where}{uncounted}{reforming}; a save is staged in "
            f"{gib(held.staged)}{copies} of the machine's memory: one save at a time, so that slow storage "
            "delays the next one and takes no more"
        )
    if model_size(job.model.config or {}).fixed:
        found.append(
            f"a resume point takes at least {gib(needs_of(job, num_shards).point_bytes)}: adapters and their "
            f"optimizer; each start reads {job.model.base}"
        )
    every = memory_every_steps(job.resume.memory_every_steps, sharded=num_shards != 1)
    step_bytes = job.train.global_batch_size * (job.sample_len + 1) * _TOKEN_BYTES
    if every is not None and every * step_bytes > job.data.replay_bytes:
        found.append(
            f"the steps of resume.memory_every_steps={every} take {gib(every * step_bytes)}, the feeder "
            f"keeps data.replay_bytes={job.data.replay_bytes}: going back so far, it opens its sources anew, "
            "which takes seconds; raise data.replay_bytes to avoid that"
        )
    return found


def _weight_bytes(job: JobConfig) -> int:
    return 2 if job.train.precision == "pure_bf16" else 4


def count_parameters(shape: Mapping[str, Any]) -> int:
    """The minimum number of parameters of a model with this transformers configuration.

    Counts all but norms and biases; 0 if the configuration does not determine it. The LM head counts if it is
    not tied to the embeddings. The defaults for `tie_word_embeddings`, and for the number and size of heads,
    are stored here for a few types of model (`_GATED`, and gpt2); tests/trainer/test_model.py compares them
    with transformers.
    """
    return model_size(shape).parameters


def model_size(shape: Mapping[str, Any]) -> ModelSize:
    """Like `count_parameters`, with a layer as a block; the measured size if the shape is `of_measured`."""
    if _MEASURED in shape:
        return ModelSize(**shape[_MEASURED])
    kind = shape.get("model_type")
    if kind == "gpt2":
        return _size_of_gpt2(shape)
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
    return ModelSize(
        parameters=rest + layers * layer,
        block=layer if layers else 0,
        rest=rest,
        num_blocks=layers,
        hidden=hidden,
        vocab=vocab,
    )


def of_measured(size: ModelSize) -> dict[str, Any]:
    """A shape of which only the size is known."""
    return {_MEASURED: asdict(size)}


def _size_of_gpt2(shape: Mapping[str, Any]) -> ModelSize:
    shape = {**_GPT2, **{_GPT2_NAMES.get(name, name): value for name, value in shape.items()}}
    hidden, layers, vocab = (_whole(shape, name) for name in ("n_embd", "n_layer", "vocab_size"))
    layer = 4 * hidden * hidden + 2 * hidden * (_whole(shape, "n_inner") or 4 * hidden)
    head = 0 if shape.get("tie_word_embeddings", True) else vocab * hidden
    rest = (vocab + _whole(shape, "n_positions")) * hidden + head
    return ModelSize(
        parameters=rest + layers * layer,
        block=layer if layers else 0,
        rest=rest,
        num_blocks=layers,
        hidden=hidden,
        vocab=vocab,
    )


def gib(num_bytes: int) -> str:
    """A number of bytes as text; less than a tenth of a GiB in MiB or KiB."""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= (1 << power) / 10:
            return f"{num_bytes / (1 << power):,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"


def _whole(shape: Mapping[str, Any], name: str) -> int:
    value = shape.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
