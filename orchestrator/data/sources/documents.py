"""What a record of a source is to the tokenizer: plain text, a conversation, or a prompt with its completion;
and how it is made of a record's fields.

Formats make documents, `tokens` turns them into tokens; this module knows neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Of a record's fields so many are named, each so far.
_NUM_NAMES, _NAME_LENGTH = 12, 60
# What a document of each content is made of: `<name>_field` of the configuration.
_FIELDS = {"text": ("text",), "chat": ("messages",), "prompt": ("prompt", "completion")}
# Beside its messages a chat may say which tools the model is offered, and set variables of its template.
TOOLS_FIELD, KWARGS_FIELD = "tools", "chat_template_kwargs"
BESIDE_MESSAGES = (TOOLS_FIELD, KWARGS_FIELD)


# What names a record's fields in the configuration, by content.
FIELD_SETTINGS = {
    "text": "text_field",
    "chat": "messages_field",
    "prompt": "prompt_field or completion_field",
}


class BadRecordError(Exception):
    """A record that is no document; the text is the reason, `code` that of the error which it becomes."""

    code: str | None = None


class WrongFieldError(BadRecordError):
    """A record without what is looked for in the field where it is looked for."""


class WrongChatValueError(WrongFieldError):
    """A chat with a value of another type than its template needs."""

    code = "data.chat_value_type"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The turns of a chat, in order, as JSON objects (`role`, `content`, …) for a tokenizer's template, the
    tools that it is offered, None where the record has none, and variables that it sets for the template.

    `as_stored`: its values stand as the record has them, `weight` means nothing, and it sets no variables
    (see `Content`).
    """

    messages: tuple[dict[str, Any], ...]
    tools: Any = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    as_stored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """A text that is given and the one that is to follow it."""

    prompt: str
    completion: str


Document = str | Conversation | Prompted


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A document with further fields of its record, by their names in `Content.transform_fields`: what its
    transforms see beside it. One that the record has not is None.
    """

    document: Document
    fields: dict[str, Any]


def bare(found: Document | Described | None) -> Document | None:
    """The document alone."""
    return found.document if isinstance(found, Described) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Which fields of a record its document is made of; `kind` is `data.sources[].content`.

    A field's name is that of a field of the record, else a way into inner ones: `meta.body`.
    `transform_fields` are further ones, for its transforms alone. `as_stored`: a list of chats that an
    earlier version froze. Their values are rendered as they are stored, so that the run keeps its stream.
    """

    kind: str = "text"
    text_field: str = "text"
    messages_field: str = "messages"
    prompt_field: str = "prompt"
    completion_field: str = "completion"
    transform_fields: tuple[str, ...] = ()
    as_stored: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a record must have."""
        return tuple(getattr(self, f"{name}_field") for name in _FIELDS[self.kind])

    @property
    def needed(self) -> Content:
        """The same without the names of fields that a document is not made of."""
        used = {f"{name}_field" for name in _FIELDS[self.kind]}
        return Content(
            kind=self.kind,
            transform_fields=self.transform_fields,
            as_stored=self.as_stored,
            **{name: getattr(self, name) for name in used},
        )

    @property
    def read(self) -> tuple[str, ...]:
        """All fields that are read, each once."""
        return tuple(dict.fromkeys((*self.fields, *self.transform_fields)))

    def setting_of(self, field: str) -> str:
        """What of the configuration names this field, for messages."""
        return self.settings if field in self.fields else "transform_fields"

    @property
    def settings(self) -> str:
        """What of the configuration names these fields, for messages."""
        return " and ".join(f"{name}_field" for name in _FIELDS[self.kind])


def document_of(record: Mapping[str, Any], content: Content) -> Document:
    """The document of a record's fields. Raises `BadRecordError` if it has none: `WrongFieldError` if a field
    is missing or holds something else.
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
    """The document, with the fields that its transforms see if `content` names any; `plain` makes of a value
    what they get. Raises as `document_of` does.
    """
    document = document_of(record, content)
    if not content.transform_fields:
        return document
    fields = {name: value_or_none(record, name) for name in content.transform_fields}
    return Described(
        document=document, fields=fields if plain is None else {n: plain(v) for n, v in fields.items()}
    )


def text_at(record: Mapping[str, Any], field: str) -> str:
    """The text in a field. Raises as `document_of` does."""
    text = value_at(record, field)
    if text is None:
        raise BadRecordError(f"{field!r} is null")
    if not isinstance(text, str):
        raise WrongFieldError(
            f"{field!r} is a JSON {kind_of(text)}, a string is expected; the record has: {names(record)}"
        )
    return text


def value_at(record: Mapping[str, Any], field: str) -> Any:
    """What a record holds in a field: in the one of that very name, else on the way that its dots lead."""
    if field in record:
        return record[field]
    first, dot, rest = field.partition(".")
    if not dot or first not in record:
        raise WrongFieldError(f"no field `{field}`; it has: {names(record)}")
    at: Any = record[first]
    passed = first
    for name in rest.split("."):
        if not isinstance(at, Mapping):
            raise WrongFieldError(
                f"no field `{field}`: `{passed}` is a JSON {kind_of(at)}, an object is expected; the record "
                f"has: {names(record)}"
            )
        if name not in at:
            raise WrongFieldError(f"no field `{field}`; `{passed}` has: {names(at)}")
        at, passed = at[name], f"{passed}.{name}"
    return at


def value_or_none(record: Mapping[str, Any], field: str) -> Any:
    """What `value_at` finds; None where it finds nothing."""
    if field in record:
        return record[field]
    at: Any = record
    for name in field.split("."):
        if not isinstance(at, Mapping) or name not in at:
            return None
        at = at[name]
    return at


def _conversation(record: Mapping[str, Any], field: str) -> Conversation:
    from orchestrator.data.sources.chat_values import typed_conversation  # it imports this module

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
    """What lies beside the messages under this name; None if there is nothing."""
    around = field.rpartition(".")[0]
    if not around or field in record:
        return record.get(f"{around}.{name}", record.get(name))
    return value_at(record, around).get(name)


def names(record: Mapping[str, Any]) -> str:
    """The record's fields, for people; of many the first."""
    found = [str(name) for name in record]
    short = [name if len(name) <= _NAME_LENGTH else name[:_NAME_LENGTH] + "…" for name in found]
    more = f" and {len(short) - _NUM_NAMES} more" if len(short) > _NUM_NAMES else ""
    return (", ".join(short[:_NUM_NAMES]) or "none") + more


def kind_of(value: object) -> str:
    """What JSON calls a value."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def utf8_text(record: bytes) -> str:
    """The record as text. Raises `BadRecordError` if it is not UTF-8."""
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        raise BadRecordError(f"not UTF-8: {error.reason} at byte {error.start} of the record") from error
