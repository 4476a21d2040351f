"""A tokenizer.json, of which the vocabulary may be 10 MB, without parsing it more often than once.

It knows the names of the parts of such a file, and nothing of what they mean.
"""

from __future__ import annotations

import gc
import json
from typing import Any

import orjson

_BEGIN = '{"added_tokens":'
_DECODER = json.JSONDecoder()


def parse(data: bytes | str) -> dict[str, Any]:
    """The object. Python's garbage collector rests meanwhile: else it walks through hundreds of thousands of
    lists again and again, which takes twice as long as parsing.
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
    """The same object as JSON, its added tokens first, where `added_tokens` finds them."""
    added = {"added_tokens": content.get("added_tokens") or []}
    return orjson.dumps(added | content | added).decode()


def added_tokens(text: str) -> list[dict[str, Any]]:
    """The added tokens of a tokenizer.json; soon, where `laid_out` made it."""
    return _split(text)[0]


def without_special_tokens(text: str) -> str:
    """The same tokenizer.json without the added tokens that are special."""
    added, rest = _split(text)
    return f"{_BEGIN}{orjson.dumps([t for t in added if not t.get('special')]).decode()}{rest}"


def _split(text: str) -> tuple[list[dict[str, Any]], str]:
    """The added tokens, and the text behind them."""
    if not text.startswith(f"{_BEGIN}["):
        text = laid_out(parse(text))
    added, end = _DECODER.raw_decode(text, len(_BEGIN))
    return added, text[end:]
