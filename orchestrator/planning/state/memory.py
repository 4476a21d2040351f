"""Computes how many bytes of a job's state one worker holds in a layout, by purpose.

All are pure integers and lower bounds: what a model keeps inside its blocks and what libraries take is
unknown. `ParallelChoice` is the number of parts of a launch's state, with the machines on which that choice
is based. An attempt's journal stores these values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from orchestrator.config.optimizer_fields import ADAMW, LION, MUON, SGD
from orchestrator.planning.state.state_layout import Layout, chunk_rows

AUTO_MEMORY_STEPS = 10  # `resume.memory_every_steps: auto` for a state that is divided into shards
_OWN_COPIES, _KEPT_COPIES = 2, 2  # in memory: of the own shard, and kept for a neighbour
_LOGIT_BYTES = 8  # of a token's logit: itself and its softmax in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of elements of a model. All 0: unknown.

    `parameters`: all; `frozen`: those without gradient and moments; `fixed`: of these, those that points do
    not hold, because each start reads them (`model.lora`).
    `block`: one of the equal blocks.
    `rest`: outside the blocks: embeddings, and a head that is not tied to them.
    `hidden`: of a token before each block, for `num_blocks` blocks.
    `vocab`: of a token's logits.
    `scalar`: the name of a parameter without dimensions, which cannot be divided.
    """

    parameters: int = 0
    frozen: int = 0
    fixed: int = 0
    block: int = 0
    rest: int = 0
    num_blocks: int = 0
    hidden: int = 0
    vocab: int = 0
    scalar: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSize:
    """Lower bounds of what an optimizer keeps of a whole model, in numbers of elements.

    `state`: its tensors. `updates`: what it needs besides in a step in shards, until the step is applied: new
    values of weights and state that are computed as whole tensors, less the gradients that are dropped then.
    """

    state: int
    updates: int = 0


def optimizer_size(size: ModelSize, optimizers: Collection[str], has_momentum: bool) -> OptimizerSize:
    """Returns the lower bound for the optimizers of a configuration, of which each parameter has one.

    `has_momentum`: SGD's. Of a plug-in nothing is known here. Adafactor's means of rows and columns are not
    counted; `plan` prints the size of all tensors where it tries the model.
    """
    trained = size.parameters - size.frozen
    # outside of blocks Muon leaves parameters to AdamW; without known blocks it may have all of them
    beside = max(0, size.rest - size.frozen) if size.num_blocks else 0
    found = {
        ADAMW: OptimizerSize(state=2 * trained),
        MUON: OptimizerSize(state=trained + beside, updates=trained - beside),
        LION: OptimizerSize(state=trained),
        SGD: OptimizerSize(state=trained if has_momentum else 0),
    }
    if len(optimizers) > 1:
        return OptimizerSize(state=min(found.get(each, OptimizerSize(state=0)).state for each in optimizers))
    return found.get(next(iter(optimizers)), OptimizerSize(state=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """What one worker holds, in bytes.

    `weights`, `gradients` and `moments` (the optimizer's state): its own rows. `fixed`: of the weights, those
    that no point holds.
    `updates`: new values of its rows that the optimizer computes before a step is applied, without the
    gradients that are dropped then.
    `gathered`: a block and the rest as a whole, weights and gradients, during computation.
    `staged`: the copy that a save is written from.
    `reforming`: besides its weights and moments those of the previous layout, while rows are moved; there are
    no gradients and gathered blocks then.
    `beside`: its rows of frozen models, and what is gathered of them.
    `activations`: what the loss of one micro-batch needs, see `activation_bytes`.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    staged: int
    reforming: int
    activations: int = 0
    updates: int = 0
    beside: int = 0
    fixed: int = 0

    def memory_points(self, lent: bool) -> int:
        """Returns the bytes of memory points: two copies of its own shard and two that it keeps for a
        neighbour.

        The latter need no memory if the neighbour is on the same machine and lends them (`lent`).
        """
        copies = _OWN_COPIES + (0 if lent else _KEPT_COPIES)
        return copies * (self.weights - self.fixed + self.moments)

    @property
    def training(self) -> int:
        """The maximum that is held at once in a step, without what is staged.

        It is reached when the last gradients are summed and activations are gone, or when the first
        micro-batch's loss is computed, before any gradient.
        """
        at_the_loss = self.activations + self.gathered // 2
        in_backward, in_the_step = self.gradients + self.gathered, self.gradients + self.updates
        at_most = max(in_backward, in_the_step, at_the_loss)
        return self.weights + self.moments + self.beside + at_most

    @property
    def peak(self) -> int:
        """The maximum that is needed at once besides what is staged: in a step, or while a group re-forms."""
        return max(self.training, self.weights + self.moments + self.beside + self.reforming)


def memory_every_steps(setting: int | str | None, sharded: bool) -> int | None:
    """Returns the value of `resume.memory_every_steps`; None: no memory points.

    If every member has the whole state, the loss of one of them loses nothing, so `auto` makes none.
    """
    if isinstance(setting, str):
        return AUTO_MEMORY_STEPS if sharded else None
    return setting


def activation_bytes(size: ModelSize, num_tokens: int, compute_bytes: int) -> int:
    """Returns a lower bound for a micro-batch of `num_tokens` when its loss is computed.

    It counts the input of each block, which is kept for the backward pass even if everything else is
    recomputed, and logits twice in float32 (themselves, and their softmax).
    """
    return num_tokens * (size.num_blocks * size.hidden * compute_bytes + size.vocab * _LOGIT_BYTES)


def worker_memory(
    size: ModelSize,
    layout: Layout,
    weight_bytes: int,
    compute_bytes: int,
    before: Layout | None = None,
    num_tokens: int = 0,
    optimizer: OptimizerSize | None = None,
) -> WorkerMemory:
    """Returns the memory of the worker that holds most (shard 0).

    A weight has `weight_bytes`, and `compute_bytes` where it is gathered for computation. `before`: the
    layout from which members bring rows that are moved (None: nothing is moved, or it stays in place).
    `num_tokens`: of a micro-batch. `optimizer`: None is AdamW's.
    """
    optimizer = optimizer or optimizer_size(size, (ADAMW,), has_momentum=False)
    own = chunk_rows(size.parameters, layout.num_shards) * weight_bytes
    fixed = chunk_rows(size.fixed, layout.num_shards) * weight_bytes
    together = size.rest + size.block
    reduced = min(together, size.parameters - size.frozen)  # frozen weights have no gradients
    gathered = 0 if layout.num_shards == 1 else (together + reduced) * compute_bytes
    trained = chunk_rows(size.parameters - size.frozen, layout.num_shards) * weight_bytes
    moved = before is not None and (layout.num_shards, before.num_shards) != (1, 1)
    held = 0
    if before is not None and moved:
        held = chunk_rows(size.parameters, before.num_shards)
        held += chunk_rows(optimizer.state, before.num_shards)
    moments = chunk_rows(optimizer.state, layout.num_shards) * weight_bytes
    updates = chunk_rows(optimizer.updates, layout.num_shards) * weight_bytes
    return WorkerMemory(
        weights=own,
        gradients=trained,
        moments=moments,
        gathered=gathered,
        staged=chunk_rows(own - fixed + moments, layout.num_replicas),
        reforming=held * weight_bytes,
        activations=activation_bytes(size, num_tokens, compute_bytes),
        updates=updates if layout.num_shards > 1 else 0,
        fixed=fixed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine for workers: its total memory (0: unknown), and that of each of its GPUs.

    `gpu_bytes` is empty if it has none or they are unknown. A 0 is a GPU whose memory is unknown.
    """

    host: str
    memory_bytes: int = 0
    gpu_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelChoice:
    """The result of `train.parallel`.

    `num_shards`: as in `state_layout.layout_of` (1: replicate, None: a shard for each worker), for the given
    `reason`.
    `machines`: those that were considered.
    `cluster`: the address of the Ray that has them (empty: one that was started for the launch, or none).
    `size`: the model's size that the choice is based on.
    """

    num_shards: int | None
    reason: str
    machines: tuple[Machine, ...] = ()
    cluster: str = ""
    size: ModelSize = ModelSize()


def choice_text(num_shards: int | None) -> str:
    """Returns a number of shards as written in the configuration."""
    if num_shards is None:
        return "shard"
    return "replicate" if num_shards == 1 else f"{{shard: {num_shards}}}"


def layout_text(layout: Layout) -> str:
    """Describes the layout of a state on a group, for people."""
    if layout.num_shards == 1:
        return "replicate: each holds the whole state"
    if layout.num_replicas == 1:
        return f"shard: the state in {layout.num_shards} parts"
    return f"{layout.num_replicas} times the state in {layout.num_shards} parts"
