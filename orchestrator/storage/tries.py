"""Retries of reading and writing files and objects, their delays, and the errors that are worth a retry.

Everything that reaches storage converts its errors to the `OSError` that a disk would raise. `tried` repeats
what failed for a temporary reason.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """Delays of `first_s`, then twice as long after each failure, and at most `most_s` seconds."""

    first_s: float
    most_s: float

    def after(self, delay_s: float) -> float:
        """Returns the delay that follows one of `delay_s`; 0: none was before."""
        return min(2 * delay_s, self.most_s) if delay_s else self.first_s

    def nth(self, num_failures: int) -> float:
        """Returns the delay after `num_failures` earlier failures."""
        return min(self.first_s * (1 << num_failures), self.most_s)


MOST_RETRY_S = 320.0
STORAGE_BACKOFF = Backoff(first_s=5.0, most_s=MOST_RETRY_S)  # of saves and deletions that storage refuses


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
_OPERATION_BACKOFF = Backoff(first_s=0.2, most_s=2.0)  # of single operations on a run's storage
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


def is_temporary(error: OSError) -> bool:
    """Whether an operation on a run's storage that failed with `error` may succeed later."""
    return error.errno not in _LASTING


def is_server_failure(error: OSError) -> bool:
    """Whether a server did not carry out a request, but may carry out the next one."""
    return error.errno == errno.EIO


def tried(
    action: Callable[[], Result],
    sleep: Callable[[float], None],
    again_s: float = math.inf,
    backoff: Backoff = _OPERATION_BACKOFF,
    repeat: Callable[[OSError], bool] = is_temporary,
) -> Result:
    """Runs `action`, up to `TRIES` times while `repeat` is true of its error.

    No try begins later than `again_s` seconds after the first one. Raises the last `OSError`.
    """
    began = time.monotonic()
    for num_failures in range(TRIES - 1):
        try:
            return action()
        except OSError as error:
            if not repeat(error) or time.monotonic() - began > again_s:
                raise
        sleep(backoff.nth(num_failures))
    return action()
