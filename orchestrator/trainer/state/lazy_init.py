"""Deferred weight initialization, one tensor at a time.

While a model is built, uninitialized tensors are allocated on torch's meta device. Each write to them is
recorded: the operation, its arguments, and where its random numbers come from.

Random numbers are either those of torch's generator, so that the weights are bitwise equal to those of a
model built at once. Or they depend only on a seed and on the tensor's name (`NamedNumbers`). Then building
draws nothing, and any rank can draw any part of any tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
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
_ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
_COPIES = {"aten::clone", "aten::_to_copy"}
_OVERWRITE = {"aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_"}
_LEAD_AWAY = {"aten::resize_", "aten::resize_as_", "aten::set_"}  # to another storage, or one of another size
# each element of the result depends on that element alone
_BY_ELEMENT = _OVERWRITE | {f"aten::{name}_" for name in ("add", "sub", "mul", "div", "clamp", "erfinv")}
_DRAWS = {"aten::normal_", "aten::uniform_"}
_PIECE = 1 << 22  # elements that one generator draws (`NamedNumbers`)


class DeferredModel:
    """A model whose initial weights can be made one by one.

    `model` is the module. Its recorded parameters are on the meta device. Parameters made in another way
    (`torch.ones(…)`, an expression) and all buffers hold their values. `make` returns the initial value of
    any parameter. It can be called in any order and any number of times, and leaves the generator unchanged.
    """

    def __init__(self, model: nn.Module, notes: _Notes, buffers: Sequence[Tensor]) -> None:
        """`buffers`: those of the model that were recorded, before they got their values."""
        self.model = model
        self._notes, self._buffers = notes, buffers

    @property
    def held_bytes(self) -> int:
        """Bytes already in memory: parameters that were not recorded, and values that were written to
        recorded ones.
        """
        real = sum(p.numel() * p.element_size() for p in self.model.parameters() if not p.is_meta)
        return real + self._notes.held_bytes()

    @property
    def holds_random_values(self) -> bool:
        """Whether parameters or buffers with values depend on random numbers."""
        return self._notes.has_drawn or any(map(self._notes.is_random, self._buffers))

    def make(self, parameter: Tensor, elements: range | None = None) -> Tensor:
        """Returns the initial value of one of the model's parameters as a new, whole tensor on the CPU.

        If only some `elements` are wanted, counted in the order of a contiguous tensor, the others may have
        any value. Takes the memory of this tensor and of the tensors that it is made from.
        """
        return self._notes.value_of(parameter, elements) if parameter.is_meta else parameter.detach().clone()


def defer(build: Callable[[], nn.Module], seed: int | None = None) -> DeferredModel:
    """Returns the model that `build` returns, with its weights not yet made.

    Without a `seed` the weights have the bits of a plain `build()`, which draws on the CPU from torch's
    default generator (or from one that it was passed). Afterwards this generator has the state that it has
    after a plain `build()`. Random operations run as usual, on scratch memory. Deferring a model therefore
    takes the time of its draws and the memory of its largest tensor.

    With a `seed` nothing is drawn here, and the weights have `NamedNumbers`.

    Where the build reads a value (`.item()`, a decomposition), that value is computed. Raises what `build`
    raises. Raises `NotImplementedError` for an operation that cannot be recorded: resizing a tensor, writing
    to several tensors in one call, and with a `seed` a random operation other than `normal_` and `uniform_`,
    or one whose result is read during the build.
    """
    notes = _Notes(seed)
    with notes, _LooksReal(notes):
        model = build()
    notes.name(model)
    recorded = [buffer for buffer in model.buffers() if notes.knows(buffer)]
    with shared_buffers_kept(model):
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and notes.knows(buffer):
                    module._buffers[name] = notes.value_of(buffer)
    return DeferredModel(model, notes, recorded)


class _Numbers(Protocol):
    """Runs a random operation with the numbers that belong to it."""

    def run(
        self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any], elements: range | None
    ) -> None:
        """Runs it. Of its target, only `elements` are wanted (None: all)."""


@dataclass(frozen=True, slots=True)
class _TorchNumbers(_Numbers):
    """The numbers that the generator gave when the operation was recorded."""

    generator: Any  # None: the default generator
    state: Tensor  # before the operation

    def run(
        self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any], elements: range | None
    ) -> None:
        del elements
        with _generator_at(self.generator, self.state):
            function(*arguments, **named)


@dataclass(frozen=True, slots=True)
class NamedNumbers(_Numbers):
    """Random numbers that depend on a seed, on the tensor's name, and on the number of the draw.

    A draw is the n-th of the operations that make the tensor's value. Its elements are drawn in pieces of
    2²² by NumPy's Philox generator (Salmon et al. 2011) in float32. The key of a piece is the first 128 bits
    of the blake3 of "seed:name:draw:piece".
    """

    storage: _Storage
    seed: int
    draw: int

    def run(
        self, function: Any, arguments: Sequence[Any], named: Mapping[str, Any], elements: range | None
    ) -> None:
        """Draws the wanted pieces, in as many threads as this process has cores."""
        if not self.storage.name:
            raise NotImplementedError("random values are read before their tensor has a name")
        target, (first, second) = arguments[0], _two_numbers(function, arguments, named)
        flat = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
        normal = function._schema.name == "aten::normal_"

        def draw(piece: int) -> None:
            key = blake3(f"{self.seed}:{self.storage.name}:{self.draw}:{piece}".encode()).digest()[:16]
            numbers = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))
            part = flat[piece * _PIECE : (piece + 1) * _PIECE]
            is_float = part.dtype == torch.float32
            drawn = part if is_float else torch.empty(len(part), dtype=torch.float32)
            if normal:
                numbers.standard_normal(dtype=np.float32, out=drawn.numpy())
                drawn.mul_(second).add_(first)
            else:
                numbers.random(dtype=np.float32, out=drawn.numpy())
                drawn.mul_(second - first).add_(first)
            if not is_float:
                part.copy_(drawn)

        wanted = range(flat.numel()) if elements is None else elements
        pieces = range(wanted.start // _PIECE, -(-wanted.stop // _PIECE)) if wanted else range(0)
        if len(pieces) > 1:
            with ThreadPoolExecutor(min(len(pieces), len(os.sched_getaffinity(0)))) as threads:
                list(threads.map(draw, pieces))
        else:
            list(map(draw, pieces))
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))


def _two_numbers(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[float, float]:
    """Returns mean and standard deviation of `normal_`, or the bounds of `uniform_`."""
    declared = function._schema.arguments[1:3]
    values = [
        arguments[number] if number < len(arguments) else named.get(each.name, each.default_value)
        for number, each in enumerate(declared, 1)
    ]
    return float(values[0]), float(values[1])


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation that wrote to a storage. Its tensor arguments are `_Ref`s, or clones of unrecorded
    tensors.
    """

    function: Any
    arguments: Sequence[Any]
    named: Mapping[str, Any]
    numbers: _Numbers | None  # None: not a random operation


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

    `kept` keeps the storage alive, so that its address is not reused. `name`: of a tensor of the model with
    this storage, once the model is built.
    """

    kept: torch.UntypedStorage
    steps: tuple[_Step, ...] = ()
    name: str = ""

    def value(self, steps: tuple[_Step, ...], elements: range | None = None) -> Tensor:
        made = torch.empty(self.kept.nbytes(), dtype=torch.uint8)
        if not all(step.function._schema.name in _BY_ELEMENT for step in steps):
            elements = None
        for step in steps:

            def value_of(ref: Any) -> Any:
                if not isinstance(ref, _Ref):
                    return ref
                return ref.of(made if ref.steps is None else ref.storage.value(ref.steps))

            arguments, named = tree_map(value_of, (tuple(step.arguments), dict(step.named)))
            if step.numbers is None:
                step.function(*arguments, **named)
            else:
                wanted = elements if _is_whole(arguments[0]) else None
                step.numbers.run(step.function, arguments, named, wanted)
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

    def __init__(self, seed: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._storages: dict[int, _Storage] = {}
        self.has_drawn = False  # for tensors whose values exist

    def is_random(self, tensor: Tensor) -> bool:
        """Whether the contents of `tensor` depend on random numbers."""

        def drawn(steps: tuple[_Step, ...]) -> bool:
            return any(
                step.numbers is not None
                or any(
                    drawn(value.steps)
                    for value in tree_flatten((tuple(step.arguments), dict(step.named)))[0]
                    if isinstance(value, _Ref) and value.steps is not None
                )
                for step in steps
            )

        steps = self._ref(tensor).steps
        assert steps is not None
        return drawn(steps)

    def name(self, model: nn.Module) -> None:
        """Names the storages after the tensors of the built model."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if self.knows(tensor):
                storage = self._storages[tensor.untyped_storage()._cdata]
                storage.name = storage.name or name

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

    def value_of(self, tensor: Tensor, elements: range | None = None) -> Tensor:
        """Returns a new tensor with the contents that `tensor` would have now; see `DeferredModel.make`."""
        with torch.no_grad():
            ref = self._ref(tensor)
            assert ref.steps is not None
            return ref.of(ref.storage.value(ref.steps, elements if _is_whole(tensor) else None))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = kwargs or {}
        kind = function._schema.name
        deferred = tree_any(self._is_deferred, (tuple(args), named))
        if not deferred and torch.Tag.nondeterministic_seeded in function.tags:
            self.has_drawn = True
        if kind in _EMPTY | _ZEROS and _stays_on_cpu(args, named, deferred):
            on_meta = {**named, "device": "meta"} | ({"pin_memory": False} if "pin_memory" in named else {})
            made = self._new(function(*args, **on_meta))
            if kind in _ZEROS:
                self._add(torch.ops.aten.zero_.default, (made,), {})
            return made
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
        alone = not any(
            isinstance(v, _Ref) and v.steps is None for v in tree_flatten((arguments[1:], by_name))[0]
        )
        overwrites = _is_whole(target) and alone and function._schema.name in _OVERWRITE
        before = () if overwrites else storage.steps
        numbers: _Numbers | None = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            numbers = self._numbers(function, args, named, target, storage, before)
        storage.steps = (*before, _Step(function, arguments, by_name, numbers))

    def _numbers(
        self,
        function: Any,
        args: Sequence[Any],
        named: Mapping[str, Any],
        target: Tensor,
        storage: _Storage,
        before: Sequence[_Step],
    ) -> _Numbers:
        generator = named.get("generator")
        if self._seed is not None:
            if function._schema.name not in _DRAWS or generator is not None:
                raise NotImplementedError(f"{function._schema.name} without torch's generator")
            return NamedNumbers(storage, self._seed, sum(step.numbers is not None for step in before))
        state = (generator or torch.default_generator).get_state()
        self._draw(function, args, named, target)
        return _TorchNumbers(generator, state)

    def _draw(self, function: Any, args: Sequence[Any], named: Mapping[str, Any], target: Tensor) -> None:
        """Advances the generator as if the operation had run."""

        def on_scratch(value: Any) -> Any:
            if value is target:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            return self.value_of(value) if self._is_deferred(value) else value

        arguments, by_name = tree_map(on_scratch, (tuple(args), dict(named)))
        function(*arguments, **by_name)


def _is_whole(tensor: Tensor) -> bool:
    """Whether the elements of a contiguous tensor are all of its storage."""
    num_bytes = tensor.numel() * tensor.element_size()
    return tensor.is_contiguous() and num_bytes == tensor.untyped_storage().nbytes()


def _stays_on_cpu(args: Sequence[Any], named: Mapping[str, Any], deferred: bool) -> bool:
    """Whether an operation's result is on the CPU, or would be if its arguments were."""
    if named.get("device") is not None:
        return torch.device(named["device"]).type == "cpu"
    like = next((a for a in args if isinstance(a, Tensor)), None)
    return deferred or like is None or like.device.type == "cpu"


@contextmanager
def _generator_at(generator: Any, state: Tensor) -> Iterator[None]:
    """Runs the block with the generator in `state`, then restores the generator."""
    generator = generator or torch.default_generator
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
