"""One line of what `orchestrator doctor` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "bad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line: `value` is what was found, `limit` what it is measured by, `advice` what to set and why, ""
    where nothing is to be done.
    """

    name: str
    state: State
    value: str
    limit: str = ""
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)
