"""A tokenizer's chat template, as found in its files, and the result of rendering a conversation.

`rendering` renders. Of token ids, only those of special tokens are used here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]
"""Characters [start, stop) of a text."""

DEFAULT, WITH_TOOLS = "default", "tool_use"


class UnrenderableError(Exception):
    """The template does not accept a conversation. The text is the reason; `code` is that of the error raised
    for it.
    """

    def __init__(self, reason: str, code: str | None = None) -> None:
        super().__init__(reason)
        self.code = code


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
