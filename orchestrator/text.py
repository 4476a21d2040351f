"""Text for people: durations and counts, and text that is safe for a terminal.

Documents, file names, journal lines, pins and the errors of workers are data from others. A terminal executes
their control characters: it changes its title, its clipboard and lines that are already shown. Every text
for people passes `visible` before it is written to a terminal or a log file; `--json` escapes by JSON's own
rules.

The `html_` functions make small static HTML for notebooks: facts and tables, every text escaped. It needs no
script and no network, so a saved notebook keeps its look.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


def span(seconds: float | None) -> str:
    """`0.79 s`, `4.2 s`, `2 min 58 s`, `12 min`, `5 h 12 min`, `8 d 7 h`, as `span` in the page's fmt.js; "?"
    for what is not known.
    """
    if seconds is None:
        return "?"
    s = max(0.0, seconds)
    if s < 10:  # noqa: PLR2004  the units, here and below
        small = f"{s * 1000:.1f} ms" if 5e-5 <= s < 0.0095 else f"{s:.2f} s"  # noqa: PLR2004
        return "0 s" if s < 5e-5 else small if s < 1 else f"{s:.1f} s"  # noqa: PLR2004
    whole, minutes, hours = round(s), round(s / 60), round(s / 3600)
    for limit, text in (
        (90, f"{whole} s"),
        (600, f"{whole // 60} min {whole % 60} s"),
        (7200, f"{minutes} min"),
        (172_800, f"{minutes // 60} h {minutes % 60} min"),
    ):
        if whole < limit:
            return text
    return f"{hours // 24} d {hours % 24} h"


def count(number: float) -> str:
    """`912`, `3.83 M`, `11.2 B`."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def steps(number: int) -> str:
    """`1 step`, `39 steps`."""
    return f"{number:,} step{'' if number == 1 else 's'}"


def workers(number: int) -> str:
    """`1 worker`, `8 workers`."""
    return f"{number:,} worker{'' if number == 1 else 's'}"


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


_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
_MUTED = "opacity:.65"


def html_page(title: str, *parts: str) -> str:
    """A heading and the content below it; `parts` are HTML already."""
    return f"<div><p style='margin:4px 0'><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def html_facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """A line per (name, value), without those whose value is None or empty."""
    rows = "".join(
        f"<tr><td style='{_CELL};{_MUTED}'>{escape(name)}</td><td style='{_CELL}'>{_html(value)}</td></tr>"
        for name, value in pairs
        if value is not None and value != ""
    )
    return f"<table style='border-collapse:collapse'>{rows}</table>" if rows else ""


def html_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A head and a row per item; empty if there is no row."""
    head = "".join(f"<th style='{_CELL};{_MUTED};font-weight:normal'>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{_html(value)}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table style='border-collapse:collapse'><tr>{head}</tr>{body}</table>" if body else ""


def html_lines(texts: Iterable[str]) -> str:
    """A paragraph per sentence."""
    return "".join(f"<p style='margin:2px 0'>{escape(text)}</p>" for text in texts)


def _html(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return escape(f"{value:,}" if isinstance(value, int) else str(value))
