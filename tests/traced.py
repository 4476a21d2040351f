"""What some work allocates, as `tracemalloc` sees it, in a process of its own with one thread: CPython 3.11
may crash where it is stopped while another thread ends, as those of pytest-timeout do.
"""

from __future__ import annotations

import traceback
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.forked import FORKED

_LIMIT_S = 240


def traced(work: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Bytes allocated by `work`, a function of a module, with these arguments: (those that it returns, and
    at most at a time). Raises `AssertionError` with the traceback where it fails.
    """
    here, there = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_trace, args=(there, work, arguments), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(_LIMIT_S), f"{work.__name__} takes more than {_LIMIT_S} s"
        found = here.recv()
    except EOFError:
        process.join()
        found = f"{work.__name__} ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
    assert isinstance(found, tuple), found
    return found


def _trace(answer: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        tracemalloc.start()
        found = work(*arguments)
        answer.send(tracemalloc.get_traced_memory())
        del found
    except BaseException:  # noqa: BLE001  whatever it is, the test says it
        answer.send(traceback.format_exc())
