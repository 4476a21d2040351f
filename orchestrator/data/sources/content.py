"""The kinds of documents: plain text, a conversation, or a prompt with its completion; and the fields of a
record of which each is made.
"""


from __future__ import annotations

from collections.abc import Mapping
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
