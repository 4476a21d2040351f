"""The optimizer over the rows that one member holds: its state, and its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestrator.trainer.loading.state_tensors import Item
from orchestrator.trainer.optimizer.kinds import Kind, Setting, step_alone
from orchestrator.trainer.optimizer.trained_rows import TrainedRows, trained_rows
from orchestrator.trainer.optimizer.whole_parameters import Shards, Update, step_whole


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
