"""The receiver of an audit's progress."""

from __future__ import annotations

from typing import Protocol


class AuditProgress(Protocol):
    """Receives progress in the audit's own thread."""

    def begin(self, what: str, unit: str, total: int) -> None:
        """The next work has `total` units (tokens, bytes)."""

    def advance(self, num: int) -> None:
        """`num` more units are done."""


class NoAuditProgress:
    """Ignores progress."""

    def begin(self, what: str, unit: str, total: int) -> None:
        """See `AuditProgress`."""

    def advance(self, num: int) -> None:
        """See `AuditProgress`."""
