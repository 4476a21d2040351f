"""The kinds of documents (plain text, conversation, prompt with completion, preference), and the fields that
each needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.records.steps import PREFERENCE

# At most this many fields of a record are named in messages, with at most this many characters each.
_NUM_NAMES, _NAME_LENGTH = 12, 60
# The fields that a document of each content needs: `<name>_field` of the configuration.
_FIELDS = {
    "text": ("text",),
    "chat": ("messages",),
    "prompt": ("prompt", "completion"),
    PREFERENCE: ("prompt", "chosen", "rejected"),
}
# The contents whose messages may have tools and variables beside them: the field that says where.
_MESSAGES = {"chat": "messages_field", PREFERENCE: "chosen_field"}
# Beside its messages, a chat may hold the tools offered to the model, and variables of its template.
TOOLS_FIELD, KWARGS_FIELD = "tools", "chat_template_kwargs"
BESIDE_MESSAGES = (TOOLS_FIELD, KWARGS_FIELD)
# The code of the errors for values of chats.
CHAT_VALUE_TYPE = "data.chat_value_type"


# The settings that name a record's fields, by content.
FIELD_SETTINGS = {
    "text": "text_field",
    "chat": "messages_field",
    "prompt": "prompt_field or completion_field",
    PREFERENCE: "prompt_field, chosen_field or rejected_field",
}


class BadContentError(Exception):
    """Base of the reasons for bad documents. The text is the reason, `code` names its kind.

    `error_code` is the code of the error that is raised for it, None for that error's own.
    """

    error_code: str | None = None

    def __init__(self, reason: str, *, code: str) -> None:
        super().__init__(reason)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), code=self.code), self.args


class BadRecordError(BadContentError):
    """A record that is no document."""


class WrongFieldError(BadRecordError):
    """A record whose configured field is missing or has a wrong value.

    `field_code` is the code of the `ConfigError` for a source whose first records are all such.
    """

    field_code = "data.field_type"


class MissingFieldError(WrongFieldError):
    """A record without the configured field."""

    field_code = "data.missing_field"


class WrongChatValueError(WrongFieldError):
    """A chat with a value of a type that its template does not expect."""

    error_code = CHAT_VALUE_TYPE


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages of a chat, in order, as JSON objects (`role`, `content`, …) for a tokenizer's template.

    `tools`: the tools offered to the model, None if the record has none. `template_kwargs`: variables that
    the record sets for the template. `num_given`: of the first messages nothing is learnt. `as_stored`: its
    values are those of the record, `weight` has no effect, and it sets no variables (see `Content`).
    """

    messages: tuple[dict[str, Any], ...]
    tools: Any = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_given: int = 0
    as_stored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """A prompt and the completion that follows it."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """One prompt with two answers, of which the chosen one is better. Both are of one kind.

    In conversations the prompt's messages are `num_given`.
    """

    chosen: Conversation | Prompted
    rejected: Conversation | Prompted

    @property
    def rows(self) -> tuple[Conversation | Prompted, Conversation | Prompted]:
        """The documents of the sample's rows, in order."""
        return self.chosen, self.rejected


Document = str | Conversation | Prompted | Preference


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A document with further fields of its record, for its transforms.

    The fields are keyed by their names in `Content.transform_fields`. A field that the record lacks is None.
    """

    document: Document
    fields: dict[str, Any]


def bare(found: Document | Described | None) -> Document | None:
    """The document without the fields."""
    return found.document if isinstance(found, Described) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The fields of a record that its document is made of. `kind` is `data.sources[].content`.

    A field's name is that of a field of the record, else a path of inner fields: `meta.body`.
    `transform_fields` are further fields, for its transforms only. `as_stored`: a list of chats that an
    earlier version froze. Their values are rendered as they are stored, so that the run keeps its stream.
    """

    kind: str = "text"
    text_field: str = "text"
    messages_field: str = "messages"
    prompt_field: str | None = "prompt"
    completion_field: str = "completion"
    chosen_field: str = "chosen"
    rejected_field: str = "rejected"
    transform_fields: tuple[str, ...] = ()
    as_stored: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a record must have."""
        names = (getattr(self, f"{name}_field") for name in _FIELDS[self.kind])
        return tuple(name for name in names if name is not None)

    @property
    def messages_at(self) -> str | None:
        """The field beside which a record may have `BESIDE_MESSAGES`; None: its records have no messages."""
        name = _MESSAGES.get(self.kind)
        return None if name is None else getattr(self, name)

    @property
    def needed(self) -> Content:
        """The same, with the names of unused fields reset."""
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
        """The setting that names this field, for messages."""
        return self.settings if field in self.fields else "transform_fields"

    @property
    def settings(self) -> str:
        """The settings that name these fields, for messages."""
        return " and ".join(f"{name}_field" for name in _FIELDS[self.kind])


def names(record: Mapping[str, Any]) -> str:
    """The record's field names, for messages; only the first of many."""
    found = [str(name) for name in record]
    short = [name if len(name) <= _NAME_LENGTH else name[:_NAME_LENGTH] + "…" for name in found]
    more = f" and {len(short) - _NUM_NAMES} more" if len(short) > _NUM_NAMES else ""
    return (", ".join(short[:_NUM_NAMES]) or "none") + more


def kind_of(value: object) -> str:
    """The JSON type of a value."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
