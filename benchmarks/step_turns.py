"""A training process of `benchmarks.step`: it trains only when the benchmark requests steps.

So several loops can take turns on one machine, and none disturbs another.
"""

from __future__ import annotations

import os
import resource
import time
from multiprocessing.connection import Client
from typing import Any

import torch

ADDRESS, KEY = "STEP_ADDRESS", b"benchmarks.step"
GPU = torch.cuda.is_available()


def wait_for_device() -> None:
    """Returns once all that was started on the GPU is done."""
    if GPU:
        torch.cuda.synchronize()


class Turns:
    """Tells the benchmark about the first step, and then makes as many steps as it requests."""

    def __init__(self) -> None:
        self._benchmark = Client(os.environ[ADDRESS], authkey=KEY)
        self._steps_left = 1
        self._began, self._profile = time.perf_counter(), None

    def mark(self, name: str) -> None:
        """Sends the time at which a part of the start ended."""
        self._benchmark.send({"mark": name, "at": time.time()})

    def after_step(self) -> None:
        """Must be called after each step. It returns when the next step may begin."""
        self._steps_left -= 1
        if self._steps_left:
            return
        wait_for_device()
        ended = time.perf_counter()
        if self._profile is not None:
            self._profile.stop()
        self._benchmark.send(
            {
                "at": time.time(),
                "seconds": ended - self._began,
                "peak_bytes": peak_bytes(),
                "kernel_s": None if self._profile is None else _kernel_seconds(self._profile),
            }
        )
        self._wait()

    def _wait(self) -> None:
        try:
            request = self._benchmark.recv()
        except EOFError:
            request = None
        if request is None:
            os._exit(0)
        self._steps_left = request["steps"]
        self._profile = _started_profile() if request["profile"] and GPU else None
        wait_for_device()
        self._began = time.perf_counter()


def peak_bytes() -> int:
    """Returns the most memory that was in use: of tensors on the GPU, else of the process."""
    if GPU:
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _started_profile() -> Any:
    from torch.profiler import ProfilerActivity, profile

    started = profile(activities=[ProfilerActivity.CUDA])
    started.start()
    return started


def _kernel_seconds(profile: Any) -> float:
    """Returns how long at least one kernel ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if "CUDA" in str(event.device_type)
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6
