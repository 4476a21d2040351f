"""What a test asks of a process: whether it has ended, and where it stands if it does not."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path


def ended(handle: int, limit_s: float = 60.0) -> bool:
    """Whether the process of the pidfd ends within the limit; closes it. Any number will do for the pidfd."""
    asked = select.poll()  # `select.select` knows 1,024 files
    asked.register(handle, select.POLLIN)
    try:
        return bool(asked.poll(1000 * limit_s))
    finally:
        os.close(handle)


def say_where_it_stands(root: str, name: str) -> None:
    """In the process: whoever asks for it gets the stacks of its threads, in a file beside `root`."""
    faulthandler.register(signal.SIGUSR1, Path(f"{root}.stacks-{name}").open("w"))  # noqa: SIM115  it stays open


def where_it_stands(root: str, name: str, process: BaseProcess) -> str:
    """The stacks of its threads, as far as it says them within a moment."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    process.join(3.0)
    return f"--- {name}\n{Path(f'{root}.stacks-{name}').read_text()}"
