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
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_reader import Journal, read_journal
from orchestrator.history.journal.line_format import EventKind
from orchestrator.records.steps import EvalRecord, StepRecord
from orchestrator.storage.files import Storage

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


class Reader(Recorder):
    """Writes whether what it is called with is in the run's storage by then."""

    def _read(self) -> Journal:
        return read_journal(Storage(str(self._folder)))

    @override
    def on_step(self, record: StepRecord) -> None:
        self._note("on_step", [record.step, record.key in {each.key for each in self._read().records}])

    @override
    def on_eval(self, record: EvalRecord) -> None:
        known = [e.fields for e in self._read().events if e.kind == EventKind.EVALUATED]
        is_there = (record.part, record.step) in {(each["part"], each["step"]) for each in known}
        self._note("on_eval", [record.part, record.step, is_there])

    @override
    def on_point(self, point: PointCommitted) -> None:
        names = RunStore(Storage(str(self._folder))).point_names()
        self._note("on_point", [point.name, point.name in names])


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
