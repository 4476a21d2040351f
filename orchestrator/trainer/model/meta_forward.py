"""A forward pass without weights: tensors on torch's meta device, small integer tensors with real values.

Positions, masks and ids are computed for real. Indices beyond the end of a table are thus found although the
table has no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

MAX_KNOWN = 1 << 20  # elements; values of larger tensors are not computed
_META = torch.device("meta")


class BeyondTableError(Exception):
    """An index is not below the number of rows that it selects from."""


class UnknownValueError(Exception):
    """The forward pass needs a value that is not computed."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Runs operations with meta tensors on the meta device, also if other arguments are CPU tensors.

    Operations on CPU tensors alone run for real if their result is small. Raises `BeyondTableError` if a
    known index is beyond what it selects from. In most cases it raises `UnknownValueError` where an unknown
    value is needed. Leaves torch's generator as it was.
    """
    with torch.random.fork_rng(devices=[]), _WithoutWeights():  # type: ignore[no-untyped-call]
        yield


class _WithoutWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        tensors = _tensors((args, named))
        if tensors:
            named = {**named, **({"device": None} if named.get("device") is not None else {})}
            if any(each.is_meta for each in tensors):
                if torch.Tag.data_dependent_output in function.tags:
                    raise UnknownValueError(f"{function._schema.name} of values that are not known")
                _require_rows(function, args)
                _require_unwritten(function, args, named)
                return _grouped(function, _on_meta(args), _on_meta(named))
            return self._if_small(function, args, named)
        if named.get("device") is None or torch.device(named["device"]).type == "cpu":
            return self._if_small(function, args, named)
        if function._schema.name in _COUNTING or named.get("dtype") in _INTEGERS:
            return self._if_small(function, args, {**named, "device": torch.device("cpu")})
        return function(*args, **named)

    def _if_small(self, function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Runs the operation for real, or on the meta device if its result is large."""
        if _needs_values(function) or _writes(function):
            return function(*args, **named)
        on_meta = _on_meta(named) | ({"device": _META} if "device" in named or not _tensors(args) else {})
        try:
            shapes = function(*_on_meta(args), **on_meta)
        except (NotImplementedError, TypeError):  # no meta form, or no device argument
            return function(*args, **named)
        if sum(each.numel() for each in _tensors(shapes)) > MAX_KNOWN:
            return shapes
        return function(*args, **named)


def _grouped(function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Runs the operation on meta tensors.

    torch's grouped matrix products accept only bfloat16 on the meta device, but other types on a CPU.
    """
    if function._schema.name != "aten::_grouped_mm" or args[0].dtype != args[1].dtype:
        return function(*args, **named)
    one, other, *rest = args
    return function(one.bfloat16(), other.bfloat16(), *rest, **named).to(one.dtype)


# operations that make positions and masks
_COUNTING = {"aten::arange", "aten::ones", "aten::full"}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _on_meta(values: Any) -> Any:
    return tree_map(lambda v: v.to(_META) if isinstance(v, Tensor) and not v.is_meta else v, values)


def _needs_values(function: Any) -> bool:
    tags = function.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _writes(function: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)


def _require_unwritten(function: Any, args: Sequence[Any], named: dict[str, Any]) -> None:
    """Raises `UnknownValueError` if a tensor with known values would get unknown ones."""
    for number, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            target = args[number] if number < len(args) else named.get(argument.name)
            if any(not each.is_meta for each in _tensors(target)):
                raise UnknownValueError(f"{function._schema.name} writes values that are not known")


def _require_rows(function: Any, args: Sequence[Any]) -> None:
    if (pairs := _SELECTS.get(function._schema.name)) is None:
        return
    for num_rows, index in pairs(*args):
        if isinstance(index, Tensor) and not index.is_meta and index.dtype in _COUNTS and index.numel():
            highest, lowest = int(index.max()), int(index.min())
            if highest >= num_rows or lowest < -num_rows:
                index_beyond = highest if highest >= num_rows else lowest
                raise BeyondTableError(f"index {index_beyond} of a table with {num_rows} rows")


_COUNTS = {torch.int32, torch.int64}
_Selected = Iterator[tuple[int, Any]]


def _rows(table: Tensor, index: Any, *_: Any) -> _Selected:
    yield table.shape[0], index


def _at(table: Tensor, indices: Sequence[Any], *_: Any) -> _Selected:
    """Yields the dimensions that `table[i, j, …]` indexes. A mask takes as many dimensions as it has."""
    dim = 0
    for index in indices:
        if dim < table.ndim:
            yield table.shape[dim], index
        dim += index.ndim if isinstance(index, Tensor) and index.dtype == torch.bool else 1


def _along(table: Tensor, dim: int, index: Any, *_: Any) -> _Selected:
    if table.ndim:
        yield table.shape[dim], index


_SELECTS: dict[str, Callable[..., _Selected]] = {
    "aten::embedding": _rows,
    "aten::index": _at,
    "aten::index_put": _at,
    "aten::index_put_": _at,
    "aten::index_select": _along,
    "aten::gather": _along,
}
