"""One line of the output of `orchestrator doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: `value` is the finding, `limit` its reference, `advice` what to set and why, "" if nothing is
    to be done.
    """

    name: str
    state: State
    value: str
    limit: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """The check as plain JSON values."""
        return asdict(self)
