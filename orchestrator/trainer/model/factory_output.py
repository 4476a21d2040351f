"""Checks a model before training: the state that resume points must hold, and one forward pass.

A model that no run could use raises `ConfigError` with the code `CODE`. The forward pass runs without
weights, on torch's meta device, with real values in small integer tensors: positions, masks and ids are
computed. Indices beyond the end of a table are thus found although the table has no values.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from orchestrator.checkpoint.files.part_file import SAFETENSORS
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.trainer.comm.group import raised_by_collective
from orchestrator.trainer.model.model_call import (
    call_model,
    input_names,
    require_router_loss,
)
from orchestrator.trainer.weights.transformers_model import text_config

CODE = "model.factory_output"
_NAMED = 5
_OTHER_DEVICES = r"\b(cuda|gpu|gpus|triton|hip|rocm|xpu|memory)\b|not implemented for"


# ---------------------------------------------------------------------------------------------------- state
def require_state(model: nn.Module, name: str) -> None:
    """Raises `ConfigError` if no resume point can hold the model's state.

    Refused are values other than tensors, dtypes that point files do not support, and different tensors that
    share memory.
    """
    held: Mapping[str, Any] = model.state_dict(keep_vars=True)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    problems = [
        f"{key} {why}" for key, value in held.items() if (why := _unholdable(value, id(value) in own))
    ]
    problems = problems or _sharing_memory(held)
    if problems:
        more = f" and {len(problems) - _NAMED} more" if problems[_NAMED:] else ""
        raise refused(f"{name}: no resume point can hold its state: {'; '.join(problems[:_NAMED])}{more}")


def _unholdable(value: object, is_own: bool) -> str:
    """Returns the reason; empty if a point can hold the value. `is_own`: it is the module's tensor."""
    if not isinstance(value, Tensor) or not is_own:
        return (
            f"is a {type(value).__name__} that is neither parameter nor buffer; remove the module's "
            "get_extra_state, or register a buffer"
        )
    if is_lazy(value):
        return "has no shape yet (a lazy module); call the model once before the factory returns it"
    if value.layout is not torch.strided:
        return f"has the layout {value.layout}; use a dense tensor"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in SAFETENSORS:
        return (
            f"has the type {dtype}, and points hold {', '.join(SAFETENSORS)}; use one of these, or register "
            "a buffer with persistent=False"
        )
    return ""


def _sharing_memory(held: Mapping[str, Tensor]) -> list[str]:
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    seen: set[int] = set()
    for name, tensor in held.items():
        if id(tensor) in seen or not tensor.numel():
            continue
        seen.add(id(tensor))
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.storage_offset() * tensor.itemsize
        end = first + (last + 1) * tensor.itemsize
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((int(first), int(end), name))
    return [
        f"{other} shares memory with {name}, but is another tensor: training on one worker and on several "
        f"would differ; tie them by assigning the same Parameter to both, or clone one"
        for spans in by_storage.values()
        for (_, end, name), (first, _, other) in zip(sorted(spans), sorted(spans)[1:], strict=False)
        if first < end
    ]


# ------------------------------------------------------------------------------------------------- a forward
@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """The result of one forward pass.

    `vocab` is the last dimension of its logits, or None if it was not run; `note` then gives the reason.
    """

    vocab: int | None = None
    note: str = ""


def try_forward(
    model: nn.Module, name: str, seq_len: int, by_document: bool, on_cpu: Callable[[], nn.Module | None]
) -> Forward:
    """Calls `model`, which has no weights (meta device), once with (1, `seq_len`) ids, as training does.

    `on_cpu` returns the same model with weights, for a forward pass that needs values. It returns None if the
    model is too large. Raises `ConfigError` if training cannot use the model: it needs other arguments, does
    not accept such samples, or does not return logits (1, seq_len, vocabulary) that depend on its parameters.
    """
    _require_arguments(model, name, by_document)
    model.train()
    try:
        return Forward(vocab=_on_meta(model, name, seq_len, by_document))
    except ConfigError:
        raise
    except BeyondTableError as error:
        raise _too_long(model, name, seq_len, by_document, error) from error
    except Exception as error:  # noqa: BLE001  user code, or an operation that the meta device does not support
        if not _lacks_values(error) and _works(model, 1, by_document):
            raise _too_long(model, name, seq_len, by_document, error) from error
        reason = f"{type(error).__name__}: {_line(error)}"
    real = on_cpu()
    if real is None:
        return Forward(
            note=f"{name}: its forward pass was not tried: it does not run without weights ({reason}), and "
            "the model is too large to be built here; the workers run it"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            output = _call(real.train(), seq_len, by_document)
        require_router_loss(real, output, name)
        return Forward(vocab=_require_logits(output, name, seq_len))
    except ConfigError:
        raise
    except Exception as error:
        if is_of_this_machine(error):
            return Forward(
                note=f"{name}: its forward pass was not tried: it does not run on this machine's CPU "
                f"({type(error).__name__}: {_line(error)}); the workers run it"
            )
        raise refused(
            f"{name}: its forward pass fails for input_ids of the shape (1, {seq_len}): "
            f"{type(error).__name__}: {_line(error)}; correct the model"
        ) from error


def refused(text: str) -> ConfigError:
    """Builds the error for a model that no run could use."""
    return ConfigError(text, code=CODE)


def _call(model: nn.Module, seq_len: int, by_document: bool) -> Any:
    ids = torch.full((1, seq_len), _usual_id(model), dtype=torch.int64)
    return call_model(model, ids, torch.zeros_like(ids) if by_document else None, None)


def _usual_id(model: nn.Module) -> int:
    """Returns an id that the model does not treat as padding. Some models count positions over other ids
    only.
    """
    padding = {each.padding_idx for each in model.modules() if isinstance(each, nn.Embedding)}
    padding.add(getattr(text_config(model), "pad_token_id", None))
    return next(number for number in range(len(padding) + 1) if number not in padding)


def _on_meta(model: nn.Module, name: str, seq_len: int, by_document: bool) -> int:
    with without_weights():
        output = _call(model, seq_len, by_document)
    require_router_loss(model, output, name)
    return _require_logits(output, name, seq_len)


def _works(model: nn.Module, seq_len: int, by_document: bool) -> bool:
    """Whether the forward pass finishes, or reaches an operation that needs values."""
    try:
        with without_weights():
            _call(model, seq_len, by_document)
    except Exception as error:  # noqa: BLE001  user code
        return _lacks_values(error)
    return True


def _too_long(model: nn.Module, name: str, seq_len: int, by_document: bool, error: Exception) -> ConfigError:
    """Builds the error for a model that accepts only shorter samples."""
    works, fails = 0, seq_len
    while fails - works > 1:
        middle = (works + fails) // 2
        if _works(model, middle, by_document):
            works = middle
        else:
            fails = middle
    if not works:
        return refused(f"{name}: its forward pass looks up an {_line(error)}; correct the model")
    return refused(
        f"{name} takes samples of at most {works} tokens, and pack.seq_len={seq_len} ({_line(error)}); set "
        f"pack.seq_len to {works} or less, or give the model more positions"
    )


def _require_arguments(model: nn.Module, name: str, by_document: bool) -> None:
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise refused(f"{name}: {type(model).__name__} has no forward method; write one")
    signature = inspect.signature(model.forward)
    known = input_names(model) if by_document else ()
    try:
        signature.bind("input_ids", **dict.fromkeys(known))
    except TypeError as error:
        raise refused(
            f"{name}: {type(model).__name__}.forward({', '.join(signature.parameters)}) cannot be called as "
            f"training calls it, with {', '.join(['input_ids', *known])}: {error}; give the other arguments "
            "defaults"
        ) from error


def _require_logits(output: Any, name: str, seq_len: int) -> int:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    wanted = f"it must return logits (1, {seq_len}, vocabulary), or an object with them as .logits"
    if not isinstance(logits, Tensor):
        raise refused(f"{name}: its forward pass returned {_described(output)}; {wanted}")
    shape = tuple(logits.shape)
    if logits.ndim != 3 or shape[:2] != (1, seq_len) or not shape[2]:  # noqa: PLR2004
        raise refused(
            f"{name}: its forward pass returned logits of the shape {shape} for input_ids of the shape "
            f"(1, {seq_len}); {wanted}"
        )
    if not logits.is_floating_point():
        raise refused(f"{name}: its forward pass returned numbers of the type {logits.dtype}; {wanted}")
    if not logits.requires_grad:
        raise refused(
            f"{name}: the logits depend on no trainable parameter (detach or no_grad); return them with "
            "their graph"
        )
    return shape[2]


def _described(output: object) -> str:
    if isinstance(output, tuple | list):
        return f"a {type(output).__name__} of {len(output)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with the keys {', '.join(map(str, output))}"
    return f"a value of the type {type(output).__name__}"


def _lacks_values(error: Exception) -> bool:
    """Whether the error comes from the meta device and not from the model's computation."""
    return isinstance(error, UnknownValueError | NotImplementedError) or "unallocated storage" in str(error)


def is_of_this_machine(error: Exception) -> bool:
    """Whether a model may work on other devices than this machine's CPU."""
    kinds = NotImplementedError | ImportError | OSError | MemoryError
    return isinstance(error, kinds) or re.search(_OTHER_DEVICES, str(error), re.IGNORECASE) is not None


def may_not_repeat(error: BaseException) -> bool:
    """Whether the machine, a peer or the framework caused an error that passes through a user's function."""
    ours = isinstance(error, OrchestratorError | torch.OutOfMemoryError)
    return ours or raised_by_collective(error) or (isinstance(error, Exception) and is_of_this_machine(error))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


# ----------------------------------------------------------------------------- a forward pass without weights
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
    value is needed. Leaves torch's generator as it was. Compiles nothing.
    """
    # without its module, whose import takes a second, nothing is compiled
    has_compiler = "torch._dynamo" in sys.modules
    eager: Any = torch.compiler.set_stance("force_eager") if has_compiler else nullcontext()
    with eager, torch.random.fork_rng(devices=[]), _WithoutWeights():  # type: ignore[no-untyped-call]
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
                return _grouped(function, _to_meta(args), _to_meta(named))
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
        on_meta = _to_meta(named) | ({"device": _META} if "device" in named or not _tensors(args) else {})
        try:
            shapes = function(*_to_meta(args), **on_meta)
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


def _to_meta(values: Any) -> Any:
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
