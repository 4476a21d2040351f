"""A chat with tools, and the forms in which files hold its values."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.data.sources.records.content import Content, Conversation
from orchestrator.data.sources.records.documents import document_of

CODE = "data.chat_value_type"  # of the error that is raised for a chat with a value of a wrong type
CALL = {"type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
MESSAGES = [
    {"role": "user", "content": "How is it in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "required": ["city"]}},
}
CHAT = Content(kind="chat")


def json_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def conversation(messages: Any = MESSAGES, **beside: Any) -> Conversation:
    found = document_of({"messages": messages, **beside}, CHAT)
    assert isinstance(found, Conversation)
    return found


def in_function(**changes: Any) -> dict[str, Any]:
    return {**TOOL, "function": {**TOOL["function"], **changes}}
