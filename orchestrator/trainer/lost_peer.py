"""Whether an error out of torch's collectives says that a peer is lost, or that the collectives themselves do
not fit together, which another group of the same processes would meet again.

Pure: it reads what an error says.
"""

from __future__ import annotations

# What gloo and NCCL say to tensors that they cannot take, and torch where it puts buffers together for them.
# gloo itself ends the process (SIGABRT) where ranks bring different sizes: nothing is raised then.
_MISMATCHES = (
    "processgroupgloo::",  # gloo looks at what it is given
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
# What is said where a connection breaks or nobody answers in time, whatever else stands beside it.
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
    """Whether all members would meet this error again in the next group. What is in doubt counts as a lost
    peer: that ends one group, and the failure budget the run.
    """
    text = str(error).lower()
    return any(mark.lower() in text for mark in _MISMATCHES) and not any(mark in text for mark in _LOST)
