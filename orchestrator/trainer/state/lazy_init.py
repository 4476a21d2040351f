"""Deferred weight initialization, one tensor at a time, bitwise equal to a model built at once.

While a model is built, uninitialized tensors are allocated on torch's meta device. Each write to them is
recorded: the operation, its arguments, and for random operations the generator's state before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_flatten, tree_map

from orchestrator.trainer.weights.ties import shared_buffers_kept

_EMPTY = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_COPIES = {"aten::clone", "aten::_to_copy"}
_OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_"}
_LEAD_AWAY = {"aten::resize_", "aten::resize_as_", "aten::set_"}  # to another storage, or one of another size


class DeferredModel:
    """A model whose initial weights can be made one by one.

    `model` is the module. Its recorded parameters are on the meta device. Parameters made in another way
    (`torch.ones(…)`, an expression) and all buffers hold their values. `make` returns the initial value of
    any parameter. It can be called in any order and any number of times, and leaves the generator unchanged.
    """

    def __init__(self, model: nn.Module, notes: _Notes) -> None:
        self.model = model
        self._notes = notes

    @property
    def held_bytes(self) -> int:
        """Bytes already in memory: parameters that were not recorded, and values that were written to
        recorded ones.
        """
        real = sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.is_meta)
        return real + self._notes.held_bytes()

    def make(self, parameter: Tensor) -> Tensor:
        """Returns the initial value of one of the model's parameters as a new, whole tensor on the CPU.

        Takes the memory of this tensor and of the tensors that it is made from.
        """
        return self._notes.value_of(parameter) if parameter.is_meta else parameter.detach().clone()


def defer(build: Callable[[], nn.Module]) -> DeferredModel:
    """Returns the model that `build` returns, with its weights not yet made.

    `build` draws on the CPU from torch's default generator (or from one that it was passed). Afterwards this
    generator has the state that it has after a plain `build()`.

    Random operations run as usual, on scratch memory. Deferring a model therefore takes the time of its draws
    and the memory of its largest tensor. Where the build reads a value (`.item()`, a decomposition), that
    value is computed. Raises what `build` raises. Raises `NotImplementedError` for an operation that cannot
    be recorded: resizing a tensor, or writing to several tensors in one call.
    """
    notes = _Notes()
    with notes, _LooksReal(notes):
        model = build()
    with shared_buffers_kept(model):
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and notes.knows(buffer):
                    module._buffers[name] = notes.value_of(buffer)
    return DeferredModel(model, notes)


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation that wrote to a storage. Its tensor arguments are `_Ref`s, or clones of unrecorded
    tensors.
    """

    function: Any
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    generator: Any  # None: the default generator
    state: Tensor | None  # the generator's state before the operation; None: not a random operation


@dataclass(frozen=True, slots=True, eq=False)
class _Ref:
    """A tensor as it was after `steps` of its storage. None: after all steps before the current one."""

    storage: _Storage
    steps: tuple[_Step, ...] | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, made: Tensor) -> Tensor:
        """Returns the tensor as a view of the storage of `made`."""
        found = torch.empty(0, dtype=self.dtype)
        return found.set_(made.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True, eq=False)
class _Storage:
    """A storage on the meta device and the steps that produce its contents.

    `kept` keeps the storage alive, so that its address is not reused.
    """

    kept: torch.UntypedStorage
    steps: tuple[_Step, ...] = ()

    def value(self, steps: tuple[_Step, ...]) -> Tensor:
        made = torch.empty(self.kept.nbytes(), dtype=torch.uint8)
        for step in steps:

            def value_of(ref: Any) -> Any:
                if not isinstance(ref, _Ref):
                    return ref
                return ref.of(made if ref.steps is None else ref.storage.value(ref.steps))

            arguments, named = tree_map(value_of, (tuple(step.arguments), dict(step.named)))
            with _generator_at(step.generator, step.state):
                step.function(*arguments, **named)
        return made


class _LooksReal(TorchFunctionMode):
    """Makes recorded tensors appear to be on the CPU.

    Otherwise `torch.nn.init` would skip them, as it does for tensors on the meta device.
    """

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        said = {"is_meta": False, "is_cpu": True, "device": torch.device("cpu")}
        self._notes, self._said = notes, {getattr(Tensor, n).__get__: value for n, value in said.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if function in self._said and self._notes.knows(args[0]):
            return self._said[function]
        return function(*args, **(kwargs or {}))


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes to tensors that begin uninitialized. All other operations run as usual."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, _Storage] = {}

    def knows(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._storages

    def held_bytes(self) -> int:
        values = [
            value
            for storage in self._storages.values()
            for step in storage.steps
            for value in tree_flatten((tuple(step.arguments), dict(step.named)))[0]
        ]
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor))

    def value_of(self, tensor: Tensor) -> Tensor:
        """Returns a new tensor with the contents that `tensor` would have now."""
        with torch.no_grad():
            ref = self._ref(tensor)
            assert ref.steps is not None
            return ref.of(ref.storage.value(ref.steps))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        kind = function._schema.name
        deferred = tree_any(self._is_deferred, (tuple(args), named))
        if kind in _EMPTY and _stays_on_cpu(args, named, deferred):
            on_meta = {**named, "device": "meta"} | ({"pin_memory": False} if "pin_memory" in named else {})
            return self._new(function(*args, **on_meta))
        if deferred and kind in _LEAD_AWAY:
            raise NotImplementedError(f"{kind} on a tensor whose values are not made yet")
        # such as `t_`: changes the view, not the values
        if not deferred or torch.Tag.inplace_view in function.tags:
            return function(*args, **named)
        if kind in _COPIES and _stays_on_cpu((), named, deferred):
            made = self._new(function(*args, **{n: v for n, v in named.items() if n != "device"}))
            self._add(torch.ops.aten.copy_.default, (made, args[0]), {})
            return made
        written = [
            n for n, a in enumerate(function._schema.arguments) if a.alias_info and a.alias_info.is_write
        ]
        if not written:
            if any(returned.alias_info is not None for returned in function._schema.returns):
                return function(*args, **named)  # a view
            return function(*self._real(tuple(args)), **self._real(named))
        targets = [
            args[n] if n < len(args) else named.get(function._schema.arguments[n].name) for n in written
        ]
        if not tree_any(self._is_deferred, targets):
            return function(*self._real(tuple(args)), **self._real(named))
        if len(targets) > 1 or not isinstance(targets[0], Tensor):
            raise NotImplementedError(f"{kind} writes to several tensors whose values are not made yet")
        self._add(function, args, named, target=targets[0])
        return targets[0]

    # ------------------------------------------------------------------------------------------------ inside
    def _is_deferred(self, value: object) -> bool:
        return isinstance(value, Tensor) and self.knows(value)

    def _new(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = _Storage(storage)
        return tensor

    def _ref(self, tensor: Tensor, present: _Storage | None = None) -> _Ref:
        storage = self._storages[tensor.untyped_storage()._cdata]
        return _Ref(
            storage,
            None if storage is present else storage.steps,
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def _real(self, values: Any) -> Any:
        return tree_map(lambda v: self.value_of(v) if self._is_deferred(v) else v, values)

    def _add(
        self, function: Any, args: Sequence[Any], named: Mapping[str, Any], target: Tensor | None = None
    ) -> None:
        target = args[0] if target is None else target
        storage = self._storages[target.untyped_storage()._cdata]

        def as_noted(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return self._ref(value, storage) if self.knows(value) else value.detach().clone()

        arguments, by_name = tree_map(as_noted, (tuple(args), dict(named)))
        generator, state = by_name.get("generator"), None
        if torch.Tag.nondeterministic_seeded in function.tags:
            state = (generator or torch.default_generator).get_state()
            self._draw(function, args, named, target)
        step = _Step(function, arguments, by_name, generator, state)
        whole = target.is_contiguous() and target.numel() * target.element_size() == storage.kept.nbytes()
        alone = not any(
            isinstance(v, _Ref) and v.steps is None for v in tree_flatten((arguments[1:], by_name))[0]
        )
        overwrites = whole and alone and function._schema.name in _OVERWRITE
        storage.steps = (step,) if overwrites else (*storage.steps, step)

    def _draw(self, function: Any, args: Sequence[Any], named: Mapping[str, Any], target: Tensor) -> None:
        """Advances the generator as if the operation had run."""

        def on_scratch(value: Any) -> Any:
            if value is target:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            return self.value_of(value) if self._is_deferred(value) else value

        arguments, by_name = tree_map(on_scratch, (tuple(args), dict(named)))
        function(*arguments, **by_name)


def _stays_on_cpu(args: Sequence[Any], named: Mapping[str, Any], deferred: bool) -> bool:
    """Whether an operation's result is on the CPU, or would be if its arguments were."""
    if named.get("device") is not None:
        return torch.device(named["device"]).type == "cpu"
    like = next((a for a in args if isinstance(a, Tensor)), None)
    return deferred or like is None or like.device.type == "cpu"


@contextmanager
def _generator_at(generator: Any, state: Tensor | None) -> Iterator[None]:
    """Runs the block with the generator in `state`, then restores the generator."""
    if state is None:
        yield
        return
    generator = generator or torch.default_generator
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
