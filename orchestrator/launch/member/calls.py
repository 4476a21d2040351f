"""The transport of a member's calls to the coordinator, as an interface.

Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class UnansweredError(Exception):
    """A call was not answered: the coordinator is away, or frozen. Whether it had an effect is unknown."""


class Calls(Protocol):
    """Transports calls to the coordinator."""

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        """Makes one call. Raises `UnansweredError` without an answer within `limit_s`, and what the call
        itself raised.
        """
