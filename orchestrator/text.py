"""Durations and counts as people read them."""

from __future__ import annotations


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
