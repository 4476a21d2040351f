"""Callbacks of the tests. They write what they are called with into the run's folder."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from orchestrator.callbacks import Callback, GroupChanged, PointCommitted, Started
from orchestrator.records.evals import EvalRecord
from orchestrator.records.steps import StepRecord

FILE = "called.jsonl"


class Recorder(Callback):
    """Writes each call as a line: the method and what identifies its argument."""

    _folder = Path()

    def _note(self, method: str, value: Any) -> None:
        with (self._folder / FILE).open("a") as file:
            file.write(json.dumps([os.getpid(), method, value]) + "\n")

    @override
    def on_start(self, start: Started) -> None:
        self._folder = Path(start.run_uri)
        self._note("on_start", [start.attempt, start.step, start.consumed_tokens])

    @override
    def on_group_change(self, group: GroupChanged) -> None:
        self._note("on_group_change", [group.generation, group.world_size, group.step])

    @override
    def on_step(self, record: StepRecord) -> None:
        self._note("on_step", [record.generation, record.step])

    @override
    def on_eval(self, record: EvalRecord) -> None:
        self._note("on_eval", [record.part, record.step, record.loss])

    @override
    def on_point(self, point: PointCommitted) -> None:
        self._note("on_point", point.name)

    @override
    def on_end(self, reason: str) -> None:
        self._note("on_end", reason)


class Hostile:
    """Changes everything that it can reach, and fails."""

    def on_step(self, record: StepRecord) -> None:
        torch.manual_seed(record.step)
        torch.set_num_threads(4)
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor):
                thing.zero_()
        raise ValueError(f"step {record.step}")


class Exits:
    """Ends its process."""

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            os._exit(3)


class Misspelled:
    def on_stpe(self, record: StepRecord) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...


class Hookless:
    def step(self, record: StepRecord) -> None: ...


class NeedsArguments:
    def __init__(self, path: str) -> None: ...

    def on_step(self, record: StepRecord) -> None: ...
