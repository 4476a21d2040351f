"""What a test asks of a process that is not its child."""

from __future__ import annotations

import os
import select


def ended(handle: int, limit_s: float = 60.0) -> bool:
    """Whether the process of the pidfd ends within the limit; closes it. Any number will do for the pidfd."""
    asked = select.poll()  # `select.select` knows 1,024 files
    asked.register(handle, select.POLLIN)
    try:
        return bool(asked.poll(1000 * limit_s))
    finally:
        os.close(handle)
