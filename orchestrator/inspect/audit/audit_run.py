"""Executes an audit: divides the history into parts for one or several processes, and joins the results.

The result does not depend on the number of processes: the parts join at cursors of the journal, each document
is counted by the part in which it ends, and of several differences the first one counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from typing_extensions import override

from orchestrator.coordinator.attempt.survey import Survey
from orchestrator.data.spec import DataSpec
from orchestrator.history.claims.lineage import SkipAt
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.step_names import step_name
from orchestrator.inspect.audit.audit_processes import (
    AuditProcesses,
    Found,
    InThisProcess,
    StepsFound,
    StepsTask,
    files_tasks,
    num_cores,
)
from orchestrator.inspect.audit.epoch_checksum import EpochChecksum, EpochFiles, EpochTotals
from orchestrator.inspect.audit.history_parts import History
from orchestrator.inspect.audit.reference.reference_encoding import EncodingDifference, reference_report
from orchestrator.inspect.audit.source_walk import SourceStretch, Stretches, at_border
from orchestrator.inspect.audit.stream_recheck import StepDifference
from orchestrator.planning.encoders import EncoderChoice, encoder_of_epoch
from orchestrator.records.cursor import SourceCursor

EncodedFiles = dict[EpochFiles, EpochChecksum]
JoinedSources = dict[tuple[str, int], "JoinedSource"]
"""By source and start, as `Stretches`."""

_COMPLETENESS = "completeness of epoch {} (the audited steps {} inside it); no duplicates found"
_RESTARTED = "completeness of epoch {} (its source was restarted inside it); no duplicates found"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSource:
    """All stretches of a source, one after the other."""

    begin: SourceCursor
    end: SourceCursor
    before_wanted: SourceCursor  # the begin of the first requested step
    totals: EpochTotals = field(default_factory=EpochTotals)
    ends_data: bool = False
    fault: str | None = None
    differences: tuple[EncodingDifference, ...] = ()
    restarted: bool = False

    @classmethod
    def of(cls, stretches: Sequence[SourceStretch], restarted: bool = False) -> JoinedSource:
        """Joins the parts of a history, in order. The last one that took any of the source ends it.
        `restarted`: a new start of the source follows.
        """
        walked = [stretch for stretch in stretches if stretch.walked]
        end, totals = stretches[-1].end, EpochTotals()
        for stretch in walked:
            totals.join(stretch.up_to_end)
        if walked:
            totals.join(walked[-1].at_end)
        return cls(
            begin=stretches[0].begin,
            end=end,
            before_wanted=stretches[0].before_wanted,
            totals=totals,
            ends_data=bool(walked) and walked[-1].ends_data,
            fault=next((stretch.fault for stretch in walked if stretch.fault), None),
            differences=tuple(one for stretch in walked for one in stretch.differences),
            restarted=restarted,
        )

    @property
    def epochs(self) -> range:
        """The epochs of which any was taken. The requested steps may begin where the source was started anew:
        then none was of the start before.
        """
        if self.restarted and self.before_wanted == self.end:
            return range(0)
        return range(self.begin.epoch, self.end.epoch + (0 if at_border(self.end) else 1))

    def left_open(self, epoch: int) -> str | None:
        """Why an epoch cannot be compared with the files; None if it was taken from its begin to its end."""
        if epoch == self.begin.epoch and not at_border(self.begin):
            return _COMPLETENESS.format(epoch, "begin")
        if epoch == self.end.epoch and not self.ends_data:
            return _RESTARTED.format(epoch) if self.restarted else _COMPLETENESS.format(epoch, "end")
        return None


def joined(stretches: Sequence[Stretches]) -> JoinedSources:
    """Joins the parts of a history, in order."""
    keys = list(dict.fromkeys(key for part in stretches for key in part))
    newest = dict(keys)  # the last start of each source
    return {
        key: JoinedSource.of(
            [part[key] for part in stretches if key in part], restarted=key[1] != newest[key[0]]
        )
        for key in keys
    }


def files_needed(spec: DataSpec, sources: JoinedSources) -> list[EpochFiles]:
    """The epochs whose files must be summed up, and the encoder for each."""
    return list(
        dict.fromkeys(
            _files(spec, name, epoch)
            for (name, _), source in sources.items()
            for epoch in source.epochs
            if source.left_open(epoch) is None
        )
    )


def _files(spec: DataSpec, source: str, epoch: int) -> EpochFiles:
    """Names the first epoch that has the same list, if transforms do not draw anew in each."""
    lists, first = spec.lists_of(source), epoch
    if not spec.settings.transforms.get(source):
        first = next(each for each in range(epoch + 1) if lists.version(each) == lists.version(epoch))
    return source, first, _encoder(spec, source, epoch)[0]


def _encoder(spec: DataSpec, source: str, epoch: int) -> tuple[EncoderChoice, bool]:
    """The encoder of an epoch, and whether it made all of it."""
    encoder = encoder_of_epoch(spec.encoders, source, epoch)
    return encoder or spec.encoders[-1].encoder, encoder is not None


def epochs_verdict(
    spec: DataSpec, sources: JoinedSources, files: EncodedFiles
) -> tuple[str | None, list[str]]:
    """The reason if an epoch held a record twice, or other documents than the files; and what of the epochs
    is not verified.
    """
    not_shown: list[str] = []
    several = len({name for name, _ in sources}) > 1
    for (name, _), source in sources.items():
        of = f"source {name}: " if several else ""
        reason, texts = _source_verdict(spec, name, source, files)
        if reason is not None:
            return of + reason, not_shown
        not_shown += [of + text for text in texts]
    return None, not_shown


def _source_verdict(
    spec: DataSpec, name: str, source: JoinedSource, files: EncodedFiles
) -> tuple[str | None, list[str]]:
    not_shown: list[str] = []
    if source.fault:
        return source.fault, not_shown
    for epoch in source.epochs:
        twice = source.totals.records[epoch].twice()
        if twice is not None:
            path = spec.plan_of(name, epoch).manifest.path(twice[0])
            return f"epoch {epoch} held the record at {twice[1]} of {path} twice", not_shown
        if left_open := source.left_open(epoch):
            not_shown.append(left_open)
        else:
            _, alone = _encoder(spec, name, epoch)
            found, held = source.totals.sums[epoch], files[_files(spec, name, epoch)]
            if not alone:
                not_shown.append(f"tokens of epoch {epoch} (two encoders made them)")
                found, held = found.without_tokens(), held.without_tokens()
            if found != held:
                return f"epoch {epoch} held {found}; the files hold {held}", not_shown
        without_target, too_long = source.totals.unpacked[epoch]
        counts = (without_target, "no target"), (too_long, "more tokens than a sample (skipped)")
        not_shown += [
            f"documents of epoch {epoch} in no sample: {num:,} with {why}" for num, why in counts if num
        ]
    return None, not_shown


class AuditProgress(Protocol):
    """Receives progress in the audit's own thread."""

    def begin(self, what: str, unit: str, total: int) -> None:
        """The next work has `total` units (tokens, bytes)."""

    def advance(self, num: int) -> None:
        """`num` more units are done."""


class NoAuditProgress(AuditProgress):
    """Ignores progress."""

    @override
    def begin(self, what: str, unit: str, total: int) -> None:
        ...

    @override
    def advance(self, num: int) -> None:
        ...


# A process takes seconds to start: at least this many tokens are worth one.
TOKENS_OF_A_PROCESS = 1 << 26
# Opening the stream at a cursor reads a window again: a part has at least this many tokens, or stored bytes
# of files.
PART_TOKENS, PART_BYTES = 1 << 24, 1 << 26
_PARTS_OF_A_PROCESS = 4  # so that no process waits long for the last one


@dataclass(frozen=True, kw_only=True, slots=True)
class HowToAudit:
    """How to execute an audit.

    The number of processes (None: as many as the machine has cores, and the steps are worth), and the
    receiver of its progress. `by_reference`: `tokenizers` encodes each document, too. `apart`: never in this
    process, even with a single one, because it runs the user's code.
    """

    processes: int | None = None
    apart: bool = False
    by_reference: bool = False
    progress: AuditProgress = field(default_factory=NoAuditProgress)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsCompared:
    """The results of all parts, in order; without a difference, what was taken of each source."""

    difference: StepDifference | None
    passed: tuple[SkipAt, ...]
    sources: JoinedSources

    def skipped_documents(self) -> dict[str, int]:
        """The number of bad documents of each source that the wanted steps passed."""
        found = dict.fromkeys((name for name, _ in self.sources), 0)
        for (name, _), source in self.sources.items():
            found[name] += source.end.bad_documents - source.before_wanted.bad_documents
        return found

    def left_out_documents(self) -> dict[str, dict[str, int]]:
        """For each source, the documents that the wanted steps passed without training them: those that
        transforms dropped, and those that are held out.
        """
        found = {name: {"filtered": 0, "held_out": 0} for name, _ in self.sources}
        for (name, _), source in self.sources.items():
            end, begin = source.end, source.before_wanted
            found[name]["filtered"] += end.filtered_documents - begin.filtered_documents
            found[name]["held_out"] += end.held_out_documents - begin.held_out_documents
        return found

    def reference(self, spec: DataSpec, seen: Survey) -> dict[str, Any]:
        """The results of `tokenizers` for the documents."""
        journalled = [e.fields["text"] for e in seen.journal.events if e.kind == EventKind.ENCODERS_DIFFER]
        ends = {name: source.end for (name, _), source in self.sources.items()}
        differences = [one for source in self.sources.values() for one in source.differences]
        return reference_report(spec, differences, ends, journalled)


NOTHING_COMPARED = StepsCompared(difference=None, passed=(), sources={})


class AuditRun:
    """An audit of the steps `wanted`, as a context: its processes end with it."""

    def __init__(self, spec: DataSpec, history: History, wanted: range, how: HowToAudit) -> None:
        self._spec, self._history, self._wanted, self._how = spec, history, wanted, how
        self._num = self._num_processes()
        self._held = ExitStack()
        self._processes: AuditProcesses | InThisProcess = InThisProcess(spec)
        self._compared: dict[int, int] = {}  # steps of each part that agree

    def _num_processes(self) -> int:
        if self._how.processes is not None:
            return self._how.processes
        tokens = self._history.tokens(self._wanted)
        return max(1, min(num_cores(), tokens // TOKENS_OF_A_PROCESS))

    def __enter__(self) -> AuditRun:
        if self._num > 1 or self._how.apart:
            self._processes = self._held.enter_context(AuditProcesses(self._spec, self._num))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def compare_steps(self) -> StepsCompared:
        """The first half: compares each step's samples with the journal.

        Ctrl-C is raised again with a text about what was compared until then.
        """
        tokens = self._history.tokens(self._wanted)
        least = max(PART_TOKENS, tokens // (_PARTS_OF_A_PROCESS * self._num)) if self._num > 1 else tokens + 1
        parts = self._history.parts(self._wanted, least)
        tasks = [StepsTask(part=part, by_reference=self._how.by_reference) for part in parts]
        self._compared = dict.fromkeys(range(len(tasks)), 0)
        try:
            results = self._run(tasks, "comparing steps", "tokens", tokens)
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(self._told(tasks)) from interrupt
        found = [each for each in results if isinstance(each, StepsFound)]
        difference, passed = found[-1].difference, tuple(at for each in found for at in each.passed)
        sources = joined([each.stretches for each in found]) if difference is None else {}
        return StepsCompared(difference=difference, passed=passed, sources=sources)

    def compare_epochs(self, found: StepsCompared) -> tuple[str | None, list[str]]:
        """The second half: compares epochs with the files.

        Returns why an epoch held a record twice, or other documents than the files (None: none did), and what
        of the epochs is not verified.
        """
        needed = files_needed(self._spec, found.sources)
        tasks = files_tasks(self._spec, needed, PART_BYTES if self._num > 1 else 1 << 62)
        sums: EncodedFiles = dict.fromkeys(needed, EpochChecksum())
        if tasks:
            total = sum(self._spec.plan_of(name, at).manifest.num_bytes for name, at, _ in needed)
            try:
                results = self._run(tasks, "reading the files", "bytes", total)
            except KeyboardInterrupt as interrupt:
                raise KeyboardInterrupt(
                    f"interrupted: all {len(self._wanted):,} steps are those of the stream, but the epochs "
                    "were not compared with the files, so nothing is claimed of them"
                ) from interrupt
            for task, result in zip(tasks, results, strict=True):
                assert isinstance(result, EpochChecksum), "files make sums"
                at = task.source, task.epoch, task.encoder
                sums[at] = sums[at] + result
        return epochs_verdict(self._spec, found.sources, sums)

    def _run(self, tasks: list[Any], what: str, unit: str, total: int) -> list[Found]:
        progress = self._how.progress
        progress.begin(what, unit, total)

        def advanced(task: int, times: int, num: int) -> None:
            self._compared[task] = self._compared.get(task, 0) + times
            progress.advance(num)

        return self._processes.run(tasks, advanced)

    def _told(self, tasks: list[StepsTask]) -> str:
        """The text about an interrupted comparison."""
        steps = sum(self._in_order(tasks))
        wanted, records = self._wanted, self._history.records
        if not steps:
            return "interrupted before the first step was compared, so nothing is claimed"
        last = step_name(records, wanted.start + steps - 1)
        rest = ""
        if steps < len(wanted):
            rest = f"; --steps {step_name(records, wanted.start + steps)}: continues"
        return (
            f"interrupted: {steps:,} of {len(wanted):,} steps, up to step {last}, are those of the stream; "
            f"nothing is claimed of the others, nor of epochs{rest}"
        )

    def _in_order(self, tasks: list[StepsTask]) -> Iterator[int]:
        """The number of steps that agree, from the first on without a gap."""
        for number, task in enumerate(tasks):
            yield self._compared[number]
            if self._compared[number] < len(task.part.wanted):
                return
