"""Durations and counts as people read them."""

from __future__ import annotations


def span(seconds: float | None) -> str:
    """`4.2 s`, `12 min`, `5.2 h`, `8.3 d`; "?" for what is not known."""
    if seconds is None:
        return "?"
    s = max(0.0, seconds)
    for size, unit, limit in ((1, "s", 90), (60, "min", 5400), (3600, "h", 36 * 3600)):
        if s < 10 and unit == "s":
            return f"{s:.1f} s"
        if s < limit:
            return f"{s / size:.1f} {unit}" if unit == "h" else f"{s / size:.0f} {unit}"
    return f"{s / 86400:.1f} d"


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
