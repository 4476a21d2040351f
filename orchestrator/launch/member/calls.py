"""How a member reaches others: the transport of its calls to the coordinator, and a probe of other members.

The probe serves membership rule 18. Importing this module does not import torch.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from orchestrator.records.membership import GenerationView

_PROBE_S = 3.0  # the timeout of a port


class UnansweredError(Exception):
    """A call was not answered: the coordinator is away, or frozen. Whether it had an effect is unknown."""


class Calls(Protocol):
    """Transports calls to the coordinator."""

    def call(self, method: str, arguments: Sequence[Any], limit_s: float) -> Any:
        """Makes one call. Raises `UnansweredError` without an answer within `limit_s`, and what the call
        itself raised.
        """


def unreached(view: GenerationView) -> tuple[str, ...]:
    """The members whose stores this one cannot reach."""
    ranks = unreached_ranks(view.probe)
    return tuple(member for rank, member in enumerate(view.members) if rank in ranks)


def unreached_ranks(addresses: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """The ranks at these addresses that this process cannot reach, all tried in parallel within
    `_PROBE_S`.
    """

    def reaches(address: tuple[str, int]) -> bool:
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = pool.map(reaches, addresses)
        return tuple(rank for rank, answer in enumerate(answers) if not answer)
