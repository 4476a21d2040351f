"""The training state of one member: weights, optimizer, step, cursor, and the key that identifies the state.

One list of items serves both copying to blank members and saving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import nn

from orchestrator.checkpoint.files.manifest import EMA, MODEL, OPTIMIZER
from orchestrator.errors import TrainingError
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, Source
from orchestrator.records.steps import StateKey
from orchestrator.trainer.model.blocks import BlockSettings, require_blocks, with_settings
from orchestrator.trainer.model.build_model import build_model, first_model, placed
from orchestrator.trainer.optimizer.optimizer_rows import OptimizerRows
from orchestrator.trainer.optimizer.optimizers import settings_of
from orchestrator.trainer.state.first_weights import FirstWeights
from orchestrator.trainer.state.frozen_weights import AdapterBase, FrozenModels, frozen_field
from orchestrator.trainer.weights.state_tensors import (
    STEPS,
    Item,
    begin_anew,
    is_trained,
    tensor_bytes,
    whole_item,
    whole_items,
)

if TYPE_CHECKING:
    from orchestrator.config.sections import ModelConfig, TrainConfig
    from orchestrator.trainer.comm.group import Group
    from orchestrator.trainer.optimizer.kinds import Setting
    from orchestrator.trainer.optimizer.optimizer_rows import Shards


@dataclass(frozen=True, kw_only=True, slots=True)
class _Received:
    """A state that this member had received when a generation ended.

    It is whole, but this member did not know whether all members had theirs.
    """

    key: StateKey
    cursor: Cursor
    committed: bool
    layout: Layout
    rank: int
    rows: OwnRows

    @property
    def holding(self) -> HeldShard:
        shard, num = self.layout.shard_of(self.rank), self.layout.num_shards
        return HeldShard(
            key=self.key, shard=shard, num_shards=num, source=Source.RECEIVED, cursor=self.cursor
        )


def _at_once() -> None:
    """Returns at once: nothing copies the state in the background."""


class OwnRows:
    """The rows that one member holds of every tensor of a state, its optimizer, and its step count.

    An optimizer that works element by element gives rows of a tensor the same bits as in the whole tensor.
    `OptimizerRows` steps the others.
    """

    def __init__(
        self,
        items: Sequence[Item],
        settings: Mapping[str, Setting],
        ema: float | None,
        device: torch.device,
        fixed: Sequence[Item] = (),
    ) -> None:
        """`items` are of the group MODEL. Those whose tensor is an `nn.Parameter` that requires a gradient
        are trained, as `settings` states, and averaged with the decay `ema`. `fixed` are tensors of the model
        that no point holds (`model.lora`).
        """
        self._model, self.fixed = list(items), list(fixed)
        self.trained = {item.name: item for item in items if is_trained(item.tensor)}
        of_both = (*items, *fixed)
        self.buffers = {
            item.name: item.tensor for item in of_both if not isinstance(item.tensor, nn.Parameter)
        }
        self._steps = torch.zeros((), dtype=torch.int64)
        # its state is created here rather than at the first step, so that a state always has the same items
        self._optimizer = OptimizerRows(list(self.trained.values()), settings, device)
        self._averages = None if ema is None else AveragedWeights(list(self.trained.values()), ema)
        self.note_buffers()

    @property
    def optimizer_steps(self) -> int:
        """The number of the optimizer's steps."""
        return int(self._steps)

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the optimizer's tensors by their names (`exp_avg`), and then by parameter."""
        return self._optimizer.by_state()

    def items(self) -> list[Item]:
        """Returns all items, in an order that is the same for every member."""
        items = [replace(item, tensor=item.tensor.detach()) for item in self._model]
        items.append(whole_item(OPTIMIZER, STEPS, self._steps, sharded=False))
        items += self._optimizer.items()
        items += self._averages.items() if self._averages is not None else ()
        return items

    def note_buffers(self) -> None:
        """Records the buffers' current versions, which `changed_buffers` compares with."""
        self._versions = {name: t._version for name, t in self.buffers.items()}

    def changed_buffers(self) -> list[str]:
        """Returns the names of the buffers that were written to since `note_buffers`."""
        return [name for name, t in self.buffers.items() if t._version != self._versions[name]]

    def filled(self) -> None:
        """Must be called after the items were written: sets the optimizer's own counts from them."""
        self._optimizer.filled(self.optimizer_steps)
        self.note_buffers()

    def prepare(self, lr: float, shards: Shards) -> None:
        """Computes the step of parameters that the optimizer steps whole; see `OptimizerRows.prepare`."""
        self._optimizer.prepare(lr, self.optimizer_steps, shards)

    def step(self, lr: float) -> None:
        """Runs one step of the optimizer with the gradients in `.grad`."""
        self._optimizer.step(lr, self.optimizer_steps)
        self._steps += 1
        if self._averages is not None:
            self._averages.step()


class TrainState:
    """Model, optimizer and their position in the run. Every member holds all of it (`replicate`).

    `key` is None while the member is blank: its contents must then not be used or sent. `committed`: a
    committed resume point holds this very state. Code that writes to the items must call `writable` before;
    `apply` and `initialise` do.

    `frozen`: the models of `model.frozen`. `base`: the weights beside adapters. `fixed`: the digests of the
    weights that the state is trained with and does not contain, by their fields, once the group has agreed on
    them.
    """

    sharded = False  # whether members hold different rows

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        device: torch.device,
        invariant: bool,
        weights_by_name: bool = False,
    ) -> None:
        """`weights_by_name`: how first weights are drawn, see `FirstWeights`.

        The initial weights are made by a member that needs them. But a factory's model is built as it is, and
        the base of adapters, which no other member and no point gives, is read by each.
        """
        self._begin_blank()
        self._first = FirstWeights(model, train, device, invariant, weights_by_name)
        whole = model.factory is not None or model.lora is not None
        outline = None if whole else self._first.outline()
        self._untouched = outline is None and (model.init_from is None or model.lora is not None)
        if outline is not None:
            self.model: nn.Module = placed(outline, device)
        else:
            build = first_model if self._untouched else build_model
            self.model = build(model, train.precision, train.seed, device, invariant)
        require_blocks(self.model, train, device)
        with_settings(self.model, BlockSettings.of(train, device, invariant))
        self.frozen = FrozenModels(model, train, device, invariant)
        self._held = dict(self.model.state_dict(keep_vars=True))  # the tensors themselves, under all names
        self.base = AdapterBase(model, train.precision, train.seed, self.model)
        items, fixed = self.base.split(whole_items(self.model))
        self.base.hold(fixed, self._layout, self._rank, are_filled=True)
        self._rows = OwnRows(items, settings_of(self.model, train), train.ema, device, fixed)

    def _begin_blank(self) -> None:
        # Returns when the tensors may be written to. Code that copies them in the background replaces it.
        self.writable: Callable[[], None] = _at_once
        self.key: StateKey | None = None
        self.cursor = Cursor()
        self.committed = False
        self.fixed: Mapping[str, str] = {}
        self._layout, self._rank = Layout(num_shards=1, num_replicas=1), 0
        self._received: _Received | None = None

    @property
    def _outline(self) -> nn.Module:
        """The model with all names of its tensors. It may be without weights."""
        return self.model

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps. It is part of the state and never reset to another base."""
        return self._rows.optimizer_steps

    @property
    def layout(self) -> Layout:
        """The layout of the tensors that `items` returns."""
        return self._layout

    def layout_on(self, world_size: int) -> Layout:
        """Returns the layout of a group of `world_size` members."""
        return Layout(num_shards=1, num_replicas=world_size)

    def form(self, group: Group) -> None:
        """Starts a new generation: afterwards `items` are the tensors for its layout.

        If the layout needs other tensors, the new ones are blank, and the previous ones stay readable as
        `before` until `formed`. In this class they stay the same. This is a collective: every member calls
        it, after `Group.compare`. Raises `GenerationEnded` if a member is lost.
        """
        self._layout = self.layout_on(group.view.world_size)

    def before(self) -> tuple[Layout, int, list[Item]] | None:
        """Between `form` and `formed`: the previous layout and rank, and the items with their values.

        None if this member held nothing.
        """
        return None if self.key is None else (self._layout, 0, self.items())

    def holdings(self, prepared: StateKey | None) -> tuple[HeldShard, ...]:
        """Returns what this member can give to others; nothing if it is blank.

        It can give its part of the state that it trains, of the step whose gradient it keeps, and of what it
        `received`.
        """
        held: list[HeldShard] = []
        shard, num = self._layout.shard_of(self._rank), self._layout.num_shards
        if self.key is not None:
            live = HeldShard(
                key=self.key, shard=shard, num_shards=num, source=Source.LIVE, cursor=self.cursor
            )
            held.append(live)
            if prepared is not None:
                held.append(replace(live, key=prepared, source=Source.PREPARED, cursor=None))
        if self._received is not None:
            held.append(self._received.holding)
        return tuple(held)

    def received(self, key: StateKey, cursor: Cursor, committed: bool) -> None:
        """Between `form` and `formed`: the items are whole, and are this member's part of the state `key`.

        The member keeps them until the next view, besides the previous ones. Other members may not have their
        parts. Or they may have them, know that all members do, and have dropped their previous ones.
        """
        self._received = _Received(
            key=key,
            cursor=cursor,
            committed=committed,
            layout=self._layout,
            rank=self._rank,
            rows=self._rows,
        )

    def take_received(self, parent: StateKey | None) -> None:
        """Makes what was `received`, but not `formed`, the state if it is `parent`; else drops it."""
        coming, self._received = self._received, None
        if coming is not None and coming.key == parent:
            self._layout, self._rank, self._rows = coming.layout, coming.rank, coming.rows
            self.key, self.cursor, self.committed = coming.key, coming.cursor, coming.committed

    def formed(self) -> None:
        """Drops the previous tensors: all members have what they need of them."""
        self._received = None

    @property
    def has_fixed(self) -> bool:
        """Whether the state is trained with weights that it does not contain."""
        return bool(self.frozen.models) or self.base.exists

    def fixed_sums(self) -> Mapping[str, int]:
        """Returns the sums of this member's shard of the weights of `fixed`, by their fields.

        Reads them if they are not read yet. Raises `ConfigError` and `StorageError`.
        """
        self.frozen.read()
        self.base.read()
        found = {frozen_field(name): found for name, found in self.frozen.sums().items()}
        return found | ({self.base.field: self.base.sum()} if self.base.exists else {})

    def fixed_digests(self) -> dict[str, str]:
        """Returns the digests of the weights of `fixed` for a member without others, by their fields."""
        return {**self.frozen.digests(), **self.base.digests()}

    def leave(self) -> None:
        """Ends the generation: nothing refers to its process group any more. The tensors stay."""

    @contextmanager
    def within(self) -> Iterator[None]:
        """Wraps a generation: calls `leave` however it ends."""
        try:
            yield
        finally:
            self.leave()

    def items(self) -> list[Item]:
        """Returns every tensor of the state, in an order that is the same for every member."""
        return self._rows.items()

    def filled(self) -> None:
        """Must be called after the items were written."""
        self._untouched = False
        self._first.forget()
        self._rows.filled()

    def digest(self) -> bytes:
        """Returns 32 bytes (blake3) that identify the state.

        They are equal for two states if and only if all their items are bitwise equal.
        """
        total = blake3()
        for item in self.items():
            head = f"{item.group}/{item.name} {item.tensor.dtype} {tuple(item.tensor.shape)}\n"
            total.update(head.encode())
            total.update(tensor_bytes(item.tensor))
        return total.digest()

    def optimizer_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the optimizer's tensors by their names (`exp_avg`), and then by parameter."""
        return self._rows.optimizer_state()

    def prepare(self, lr: float) -> None:
        """Computes what a step with the gradients in `.grad` needs of other members.

        `apply` then needs no collective. Called before it with the same `lr`, where the step has units of
        loss. This is a collective; the state does not change. Raises `GenerationEnded` if a member is lost.
        In this class every member has all that it needs.
        """

    def apply(self, lr: float, num_units: float) -> None:
        """Runs one optimizer step with the gradients in `.grad`, for a step with `num_units` units of loss.

        Without units there is no gradient, and the optimizer makes no step: momentum and weight decay would
        change the weights although nothing is learned. Raises `TrainingError` if the forward pass has changed
        a buffer, because the ranks then hold different ones. Raises it also if the forward pass has replaced
        a tensor of the state, because the new tensor would be neither trained nor saved.
        """
        changed = sorted({*self._rows.changed_buffers(), *self._replaced()})
        if changed:
            raise TrainingError(
                f"the model's forward pass changes its buffers {changed}, which would differ between ranks; "
                "use layers without running statistics, or register them with persistent=False",
                code="model.changes_state",
            )
        self.writable()
        self._untouched = self.committed = False
        if num_units:
            self._rows.step(lr)

    def _replaced(self) -> list[str]:
        """Returns the names of tensors that were added, removed or replaced since the state was made."""
        now = self.model.state_dict(keep_vars=True)
        return [name for name in {**self._held, **now} if self._held.get(name) is not now.get(name)]

    def initialise(self) -> None:
        """Resets the state to the initial weights and an optimizer without steps."""
        if self._untouched:
            return
        self.writable()
        items = self.items()
        weights = [item for item in items if item.group == MODEL]
        with torch.no_grad():
            self._first.fill(weights, self._outline, self.base)
        begin_anew(items, weights)
        self.filled()
        self._untouched = True


# -------------------------------------------------------------------------------------------------- train.ema
class AveragedWeights:
    """Averages in float32 over this member's rows of the trained weights.

    After each step of the optimizer an average a of a weight w becomes decay · a + (1 - decay) · w. Rows get
    the same bits as whole tensors. In bfloat16 a change of 1 - decay would be lost, so averages are float32
    whatever the weights are.
    """

    def __init__(self, items: Sequence[Item], decay: float) -> None:
        """`items`: the trained weights, with which the averages begin."""
        self._items, self._decay = items, decay
        self._averages = [item.tensor.detach().float().clone() for item in items]

    def items(self) -> Iterator[Item]:
        """Yields the averages as items of the training state, under the names of their weights."""
        for item, average in zip(self._items, self._averages, strict=True):
            whole = replace(item.whole, group=EMA, itemsize=average.dtype.itemsize)
            yield replace(item, whole=whole, tensor=average)

    @torch.no_grad()
    def step(self) -> None:
        """Takes the weights as they are now into the averages."""
        if self._items:
            weights = [item.tensor.detach().float() for item in self._items]
            torch._foreach_lerp_(self._averages, weights, 1 - self._decay)
