"""A tokenizer's chat template as found in its files, and the values of a conversation in the form it accepts.

The arguments of a call are an object in transformers and a JSON text in OpenAI's API, and templates accept
one or the other. A template for texts prints them unchanged. A template for objects prints a text in quotes,
or fails. So the form is determined from the template's output. `rendering` renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.data.sources.records.content import CHAT_VALUE_TYPE, BadContentError, kind_of

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

DEFAULT, WITH_TOOLS = "default", "tool_use"


class UnrenderableError(BadContentError):
    """The template does not accept a conversation."""


class UnrenderableValueError(UnrenderableError):
    """The template does not accept the type of a value in a conversation."""

    error_code = CHAT_VALUE_TYPE


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """The jinja sources of a chat template.

    `sources` are by name: always `default`, and `tool_use` if conversations with tools have another.
    `variables` are the texts of the named special tokens (`bos_token`, …).
    """

    sources: dict[str, str]
    variables: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialToken:
    """A special token. `lstrip` and `rstrip`: whether it absorbs the white space before and after it."""

    text: str
    token: int
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """A conversation as text.

    `specials` are the places of the template's own special tokens, in order. `targets` are the characters to
    be trained. `special_texts` is the number of special tokens spelled out in the messages.
    """

    text: str
    specials: tuple[tuple[int, int, SpecialToken], ...]
    targets: tuple[Span, ...]
    special_texts: int


def read_chat_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """The template among a tokenizer's files, None if there is none.

    It is `chat_template.jinja`, else `chat_template` in `tokenizer_config.json` (a text, or a list of {name,
    template}).
    """
    variables: dict[str, str] = {}
    found: Any = None
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = json.loads(files[name]) if name in files else {}
        found = content.get("chat_template", found)
        for key, value in content.items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                variables[key] = text
    if "chat_template.jinja" in files:
        found = files["chat_template.jinja"].decode()
    if isinstance(found, list):
        named = {each["name"]: each["template"] for each in found}
        sources = {name: named[name] for name in (DEFAULT, WITH_TOOLS) if name in named}
    else:
        sources = {DEFAULT: found} if isinstance(found, str) else {}
    return ChatTemplate(sources=sources, variables=variables) if DEFAULT in sources else None


# ----------------------------------------------------------------------------------- values of a conversation
_Messages = list[dict[str, Any]]
# The names of a message's reasoning in transformers, by precedence. Its templates read the first and the
# second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_SHOWN = 60  # characters of a text that a message shows


def without_nulls(messages: Sequence[Mapping[str, Any]]) -> _Messages:
    """The messages without keys that are null, as transformers passes them to a template."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def with_reasoning(messages: _Messages) -> _Messages:
    """The messages with their reasoning under each name that templates read, as in transformers."""
    found: _Messages = []
    for message in messages:
        reasoning = next((message[key] for key in _REASONING if key in message), None)
        own = {} if reasoning is None else {"reasoning_content": reasoning}
        found.append({**({"thinking": reasoning} if own else {}), **message, **own})
    return found


def with_arguments(messages: _Messages, render: Callable[[_Messages], str]) -> _Messages:
    """The messages, with arguments of calls that are JSON texts in the form that the template accepts.

    They stay texts if the template prints them unchanged, else they become the objects that they describe.
    Raises `UnrenderableError` if the template does not accept texts and one is no JSON object.
    """
    texts = [text for function in _functions(messages) if isinstance(text := function["arguments"], str)]
    if not texts or _prints(texts, messages, render):
        return messages
    return [_with_objects(number, message) for number, message in enumerate(messages, start=1)]


def require_texts(
    messages: _Messages, own: _Messages, rendered: str, render: Callable[[_Messages], str]
) -> None:
    """Raises `UnrenderableError` if the template printed a value in a wrong form.

    That is a list or an object of a message in Python's form (`{'city': 'Oslo'}`), or a number or boolean
    where it expects a text (the reasoning and the name). `own` are the messages without the additions of
    `with_reasoning`.
    """
    for number, (message, written) in enumerate(zip(messages, own, strict=True), start=1):
        values = [("`arguments` of a call", function["arguments"]) for function in _functions([message])]
        values += [(f"`{key}`", message[key]) for key in written]
        for what, value in values:
            if isinstance(value, (dict, list)) and _is_printed(value, messages, rendered):
                raise _no_text(number, what, value, ": it prints Python's form of it")
        for key in (*_REASONING, "name"):
            value = written.get(key)
            if isinstance(value, (bool, int, float)) and _prints_key(key, message, messages, render):
                raise _no_text(number, f"`{key}`", value, "")


def require_no_json_text(value: Any) -> None:
    """Raises `TypeError` for the JSON text of a list or an object, which a template would read by letters."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            return
        raise TypeError(
            f"it reads the letters of a text that is the JSON of an {kind_of(parsed)}, {value[:_SHOWN]!r}; "
            f"write the {kind_of(parsed)} itself"
        )


def _no_text(number: int, what: str, value: Any, how: str) -> UnrenderableValueError:
    return UnrenderableValueError(
        f"{what} in message {number} is a JSON {kind_of(value)}, and the tokenizer's chat_template takes a "
        f"text there{how}; write it as a text",
        code="chat.text_expected",
    )


def _prints_key(
    key: str, message: dict[str, Any], messages: _Messages, render: Callable[[_Messages], str]
) -> bool:
    """Whether the template prints the message's value under this key, tested with a text."""
    text = "value"
    while any(text in each for each in _texts(messages)):
        text += "s"
    keys = _REASONING if key in _REASONING else (key,)
    changed = message | {each: text for each in keys if each in message}
    try:
        before, after = render(messages), render([changed if m is message else m for m in messages])
    except Exception:  # noqa: BLE001  a template may raise anything
        return False
    return after.count(text) > before.count(text)


def _functions(messages: _Messages) -> Iterator[dict[str, Any]]:
    """The calls of the messages that have arguments."""
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") or call
            if function.get("arguments") is not None:
                yield function


def _prints(texts: list[str], messages: _Messages, render: Callable[[_Messages], str]) -> bool:
    """Whether the template prints these texts unchanged."""
    try:
        rendered = render(messages)
    except Exception:  # noqa: BLE001  a template may raise anything
        return False
    quoted = {json.dumps(text, ensure_ascii=ascii_only) for text in texts for ascii_only in (False, True)}
    return all(text.strip() in rendered for text in texts) and not any(text in rendered for text in quoted)


def _with_objects(number: int, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    where = f"of message {number}"
    return {
        **message,
        "tool_calls": [_with_object(f"call {i} {where}", c) for i, c in enumerate(calls, start=1)],
    }


def _with_object(where: str, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError as error:
        raise _no_object(where, f"no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise _no_object(where, "not that of an object")
    changed = {**function, "arguments": arguments}
    return changed if function is call else {**call, "function": changed}


def _no_object(where: str, why: str) -> UnrenderableValueError:
    return UnrenderableValueError(
        f"`arguments` of {where} is a text that is {why}, and the tokenizer's chat_template takes an object "
        "there; write it as an object",
        code="chat.object_expected",
    )


def _is_printed(value: dict[str, Any] | list[Any], messages: _Messages, rendered: str) -> bool:
    """Whether Python's form of the value, or of a part of it, was printed and is in no message."""
    printed = [form for form in _python_forms(value) if form in rendered]
    return any(not any(form in text for text in _texts(messages)) for form in printed)


def _python_forms(value: Any) -> Iterator[str]:
    """Python's forms of the innermost lists and objects of a value, if they are not JSON."""
    items = list(value.values()) if isinstance(value, dict) else value
    inner = [form for item in items if isinstance(item, (dict, list)) for form in _python_forms(item)]
    yield from inner
    if not inner and (form := str(value)) != json.dumps(value, ensure_ascii=False):
        yield form


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
