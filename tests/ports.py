"""Ports for processes that bind them later."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# below those that the kernel gives to whoever asks for any, and above those that Ray's workers take
FIRST, LAST = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different; nobody is given one meanwhile who did not ask for
    exactly it.
    """
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(range(FIRST, LAST), LAST - FIRST):
            if len(found) == count:
                break
            with suppress(OSError):  # it is in use
                held.enter_context(socket.socket()).bind(("", port))
                found.append(port)
    assert len(found) == count, f"{count} ports are wanted, {len(found)} are free"
    return found
