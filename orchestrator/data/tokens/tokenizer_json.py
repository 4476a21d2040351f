"""A tokenizer.json: parsed at most once, and the texts for which two encoders must give the same ids.

Its vocabulary may take 10 MB.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
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


# ----------------------------------------------------------------------------------- texts that test encoders
# Increased when these texts, or their comparison, change: earlier comparisons are then invalid.
ADVERSARIAL_VERSION = 2
# Texts on which encoders have differed, or might differ.
ADVERSARIAL_TEXTS = (
    "",
    " ",
    "\n",
    "\r\n\r\n \t \u00a0\u2003x",
    "a" * 3000,
    "ab" * 1500 + "  " * 500,
    "\x00\x01\x7f\u0085",
    "\ufeffbom \ufffd \ufffe \U0010ffff \ue000",
    "don't DON'T I'LL we\u2019ve 'tis it'sn't",
    "1234567890 3.14159 1e-10 0x1F ٣٤٥ ①②",
    "e\u0301 é ﬁ ﷽ İ ı ß ẞ ǅ",
    "日本語とカタカナ 한국어 한글 ไทย हिन्दी עברית العربية",
    "🏳️‍🌈👩‍👩‍👧‍👦🇩🇪 👍🏽",
    "x\u200b\u200d\u2028\u2029\u00ady",
    "def f(x):\n\treturn  {'a': [1,2,3]}  # ß→あ \r\n",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "ÀÉÎõü αβγ ЖЩЯ \t\t  trailing   ",
)
# At most this many of a tokenizer's added tokens are tried, spread over all of them.
_NUM_ADDED = 64


def added_token_texts(added: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts that test the borders of added tokens.

    The tokens stand inside words, beside white space, in another case, and beside each other.
    """
    step = max(1, len(added) // _NUM_ADDED)
    chosen = [token["content"] for token in added[::step]]
    beside = zip(chosen, chosen[1:], strict=False)
    return [
        *(f"a{t}b {t}\n\n{t} \t{t}{t}. {t[:-1]} {t[1:]} {t.upper()} {t.lower()}" for t in chosen),
        *(f"x {one}{other} {one} {other}y" for one, other in beside),
    ]
