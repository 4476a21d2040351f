"""The values of a chat as chat templates need them: JSON text is parsed where a list or an object belongs.

A template reads whatever it gets: tools that are one JSON text would be rendered letter by letter. So each
value has its type here, or the record is refused by name. What stands where, and which forms are read, is in
docs/formats.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from orchestrator.data.sources.documents import (
    KWARGS_FIELD,
    TOOLS_FIELD,
    Conversation,
    WrongChatValueError,
    kind_of,
    names,
)

# Arguments of transformers' apply_chat_template: not variables that a record may set.
_RESERVED = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "return_assistant_tokens_mask"),
)


def typed_conversation(field: str, messages: Any, beside: Mapping[str, Any]) -> Conversation:
    """The conversation of a record's `messages`, which stand in `field`, and of what lies `beside` them:
    `tools` and `chat_template_kwargs`.

    Raises `WrongChatValueError` for a value of another type than templates read.
    """
    where = repr(field)
    listed = _list_at(where, messages, "messages")
    found = tuple(_message(f"message {i} of {where}", each) for i, each in enumerate(listed, start=1))
    if not found:
        raise WrongChatValueError(f"{where} has no messages")
    return Conversation(
        messages=found,
        tools=_tools(beside.get(TOOLS_FIELD)),
        template_kwargs=_template_kwargs(beside.get(KWARGS_FIELD)),
    )


def json_value(text: str | bytes, where: str) -> Any:
    """The value of a JSON text. Raises `WrongChatValueError` with the reason."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise WrongChatValueError(
            f"{where} is a text and no JSON: {error}; write it as JSON, or leave it out"
        ) from error


def _message(where: str, value: Any) -> dict[str, Any]:
    message = _object_at(where, value, "an object with a role")
    if not isinstance(message.get("role"), str):
        what = f"the role {message['role']!r}" if "role" in message else "no field `role`"
        raise WrongChatValueError(f"{where} has {what}; it has: {names(message)}")
    changed = dict(message)
    if "content" in message:
        _require_content(f"`content` of {where}", message["content"])
    if message.get("tool_calls") is not None:
        calls = _list_at(f"`tool_calls` of {where}", message["tool_calls"], "calls")
        changed["tool_calls"] = [_call(f"call {i} of {where}", call) for i, call in enumerate(calls, start=1)]
    if message.get("weight") not in (None, 0, 1):
        raise WrongChatValueError(
            f"`weight` of {where} is {message['weight']!r}; a message is learnt or not: write 1 or 0"
        )
    return changed


def _require_content(where: str, content: Any) -> None:
    """A text, null, a list of parts, or an object (what a tool gave back, in some templates)."""
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
    """A call of a tool: {"function": {"name", "arguments"}}, or these two alone."""
    call = dict(_object_at(where, value, "an object"))
    if call.get("function") is None:
        return _with_arguments(where, call)
    function = dict(_object_at(f"`function` of {where}", call["function"], "an object"))
    return {**call, "function": _with_arguments(where, function)}


def _with_arguments(where: str, function: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object or its JSON text. The template decides which it takes (`tokens.call_forms`)."""
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, (str, dict)):
        raise _wrong(f"`arguments` of {where}", arguments, "an object, or its JSON text,")
    return function


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    where = f"`{TOOLS_FIELD}`"
    tools = _parsed(where, value, "a list of tools")
    if tools is None:  # the JSON text "null"
        return None
    if not isinstance(tools, list):
        raise _wrong(where, tools, "a list of tools")
    return [_tool(f"tool {number}", tool) for number, tool in enumerate(tools, start=1)]


def _tool(where: str, value: Any) -> dict[str, Any]:
    tool = dict(_object_at(where, value, "an object"))
    if tool.get("function") is not None:
        function = dict(_object_at(f"`function` of {where}", tool["function"], "an object"))
        tool["function"] = _with_parameters(where, function)
        return tool
    return _with_parameters(where, tool)


def _with_parameters(where: str, function: dict[str, Any]) -> dict[str, Any]:
    if function.get("parameters") is not None:
        at = f"`parameters` of {where}"
        function["parameters"] = _object_at(at, function["parameters"], "an object (a JSON schema)")
    return function


def _template_kwargs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    found = _object_at(f"`{KWARGS_FIELD}`", value, "an object")
    if taken := [name for name in found if name in _RESERVED]:
        raise WrongChatValueError(
            f"`{KWARGS_FIELD}` sets {', '.join(taken)}, which are no variables of a template; leave them out"
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
    """The value, or that of a JSON text, which is parsed once."""
    if not isinstance(value, str):
        return value
    found = json_value(value, where)
    if isinstance(found, str):
        raise _wrong(f"{where}, a JSON text,", found, what)
    return found


def _wrong(where: str, value: Any, what: str) -> WrongChatValueError:
    return WrongChatValueError(f"{where} is a JSON {kind_of(value)}, {what} is expected")
