"""Converts values of a record to plain Python values, the same on every machine and from every library.

pyarrow's own conversion returns pandas types if pandas is installed, and time zones of the library that is
installed. So values of Arrow columns have a conversion here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import orjson

from orchestrator.data.sources.records.content import BadRecordError

_AS_THEY_ARE = (str, int, float, bool, type(None), bytes, Decimal, datetime, date, time, timedelta)
_NUMBER_BYTES = 8


def plain(value: Any) -> Any:
    """A copy of the value, made of plain Python types.

    These are `None`, `bool`, `int`, `float`, `str`, `bytes`, `Decimal`, `datetime`, `date`, `time`,
    `timedelta`, and lists and dicts of these. numpy values are converted by `tolist`, other sequences to
    lists, mappings to dicts. Raises `BadRecordError` for a value of any other type.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    raise BadRecordError(
        f"a field for its transforms holds a {type(value).__name__}; a number, a text, a date, or a list or "
        "mapping of these is expected",
        code="record.value_type",
    )


def own_copy(value: Any) -> Any:
    """The value with its own copies of dicts and lists. Other values are shared."""
    if isinstance(value, dict):
        return {key: own_copy(each) for key, each in value.items()}
    if isinstance(value, list):
        return [own_copy(each) for each in value]
    return value


def num_bytes(value: Any) -> int:
    """The approximate bytes of a plain value: those of a text's UTF-8, 8 for a number, and 1 for each
    item.
    """
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(num_bytes, value)) + len(value)
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values())) + len(value)
    return 0 if value is None else _NUMBER_BYTES


# ------------------------------------------------------------------------------------ values of Arrow columns
_Value = Callable[[Any], Any]
# Nanoseconds of each unit.
_UNIT_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_EPOCH = datetime(1970, 1, 1)
_PLAIN = (
    *("null", "boolean", "integer", "floating", "decimal", "string", "large_string", "string_view"),
    *("binary", "large_binary", "fixed_size_binary", "binary_view", "date"),
    *("timestamp", "time", "duration"),
)
_LISTS = ("list", "large_list", "fixed_size_list")
_OUT_OF_RANGE = "record.out_of_range"


def is_json(kind: Any, metadata: Any = None) -> bool:
    """Whether values of the type are JSON texts that stand for their values (Arrow's extension type
    `arrow.json`).

    A reader that does not support the type leaves its name in a field's `metadata`, which is checked too.
    """
    name = getattr(kind, "extension_name", "") or (metadata or {}).get(b"ARROW:extension:name", b"").decode()
    return bool(name == "arrow.json")


def parsed_json(text: str | bytes | None) -> Any:
    """The value of a JSON text, None for a null. Raises `BadRecordError`."""
    if text is None:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRecordError(
            f"a value of Arrow's type JSON is no JSON: {error}", code="record.not_json"
        ) from error


def is_plain(kind: Any) -> bool:
    """Whether values of the type have a plain Python value (`plain_value`)."""
    import pyarrow as pa

    if is_json(kind):
        return True
    if pa.types.is_dictionary(kind) or _is_any(kind, _LISTS):
        return is_plain(kind.value_type)
    if pa.types.is_map(kind):
        return is_plain(kind.key_type) and is_plain(kind.item_type)
    if pa.types.is_struct(kind):
        return all(is_plain(field.type) for field in kind)
    return _is_any(kind, _PLAIN)


def plain_value(kind: Any) -> _Value:
    """Returns the function that converts an Arrow scalar of this type to a Python value.

    Values are `None`, `bool`, `int`, `float`, `Decimal`, `str`, `bytes`, `date`, `time` and `timedelta`. A
    timestamp becomes a `datetime`, in UTC if the column has a time zone, else without one. A list becomes a
    list, a struct a dict with all its fields, a map a list of pairs, Arrow's JSON its parsed value.

    The function raises `BadRecordError` for a text that is not UTF-8, and for a time with nanoseconds or
    outside of Python's range of years.
    """
    import pyarrow as pa

    if is_json(kind):
        return lambda scalar: parsed_json(scalar.as_py())
    if pa.types.is_dictionary(kind):
        inner = plain_value(kind.value_type)
        return lambda scalar: inner(scalar.value) if scalar.is_valid else None
    if _is_any(kind, _LISTS):
        item = plain_value(kind.value_type)
        return lambda scalar: [item(each) for each in scalar.values] if scalar.is_valid else None
    if pa.types.is_map(kind):
        key, value = plain_value(kind.key_type), plain_value(kind.item_type)
        return lambda scalar: (
            [(key(pair[0]), value(pair[1])) for pair in scalar.values] if scalar.is_valid else None
        )
    if pa.types.is_struct(kind):
        fields = [(field.name, plain_value(field.type)) for field in kind]
        return lambda scalar: (
            {name: make(scalar[i]) for i, (name, make) in enumerate(fields)} if scalar.is_valid else None
        )
    if pa.types.is_timestamp(kind):
        epoch = _EPOCH if kind.tz is None else _EPOCH.replace(tzinfo=UTC)
        return _since(kind.unit, lambda passed: epoch + passed)
    if pa.types.is_duration(kind):
        return _since(kind.unit, lambda passed: passed)
    return _since(kind.unit, _time_of_day) if pa.types.is_time(kind) else _as_py


def _as_py(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8: {error}", code="record.not_utf8") from error
    except (ValueError, OverflowError) as error:
        raise BadRecordError(f"{scalar.type} {scalar}: {error}", code=_OUT_OF_RANGE) from error


def _since(unit: str, make: Callable[[timedelta], Any]) -> _Value:
    """The converter of a scalar that counts a unit."""

    def value(scalar: Any) -> Any:
        count = scalar.value
        if count is None:
            return None
        microseconds, rest = divmod(count * _UNIT_NS[unit], 1000)
        if rest:
            raise BadRecordError(
                f"{scalar.type} {count} has nanoseconds, which Python's datetime does not hold; write the "
                "column in microseconds",
                code="record.nanoseconds",
            )
        try:
            return make(timedelta(microseconds=microseconds))
        except OverflowError as error:
            raise BadRecordError(f"{scalar.type} {count}: {error}", code=_OUT_OF_RANGE) from error

    return value


def _time_of_day(passed: timedelta) -> time:
    return (_EPOCH + passed).time()


def _is_any(kind: Any, names: tuple[str, ...]) -> bool:
    import pyarrow as pa

    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)
