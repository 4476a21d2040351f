"""The retries of a store's operation, and the errors that are worth a retry.

A store converts its errors to the `OSError` that a disk would raise.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

FAILED = "storage.failed"  # the code of a failure whose kind is not known
DENIED, FULL = "storage.denied", "storage.full"
TIMEOUT, UNREACHABLE = "storage.timeout", "storage.unreachable"
_CODES = {
    errno.EACCES: DENIED,
    errno.EPERM: DENIED,
    errno.EROFS: DENIED,
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.ETIMEDOUT: TIMEOUT,
    errno.ENOTCONN: UNREACHABLE,
    errno.ECONNREFUSED: UNREACHABLE,
    errno.ECONNRESET: UNREACHABLE,
    errno.ECONNABORTED: UNREACHABLE,
    errno.EHOSTDOWN: UNREACHABLE,
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.ENETDOWN: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
    errno.EEXIST: "storage.name_taken",
    errno.ENOENT: "storage.not_found",
    errno.ESTALE: "storage.changed_while_read",
    errno.ENOTDIR: "storage.unusable_path",
    errno.EISDIR: "storage.unusable_path",
    errno.ENAMETOOLONG: "storage.unusable_path",
    errno.ELOOP: "storage.unusable_path",
}

TRIES = 4
FIRST_WAIT_S = 0.2  # before the second try; each later wait is twice as long
# A retry cannot help: the answer depends on the name or the rights, not on the time.
_LASTING = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EINVAL,
        errno.ENOTEMPTY,
    }
)


class RequestFailedError(OSError):
    """A server could not carry out a request. `code` names the kind of failure."""

    code = FAILED


def problem_code(error: OSError) -> str:
    """The `code` of the `StorageError` that `error` becomes."""
    if isinstance(error, RequestFailedError):
        return error.code
    return _CODES.get(error.errno or 0, FAILED)


def tried(action: Callable[[], Result], sleep: Callable[[float], None], again_s: float = math.inf) -> Result:
    """Runs `action`, again while it fails for a temporary reason, until `again_s` seconds after its first
    start.

    Raises its last `OSError`.
    """
    began = time.monotonic()
    try:
        return action()  # the common case; tenacity costs more than most calls
    except OSError as error:
        if error.errno in _LASTING or time.monotonic() - began > again_s:
            raise
    import tenacity

    sleep(FIRST_WAIT_S)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda e: isinstance(e, OSError) and e.errno not in _LASTING),
        stop=lambda state: state.attempt_number >= TRIES - 1 or time.monotonic() - began > again_s,
        wait=tenacity.wait_exponential(multiplier=2 * FIRST_WAIT_S, max=2.0),
        sleep=sleep,
        reraise=True,
    )
    return retrying(action)
