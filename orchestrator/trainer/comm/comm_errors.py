"""Distinguishes two causes of an error from torch's collectives: a lost peer, or mismatched collectives.

Another group of the same processes would fail again on mismatched collectives. The decision uses only the
text of the error.
"""

from __future__ import annotations

# Messages of gloo and NCCL for tensors that they cannot accept, and of torch when it assembles buffers for
# them. If ranks pass different sizes, gloo aborts the process (SIGABRT) and raises nothing.
_MISMATCHES = (
    "processgroupgloo::",  # gloo checks its arguments
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "Detected mismatch between collectives",
    "must match the size",
    "size mismatch",
    "shape mismatch",
    "same dtype",
    "same type",
    "expected all tensors to be",
    "is invalid for input of size",
    "output tensor size must be equal to",
    "input tensor must be the same",
)
# Messages about a broken connection or a timeout. They take precedence over all others.
_LOST = (
    "closed by peer",
    "reset by peer",
    "refused",
    "broken pipe",
    "timed out",
    "timeout",
    "socket",
    "unreachable",
    "ncclremoteerror",
    "ncclsystemerror",
    "aborted",
)


def is_mismatch(error: BaseException) -> bool:
    """Whether all members would meet this error again in the next group.

    In doubt the error counts as a lost peer: that ends one group, and the failure budget ends the run.
    """
    text = str(error).lower()
    return any(mark.lower() in text for mark in _MISMATCHES) and not any(mark in text for mark in _LOST)
