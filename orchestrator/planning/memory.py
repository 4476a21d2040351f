"""How many bytes of a job's state one worker holds in a layout, by what they are for.

Pure integers, all of them lower bounds: what a model keeps inside its blocks and what libraries take is not
known. It knows no machine and no configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.planning.state_layout import Layout, chunk_rows

AUTO_MEMORY_STEPS = 10  # `resume.memory_every_steps: auto` where the state is cut into shards
_OWN_COPIES, _KEPT_COPIES = 2, 2  # in memory: of the own shard, and kept for a neighbour
_MOMENTS = 2
_LOGIT_BYTES = 8  # of a token's logit: itself and its softmax in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of elements: of all `parameters`, of one of the equal blocks (`block`), and of what lies in no
    block (`rest`): embeddings, and a head that is not tied to them; of what a token is in front of each block
    (`hidden`, for `num_blocks` of them) and of its logits (`vocab`). Of the parameters so many are `frozen`:
    they have neither gradient nor moments. `scalar` names one without dimensions, which cannot be divided.
    All 0: not known.
    """

    parameters: int = 0
    frozen: int = 0
    block: int = 0
    rest: int = 0
    num_blocks: int = 0
    hidden: int = 0
    vocab: int = 0
    scalar: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """What one worker holds, in bytes. `weights`, `gradients` and `moments` are its own rows. `gathered`: a
    block and the rest as a whole, weights and gradients, while they are computed with. `staged`: the copy
    that a save is written from. `reforming`: beside its weights and moments those of the layout before,
    while rows are moved; gradients and gathered blocks are not there then. `activations`: what the loss of
    one micro-batch needs, see `activation_bytes`.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    staged: int
    reforming: int
    activations: int = 0

    def memory_points(self, lent: bool) -> int:
        """Two copies of its own shard and two that it keeps for a neighbour, unless that one lends them
        (`lent`): it is on the same machine then.
        """
        copies = _OWN_COPIES + (0 if lent else _KEPT_COPIES)
        return copies * (self.weights + self.moments)

    @property
    def training(self) -> int:
        """The most that is held at once in a step, but for what is staged: when the last gradients are summed
        and activations are gone, or when the first micro-batch's loss is computed, before any gradient.
        """
        at_the_loss = self.activations + self.gathered // 2
        return self.weights + self.moments + max(self.gradients + self.gathered, at_the_loss)

    @property
    def peak(self) -> int:
        """The most that is needed at once beside what is staged: in a step, or while a group re-forms."""
        return max(self.training, self.weights + self.moments + self.reforming)


def memory_every_steps(setting: int | str | None, sharded: bool) -> int | None:
    """What `resume.memory_every_steps` comes to; None: no memory points. Where every member has the whole
    state nothing is lost with one of them, so `auto` makes none there.
    """
    if isinstance(setting, str):
        return AUTO_MEMORY_STEPS if sharded else None
    return setting


def activation_bytes(size: ModelSize, num_tokens: int, compute_bytes: int) -> int:
    """What is held of a micro-batch of `num_tokens` when its loss is computed, at least: what goes into each
    block, which is kept for the backward pass even where all else is computed again, and logits twice in
    float32 (as they are, and their softmax).
    """
    return num_tokens * (size.num_blocks * size.hidden * compute_bytes + size.vocab * _LOGIT_BYTES)


def worker_memory(
    size: ModelSize,
    layout: Layout,
    weight_bytes: int,
    compute_bytes: int,
    before: Layout | None = None,
    num_tokens: int = 0,
) -> WorkerMemory:
    """The memory of the worker that holds most (shard 0). A weight has `weight_bytes`, `compute_bytes` where
    it is gathered to be computed with. `before`: the layout from which members bring rows that are moved
    (None: nothing is moved, or it lies in place). `num_tokens`: of a micro-batch.
    """
    own = chunk_rows(size.parameters, layout.num_shards) * weight_bytes
    gathered = 0 if layout.num_shards == 1 else 2 * (size.rest + size.block) * compute_bytes
    trained = chunk_rows(size.parameters - size.frozen, layout.num_shards) * weight_bytes
    moved = before is not None and (layout.num_shards, before.num_shards) != (1, 1)
    held = 0
    if before is not None and moved:
        held = chunk_rows(size.parameters, before.num_shards)
        held += _MOMENTS * chunk_rows(size.parameters - size.frozen, before.num_shards)
    return WorkerMemory(
        weights=own,
        gradients=trained,
        moments=_MOMENTS * trained,
        gathered=gathered,
        staged=chunk_rows(own + _MOMENTS * trained, layout.num_replicas),
        reforming=held * weight_bytes,
        activations=activation_bytes(size, num_tokens, compute_bytes),
    )
