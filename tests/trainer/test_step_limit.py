"""How long others wait in a step, and what an error in its collectives says."""

from __future__ import annotations

import pytest

from orchestrator.trainer.gradient.parallel import is_mismatch
from orchestrator.trainer.interfaces.loop_interface import COMPILE_LIMIT_S, step_limit_s


@pytest.mark.parametrize(
    ("last_step_s", "may_compile", "expected"),
    [
        (None, False, 900.0),
        (1.0, False, 60.0),
        (20.0, False, 100.0),
        (None, True, COMPILE_LIMIT_S),
        (1.0, True, COMPILE_LIMIT_S),  # a shorter last micro-batch compiles again
        (1000.0, True, 5000.0),
    ],
)
def test_a_first_step_and_one_that_may_compile_have_limits_of_their_own(
    last_step_s: float | None, expected: float, *, may_compile: bool
) -> None:
    assert step_limit_s(60.0, last_step_s, may_compile) == expected


# as torch 2.13 and NCCL 2 say it
GLOO = "[../third_party/gloo/gloo/transport/tcp/"
LOST = [
    f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:15275. This is typically caused by a remote "
    "worker crashing. Check the logs of the remote worker before reporting an error.",
    f"{GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete",
    f"{GLOO}pair.cc:667] Connection reset by peer",
    f"{GLOO}buffer.cc:76] Broken pipe",
    "Application timeout caused pair closure",
    "NCCL error in: ../NCCLUtils.cpp:77, remote process exited or there was a network error\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed: size mismatch",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)",
    "something that nobody has seen before",
]
MISMATCHED = [
    "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (5), got (4))",
    "output tensor size must be equal to world_size times input tensor size",
    "NCCL error: invalid argument (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.5\n"
    "ncclInvalidArgument: Invalid value for an argument.",
    "Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLGATHER",
    "The size of tensor a (4) must match the size of tensor b (8) at non-singleton dimension 0",
    "shape '[4, 2]' is invalid for input of size 9",
]


@pytest.mark.parametrize("text", LOST)
def test_what_may_be_a_lost_peer_counts_as_one(text: str) -> None:
    assert not is_mismatch(RuntimeError(text))


@pytest.mark.parametrize("text", MISMATCHED)
def test_what_every_group_would_meet_again_is_told_apart(text: str) -> None:
    assert is_mismatch(RuntimeError(text))
