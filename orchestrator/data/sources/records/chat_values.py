"""Gives the values of a chat the types that templates expect.

JSON text is parsed where a list or an object belongs. A template renders any value: tools given as one JSON
text would be rendered letter by letter. So each value gets its type here, or the record is refused by name.
docs/formats.md lists the fields and the accepted forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from orchestrator.data.sources.records.content import (
    KWARGS_FIELD,
    TOOLS_FIELD,
    Conversation,
    WrongChatValueError,
    kind_of,
    names,
)

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
