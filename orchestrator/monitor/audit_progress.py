"""Who hears how far an audit is."""

from __future__ import annotations

from typing import Protocol


class AuditProgress(Protocol):
    """Told from the audit's own thread."""

    def begin(self, what: str, unit: str, total: int) -> None:
        """So many units (tokens, bytes) are to be worked through now."""

    def advance(self, num: int) -> None:
        """So many more are."""


class NoAuditProgress:
    """Nobody listens."""

    def begin(self, what: str, unit: str, total: int) -> None:
        """See `AuditProgress`."""

    def advance(self, num: int) -> None:
        """See `AuditProgress`."""
