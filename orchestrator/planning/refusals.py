"""Why a start is refused: the value that the decisions of this package return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason against a start. `code` is its error code, `text` has both values and what to do."""

    code: str
    text: str
