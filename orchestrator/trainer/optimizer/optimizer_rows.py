"""The optimizer over the rows that one member holds: its state, and its steps.

An optimizer that does not work element by element steps whole parameters. In shards each parameter then has
an owner, one of the shards of a replica:

    rows of weight, gradient and state        the owner steps the          new rows of weight and state
    of every shard  ── gathered by ──▶        whole parameter    ── scattered to ──▶       every shard

Owners are balanced by cost. They step one parameter each per round, while the rows of the next round are
under way. A parameter gets the bits that one process computes from the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.checkpoint.files.manifest import OPTIMIZER
from orchestrator.planning.state.state_layout import StateTensor, held_rows
from orchestrator.trainer.comm.group import collective
from orchestrator.trainer.comm.reshard import tensor_as_bytes
from orchestrator.trainer.optimizer.kinds import Kind, Setting, StateForm, step_alone, stored_name
from orchestrator.trainer.weights.state_tensors import Item


class OptimizerRows:
    """All optimizers of a state over this member's rows.

    An optimizer that works element by element steps the rows. Another one steps whole parameters: under
    `replicate` each member steps all of them, and in shards `prepare` has computed the new rows before. All
    parameters make the same number of steps, which the caller keeps.
    """

    def __init__(
        self, items: Sequence[Item], settings: Mapping[str, Setting], device: torch.device
    ) -> None:
        """`items`: the trained parameters, whose tensors have the gradients. `settings` is by their names."""
        self._rows = [trained_rows(item, settings[item.name], device) for item in items]
        self._batches = [_Batch(rows) for rows in _by_kind(self._rows)]
        self._by_rows = [
            rows for rows in self._rows if rows.setting.kind.steps_alone and rows.setting.kind.elementwise
        ]
        self._whole = [rows for rows in self._rows if not rows.setting.kind.elementwise]
        self._updates: list[Update] | None = None
        self.filled(0)

    def items(self) -> Iterator[Item]:
        """Yields the tensors of the optimizer's state, in the order of the parameters."""
        for rows in self._rows:
            yield from rows.items()

    def by_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the state's tensors by their names without the parameter, and then by parameter."""
        found: dict[str, dict[str, Tensor]] = {}
        for rows in self._rows:
            for item in rows.items():
                found.setdefault(item.name.removesuffix(f".{rows.item.name}"), {})[
                    rows.item.name
                ] = item.tensor
        return found

    def filled(self, steps: int) -> None:
        """Must be called after the items were written. `steps`: the number of steps until then."""
        self._updates = None
        for batch in self._batches:
            batch.bind(steps)

    def prepare(self, lr: float, steps: int, shards: Shards) -> None:
        """Computes the step of parameters that are stepped whole, for the members of `shards`.

        Their gradients are dropped. This is a collective: every member of the shards calls it. Raises
        `GenerationEnded` if a member is lost, and what a plug-in raises. The state does not change before
        `step`.
        """
        self._updates = None
        if self._whole:
            self._updates = step_whole(self._whole, lr, steps, shards)

    def step(self, lr: float, steps: int) -> None:
        """Runs one step with the gradients in `.grad`, after so many steps.

        What was prepared is taken. It was computed for the same `lr`.
        """
        for batch in self._batches:
            batch.step(lr, first=not steps)
        for rows in self._by_rows:
            _step_rows(rows, lr, steps)
        if self._updates is None:
            for rows in self._whole:
                assert len(rows.item.tensor) == rows.item.whole.num_rows, "a step of shards is prepared"
                _step_rows(rows, lr, steps)
            return
        for update in self._updates:
            update.carry_out()
        self._updates = None


def _step_rows(rows: TrainedRows, lr: float, steps: int) -> None:
    weight = rows.item.tensor
    assert weight.grad is not None, f"{rows.item.name} has a gradient"
    step_alone(rows.setting, lr, weight, weight.grad, rows.state, steps)


def _by_kind(rows: Sequence[TrainedRows]) -> list[list[TrainedRows]]:
    found: dict[str, list[TrainedRows]] = {}
    for each in rows:
        if not each.setting.kind.steps_alone:
            found.setdefault(each.setting.kind.name, []).append(each)
    return list(found.values())


@dataclass(slots=True)
class _Batch:
    """One optimizer of torch over all parameters of a kind that works element by element."""

    rows: list[TrainedRows]
    _optimizer: torch.optim.Optimizer = field(init=False)
    _scales: list[float] = field(init=False)

    def __post_init__(self) -> None:
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for each in self.rows:
            setting = each.setting
            groups.setdefault((setting.lr_scale, setting.weight_decay), []).append(each.item.tensor)
        self._scales = [scale for scale, _ in groups]
        self._optimizer = self._kind.build(
            [
                {"params": tensors, "lr": scale, "weight_decay": decay}
                for (scale, decay), tensors in groups.items()
            ]
        )

    @property
    def _kind(self) -> Kind:
        return self.rows[0].setting.kind

    def bind(self, steps: int) -> None:
        for each in self.rows:
            self._kind.bind(self._optimizer, each.item.tensor, each.state, steps)

    def step(self, lr: float, first: bool) -> None:
        for group, scale in zip(self._optimizer.param_groups, self._scales, strict=True):
            group["lr"] = lr * scale
        self._optimizer.step()
        if first:  # it may have made its state itself
            for each in self.rows:
                self._kind.read(self._optimizer, each.item.tensor, each.state)


# ---------------------------------------------------------------------------------- the rows of one parameter
@dataclass(frozen=True, slots=True)
class TrainedRows:
    """This member's rows of a trained parameter, with what the optimizer keeps of them."""

    item: Item
    setting: Setting
    forms: tuple[StateForm, ...]
    state: Mapping[str, Tensor]

    def items(self) -> Iterator[Item]:
        """Yields the state's tensors as items of the training state."""
        for form in self.forms:
            is_divided = self.is_divided(form)
            whole = StateTensor(
                group=OPTIMIZER,
                name=stored_name(self.setting.kind, form, self.item.name),
                shape=form.shape,
                itemsize=form.dtype.itemsize,
                sharded=is_divided,
            )
            first_row = self.item.first_row if is_divided else 0
            yield Item(whole=whole, tensor=self.state[form.name], first_row=first_row)

    def is_divided(self, form: StateForm) -> bool:
        """Whether this tensor of the state is divided with the parameter's rows."""
        whole = self.item.whole
        return whole.sharded and form.shape[:1] == whole.shape[:1]


def trained_rows(item: Item, setting: Setting, device: torch.device) -> TrainedRows:
    """Returns the rows with a state of zeros, as before the first step."""
    forms = setting.kind.forms(item.whole.shape, item.tensor.dtype)
    rows = TrainedRows(item, setting, forms, {})
    state = {}
    for form in forms:
        shape = (len(item.tensor), *form.shape[1:]) if rows.is_divided(form) else form.shape
        state[form.name] = torch.zeros(shape, dtype=form.dtype, device="cpu" if form.on_cpu else device)
    return TrainedRows(item, setting, forms, state)


# ------------------------------------------------------------------------------------------- whole parameters
_WHAT = "moving the parameters that the optimizer steps whole"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """The shards of one replica. `group` are their ranks, in the order of the shards."""

    num_shards: int
    shard: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Update:
    """New bytes of a tensor of the state."""

    tensor: Tensor
    content: Tensor

    def carry_out(self) -> None:
        """Writes them."""
        tensor_as_bytes(self.tensor).copy_(self.content)


def owners_of(shapes: Sequence[tuple[int, ...]], num_shards: int) -> list[list[int]]:
    """Returns the numbers of the parameters that each shard owns, the costliest first.

    The costliest parameter is given away first, each to the shard that has least so far (Graham, "Bounds on
    multiprocessing timing anomalies", 1969: at most 4/3 of the best division).
    """
    costs = [math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1) for shape in shapes]
    load = [(0, 0, shard) for shard in range(num_shards)]
    heapify(load)
    owned: list[list[int]] = [[] for _ in range(num_shards)]
    for number in sorted(range(len(shapes)), key=lambda n: (-costs[n], n)):
        cost, num, shard = load[0]
        owned[shard].append(number)
        heapreplace(load, (cost + costs[number], num + 1, shard))
    return owned


def step_whole(parameters: Sequence[TrainedRows], lr: float, steps: int, shards: Shards) -> list[Update]:
    """Computes one step of parameters, and returns the new values of this shard's rows and of their state.

    The rows' gradients are dropped as soon as they are sent. Besides the result it takes the memory of two
    whole parameters with their gradients and states. This is a collective of the shards. Raises
    `GenerationEnded` if one of them is lost, and what a plug-in raises.
    """
    owned = owners_of([each.item.whole.shape for each in parameters], shards.num_shards)
    rounds = [
        [parameters[numbers[at]] if at < len(numbers) else None for numbers in owned]
        for at in range(max(map(len, owned), default=0))
    ]
    coming = [_Round(each, lr, steps, shards) for each in rounds]
    for number, each in enumerate(coming):
        if not number:
            each.gather()
        if number + 1 < len(coming):
            coming[number + 1].gather()
        each.step()
    return [update for each in coming for update in each.updates()]


@dataclass(slots=True)
class _Exchange:
    """A running all-to-all of bytes. Its buffers live until it has ended."""

    sent: Tensor
    received: Tensor
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            with collective(_WHAT):
                self.work.wait()
            self.work = None
        self.sent = self.received
        return self.received


class _Round:
    """One parameter of each owner (None: it has no more)."""

    def __init__(
        self, parameters: Sequence[TrainedRows | None], lr: float, steps: int, shards: Shards
    ) -> None:
        self._parameters, self._lr, self._steps, self._shards = parameters, lr, steps, shards
        self._own = parameters[shards.shard]
        self._coming: _Exchange | None = None
        self._going: _Exchange | None = None

    def gather(self) -> None:
        """Sends this shard's rows to each owner, and drops their gradients."""
        parts = []
        for each in self._parameters:
            rows = [] if each is None else _rows_of(each)
            parts.append([tensor_as_bytes(tensor.contiguous()) for tensor in rows])
        forms = [] if self._own is None else _forms(self._own)
        sizes = [
            sum(form.row_bytes * len(self._rows(form, shard)) for form in forms)
            for shard in range(self._shards.num_shards)
        ]
        self._coming = self._exchange(parts, sizes)
        for each in self._parameters:
            if each is not None:
                each.item.tensor.grad = None

    def step(self) -> None:
        """Steps the own parameter, and sends its new rows to each shard."""
        assert self._coming is not None, "the rows are gathered before"
        gathered, self._coming = self._coming.wait(), None
        parts = [list[Tensor]() for _ in range(self._shards.num_shards)]
        if self._own is not None:
            new, beside = self._stepped(self._own, gathered)
            del gathered
            for shard, part in enumerate(parts):
                for form, tensor in new:
                    rows = self._rows(form, shard)
                    part.append(tensor_as_bytes(tensor[rows.start : rows.stop]))
                part.extend(beside)
        sizes = [0 if each is None else sum(map(_num_bytes, _kept(each))) for each in self._parameters]
        self._going = self._exchange(parts, sizes)

    def _stepped(
        self, own: TrainedRows, gathered: Tensor
    ) -> tuple[list[tuple[StateTensor, Tensor]], list[Tensor]]:
        """Returns the new tensors that are divided by rows, and the bytes of the others."""
        forms, wholes = _forms(own), self._put_together(own, gathered)
        (weight, gradient), divided = wholes[:2], wholes[2:]
        tensors = {name: own.state[name].clone() for name in _undivided_names(own)}
        tensors |= dict(zip(_divided_names(own), divided, strict=True))
        state = {form.name: tensors[form.name] for form in own.forms}
        step_alone(own.setting, self._lr, weight, gradient, state, self._steps)
        beside = [tensor_as_bytes(state[name]).to(weight.device) for name in _undivided_names(own)]
        return [(forms[0], weight), *zip(forms[2:], divided, strict=True)], beside

    def updates(self) -> list[Update]:
        """Returns the new values of this shard's rows, once they are here."""
        assert self._going is not None, "the parameters are stepped before"
        received, at, found = self._going.wait(), 0, []
        for each in self._parameters:
            for tensor in () if each is None else _kept(each):
                size = _num_bytes(tensor)
                found.append(Update(tensor, received[at : at + size]))
                at += size
        return found

    def _put_together(self, own: TrainedRows, gathered: Tensor) -> list[Tensor]:
        forms = _forms(own)
        dtypes = [own.item.tensor.dtype, own.item.tensor.dtype]
        dtypes += [form.dtype for form in own.forms if own.is_divided(form)]
        wholes = [
            torch.empty(form.shape, dtype=dtype, device=gathered.device)
            for form, dtype in zip(forms, dtypes, strict=True)
        ]
        at = 0
        for shard in range(self._shards.num_shards):
            for form, whole in zip(forms, wholes, strict=True):
                rows = self._rows(form, shard)
                size = len(rows) * form.row_bytes
                first = rows.start * form.row_bytes
                tensor_as_bytes(whole)[first : first + size].copy_(gathered[at : at + size])
                at += size
        return wholes

    def _rows(self, form: StateTensor, shard: int) -> range:
        return held_rows(form, self._shards.num_shards, shard)

    def _exchange(self, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> _Exchange:
        """Sends each shard its bytes, and receives `sizes[s]` bytes of shard s."""
        device = next(each for each in self._parameters if each is not None).item.tensor.device
        flat = [part for of_one in parts for part in of_one]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device=device)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        with collective(_WHAT):
            work = dist.all_to_all_single(
                received,
                sent,
                list(sizes),
                [sum(part.numel() for part in of_one) for of_one in parts],
                group=self._shards.group,
                async_op=True,
            )
        return _Exchange(sent, received, work)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _divided_names(rows: TrainedRows) -> list[str]:
    return [form.name for form in rows.forms if rows.is_divided(form)]


def _undivided_names(rows: TrainedRows) -> list[str]:
    return [form.name for form in rows.forms if not rows.is_divided(form)]


def _rows_of(rows: TrainedRows) -> list[Tensor]:
    """What an owner needs of a shard: its rows of weight, gradient and state."""
    weight = rows.item.tensor
    assert weight.grad is not None, f"{rows.item.name} has a gradient"
    return [weight.detach(), weight.grad, *(rows.state[name] for name in _divided_names(rows))]


def _kept(rows: TrainedRows) -> list[Tensor]:
    """What a shard gets back: its rows of weight and state, and what every shard has of the state."""
    names = [*_divided_names(rows), *_undivided_names(rows)]
    return [rows.item.tensor.detach(), *(rows.state[name] for name in names)]


def _forms(rows: TrainedRows) -> list[StateTensor]:
    """The whole tensors of `_rows_of`."""
    divided = [item.whole for item in rows.items() if item.whole.sharded]
    return [rows.item.whole, rows.item.whole, *divided]
