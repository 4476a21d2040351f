"""What a record of a source is to the tokenizer: plain text, a conversation, or a prompt with its completion.

Formats make documents, `tokens` turns them into tokens; this module knows neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The turns of a chat, in order, as JSON objects (`role`, `content`, …) for a tokenizer's template, and
    the tools that it is offered, None where the record has none.
    """

    messages: tuple[dict[str, Any], ...]
    tools: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """A text that is given and the one that is to follow it."""

    prompt: str
    completion: str


Document = str | Conversation | Prompted
