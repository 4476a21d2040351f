"""Parses a tokenizer.json, whose vocabulary may take 10 MB, at most once."""

from __future__ import annotations

import gc
import json
from typing import Any

import orjson

_BEGIN = '{"added_tokens":'
_DECODER = json.JSONDecoder()


def parse(data: bytes | str) -> dict[str, Any]:
    """The parsed object. Garbage collection is off meanwhile: traversing hundreds of thousands of lists
    repeatedly would take twice as long as parsing.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found: dict[str, Any] = orjson.loads(data)
    finally:
        if was_enabled:
            gc.enable()
    return found


def laid_out(content: dict[str, Any]) -> str:
    """The object as JSON with its added tokens first, where `added_tokens` finds them."""
    added = {"added_tokens": content.get("added_tokens") or []}
    return orjson.dumps(added | content | added).decode()


def added_tokens(text: str) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json. Fast if `laid_out` wrote it."""
    return _split(text)[0]


def without_special_tokens(text: str) -> str:
    """The tokenizer.json without its special added tokens."""
    added, rest = _split(text)
    return f"{_BEGIN}{orjson.dumps([t for t in added if not t.get('special')]).decode()}{rest}"


def _split(text: str) -> tuple[list[dict[str, Any]], str]:
    """The added tokens, and the text after them."""
    if not text.startswith(f"{_BEGIN}["):
        text = laid_out(parse(text))
    added, end = _DECODER.raw_decode(text, len(_BEGIN))
    return added, text[end:]
