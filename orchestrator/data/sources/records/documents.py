"""Makes the document of a record from its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.data.sources.records.chat_values import typed_conversation
from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    TOOLS_FIELD,
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    MissingFieldError,
    Prompted,
    WrongFieldError,
    kind_of,
    names,
)


def document_of(record: Mapping[str, Any], content: Content) -> Document:
    """The document of a record. Raises `BadRecordError` if it has none.

    Raises `WrongFieldError` if a field is missing or has a wrong type.
    """
    if content.kind == "text":
        return text_at(record, content.text_field)
    if content.kind == "prompt":
        return Prompted(
            prompt=text_at(record, content.prompt_field),
            completion=text_at(record, content.completion_field),
        )
    return (_stored_conversation if content.as_stored else _conversation)(record, content.messages_field)


def described(
    record: Mapping[str, Any], content: Content, plain: Callable[[Any], Any] | None = None
) -> Document | Described:
    """The document, with the fields for its transforms if `content` names any.

    `plain` converts each field's value for the transforms. Raises as `document_of`.
    """
    document = document_of(record, content)
    if not content.transform_fields:
        return document
    fields = {name: value_or_none(record, name) for name in content.transform_fields}
    return Described(
        document=document, fields=fields if plain is None else {n: plain(v) for n, v in fields.items()}
    )


def text_at(record: Mapping[str, Any], field: str) -> str:
    """The text in a field. Raises as `document_of`."""
    text = value_at(record, field)
    if text is None:
        raise BadRecordError(f"{field!r} is null")
    if not isinstance(text, str):
        raise WrongFieldError(
            f"{field!r} is a JSON {kind_of(text)}, a string is expected; the record has: {names(record)}"
        )
    return text


def value_at(record: Mapping[str, Any], field: str) -> Any:
    """The value of a field: the field of exactly that name, else the one at the path that its dots spell."""
    if field in record:
        return record[field]
    first, dot, rest = field.partition(".")
    if not dot or first not in record:
        raise MissingFieldError(f"no field `{field}`; it has: {names(record)}")
    at: Any = record[first]
    passed = first
    for name in rest.split("."):
        if not isinstance(at, Mapping):
            raise MissingFieldError(
                f"no field `{field}`: `{passed}` is a JSON {kind_of(at)}, an object is expected; the record "
                f"has: {names(record)}"
            )
        if name not in at:
            raise MissingFieldError(f"no field `{field}`; `{passed}` has: {names(at)}")
        at, passed = at[name], f"{passed}.{name}"
    return at


def value_or_none(record: Mapping[str, Any], field: str) -> Any:
    """The value of `value_at`, or None if it finds none."""
    if field in record:
        return record[field]
    at: Any = record
    for name in field.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return None
        at = at[name]
    return at


def _conversation(record: Mapping[str, Any], field: str) -> Conversation:
    messages = value_at(record, field)
    if messages is None:
        raise BadRecordError(f"{field!r} is null")
    beside = {name: _beside(record, field, name) for name in BESIDE_MESSAGES}
    return typed_conversation(field, messages, beside)


def _stored_conversation(record: Mapping[str, Any], field: str) -> Conversation:
    """The conversation as earlier versions read it."""
    messages = value_at(record, field)
    if messages is None:
        raise BadRecordError(f"{field!r} is null")
    if not isinstance(messages, list):
        raise WrongFieldError(f"{field!r} is a JSON {kind_of(messages)}, a list of messages is expected")
    if not messages:
        raise BadRecordError(f"{field!r} has no messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongFieldError(f"message {number} of {field!r} is no object with a role")
    return Conversation(messages=tuple(messages), tools=_beside(record, field, TOOLS_FIELD), as_stored=True)


def _beside(record: Mapping[str, Any], field: str, name: str) -> Any:
    """The value beside the messages under this name, or None."""
    around = field.rpartition(".")[0]
    if not around or field in record:
        return record.get(f"{around}.{name}", record.get(name))
    return value_at(record, around).get(name)


def utf8_text(record: bytes) -> str:
    """The record as text. Raises `BadRecordError` if it is not UTF-8."""
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8: {error.reason} at byte {error.start} of the record") from error
