"""Small static HTML for notebooks: facts and tables, every text escaped.

It needs no script and no network, so a saved notebook keeps its look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0"
_MUTED = "opacity:.65"


def page(title: str, *parts: str) -> str:
    """A heading and the content below it; `parts` are HTML already."""
    return f"<div><p style='margin:4px 0'><b>{escape(title)}</b></p>{''.join(parts)}</div>"


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """A line per (name, value), without those whose value is None or empty."""
    rows = "".join(
        f"<tr><td style='{_CELL};{_MUTED}'>{escape(name)}</td><td style='{_CELL}'>{_text(value)}</td></tr>"
        for name, value in pairs
        if value is not None and value != ""
    )
    return f"<table style='border-collapse:collapse'>{rows}</table>" if rows else ""


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A head and a row per item; empty if there is no row."""
    head = "".join(f"<th style='{_CELL};{_MUTED};font-weight:normal'>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td style='{_CELL}'>{_text(value)}</td>" for value in row) + "</tr>"
        for row in rows
    )
    return f"<table style='border-collapse:collapse'><tr>{head}</tr>{body}</table>" if body else ""


def lines(texts: Iterable[str]) -> str:
    """A paragraph per sentence."""
    return "".join(f"<p style='margin:2px 0'>{escape(text)}</p>" for text in texts)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return escape(f"{value:,}" if isinstance(value, int) else str(value))
