"""The rules between the optimizer's fields: which arguments each optimizer of ours takes, and their values.

The rules check plain JSON values. Arguments of a plug-in are checked where its function is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.problems import show

ADAMW, MUON, LION, ADAFACTOR, SGD = "adamw", "muon", "lion", "adafactor", "sgd"


@dataclass(frozen=True, slots=True)
class _Argument:
    """The values that an argument may have, and how a message says it."""

    is_valid: Callable[[Any], bool]
    expected: str


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(is_valid: Callable[[float], bool], expected: str) -> _Argument:
    return _Argument(lambda value: _is_number(value) and is_valid(value), expected)


def _numbers(num: int, is_valid: Callable[[float], bool], expected: str) -> _Argument:
    def check(values: Any) -> bool:
        is_list = isinstance(values, list | tuple) and len(values) == num
        return is_list and all(_is_number(value) and is_valid(value) for value in values)

    return _Argument(check, expected)


def _adafactor_eps(values: Any) -> bool:
    if not isinstance(values, list | tuple) or len(values) != 2:
        return False
    first, second = values
    return (first is None or (_is_number(first) and first >= 0)) and _is_number(second) and second >= 0


_MOMENTUM = _number(lambda value: 0 <= value < 1, "a number >= 0 and < 1")
_FLAG = _Argument(lambda value: isinstance(value, bool), "true or false")
_ARGUMENTS: Mapping[str, Mapping[str, _Argument]] = {
    ADAMW: {},
    MUON: {
        "momentum": _MOMENTUM,
        "nesterov": _FLAG,
        "ns_coefficients": _numbers(3, lambda value: True, "three numbers"),
        "ns_steps": _Argument(
            lambda value: type(value) is int and 1 <= value < 100, "a whole number from 1 to 99"
        ),
        "eps": _number(lambda value: value > 0, "a number > 0"),
        "adjust_lr_fn": _Argument(
            lambda value: value in ("match_rms_adamw", "original"), "match_rms_adamw or original"
        ),
    },
    LION: {"betas": _numbers(2, lambda value: 0 <= value < 1, "two numbers >= 0 and < 1")},
    ADAFACTOR: {
        "beta2_decay": _number(lambda value: value <= 0, "a number <= 0"),
        "eps": _Argument(_adafactor_eps, "two numbers >= 0, the first of them or null"),
        "d": _number(lambda value: value >= 1, "a number >= 1"),
    },
    SGD: {
        "momentum": _MOMENTUM,
        "dampening": _number(lambda value: True, "a number"),
        "nesterov": _FLAG,
    },
}
# AdamW also trains what Muon does not.
_WITH_ADAMW = (ADAMW, MUON)


def optimizer_args_problem(arguments: Mapping[str, Any], optimizer: str) -> tuple[str, str] | None:
    """Returns the code and the text of what is wrong with `train.optimizer_args`; None: nothing."""
    known = _ARGUMENTS.get(optimizer)
    if known is None:
        return None  # a plug-in
    for name, value in arguments.items():
        if name not in known:
            takes = f"{optimizer} takes {', '.join(known) or 'none'}"
            beside = " besides train.betas, train.eps and train.weight_decay" if optimizer == ADAMW else ""
            return "config.unknown_key", f"names {show(name)}, and {takes}{beside}; leave it out"
        if not known[name].is_valid(value):
            return "config.invalid_value", f"gives {name}={show(value)}; expected {known[name].expected}"
    if optimizer == SGD and arguments.get("nesterov"):
        momentum, dampening = arguments.get("momentum", 0), arguments.get("dampening", 0)
        if not momentum or dampening:
            return (
                "config.conflict",
                f"gives nesterov=true, momentum={momentum} and dampening={dampening}; Nesterov's method "
                "needs a momentum > 0 and no dampening",
            )
    return None


def adamw_only_problem(
    value: Any, default: Any, optimizer: str, groups: Sequence[Mapping[str, Any]]
) -> tuple[str, str] | None:
    """Returns the code and the text where AdamW's `value` is set and no parameter uses AdamW."""
    if value == default or optimizer in _WITH_ADAMW:
        return None
    if any(group.get("optimizer") == ADAMW for group in groups):
        return None
    return (
        "config.conflict",
        f"is {show(value)}, which is AdamW's, and train.optimizer={optimizer}; leave it out, and give the "
        "optimizer's own arguments in train.optimizer_args",
    )


def group_optimizer_problem(
    groups: Sequence[Mapping[str, Any]], optimizer: str
) -> tuple[str, str] | None:
    """Returns the code and the text of an entry of `train.param_groups` with an optimizer that it cannot
    have.

    A plug-in may be named where it is that of `train.optimizer`, whose arguments it has.
    """
    for group in groups:
        own = group.get("optimizer")
        if own is not None and ":" in own and own != optimizer:
            return (
                "config.conflict",
                f"has optimizer={own} for {show(group.get('match'))}, and train.optimizer={optimizer}; a "
                "plug-in can be named here if train.optimizer names it, too",
            )
    return None


def stateful_key(flat: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what decides which state the optimizer has, as far as the configuration shows it.

    `flat` has every field. Two configurations with different keys cannot continue each other's state.
    """
    groups = [
        (group.get("match"), group["optimizer"])
        for group in flat["train.param_groups"]
        if group.get("optimizer") is not None
    ]
    arguments = flat["train.optimizer_args"]
    has_momentum = bool(arguments.get("momentum")) if flat["train.optimizer"] == SGD else None
    return flat["train.optimizer"], has_momentum, tuple(groups)


def optimizer_text(flat: Mapping[str, Any]) -> str:
    """Describes the optimizer of a flat configuration, for messages."""
    name, has_momentum, groups = stateful_key(flat)
    text = str(name)
    if has_momentum is not None:
        text += " with momentum" if has_momentum else " without momentum"
    for match, own in groups:
        text += f", {own} for {match}"
    return text
