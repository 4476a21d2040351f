"""Makes text of a run safe for a terminal: control characters become visible escapes.

Documents, file names, journal lines, pins and the errors of workers are data from others. A terminal executes
their control characters: it changes its title, its clipboard and lines that are already shown. Every text for
people passes `visible` before it is written to a terminal or a log file; `--json` escapes by JSON's own
rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Kept: a line feed and a tab, which only move on. Replaced:
_REPLACED = (
    (0x00, 0x09),  # C0: escape sequences, bell, backspace
    (0x0B, 0x20),  # C0 after the line feed: carriage return overwrites a line
    (0x7F, 0xA0),  # delete, and C1: 0x9B begins an escape sequence, too
    (0x061C, 0x061D),  # Arabic letter mark
    (0x200E, 0x2010),  # left-to-right and right-to-left mark
    (0x2028, 0x202F),  # line and paragraph separator, and what overrides the direction of text
    (0x2066, 0x206A),  # isolates, which change the direction as well
    (0xD800, 0xE000),  # halves of a pair: bytes of a file name that are no UTF-8; no stream takes them
    (0xE0001, 0xE0080),  # tags, which nothing shows
)
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    for begin, end in _REPLACED
    for code in range(begin, end)
}
_FOUND = re.compile("[" + "".join(f"{chr(b)}-{chr(e - 1)}" for b, e in _REPLACED) + "]")


def visible(text: str) -> str:
    r"""Returns `text` with every control character as an escape of Python (`\x1b`, `\u202e`).

    Line feeds, tabs and backslashes stay: the result is for people and is not read back.
    """
    return text.translate(_ESCAPES) if _FOUND.search(text) else text


def visible_lines(lines: Iterable[str]) -> str:
    """The lines, each `visible` and ended by a line feed. Text after a line feed within one is indented, so
    that no text of a run looks like a line of ours.
    """
    return "".join(visible(line).replace("\n", "\n    ") + "\n" for line in lines)


def visible_json(document: str) -> str:
    r"""Escapes the control characters that JSON leaves unchanged (DEL, C1, those that change the direction of
    text), in JSON's way (`\u202e`). The document's meaning stays the same.
    """
    return _FOUND.sub(_as_json, document) if _FOUND.search(document) else document


def _as_json(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))
