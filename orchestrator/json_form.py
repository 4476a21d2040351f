"""Records as JSON: dataclasses to JSON and back by their type hints, and sealed documents.

Records have this form in storage and in the journal. A field that is unknown, missing or of another type is
refused by name. A sealed document carries the digest of its own content, which reveals any changed byte.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from blake3 import blake3

from orchestrator.errors import LaterFormatError, OrchestratorError

Record = TypeVar("Record")

FORM = "storage.record_form"  # the error code of a value that does not have the form of its record


def encode(value: Any) -> Any:
    """`value` (a dataclass, nested) as plain JSON types. Arrays are refused."""
    kind: Any = type(value)
    if kind in _SCALARS or value is None:
        return value
    if (names := _field_names(kind)) is not None:
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    assert isinstance(value, (bool, int, float, str)), f"{type(value)} has no JSON form"
    return value


def decode(kind: type[Record], value: Any, where: str = "") -> Record:
    """The inverse of `encode` for the dataclass `kind`. Raises `OrchestratorError` naming the field that is
    missing or unknown.
    """
    if not isinstance(value, Mapping):
        raise OrchestratorError(
            f"{where or kind.__name__}: expected an object, found {type(value).__name__}", code=FORM
        )
    layout = _layout(typing.cast(Any, kind))
    if not layout.required <= value.keys() <= layout.decoders.keys():
        unknown = sorted(set(value) - set(layout.decoders))
        missing = sorted(layout.required - set(value))
        raise OrchestratorError(
            f"{where or kind.__name__}: unknown fields {unknown}, missing fields {missing}; was it written "
            "by another version?",
            code=FORM,
        )
    scalars, decoders = layout.scalars, layout.decoders
    return kind(
        **{
            # most fields of a record are scalars of the right type: for them no text is made
            name: v if type(v) is scalars.get(name) else decoders[name](v, f"{where or kind.__name__}.{name}")
            for name, v in value.items()
        }
    )


_SCALARS = frozenset({bool, int, float, str})
_Decoder = Callable[[Any, str], Any]  # of (value, its place)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """The decoding of a dataclass. It is made of the type hints once, because reading them takes longer than
    decoding.

    `scalars` has the fields that take a JSON value of exactly this type unchanged.
    """

    decoders: dict[str, _Decoder]
    scalars: dict[str, type]
    required: frozenset[str]


@functools.cache
def _layout(kind: Any) -> _Layout:
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    return _Layout(
        decoders={f.name: _decoder(hints[f.name]) for f in fields},
        scalars={f.name: hints[f.name] for f in fields if hints[f.name] in _SCALARS},
        required=frozenset(
            f.name
            for f in fields
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ),
    )


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """None if it is no dataclass."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


def _decoder(hint: Any) -> _Decoder:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        some = _decoder(next(a for a in args if a is not type(None)))
        return lambda value, where: None if value is None else some(value, where)
    if dataclasses.is_dataclass(hint):
        return functools.partial(decode, typing.cast(type, hint))
    if origin is tuple:
        return _tuple_decoder(args)
    if origin is dict:
        item = _decoder(args[1])
        return lambda value, where: {
            str(k): item(v, where) for k, v in _container(Mapping, "an object", value, where).items()
        }
    return functools.partial(_scalar, hint) if hint in _SCALARS else lambda value, where: value


def _tuple_decoder(args: tuple[Any, ...]) -> _Decoder:
    if len(args) == 2 and args[1] is Ellipsis:
        one = _decoder(args[0])
        return lambda value, where: tuple(one(v, where) for v in _container(list, "a list", value, where))
    each = [_decoder(a) for a in args]
    return lambda value, where: tuple(
        d(v, where) for d, v in zip(each, _container(list, "a list", value, where, len(each)), strict=True)
    )


def _container(kind: Any, name: str, value: Any, where: str, length: int | None = None) -> Any:
    """Returns `value`, if it is a container of this kind and length."""
    if not isinstance(value, kind):
        raise OrchestratorError(f"{where}: expected {name}, found {value!r}", code=FORM)
    if length is not None and len(value) != length:
        raise OrchestratorError(f"{where}: expected {length} values, found {value!r}", code=FORM)
    return value


def _scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise OrchestratorError(f"{where}: expected {hint.__name__}, found {value!r}", code=FORM)
    return value


# ------------------------------------------------------------------------------------------- sealed documents
SEAL_FORMAT = 2  # of sealed documents; older ones have no number


class SealError(OrchestratorError):
    """The bytes are not those that were written. The text has the reason."""

    code = "storage.damaged_document"


class LaterSealError(SealError):
    """A later version wrote the document. It is not damaged."""

    code = LaterFormatError.code


def canonical(value: Any) -> bytes:
    """`value` (plain JSON types) as bytes that depend only on the value: sorted names, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def seal(content: Any) -> bytes:
    """The document `{"content": …, "digest": blake3 of the canonical content, "format": 2}`, indented, with a
    final newline.
    """
    return _written({"content": content, "digest": _digest(content), "format": SEAL_FORMAT})


def unseal(data: bytes) -> Any:
    """The content of a sealed document, of this format or an earlier one.

    Raises `SealError` unless the bytes are exactly those of its sealed form.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SealError(f"is not JSON ({error}); {len(data)} bytes") from error
    if not isinstance(document, dict) or set(document) - {"format"} != {"content", "digest"}:
        raise SealError("is JSON, but not a sealed document")
    found = _digest(document["content"])
    if found != document["digest"]:
        raise SealError(f"has content of digest {found}, the seal says {document['digest']}")
    # Spaces and the spelling of numbers are not content: only this detects a change of them.
    if _written(document) != data:
        raise SealError("has the content that was sealed, but not the bytes that were written")
    if document.get("format", SEAL_FORMAT) != SEAL_FORMAT:
        raise LaterSealError(
            f"is a sealed document of format {document['format']}, this version reads 1 and {SEAL_FORMAT}; "
            "use the version that wrote it, or a later one"
        )
    return document["content"]


def _digest(content: Any) -> str:
    return blake3(canonical(content)).hexdigest()


def _written(document: dict[str, Any]) -> bytes:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(document, option=options)
