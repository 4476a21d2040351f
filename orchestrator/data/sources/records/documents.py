"""Makes the document of a record from its fields. docs/formats.md lists the fields and the accepted forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.data.sources.records.chat_values import typed_conversation, typed_messages
from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    TOOLS_FIELD,
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    MissingFieldError,
    Preference,
    Prompted,
    WrongFieldError,
    kind_of,
    names,
)
from orchestrator.records.steps import PREFERENCE

_MISSING = "record.missing_field"
_Messages = tuple[dict[str, Any], ...]


def document_of(record: Mapping[str, Any], content: Content) -> Document:
    """The document of a record. Raises `BadRecordError` if it has none.

    Raises `WrongFieldError` if a field is missing or has a wrong type.
    """
    if content.kind == "text":
        return text_at(record, content.text_field)
    if content.kind == "prompt":
        prompt, completion = (text_at(record, field) for field in content.fields)
        return Prompted(prompt=prompt, completion=completion)
    if content.kind == PREFERENCE:
        return _preference(record, content)
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
    text = _present_at(record, field)
    if not isinstance(text, str):
        raise WrongFieldError(
            f"{field!r} is a JSON {kind_of(text)}, a string is expected; the record has: {names(record)}",
            code="record.field_type",
        )
    return text


def _present_at(record: Mapping[str, Any], field: str) -> Any:
    """The value of `value_at`. Raises `BadRecordError` if it is null."""
    value = value_at(record, field)
    if value is None:
        raise BadRecordError(f"{field!r} is null", code="record.null_field")
    return value


def value_at(record: Mapping[str, Any], field: str) -> Any:
    """The value of a field: the field of exactly that name, else the one at the path that its dots spell."""
    if field in record:
        return record[field]
    first, dot, rest = field.partition(".")
    if not dot or first not in record:
        raise MissingFieldError(f"no field `{field}`; it has: {names(record)}", code=_MISSING)
    at: Any = record[first]
    passed = first
    for name in rest.split("."):
        if not isinstance(at, Mapping):
            raise MissingFieldError(
                f"no field `{field}`: `{passed}` is a JSON {kind_of(at)}, an object is expected; the record "
                f"has: {names(record)}",
                code=_MISSING,
            )
        if name not in at:
            raise MissingFieldError(f"no field `{field}`; `{passed}` has: {names(at)}", code=_MISSING)
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
    messages = _present_at(record, field)
    beside = {name: _beside(record, field, name) for name in BESIDE_MESSAGES}
    return typed_conversation(field, messages, beside)


def _stored_conversation(record: Mapping[str, Any], field: str) -> Conversation:
    """The conversation as earlier versions read it."""
    messages = _present_at(record, field)
    if not isinstance(messages, list):
        raise WrongFieldError(
            f"{field!r} is a JSON {kind_of(messages)}, a list of messages is expected",
            code="record.field_type",
        )
    if not messages:
        raise BadRecordError(f"{field!r} has no messages", code="record.no_messages")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WrongFieldError(
                f"message {number} of {field!r} is no object with a role", code="record.chat_role"
            )
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
        raise BadRecordError(
            f"not UTF-8: {error.reason} at byte {error.start} of the record", code="record.not_utf8"
        ) from error


# ---------------------------------------------------------------------------------------------- preferences
def _preference(record: Mapping[str, Any], content: Content) -> Preference:
    """A prompt with two answers: all texts, or all lists of messages. Raises as `document_of`."""
    fields = content.fields
    values = {field: _present_at(record, field) for field in fields}
    texts = [field for field, value in values.items() if isinstance(value, str)]
    if not texts:
        return _chats(record, content, values)
    if content.prompt_field is None:
        raise WrongFieldError(
            f"{texts[0]!r} is a text, and prompt_field is null, for which chosen and rejected must be whole "
            "chats; name the field of the prompt",
            code="record.no_prompt",
        )
    if len(texts) < len(fields):
        other = next(field for field in fields if field not in texts)
        raise WrongFieldError(
            f"{texts[0]!r} is a text, and {other!r} is a JSON {kind_of(values[other])}; write all of "
            f"{', '.join(fields)} as texts, or all as lists of messages (prompt_field: null where chosen and "
            "rejected have the messages of the prompt, too)",
            code="record.field_type",
        )
    prompt, chosen, rejected = (values[field] for field in fields)
    _require_answers(content, chosen, rejected)
    return Preference(
        chosen=Prompted(prompt=prompt, completion=chosen),
        rejected=Prompted(prompt=prompt, completion=rejected),
    )


def _chats(record: Mapping[str, Any], content: Content, values: Mapping[str, Any]) -> Preference:
    """The answers of messages, each after those of the prompt."""
    field = content.chosen_field
    chosen, rejected = (typed_messages(f, values[f]) for f in (field, content.rejected_field))
    if content.prompt_field is None:
        num_given = _num_equal(chosen, rejected)
        prompt, chosen, rejected = chosen[:num_given], chosen[num_given:], rejected[num_given:]
    else:
        prompt = typed_messages(content.prompt_field, values[content.prompt_field])
    _require_answers(content, chosen, rejected)
    beside = {name: _beside(record, field, name) for name in BESIDE_MESSAGES}
    return Preference(
        chosen=typed_conversation(field, [*prompt, *chosen], beside, len(prompt)),
        rejected=typed_conversation(content.rejected_field, [*prompt, *rejected], beside, len(prompt)),
    )


def _num_equal(one: _Messages, other: _Messages) -> int:
    """The number of messages with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _require_answers(content: Content, chosen: str | _Messages, rejected: str | _Messages) -> None:
    """Raises `BadRecordError` if there is no answer, or if both are the same."""
    if chosen == rejected:
        raise BadRecordError(
            f"{content.chosen_field!r} and {content.rejected_field!r} are the same, so neither is preferred",
            code="record.equal_answers",
        )
    for field, answer in ((content.chosen_field, chosen), (content.rejected_field, rejected)):
        if not answer:
            raise BadRecordError(f"{field!r} has no answer", code="record.empty_answer")
