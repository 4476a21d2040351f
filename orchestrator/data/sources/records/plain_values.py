"""Plain Python values of records, and plain types for columns of Arrow data: the same on every machine and
from every library.

pyarrow's own conversion returns pandas types if pandas is installed, and time zones of the library that is
installed. So values of Arrow columns have a conversion here. `require_columns` checks that a file has the
columns that are read, and that their types fit.

Arrow has several layouts of one value: a text is a string, a large string, a string view, or one of these in
a dictionary or run-end encoded. Few of its compute functions support all of them. `plain_array` replaces
these layouts:

    string_view, binary_view          -> large_string, large_binary
    list_view, large_list_view        -> large_list
    run_end_encoded                   -> its values, repeated
    dictionary                        -> its values; of texts a dictionary still

at any depth. Arrays that need no change are returned as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import orjson

from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    CHAT_VALUE_TYPE,
    KWARGS_FIELD,
    BadRecordError,
    Content,
)
from orchestrator.errors import ConfigError
from orchestrator.records.steps import PREFERENCE

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
_TEXTS = ("string", "large_string", "binary", "large_binary")
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


# ---------------------------------------------------------------------------------- the columns that are read
def columns_of(schema: Any, content: Content) -> dict[str, tuple[str, ...]]:
    """The columns that are read: each field's name, and its path in the schema."""
    ways = {f: (f,) if f in schema.names else tuple(f.split(".")) for f in content.read}
    if content.messages_at is not None:
        *around, _ = ways[content.messages_at]
        beside = _inner_names(schema, around)
        ways |= {".".join((*around, name)): (*around, name) for name in BESIDE_MESSAGES if name in beside}
    return ways


def _inner_names(schema: Any, way: list[str]) -> list[str]:
    import pyarrow as pa

    fields: list[Any] = list(schema)
    for name in way:
        kind = next((field.type for field in fields if field.name == name), None)
        is_struct = kind is not None and pa.types.is_struct(kind)
        fields = list(kind) if is_struct else []  # type: ignore[arg-type]
    return [field.name for field in fields]


def require_columns(path: str, schema: Any, content: Content) -> None:
    """Raises `ConfigError` if a column that `content` names is missing, not unique, or of a wrong type."""
    for field, way in columns_of(schema, content).items():
        if (num := schema.names.count(way[0])) > 1:
            raise ConfigError(
                f"{path}: {num} columns are called {way[0]!r}, and any of them may hold "
                f"{_holds(field, content)}; rename them in the file, or set {content.setting_of(field)} to "
                "another one",
                code="data.ambiguous_field",
            )
        stored = _type_at(path, schema, field, way, content)
        kind, column = _plain(path, field, stored), f"{path}: column {field!r} is {stored}"
        if field in content.transform_fields and not is_plain(kind):
            raise ConfigError(
                f"{column}, which has no plain Python value for transforms; leave it out of transform_fields",
                code="data.transform_field_type",
            )
        if content.messages_at and field not in content.transform_fields:
            _require_chat_type(column, kind, field, content)
        if field in content.fields and not content.messages_at and not is_text(kind):
            raise ConfigError(f"{column}, text is expected; set {content.settings}", code="data.field_type")


def unreadable_type(path: str, field: str, kind: Any, error: Exception) -> ConfigError:
    """The error for a column of a type that Arrow cannot compute with."""
    return ConfigError(
        f"{path}: column {field!r} is {kind}, which cannot be read: {error}; write it as large_string, as "
        "large_list or as a struct of these",
        code="data.unreadable_type",
    )


def _plain(path: str, field: str, kind: Any) -> Any:
    import pyarrow as pa

    try:
        return plain_type(kind)
    except pa.ArrowException as error:
        raise unreadable_type(path, field, kind, error) from error


def _type_at(path: str, schema: Any, field: str, way: tuple[str, ...], content: Content) -> Any:
    import pyarrow as pa

    if way[0] not in schema.names:
        raise ConfigError(
            f"{path}: no field `{field}`; it has: {', '.join(schema.names)}. Set {content.setting_of(field)}",
            code="data.missing_field",
        )
    kind = schema.field(way[0]).type
    for i, name in enumerate(way[1:], start=1):
        passed = ".".join(way[:i])
        if not pa.types.is_struct(kind):
            raise ConfigError(
                f"{path}: no field `{field}`: column {passed!r} is {kind}, and has no inner fields. Set "
                f"{content.setting_of(field)}",
                code="data.missing_field",
            )
        inner = [kind.field(k).name for k in range(kind.num_fields)]
        if inner.count(name) != 1:
            raise ConfigError(
                f"{path}: no field `{field}`; `{passed}` has: {', '.join(inner)}. Set "
                f"{content.setting_of(field)}",
                code="data.missing_field",
            )
        kind = kind.field(name).type
    return kind


def _holds(field: str, content: Content) -> str:
    return f"the {content.kind}" if field in content.fields else "the field for transforms"


def is_text(kind: Any) -> bool:
    """Whether values of the type are texts, or bytes that may be texts."""
    import pyarrow as pa

    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    return _is_any(inner, (*_TEXTS, "string_view", "binary_view"))


def _require_chat_type(column: str, kind: Any, field: str, content: Content) -> None:
    """Raises `ConfigError` if no value of a column of this type fits a chat.

    Messages and tools are lists of objects, variables of a template an object. Each may also be JSON text.
    """
    import pyarrow as pa

    if _is_json_text(kind) or pa.types.is_null(kind):
        return
    is_messages, is_object = field in content.fields, field.endswith(KWARGS_FIELD)
    if is_object:
        what, fits = "an object", pa.types.is_struct(kind)
    else:
        text = "a text or " if content.kind == PREFERENCE and is_messages else ""
        what = f"{text}a list of {'messages' if is_messages else 'tools'}"
        item = getattr(kind, "value_type", None)
        fits = item is not None and (pa.types.is_struct(item) or _is_json_text(item))
    if not fits:
        way_out = f"set {content.settings}" if is_messages else "rename it, or write it so"
        raise ConfigError(
            f"{column}, {what} is expected, or its JSON; {way_out}",
            code=CHAT_VALUE_TYPE,
        )


def _is_json_text(kind: Any) -> bool:
    return is_json(kind) or is_text(kind)


# -------------------------------------------------------------------------------------- arrays in plain types
def plain_type(kind: Any) -> Any:
    """The type of `plain_array` of an array of this type. Raises `pyarrow.ArrowException` if Arrow lacks a
    function for it.
    """
    import pyarrow as pa

    return plain_array(pa.nulls(2, kind)).type


def plain_array(array: Any) -> Any:
    """The same values in a type that Arrow's compute functions support. Texts are not checked for UTF-8.

    The offsets and indices of the array are used as they are; see `require_sound`. Raises
    `pyarrow.ArrowException` if Arrow lacks a function for it.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    if types.is_string_view(kind):
        return array.cast(pa.large_binary()).view(pa.large_string())
    if types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        runs = np.searchsorted(ends, np.arange(len(array)) + array.offset, side="right")
        return plain_array(array.values).take(pa.array(runs, pa.int64()))
    if types.is_dictionary(kind):
        return _plain_dictionary(array)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return _list_of_views(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _plain_list(array)
    if types.is_map(kind):
        return _plain_map(array)
    return _plain_struct(array) if types.is_struct(kind) else array


def _plain_dictionary(array: Any) -> Any:
    import pyarrow as pa

    values = plain_array(array.dictionary)
    if not _is_any(values.type, _TEXTS):
        return values.take(array.indices)
    if values.type == array.type.value_type:
        return array
    return pa.DictionaryArray.from_arrays(array.indices, values, ordered=array.type.ordered, safe=False)


def _list_of_views(array: Any) -> Any:
    """List views may overlap and lie in any order: their items are taken one list after the other."""
    import pyarrow as pa

    sizes = np.where(_valid(array), array.sizes.to_numpy(zero_copy_only=False), 0).astype(np.int64)
    ends = np.cumsum(sizes)
    shifts = array.offsets.to_numpy(zero_copy_only=False)[: len(array)] - (ends - sizes)
    places = np.repeat(shifts, sizes) + np.arange(ends[-1] if len(ends) else 0)
    items = plain_array(array.values).take(pa.array(places, pa.int64()))
    return _large_list(array, np.concatenate([[0], ends]), items)


def _plain_list(array: Any) -> Any:
    import pyarrow as pa

    items = plain_array(array.values)
    if items.type == array.type.value_type:
        return array
    if pa.types.is_fixed_size_list(array.type):
        offsets = (np.arange(len(array) + 1) + array.offset) * array.type.list_size
    else:
        offsets = _offsets(array)
    return _large_list(array, offsets, items)


def _large_list(array: Any, offsets: Any, items: Any) -> Any:
    import pyarrow as pa

    field = array.type.value_field.with_type(items.type)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()), items, type=pa.large_list(field), mask=_mask(array)
    )


def _plain_map(array: Any) -> Any:
    import pyarrow as pa

    keys, items, kind = plain_array(array.keys), plain_array(array.items), array.type
    if (keys.type, items.type) == (kind.key_type, kind.item_type):
        return array
    plain = pa.map_(
        kind.key_field.with_type(keys.type), kind.item_field.with_type(items.type), kind.keys_sorted
    )
    return pa.MapArray.from_arrays(
        pa.array(_offsets(array), pa.int32()), keys, items, type=plain, mask=_mask(array)
    )


def _plain_struct(array: Any) -> Any:
    import pyarrow as pa

    inner = [plain_array(array.field(i)) for i in range(array.type.num_fields)]
    fields = [field.with_type(each.type) for field, each in zip(array.type, inner, strict=True)]
    if all(field.type == old.type for field, old in zip(fields, array.type, strict=True)):
        return array
    return pa.StructArray.from_arrays(inner, fields=fields, mask=_mask(array))


def _offsets(array: Any) -> Any:
    """(num_lists + 1,) where the items of each list or map begin, and where the last ends."""
    return array.offsets.to_numpy(zero_copy_only=False) if len(array) else np.zeros(1, np.int64)


def _valid(array: Any) -> Any:
    return array.is_valid().to_numpy(zero_copy_only=False)


def _mask(array: Any) -> Any:
    return array.is_null() if array.null_count else None


def require_sound(array: Any) -> None:
    """Raises `pyarrow.ArrowInvalid` if a value lies outside the memory of the array.

    Does not check that texts are UTF-8: a text that is not is one bad record.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    array.validate()
    if (as_bytes := _as_bytes(kind)) is not None:
        array.view(as_bytes).validate(full=True)
    elif types.is_dictionary(kind):
        array.indices.validate(full=True)
        indices = array.indices.drop_null().to_numpy(zero_copy_only=False)
        _require(len(array.dictionary) > indices.max(initial=0) or not len(indices), "an index is too large")
        _require(indices.min(initial=0) >= 0, "an index is negative")
        require_sound(array.dictionary)
    elif types.is_run_end_encoded(kind):
        ends = array.run_ends.to_numpy(zero_copy_only=False)
        _require(bool((np.diff(ends) > 0).all()), "its runs are not in order")
        _require(
            not len(array) or (len(ends) > 0 and ends[-1] >= array.offset + len(array)), "a run is missing"
        )
        require_sound(array.values)
    elif types.is_list_view(kind) or types.is_large_list_view(kind):
        if len(array):
            offsets, sizes = (
                each.to_numpy(zero_copy_only=False).astype(np.int64) for each in (array.offsets, array.sizes)
            )
            _require(bool((offsets >= 0).all() and (sizes >= 0).all()), "a list has a negative place")
            _require(bool((sizes <= len(array.values) - offsets).all()), "a list ends behind its items")
        require_sound(array.values)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets, items = _offsets(array), (array.keys, array.items) if types.is_map(kind) else (array.values,)
        in_order = bool(offsets[0] >= 0 and (offsets[1:] >= offsets[:-1]).all())
        _require(in_order and offsets[-1] <= len(items[0]), "its lists are not in order")
        for each in items:
            require_sound(each)
    elif types.is_fixed_size_list(kind):
        require_sound(array.values)
    elif types.is_struct(kind):
        for i in range(kind.num_fields):
            require_sound(array.field(i))
    elif isinstance(kind, pa.BaseExtensionType):
        require_sound(array.storage)
    else:
        array.validate(full=True)


def _as_bytes(kind: Any) -> Any:
    """The type of bytes with the same layout as this type of texts; None for another type."""
    import pyarrow as pa

    types = pa.types
    texts: dict[Callable[[Any], bool], Callable[[], Any]] = {
        types.is_string: pa.binary,
        types.is_large_string: pa.large_binary,
        types.is_string_view: pa.binary_view,
    }
    return next((as_bytes() for is_one, as_bytes in texts.items() if is_one(kind)), None)


def _require(holds: bool, wrong: str) -> None:
    import pyarrow as pa

    if not holds:
        raise pa.ArrowInvalid(f"the column is damaged: {wrong}")
