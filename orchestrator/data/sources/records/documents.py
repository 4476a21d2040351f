"""Makes the document of a record from its fields. docs/formats.md lists the fields and the accepted forms.

The values of a chat get the types that templates expect: JSON text is parsed where a list or an object
belongs. A template renders any value, so tools given as one JSON text would be rendered letter by letter. If
a value has another type, the error of its record names the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from orchestrator.data.sources.records.content import (
    BESIDE_MESSAGES,
    KWARGS_FIELD,
    TOOLS_FIELD,
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    MissingFieldError,
    Preference,
    Prompted,
    WrongChatValueError,
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


# ------------------------------------------------------------------------------------------------------ chats
# Arguments of transformers' apply_chat_template, which a record may not set as variables.
_RESERVED = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "return_assistant_tokens_mask"),
)
# The fields of a tool or its function that hold a JSON schema.
_SCHEMA_FIELDS = (
    *("parameters", "input_schema", "inputSchema"),
    *("output_schema", "outputSchema", "return", "response"),
)
# Keywords of JSON Schema (drafts 3 to 2020-12) whose value is one schema, an object of schemas by the user's
# names, or a list of schemas; and other keywords whose value may be an object.
_SCHEMA_AT = frozenset(
    (
        *("items", "additionalItems", "unevaluatedItems", "contains", "propertyNames", "contentSchema"),
        *("additionalProperties", "unevaluatedProperties", "not", "if", "then", "else"),
    )
)
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_LISTED_SCHEMAS = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_OTHER_OBJECTS = frozenset(("default", "const", "examples", "dependencies", "dependentRequired"))


def typed_conversation(
    field: str, messages: Any, beside: Mapping[str, Any], num_given: int = 0
) -> Conversation:
    """The conversation of a record's `messages` and of the values `beside` them.

    `field` is the name of the messages' field. `beside` may hold `tools` and `chat_template_kwargs`.
    `num_given` is that of the conversation. Raises `WrongChatValueError` for a value of a type that templates
    do not read.
    """
    found = typed_messages(field, messages)
    if not found:
        raise WrongChatValueError(f"{field!r} has no messages", code="record.no_messages")
    return Conversation(
        messages=found,
        tools=_tools(beside.get(TOOLS_FIELD)),
        template_kwargs=_template_kwargs(beside.get(KWARGS_FIELD)),
        num_given=num_given,
    )


def typed_messages(field: str, messages: Any) -> tuple[dict[str, Any], ...]:
    """The messages in a record's `field`, perhaps none. Raises as `typed_conversation`."""
    where = repr(field)
    listed = _list_at(where, messages, "messages")
    return tuple(_message(f"message {i} of {where}", each) for i, each in enumerate(listed, start=1))


def json_value(text: str | bytes, where: str) -> Any:
    """The value of a JSON text. Raises `WrongChatValueError` with the reason."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WrongChatValueError(
            f"{where} is a text and no JSON: {error}; write it as JSON, or leave it out",
            code="record.not_json",
        ) from error


def _message(where: str, value: Any) -> dict[str, Any]:
    message = _object_at(where, value, "an object with a role")
    if not isinstance(message.get("role"), str):
        what = f"the role {message['role']!r}" if "role" in message else "no field `role`"
        raise WrongChatValueError(f"{where} has {what}; it has: {names(message)}", code="record.chat_role")
    changed = dict(message)
    if "content" in message:
        _require_content(f"`content` of {where}", message["content"])
    if message.get("tool_calls") is not None:
        calls = _list_at(f"`tool_calls` of {where}", message["tool_calls"], "calls")
        changed["tool_calls"] = [_call(f"call {i} of {where}", call) for i, call in enumerate(calls, start=1)]
    if message.get("function_call") is not None:  # a call in OpenAI's API before `tool_calls`
        at = f"`function_call` of {where}"
        changed["function_call"] = _with_arguments(at, _object_at(at, message["function_call"], "an object"))
    if message.get("weight") not in (None, 0, 1):
        raise WrongChatValueError(
            f"`weight` of {where} is {message['weight']!r}; a message is learnt or not: write 1 or 0",
            code="record.chat_weight",
        )
    return changed


def _require_content(where: str, content: Any) -> None:
    """Requires a text, null, a list of parts, or an object (a tool's result, in some templates)."""
    if content is None or isinstance(content, (str, dict)):
        return
    if not isinstance(content, list):
        raise _wrong(where, content, "a text or a list of parts")
    for number, part in enumerate(content, start=1):
        at = f"part {number} of {where}"
        if not isinstance(part, dict) or not isinstance(part.get("type", "text"), str):
            raise _wrong(at, part, "an object with a `type`")
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            raise _wrong(f"`text` of {at}", part.get("text"), "a text")


def _call(where: str, value: Any) -> dict[str, Any]:
    """A tool call: {"function": {"name", "arguments"}}, or just these two fields."""
    call = dict(_object_at(where, value, "an object"))
    if call.get("function") is None:
        return _with_arguments(where, call)
    function = dict(_object_at(f"`function` of {where}", call["function"], "an object"))
    return {**call, "function": _with_arguments(where, function)}


def _with_arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    """Requires arguments to be an object or JSON text. The template decides (`tokens.chat_template`)."""
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise _wrong(f"`arguments` of {where}", arguments, "an object, or its JSON text,")
    return function


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    tools = _parsed(f"`{TOOLS_FIELD}`", value, "a list of tools")
    if tools is None:  # the JSON text "null"
        return None
    if not isinstance(tools, list):
        raise _wrong(f"`{TOOLS_FIELD}`", tools, "a list of tools")
    try:
        return [_tool(f"{TOOLS_FIELD}[{index}]", tool) for index, tool in enumerate(tools)]
    except RecursionError as error:
        raise WrongChatValueError(
            f"`{TOOLS_FIELD}` has a JSON schema that is nested too deep", code="record.schema_depth"
        ) from error


def _tool(place: str, value: Any) -> dict[str, Any]:
    tool = _with_schemas(place, _object_at(f"`{place}`", value, "an object"))
    if tool.get("function") is not None:
        inner = f"{place}.function"
        tool["function"] = _with_schemas(inner, _object_at(f"`{inner}`", tool["function"], "an object"))
    return tool


def _with_schemas(place: str, function: dict[str, Any]) -> dict[str, Any]:
    """A tool or its function, with its JSON schemas parsed."""
    schemas = {name: function[name] for name in _SCHEMA_FIELDS if function.get(name) is not None}
    return function | {name: _parameters(f"{place}.{name}", each) for name, each in schemas.items()}


# ------------------------------------------------------------------------------------------ JSON schemas
def _parameters(place: str, value: Any) -> dict[str, Any]:
    """A schema, or a map from parameter names to their schemas, as in some data sets."""
    parameters = _object_at(f"`{place}`", value, "an object (a JSON schema)")
    read = _named_schemas if _maps_names(parameters) else _schema_object
    return read(place, parameters)


def _maps_names(parameters: dict[str, Any]) -> bool:
    """Whether these are schemas by parameter names.

    All values are objects, and the keys are not only keywords of a schema with such values.
    """
    if "properties" in parameters or not all(isinstance(each, dict) for each in parameters.values()):
        return False
    return not parameters.keys() <= _SCHEMA_AT | _SCHEMAS_BY_NAME | _OTHER_OBJECTS


def _schema(place: str, value: Any) -> dict[str, Any] | bool:
    schema = _parsed(f"`{place}`", value, "a JSON schema (an object, true or false)")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _wrong(f"`{place}`", schema, "a JSON schema (an object, true or false)")
    return _schema_object(place, schema)


def _schema_object(place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each if each is None else _of_keyword(f"{place}.{name}", name, each)
        for name, each in schema.items()
    }


def _of_keyword(place: str, name: str, value: Any) -> Any:
    """The value of a schema's keyword. The value of an unknown keyword is data and stays as it is."""
    at = f"`{place}`"
    if name in _SCHEMAS_BY_NAME:
        return _named_schemas(place, _object_at(at, value, "an object"))
    if name in _SCHEMA_AT:
        parsed = _parsed(at, value, "a JSON schema")
        is_tuple = name == "items" and isinstance(parsed, list)  # drafts before 2020-12
        return _listed_schemas(place, parsed) if is_tuple else _schema(place, parsed)
    if name in _LISTED_SCHEMAS:
        return _listed_schemas(place, _list_at(at, value, "JSON schemas"))
    if name == "required":  # in draft 3 a boolean of each property
        return value if isinstance(value, bool) else _list_at(at, value, "names")
    if name == "enum":
        return _list_at(at, value, "values")
    if name == "type" and isinstance(value, str) and value.lstrip().startswith("["):
        return _list_at(at, value, "types")
    if name in ("dependencies", "dependentRequired"):
        found = _object_at(at, value, "an object")
        return {key: _dependency(f"{place}.{key}", name, each) for key, each in found.items()}
    return value


def _named_schemas(place: str, schemas: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each if each is None else _schema(f"{place}.{name}", each) for name, each in schemas.items()
    }


def _listed_schemas(place: str, schemas: list[Any]) -> list[Any]:
    return [_schema(f"{place}[{index}]", each) for index, each in enumerate(schemas)]


def _dependency(place: str, keyword: str, value: Any) -> Any:
    """The names of the properties that another property requires; in drafts before 2019-09 also a schema."""
    if keyword == "dependentRequired":
        return _list_at(f"`{place}`", value, "names")
    parsed = _parsed(f"`{place}`", value, "a list of names or a JSON schema")
    return parsed if isinstance(parsed, list) else _schema(place, parsed)


# ------------------------------------------------------------------------------------------ variables
def _template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    found = _object_at(f"`{KWARGS_FIELD}`", value, "an object")
    if taken := [name for name in found if name in _RESERVED]:
        raise WrongChatValueError(
            f"`{KWARGS_FIELD}` sets {', '.join(taken)}, which are no variables of a template; leave them out",
            code="record.reserved_variable",
        )
    return found


# ------------------------------------------------------------------------------------------ JSON values
def _list_at(where: str, value: Any, what: str) -> list[Any]:
    found = _parsed(where, value, f"a list of {what}")
    if not isinstance(found, list):
        raise _wrong(where, found, f"a list of {what}")
    return found


def _object_at(where: str, value: Any, what: str) -> dict[str, Any]:
    found = _parsed(where, value, what)
    if not isinstance(found, dict):
        raise _wrong(where, found, what)
    return found


def _parsed(where: str, value: Any, what: str) -> Any:
    """The value, or the parsed value of a JSON text. Parses once."""
    if not isinstance(value, str):
        return value
    found = json_value(value, where)
    if isinstance(found, str):
        raise _wrong(f"{where}, a JSON text,", found, what)
    return found


def _wrong(where: str, value: Any, what: str) -> WrongChatValueError:
    return WrongChatValueError(
        f"{where} is a JSON {kind_of(value)}, {what} is expected", code="record.chat_value_type"
    )
