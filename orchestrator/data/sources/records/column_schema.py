"""The columns of an Arrow schema that documents and transforms read, and checks that they exist."""

from __future__ import annotations

from typing import Any

from orchestrator.data.sources.records.arrow_values import is_json, is_plain
from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    KWARGS_FIELD,
    Content,
    WrongChatValueError,
)
from orchestrator.data.sources.records.plain_arrays import plain_type
from orchestrator.errors import ConfigError


def columns_of(schema: Any, content: Content) -> dict[str, tuple[str, ...]]:
    """The columns that are read: each field's name, and its path in the schema."""
    ways = {f: (f,) if f in schema.names else tuple(f.split(".")) for f in content.read}
    if content.kind == "chat":
        *around, _ = ways[content.messages_field]
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
        if content.kind == "chat" and field not in content.transform_fields:
            _require_chat_type(column, kind, field, content)
        if field in content.fields and content.kind != "chat" and not is_text(kind):
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

    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(pa.types, f"is_{name}")(plain) for name in tests)


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
        what = f"a list of {'messages' if is_messages else 'tools'}"
        item = getattr(kind, "value_type", None)
        fits = item is not None and (pa.types.is_struct(item) or _is_json_text(item))
    if not fits:
        way_out = f"set {content.settings}" if is_messages else "rename it, or write it so"
        raise ConfigError(
            f"{column}, {what} is expected, or its JSON; {way_out}",
            code=WrongChatValueError.code,
        )


def _is_json_text(kind: Any) -> bool:
    return is_json(kind) or is_text(kind)
