"""The tasks of an audit, each a pure function of the run's data.

The results do not depend on the order and the process in which they are executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError
from orchestrator.history.claims.lineage import SkipAt
from orchestrator.history.sentences import count
from orchestrator.inspect.audit.checksums.epoch_checksum import EpochChecksum, EpochFiles
from orchestrator.inspect.audit.checksums.file_checksum import checksum_files
from orchestrator.inspect.audit.history_parts import HistoryPart
from orchestrator.inspect.audit.source_walk import Stretches
from orchestrator.inspect.audit.stream_recheck import Difference, PartWalk
from orchestrator.planning.encoders import EncoderChoice

Done = Callable[[int], None]
"""Called after each step, with its positions, or file, with its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsTask:
    """Compares these steps with the stream. `by_reference`: `tokenizers` encodes each document, too."""

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
    """Sums up the documents of these files of the list that an epoch of a source reads, with this encoder."""

    source: str
    epoch: int  # transforms draw anew in each, and it may have a list of its own
    encoder: EncoderChoice
    files: range

    def __str__(self) -> str:
        return f"read {count(len(self.files), 'file')} of source {self.source}"


Task = StepsTask | FilesTask
Found = StepsFound | EpochChecksum


def carry_out(spec: DataSpec, task: Task, done: Done) -> Found:
    """Executes the task. Raises as the stream and its files do."""
    if isinstance(task, FilesTask):
        return checksum_files(spec, task.encoder, task.source, task.epoch, task.files, done)
    walk = PartWalk(spec, task.part, by_reference=task.by_reference)
    difference = next(walk.differences(done), None)
    stretches = walk.stretches() if difference is None else {}
    return StepsFound(difference=difference, passed=tuple(walk.passed), stretches=stretches)


def ends_all(found: Found) -> bool:
    """Whether nothing after it in the audit matters any more."""
    return isinstance(found, StepsFound) and found.difference is not None


def files_tasks(spec: DataSpec, wanted: Sequence[EpochFiles], least_bytes: int) -> list[FilesTask]:
    """Tasks for all files of these epochs' lists, each with its encoder, in runs of at least `least_bytes`
    stored bytes if possible.
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
    """Additional steps or files of the current task, and their positions or bytes."""

    times: int
    num: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The task raised this. `error` is None if it is none of our classes; `text` is its text."""

    error: OrchestratorError | None
    text: str


Message = Progressed | Failed | Found
"""A message of a process that executes a task; the result comes last."""
