"""Texts on which encoders are compared before one of them is trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Raised when these texts, or how encoders are compared on them, change: earlier comparisons count no more.
ADVERSARIAL_VERSION = 2
# Texts on which encoders have been seen to differ, or might.
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
# Of a tokenizer's added tokens so many are tried, from all of them.
_NUM_ADDED = 64


def added_token_texts(added: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts that try where added tokens begin and end: inside of words, beside white space, in another case,
    and beside each other.
    """
    step = max(1, len(added) // _NUM_ADDED)
    chosen = [token["content"] for token in added[::step]]
    beside = zip(chosen, chosen[1:], strict=False)
    return [
        *(f"a{t}b {t}\n\n{t} \t{t}{t}. {t[:-1]} {t[1:]} {t.upper()} {t.lower()}" for t in chosen),
        *(f"x {one}{other} {one} {other}y" for one, other in beside),
    ]
