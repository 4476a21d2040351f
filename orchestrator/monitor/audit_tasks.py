"""The parts that an audit's work is divided into, each a pure function of the run's data: whoever carries
them out, in whatever order and process, what they find is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.history.sentences import count
from orchestrator.history.skips import SkipAt
from orchestrator.monitor.epoch_checksum import EpochChecksum, EpochFiles
from orchestrator.monitor.file_checksum import checksum_files
from orchestrator.monitor.history_parts import HistoryPart
from orchestrator.monitor.source_walk import Stretches
from orchestrator.monitor.walk import Difference, PartWalk
from orchestrator.planning.encoders import EncoderChoice

Done = Callable[[int], None]
"""Notified of what was just done: a step, with its positions; or a file, with its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsTask:
    """To compare these steps with the stream. `by_reference`: `tokenizers` encodes each document, too."""

    part: HistoryPart
    by_reference: bool = False

    def __str__(self) -> str:
        return f"compared {count(len(self.part.wanted), 'step')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsFound:
    """`difference`: the first one; without one, what the steps took of each source."""

    difference: Difference | None
    passed: tuple[SkipAt, ...]
    stretches: Stretches


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesTask:
    """To sum up the documents of these files of the list that an epoch of a source reads, encoded so."""

    source: str
    epoch: int  # transforms draw anew in each, and it may have a list of its own
    encoder: EncoderChoice
    files: range

    def __str__(self) -> str:
        return f"read {count(len(self.files), 'file')} of source {self.source}"


Task = StepsTask | FilesTask
Found = StepsFound | EpochChecksum


def carry_out(spec: DataSpec, task: Task, done: Done) -> Found:
    """What the task asks for. Raises as the stream and its files do."""
    if isinstance(task, FilesTask):
        return checksum_files(spec, task.encoder, task.source, task.epoch, task.files, done)
    walk = PartWalk(spec, task.part, by_reference=task.by_reference)
    difference = next(walk.differences(done), None)
    stretches = walk.stretches() if difference is None else {}
    return StepsFound(difference=difference, passed=tuple(walk.passed), stretches=stretches)


def ends_all(found: Found) -> bool:
    """Whether nothing that comes after it in the audit matters any more."""
    return isinstance(found, StepsFound) and found.difference is not None


def files_tasks(spec: DataSpec, wanted: Sequence[EpochFiles], least_bytes: int) -> list[FilesTask]:
    """All files of these epochs' lists, each with its encoder, in runs of at least so many bytes (as they are
    stored) where there are as many.
    """
    tasks = []
    for source, epoch, encoder in wanted:
        begin = held = 0
        sizes = spec.plan_of(source, epoch).manifest.files.sizes.tolist()
        for number, size in enumerate(sizes):
            held += size
            if held >= least_bytes or number == len(sizes) - 1:
                files = range(begin, number + 1)
                tasks.append(FilesTask(source=source, epoch=epoch, encoder=encoder, files=files))
                begin, held = number + 1, 0
    return tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Progressed:
    """So many steps or files more of the task at hand, and their positions or bytes."""

    times: int
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The task raised this; `error` is None where it is none of ours, and `text` says it."""

    error: OrchestratorError | None
    text: str


Message = Progressed | Failed | Found
"""What a process that carries out a task says of it; what it found comes last."""
