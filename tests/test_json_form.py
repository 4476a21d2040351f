"""Values survive their JSON, what is not as it was written is named, and types are read once."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import json_form
from orchestrator.errors import OrchestratorError
from orchestrator.json_form import decode, encode
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey, StepRecord
from tests.raising import raises


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    number: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    flag: bool
    inner: Inner
    maybe: Inner | None
    pair: tuple[int, str]
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None
    text: str | None = None


def plain_decode(kind: Any, value: Any, where: str = "") -> Any:
    """What decoding means, read from the type hints anew at each value."""
    if not isinstance(value, Mapping):
        raise OrchestratorError(f"{where or kind.__name__}: expected an object, found {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(known))
    missing = sorted(
        name
        for name, f in known.items()
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise OrchestratorError(
            f"{where or kind.__name__}: unknown fields {unknown}, missing fields {missing}; was it written "
            "by another version?"
        )
    return kind(
        **{name: plain_field(hints[name], v, f"{where or kind.__name__}.{name}") for name, v in value.items()}
    )


def plain_field(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return plain_field(next(a for a in args if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return plain_decode(hint, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise OrchestratorError(f"{where}: expected a list, found {value!r}")
        inner = args if len(args) != 2 or args[1] is not Ellipsis else (args[0],) * len(value)
        if len(inner) != len(value):
            raise OrchestratorError(f"{where}: expected {len(inner)} values, found {value!r}")
        return tuple(plain_field(a, v, where) for a, v in zip(inner, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise OrchestratorError(f"{where}: expected an object, found {value!r}")
        return {str(k): plain_field(args[1], v, where) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, float, bool) and type(value) is not hint:
        raise OrchestratorError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, width=16),
    st.sampled_from(["", "a"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["number", "share", "name", "x"]), inner, max_size=3),
    ),
    max_leaves=4,
)
INNER = st.fixed_dictionaries(
    {"number": st.integers()}, optional={"share": st.one_of(st.floats(0, 1), st.just(1))}
)
OUTER = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3),
        "flag": st.booleans(),
        "inner": INNER,
        "maybe": st.one_of(st.none(), INNER),
        "pair": st.tuples(st.integers(), st.text(max_size=2)).map(list),
    },
    optional={
        "many": st.lists(INNER, max_size=2),
        "named": st.dictionaries(st.text(max_size=2), INNER, max_size=2),
        "anything": VALUES,
        "text": st.one_of(st.none(), st.text(max_size=2)),
    },
)


def outcome(decoder: Any, kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    """The value, or the class and the text of what is raised."""
    try:
        found = decoder(kind, copy.deepcopy(value), where)
    except OrchestratorError as error:
        return type(error), str(error)
    return found, repr(found)  # 1 and 1.0 and True are equal, but not the same


@given(OUTER, st.sampled_from(["", "attempts/0001.json"]), st.data())
def test_decoding_is_what_the_type_hints_say_in_value_and_in_every_error(value, where, data) -> None:
    assert outcome(decode, Outer, value, where) == outcome(plain_decode, Outer, value, where)
    for _ in range(4):
        changed = copy.deepcopy(value)
        place = changed
        inside = [k for k in ("inner", "maybe") if isinstance(changed.get(k), dict)]
        if inside and data.draw(st.booleans()):
            place = changed[data.draw(st.sampled_from(inside))]
        name = data.draw(st.sampled_from([*place, "x"]))
        if data.draw(st.booleans()) and name in place:
            del place[name]
        else:
            place[name] = data.draw(VALUES)
        assert outcome(decode, Outer, changed, where) == outcome(plain_decode, Outer, changed, where)


@pytest.mark.parametrize(
    ("kind", "value", "values"),
    [
        (StateKey, [1], (": ", "object", "list")),
        (StateKey, {"attempt": 1, "stepp": 2}, (": ", "['stepp']", "['generation', 'step']")),
        (StateKey, {"attempt": 1, "generation": True, "step": 2}, (".generation: ", "int", "True")),
        (StateKey, {"attempt": 1, "generation": 1, "step": 2.0}, (".step: ", "int", "2.0")),
        (Cursor, {"sources": {"a": {"epoch": "1"}}}, (".sources.epoch: ", "int", "'1'")),
        (Cursor, {"sources": {"a": None}}, (".sources: ", "object", "NoneType")),
    ],
)
def test_what_is_not_as_it_was_written_is_named(kind: Any, value: Any, values: tuple[str, ...]) -> None:
    with raises(OrchestratorError, "storage.record_form", kind.__name__, *values):
        decode(kind, value)
    with raises(OrchestratorError, "storage.record_form", "attempts/0003.json", *values):
        decode(kind, value, "attempts/0003.json")


def test_encoding_gives_plain_json_types_and_refuses_what_has_no_json_form() -> None:
    value = Outer(
        name="a", flag=True, inner=Inner(number=1), maybe=None, pair=(1, "b"),
        many=(Inner(number=2, share=1.0),), named={"c": Inner(number=3)}, anything=[math.inf, {"d": (None,)}],
    )  # fmt: skip
    plain = encode(value)
    assert plain == {
        "name": "a", "flag": True, "inner": {"number": 1, "share": 0.5}, "maybe": None, "pair": [1, "b"],
        "many": [{"number": 2, "share": 1.0}], "named": {"c": {"number": 3, "share": 0.5}},
        "anything": [math.inf, {"d": [None]}], "text": None,
    }  # fmt: skip
    assert decode(Outer, {**plain, "anything": value.anything}) == value
    for strange in (Inner, object(), {1, 2}, b"bytes"):
        with pytest.raises(AssertionError):
            encode({"x": strange})


def test_the_type_hints_of_a_class_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    get_type_hints = typing.get_type_hints

    def counted(kind: Any) -> dict[str, Any]:
        read.append(kind)
        return get_type_hints(kind)

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Fresh:  # nobody has decoded it yet
        number: int

    monkeypatch.setattr(json_form.typing, "get_type_hints", counted)
    for number in range(3):
        assert decode(Fresh, {"number": number}).number == number
    assert read == [Fresh]


def test_an_integer_where_a_float_is_expected_is_taken_as_one() -> None:
    of_other_kinds = {"digest": "0" * 16, **dict.fromkeys(("skipped", "metrics", "documents", "not_finite"))}
    values = {f.name: 0 for f in dataclasses.fields(StepRecord)} | of_other_kinds
    record = decode(StepRecord, values)
    assert (type(record.loss), type(record.step)) == (float, int)
