"""The sections `model` and `train`: what is trained, in which steps, and divided how."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from orchestrator.config.declaring import FUNCTION, Section, may_change, same


class ModelConfig(Section):
    """What is trained; exactly one of `config`, `pretrained`, `factory`."""

    config: Annotated[dict[str, Any] | None, same("a mapping with model_type, or null")] = None
    """A transformers configuration with `model_type`; the weights start at random, in the type that
    `train.precision` gives them (a `dtype` here must be that one).
    """
    pretrained: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, in transformers' format with safetensors to start from."""
    factory: Annotated[
        str | None,
        same("package.module:function, or null", pattern=FUNCTION),
    ] = None
    """`package.module:function` that returns the model; `plan` and a new run's start build it on torch's meta
    device and call it once (docs/howto/factories.md).
    """
    factory_args: Annotated[dict[str, Any], same("a mapping of arguments")] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    init_from: Annotated[str | None, same("a folder or URI, or null", min_length=1)] = None
    """Folder, or a bucket's URI, that the first weights of a new run come from: exported ones, or a point of
    another run.
    """
    attn_implementation: Annotated[Literal["auto", "eager", "sdpa"], may_change("auto, eager or sdpa")] = (
        "auto"
    )
    """How a transformers model computes attention; `auto`: as its configuration says, else `sdpa` where its
    architecture has it, else what transformers takes for it; `eager` under invariant numerics on GPUs.
    """


class ShardsConfig(Section):
    """`train.parallel` as HSDP."""

    shard: Annotated[int, Field(ge=2)]
    """Workers that hold the state together."""
    replicate: Annotated[int, Field(ge=1)]
    """How many times they hold it, with all workers there."""


class TrainConfig(Section):
    """Batches, length, optimizer and schedule."""

    global_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per step, over all workers."""
    micro_batch_size: Annotated[int, may_change("a whole number >= 1, in samples", ge=1)]
    """Samples per forward pass; need not divide the batch, the last micro-batch is smaller. A router's
    balancing loss is computed over these.
    """
    max_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many steps of the batch size and seq_len it was first given with; null: no limit."""
    max_samples: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many samples; null: no limit."""
    max_tokens: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Stop after this many tokens (positions); null: no limit."""
    lr: Annotated[float, may_change("a number > 0, e.g. 3e-4", gt=0)]
    """Highest learning rate."""
    min_lr_ratio: Annotated[float, may_change("a number from 0 to 1", ge=0, le=1)] = 0.1
    """Where a decay ends, as a share of `lr`."""
    schedule: Annotated[Literal["constant", "cosine", "wsd"], may_change("constant, cosine or wsd")] = (
        "constant"
    )
    """Learning rate over consumed tokens; `wsd`: warm up, stay, decay linearly."""
    warmup_steps: Annotated[int, may_change("a whole number >= 0, in steps", ge=0)] = 0
    """Steps of linear warm-up, turned into tokens when first given."""
    decay_steps: Annotated[int | None, may_change("a whole number >= 1, or null", ge=1)] = None
    """Steps of the decay at the end (`wsd` only), turned into tokens when first given."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        may_change("two numbers >= 0 and < 1, e.g. [0.9, 0.95]"),
    ] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, may_change("a number > 0", gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, may_change("a number >= 0", ge=0)] = 0.1
    """AdamW's weight decay."""
    max_grad_norm: Annotated[float | None, may_change("a number > 0, or null", gt=0)] = 1.0
    """Gradients are clipped to this norm; null: never."""
    seed: Annotated[int, may_change("a whole number >= 0", ge=0)] = 0
    """Seed of the initial weights and of dropout."""
    precision: Annotated[
        Literal["float32", "bf16", "pure_bf16"], may_change("float32, bf16 or pure_bf16")
    ] = "float32"
    """`bf16`: products in bfloat16 (autocast); weights, gradients and moments stay float32. `pure_bf16`: all
    in bfloat16: steps below about 1/256 of a weight are lost (at usual rates most, and norms never move), and
    no resume changes to or from it.
    """
    numerics: Annotated[Literal["auto", "invariant", "fast"], may_change("auto, invariant or fast")] = "auto"
    """`invariant`: the same bits on any number of workers, under `parallel: replicate` only; `auto`:
    invariant on CPU where each worker holds the whole state, else fast.
    """
    parallel: Annotated[
        Literal["auto", "replicate", "shard"] | ShardsConfig,
        may_change("auto, replicate, shard or {shard: n, replicate: m}"),
    ] = "auto"
    """Who holds the state: `replicate`: each worker all of it (DDP). `shard`: each an equal part (FSDP2).
    `{shard: n, replicate: m}`: n workers together, m times (HSDP); with a number of workers that n does not
    divide each holds a part of its own. `auto`: replicate where that fits in memory, else shard.
    """
    compile: Annotated[Literal["none", "blocks"], may_change("none or blocks")] = "none"
    """`blocks`: each block of a sharded model is compiled by `torch.compile`, which takes up to minutes in
    the first step of each process; last bits change.
    """
    activation_checkpointing: Annotated[Literal["none", "blocks"], may_change("none or blocks")] = "none"
    """`blocks`: activations inside each block of a sharded model are not kept for backward, but computed
    again: less memory, about a third more work.
    """

    def is_fast(self, use_gpu: bool) -> bool:
        """Whether last bits depend on the number of workers, as far as the configuration says it."""
        if self.numerics == "auto":
            return use_gpu or self.num_shards != 1
        return self.numerics == "fast"

    @property
    def num_shards(self) -> int | None:
        """Into how many parts `parallel` cuts the state (None: one for each worker); 1 under `auto`, which is
        decided by who knows the machines.
        """
        if isinstance(self.parallel, ShardsConfig):
            return self.parallel.shard
        return None if self.parallel == "shard" else 1
