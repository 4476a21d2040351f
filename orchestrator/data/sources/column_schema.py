"""Which columns of an Arrow schema a source's documents are made of and its transforms see, and whether it
has them.
"""

from __future__ import annotations

from typing import Any

from orchestrator.data.sources.arrow_values import is_plain
from orchestrator.data.sources.documents import TOOLS_FIELD, Content
from orchestrator.errors import ConfigError


def columns_of(schema: Any, content: Content) -> dict[str, tuple[str, ...]]:
    """The columns that are read: each field's name, and the way to it in the schema."""
    ways = {f: (f,) if f in schema.names else tuple(f.split(".")) for f in content.read}
    if content.kind == "chat":
        *around, _ = ways[content.messages_field]
        beside = _inner_names(schema, around)
        if TOOLS_FIELD in beside:
            ways[".".join((*around, TOOLS_FIELD))] = (*around, TOOLS_FIELD)
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
    """Raises `ConfigError` if the file's schema has not the columns that `content` names, each once, or one
    of another type.
    """
    for field, way in columns_of(schema, content).items():
        if (num := schema.names.count(way[0])) > 1:
            raise ConfigError(
                f"{path}: {num} columns are called {way[0]!r}, and which one holds {_holds(field, content)} "
                f"nobody can tell; rename them in the file, or set {content.setting_of(field)} to another one"
            )
        kind = _type_at(path, schema, field, way, content)
        if field in content.transform_fields and not is_plain(kind):
            raise ConfigError(
                f"{path}: column {field!r} is {kind}, which has no plain Python value for transforms; leave "
                "it out of transform_fields"
            )
        if field not in content.fields:  # also the tools of a chat
            continue
        if content.kind == "chat" and not _is_list_of_structs(kind):
            raise ConfigError(
                f"{path}: column {field!r} is {kind}, a list of messages is expected; set {content.settings}"
            )
        if content.kind != "chat" and not is_text(kind):
            raise ConfigError(f"{path}: column {field!r} is {kind}, text is expected; set {content.settings}")


def _type_at(path: str, schema: Any, field: str, way: tuple[str, ...], content: Content) -> Any:
    import pyarrow as pa

    if way[0] not in schema.names:
        raise ConfigError(
            f"{path}: no field `{field}`; it has: {', '.join(schema.names)}. Set {content.setting_of(field)}"
        )
    kind = schema.field(way[0]).type
    for i, name in enumerate(way[1:], start=1):
        passed = ".".join(way[:i])
        if not pa.types.is_struct(kind):
            raise ConfigError(
                f"{path}: no field `{field}`: column {passed!r} is {kind}, and has no inner fields. Set "
                f"{content.setting_of(field)}"
            )
        inner = [kind.field(k).name for k in range(kind.num_fields)]
        if inner.count(name) != 1:
            raise ConfigError(
                f"{path}: no field `{field}`; `{passed}` has: {', '.join(inner)}. Set "
                f"{content.setting_of(field)}"
            )
        kind = kind.field(name).type
    return kind


def _holds(field: str, content: Content) -> str:
    return f"the {content.kind}" if field in content.fields else "the field for transforms"


def is_text(kind: Any) -> bool:
    """Whether values of the type are texts, or bytes that may be."""
    import pyarrow as pa

    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return any(getattr(pa.types, f"is_{name}")(plain) for name in tests)


def _is_list_of_structs(kind: Any) -> bool:
    import pyarrow as pa

    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_struct(kind.value_type))
