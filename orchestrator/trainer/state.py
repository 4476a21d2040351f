"""The training state of one member: weights, optimizer, step, cursor, and the key that says which state it
is.

One list of items serves both copying to blank members and saving. It knows no files and no other member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from torch import Tensor, nn

from orchestrator.errors import TrainingError
from orchestrator.planning.state_layout import Layout, StateTensor
from orchestrator.records import Cursor, StateKey
from orchestrator.trainer.model import build_model, first_model

if TYPE_CHECKING:
    from orchestrator.config.schema import ModelConfig, TrainConfig
    from orchestrator.trainer.group import Group

MODEL, OPTIMIZER = "model", "optimizer"
STEPS = "steps"  # the item that counts optimizer steps
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Rows of a tensor of the state, as themselves: who writes to `tensor` changes the state. Tied weights
    are one item. `tensor` has the rows from `first_row` on that this member holds of `whole`: all of them
    under replicate.
    """

    whole: StateTensor
    tensor: Tensor
    first_row: int = 0

    @property
    def group(self) -> str:
        """MODEL or OPTIMIZER."""
        return self.whole.group

    @property
    def name(self) -> str:
        """Unique in its group."""
        return self.whole.name


def whole_item(group: str, name: str, tensor: Tensor, *, sharded: bool) -> Item:
    """The item of a tensor that is held whole; `sharded`: its rows are divided where there are shards."""
    whole = StateTensor(
        group=group,
        name=name,
        shape=tuple(tensor.shape),
        itemsize=tensor.element_size(),
        sharded=sharded and tensor.ndim > 0,
    )
    return Item(whole=whole, tensor=tensor)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's values as bytes, in order; a copy only where it lies on a GPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _at_once() -> None:
    """Nobody copies the state in the background."""


class TrainState:
    """Model, AdamW and their place in the run.

    `key` is None while the member is blank: then nothing in here may be used or sent. `committed` says that a
    committed resume point holds this very state. Whoever writes to the items calls `writable` before;
    `apply` and `initialise` do. Weight decay applies to tensors of two and more dimensions,
    as is usual (not to biases and norms).
    """

    sharded = False  # whether members hold different rows

    def __init__(self, model: ModelConfig, train: TrainConfig, device: torch.device, invariant: bool) -> None:
        self._layout = Layout(num_shards=1, num_replicas=1)
        self._first = partial(first_model, model, train.precision, train.seed, device, invariant)
        self.model: nn.Module = build_model(model, train.precision, train.seed, device, invariant)
        # returns when the tensors may be written to: who copies them in the background sets it
        self.writable: Callable[[], None] = _at_once
        self.key: StateKey | None = None
        self.cursor = Cursor()
        self.committed = False
        # holds the first weights; those of another folder are read only by who needs them
        self._untouched = model.init_from is None
        self._held = dict(self.model.state_dict(keep_vars=True))  # the tensors themselves, under all names
        self._named = dict(own_tensors(self._held))
        for tensor in self._named.values():
            tensor.data = tensor.data.contiguous()
        trained = {name: t for name, t in self._named.items() if t.requires_grad}
        self._steps = torch.zeros((), dtype=torch.int64)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [t for t in trained.values() if t.ndim >= 2], "weight_decay": train.weight_decay},
                {"params": [t for t in trained.values() if t.ndim < 2], "weight_decay": 0.0},
            ],
            lr=train.lr,
            betas=(train.betas[0], train.betas[1]),
            eps=train.eps,
            fused=True,
        )
        # made here rather than at the first step, so that a state always has the same items
        for tensor in trained.values():
            self._optimizer.state[tensor] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                **{
                    moment: torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                    for moment in _MOMENTS
                },
            }
        self._trained = trained
        self._buffers = {name: t for name, t in self._named.items() if not isinstance(t, nn.Parameter)}
        self._versions = {name: t._version for name, t in self._buffers.items()}

    @property
    def optimizer_steps(self) -> int:
        """How often the optimizer has stepped; part of the state, never re-based."""
        return int(self._steps)

    @property
    def layout(self) -> Layout:
        """That of the tensors that `items` gives."""
        return self._layout

    def form(self, group: Group) -> None:
        """A new generation: afterwards `items` are the tensors for its layout. Where that needs others than
        there were, these are blank, and those from before stay readable as `before` until `formed`; here
        they stay the same. A collective: every member calls it, after `Group.compare`. Raises
        `GenerationEnded` if one of them is lost.
        """
        self._layout = Layout(num_shards=1, num_replicas=group.view.world_size)

    def before(self) -> tuple[Layout, int, list[Item]] | None:
        """Between `form` and `formed`: the layout and the rank of before, and the items with their values;
        None if this member held nothing.
        """
        return None if self.key is None else (self._layout, 0, self.items())

    def formed(self) -> None:
        """All members have what they need of what was before: it is dropped."""

    def items(self) -> list[Item]:
        """Every tensor that makes up the state, in an order that is the same for every member."""
        items = [
            whole_item(MODEL, name, tensor.detach(), sharded=name not in self._buffers)
            for name, tensor in self._named.items()
        ]
        items.append(whole_item(OPTIMIZER, STEPS, self._steps, sharded=False))
        for name, tensor in self._trained.items():
            of_one = self._optimizer.state[tensor]
            items += [
                whole_item(OPTIMIZER, f"{moment}.{name}", of_one[moment], sharded=True) for moment in _MOMENTS
            ]
        return items

    def filled(self) -> None:
        """Must follow whatever wrote to the items: the optimizer's own counts are set from them."""
        self._untouched = False
        for tensor in self._trained.values():
            self._optimizer.state[tensor]["step"].fill_(float(self._steps))
        self._versions = {name: t._version for name, t in self._buffers.items()}

    def digest(self) -> bytes:
        """32 bytes (blake3) that two states share if, and only if, all their items are equal to the last
        bit.
        """
        total = blake3()
        for item in self.items():
            head = f"{item.group}/{item.name} {item.tensor.dtype} {tuple(item.tensor.shape)}\n"
            total.update(head.encode())
            total.update(tensor_bytes(item.tensor))
        return total.digest()

    def apply(self, lr: float) -> None:
        """One optimizer step with the gradients that stand in `.grad`. Raises `TrainingError` if the forward
        pass has changed a buffer, for then the ranks hold different ones, or has put another tensor in the
        place of one of the state, which would neither be trained nor saved.
        """
        changed = self._changed_by_forward()
        if changed:
            raise TrainingError(
                f"the model's forward pass changes its buffers {changed}, which would differ between ranks; "
                "use layers without running statistics, or register them with persistent=False"
            )
        self.writable()
        self._untouched = self.committed = False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._steps += 1

    def _changed_by_forward(self) -> list[str]:
        """Names of tensors that were written to, came, went or were replaced since the last step."""
        written = [name for name, t in self._buffers.items() if t._version != self._versions[name]]
        now = self.model.state_dict(keep_vars=True)
        other = [name for name in {**self._held, **now} if self._held.get(name) is not now.get(name)]
        return sorted({*written, *other})

    def initialise(self) -> None:
        """Back to the first weights and an optimizer that has not stepped, whatever was there."""
        if self._untouched:
            return
        self.writable()
        fresh = dict(own_tensors(self._first().state_dict(keep_vars=True)))
        for item in self.items():
            if item.group == MODEL:
                item.tensor.copy_(fresh[item.name].detach())
            else:
                item.tensor.zero_()
        self.filled()
        self._untouched = True


def own_tensors(held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name; of tied ones only the first name, the others are aliases."""
    seen: set[int] = set()
    for name, tensor in held.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
