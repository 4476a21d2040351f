"""The proof of what a run was trained on: its stream, recomputed from the files, against its journal.

It reads the files and what `coordinator.attempt.survey` found; it knows neither cluster nor points' contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from orchestrator.coordinator.attempt import Survey
from orchestrator.data.sources.fragments import SourcePlan
from orchestrator.data.sources.listing import same_files
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.history.skips import SkipAt, skips_of
from orchestrator.history.step_names import find_steps, step_name
from orchestrator.monitor.epoch_checksum import EpochChecksum, checksum_files
from orchestrator.monitor.reference_mixture import ReferenceMixture, rule_of
from orchestrator.monitor.reference_packing import NO_TARGET, ReferencePacker, Samples
from orchestrator.monitor.reference_windows import ReferenceWindows
from orchestrator.monitor.trained import TrainedTokens
from orchestrator.monitor.trained_documents import TrainedDocuments
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.digest import batch_digest
from orchestrator.planning.encoders import EncoderChoice, encoder_of_epoch
from orchestrator.records import Cursor, Int32Array, SourceCursor, StateKey, StepRecord, decode
from orchestrator.resume.points import parse_point_name

_FORKED = "the steps up to {0:,}: they are the history of {1}, of which this run is a fork; audit them there"
_SKIPPED = (
    "that every token was trained: {0.samples:,} samples ({0.tokens:,} tokens) from sample {1:,} on were "
    "skipped on purpose after {2} by attempt {3} ({0.request}); epochs and documents count them as read"
)
_RUN_TOKENS = 1 << 18  # skipped samples are drawn by so many tokens at a time
_COMPLETENESS = "completeness of epoch {} (the audited steps {} inside it); no duplicates found"


def audit_history(
    spec: DataSpec, seen: Survey, steps: str | None = None, committed: Iterable[str] = ()
) -> dict[str, Any]:
    """The document of `audit --json`, without the number of attempts.

    It shows that each step trained exactly the samples that the plan gives it, each once, in order: their
    digests are recomputed by a packer of the audit's own (`monitor.reference_packing`). And it shows that the
    tokens of these samples are, for every epoch that was read from its first to its last document, those that
    the files hold, read in their own order (data rules 26 and 27). `steps` (`A:B`) limits it to these; it is
    read from the nearest cursor in the journal on. Audits of adjacent steps join, because a cursor that is
    passed is compared. `not_shown` says what this audit leaves open; where there is nothing to compare,
    `exactly_once` is None. `all_final`: no step that was audited may still be replaced. `repeated_files` are
    those of which the run's frozen list has more than one path (older versions made such lists): each token
    of the stream was trained once, their documents were not.
    `skipped_documents` counts, by source, the bad documents that the audited steps passed; None where there
    is a difference, or nothing to compare.
    `skipped_samples` are those that an attempt was told to leave out before one of the audited steps
    (`resume.data: skip`): they are drawn as the claim says, end where it says, and are compared with no
    record. What an epoch is shown to have held they belong to; `not_shown` says that they were not trained.

    Raises `DataIdentityError` for a step that differs in an attempt that was told to go on with changed files
    (data rule 27).

    `committed` are the names of the run's committed points, listed before `seen` was read: no point is
    committed before the records up to its step are durable, so these must be there.
    """
    records = seen.lineage.records
    points = [key for key in map(parse_point_name, committed) if key is not None]
    missing, reason = _missing_records(seen, points)
    all_steps: list[StepRecord | StateKey] = [*records, *missing]
    asked = range(len(all_steps)) if steps is None else find_steps(all_steps, steps)
    wanted = range(min(asked.start, len(records)), min(asked.stop, len(records)))
    walk = Walk(spec, seen, records, wanted.start)
    first = None
    if steps is None and seen.lineage.gaps:
        first = {"step": None, "reason": seen.lineage.gaps[0]}
    first = first or next(walk.differences(wanted), None)
    if first is None and asked.stop > len(records):
        first = {"step": None, "reason": reason}
    not_shown: list[str] = []
    if first is None:
        first, not_shown = walk.epochs()
    if first is None and not wanted:
        not_shown.append("anything: nothing is trained yet, so there is nothing to compare")
    if first is None:
        not_shown += [
            _SKIPPED.format(at.skip, at.skip.begin.drawn_samples, at.parent.point_name, at.attempt)
            for at in walk.passed
        ]
    repeated = 0
    for plan in spec.plans:
        num, text = _repeated_files(plan.manifest)
        repeated += num
        not_shown += [text] if num and wanted else []
    origin = seen.fork.origin if seen.fork is not None else None
    before = records[wanted.start - 1] if wanted and wanted.start else origin and origin.cursor
    not_shown += [_FORKED.format(origin.step, origin.forked_from.run)] if origin and wanted else []
    last = records[wanted.stop - 1] if wanted else None
    final = [key for key in sorted(points) if seen.lineage.on_lineage(key)]
    return {
        "exactly_once": first is None if wanted or first else None,
        "samples": (last.consumed_samples if last else 0) - (before.consumed_samples if before else 0),
        "tokens": (last.consumed_tokens if last else 0) - (before.consumed_tokens if before else 0),
        "steps": len(wanted),
        "first_step": step_name(records, wanted.start) if wanted else None,
        "last_step": step_name(records, wanted.stop - 1) if wanted else None,
        "final_up_to_step": final[-1].step if final else None,
        "all_final": bool(last and final and last.key <= final[-1]),
        "first_difference": first,
        "not_shown": not_shown,
        "repeated_files": repeated,
        "skipped_documents": walk.skipped() if wanted and first is None else None,
        "skipped_samples": [_skip_row(at) for at in walk.passed],
    }


def _skip_row(at: SkipAt) -> dict[str, Any]:
    return {
        "attempt": at.attempt,
        "point": at.parent.point_name,
        "setting": str(at.skip.request),
        "first_index": at.skip.begin.drawn_samples,
        "samples": at.skip.samples,
        "tokens": at.skip.tokens,
    }


def accepted_text(seen: Survey) -> str:
    """What of the history can be audited although an attempt was told to go on with changed files, as the end
    of a sentence; empty if none that trained was.
    """
    records, accepted = seen.lineage.records, _accepting(seen)
    index = next((i for i, record in enumerate(records) if record.attempt in accepted), None)
    if index is None:
        return ""
    before = (
        f"what was trained before it can be audited by --steps :{step_name(records, index - 1)}, with the "
        "files as they were when the run was started"
        if index
        else "nothing was trained before it"
    )
    return (
        f". Attempt {records[index].attempt} was told to go on with changed files (resume.accept_changed); "
        + before
    )


def _accepting(seen: Survey) -> frozenset[int]:
    """The attempts that were told to go on with changed files, whether or not there were any."""
    return frozenset(
        event.attempt
        for event in seen.journal.events
        if event.kind == "attempt" and event.fields["config"].get("resume.accept_changed")
    )


def _repeated_files(manifest: Manifest) -> tuple[int, str]:
    """How many files the frozen list has by more than one path, and what to say of them."""
    others = same_files(manifest.base, [row.path for row in manifest.files])
    if not others:
        return 0, ""
    name = min(others)
    return len(set(others.values())), (
        f"that each document was trained once: {len(others)} paths of source {manifest.source} lead to files "
        f"that the run has under another path, too, e.g. {name} and {others[name]}; its stream holds their "
        "documents once for each path, and it is the tokens of this stream that are shown"
    )


def _missing_records(seen: Survey, points: Iterable[StateKey]) -> tuple[list[StateKey], str]:
    """The steps behind the last record that must have been trained, because a point behind them is committed,
    and what to say of them. Gaps before the last record are the lineage's to find.
    """
    newest = max((key for key in points if _is_behind(seen, key)), default=None)
    if newest is None:
        return [], ""
    advice = (
        f"a point is committed only behind the records up to its step, so a part of journal/"
        f"a{newest.attempt:04d} is lost, and what was trained there cannot be compared; restore it"
    )
    head = seen.lineage.segments[-1] if seen.lineage.segments else None
    if head is None or head.start.id != (newest.attempt, newest.generation):
        return [newest], (
            f"{newest.point_name} was committed at step {newest.step}, but the journal does not know "
            f"generation {newest.generation} of attempt {newest.attempt}: {advice}"
        )
    missing = [replace(newest, step=step) for step in range(head.stop_step, newest.step + 1)]
    return missing, (
        f"{newest.point_name} was committed at step {newest.step}, but the journal's last record before it "
        f"is that of step {head.stop_step - 1}: the records of {len(missing)} "
        f"step{'' if len(missing) == 1 else 's'} are missing; {advice}"
    )


def _is_behind(seen: Survey, point: StateKey) -> bool:
    """Whether the point belongs to the history and lies behind its last record; also one of the newest
    attempt whose generation the journal does not know.
    """
    head = seen.lineage.segments[-1] if seen.lineage.segments else None
    if head is not None and head.open and head.start.id == (point.attempt, point.generation):
        return point.step >= head.stop_step
    known = {start.id for start in seen.journal.generations}
    return point.attempt == seen.lineage.attempt and (point.attempt, point.generation) not in known


class _SourceWalk:
    """One source's stream from a cursor on, and the samples of it that were trained."""

    def __init__(
        self,
        spec: DataSpec,
        plan: SourcePlan,
        cursor: Cursor,
        packer: type[ReferencePacker],
        windows: type[ReferenceWindows],
    ) -> None:
        self.plan, self._spec = plan, spec
        self.begin = cursor.sources.get(plan.source, SourceCursor())
        chunks = spec.endless().chunks(cursor, plan.source)
        self.trained: TrainedTokens | TrainedDocuments
        self.packer: ReferencePacker | ReferenceWindows
        if spec.settings.pack_mode == "concat":
            self.trained = TrainedTokens(self.begin.earlier_tokens + self.begin.token)
            self.packer = packer(self.trained.watch(chunks), self.begin)
        else:
            self.trained = TrainedDocuments(self.begin.packs, spec.settings.long_document)
            self.packer = windows(self.trained.watch(chunks), self.begin, spec.settings)
        self.walked = False
        self.skipped_before = 0

    def take(self, num_tokens: int, seq_len: int) -> tuple[Samples, str | None]:
        """Its next samples, and what is wrong with them in themselves."""
        self.walked = True
        found = self.packer.samples(num_tokens, seq_len)
        return found, self.trained.add(found, num_tokens)

    def place(self) -> SourceCursor:
        """Where the next input token lies."""
        return self.packer.cursor() if self.walked else self.begin

    def epochs(self) -> tuple[str | None, list[str]]:
        """Why an epoch held a record twice, or other documents than the files, and what of the epochs is not
        verified.
        """
        begin, end = self.begin, self.place()
        ends_data = self.walked and not _at_border(end) and self.packer.ends_epoch()
        not_shown: list[str] = []
        if reason := self.trained.end():
            return reason, not_shown
        checksums = self.trained.checksums
        for epoch in range(begin.epoch, end.epoch + (0 if _at_border(end) else 1)):
            twice = checksums.twice(epoch)
            if twice is not None:
                path = self.plan.manifest.path(twice[0])
                return f"epoch {epoch} held the record at {twice[1]} of {path} twice", not_shown
            if epoch == begin.epoch and not _at_border(begin):
                not_shown.append(_COMPLETENESS.format(epoch, "begin"))
            elif epoch == end.epoch and not ends_data:
                not_shown.append(_COMPLETENESS.format(epoch, "end"))
            else:
                encoder = encoder_of_epoch(self._spec.encoders, self.plan.source, epoch)
                found, files = checksums.of(epoch), self._files(encoder or self._spec.encoders[-1].encoder)
                if encoder is None:
                    not_shown.append(f"tokens of epoch {epoch} (two encoders made them)")
                    found, files = found.without_tokens(), files.without_tokens()
                if found != files:
                    return f"epoch {epoch} held {found}; the files hold {files}", not_shown
            not_shown += self._unpacked(epoch)
        return None, not_shown

    def _unpacked(self, epoch: int) -> list[str]:
        """The documents that no sample held, by the rules of packing."""
        if isinstance(self.trained, TrainedTokens):
            return []
        without_target, too_long = self.trained.unpacked[epoch]
        counts = (without_target, "no target"), (too_long, "more tokens than a sample (skipped)")
        return [f"documents of epoch {epoch} in no sample: {num:,} with {why}" for num, why in counts if num]

    @cache  # noqa: B019  one walk, and at most as many entries as a run had encoders
    def _files(self, encoder: EncoderChoice) -> EpochChecksum:
        return checksum_files(self._spec, encoder, self.plan.source)


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedStep:
    """A step as the stream gives it."""

    first_index: int  # of its first sample
    turns: list[tuple[str, int]]  # (source, positions) of each sample
    samples: Samples


class Walk:
    """The stream beside the records, from the nearest known cursor on."""

    def __init__(
        self,
        spec: DataSpec,
        seen: Survey,
        records: tuple[StepRecord, ...],
        first: int,
        packer: type[ReferencePacker] = ReferencePacker,
        windows: type[ReferenceWindows] = ReferenceWindows,
    ) -> None:
        """`first`: the first record that is asked for. `packer` makes the samples, `windows` those of whole
        documents.
        """
        self._spec, self._records = spec, records
        self._seq_lens = {start.id: start.seq_len for start in seen.journal.generations}
        self._known = _known_cursors(seen, records)
        self._first = max((i for i in self._known if i <= first), default=0)
        self._begin = self._known.get(self._first, Cursor())
        # a history says itself how far it went: the last attempt's num_epochs may be smaller than an earlier
        # one's
        self._sources = {
            plan.source: _SourceWalk(spec, plan, self._begin, packer, windows) for plan in spec.plans
        }
        self._numbers = {plan.source: number for number, plan in enumerate(spec.plans)}
        self._targets = self._begin.target_tokens
        self._skips = [at for at in skips_of(seen.lineage) if at.index >= self._first]
        self._skipped = (self._begin.skipped_samples, self._begin.skipped_tokens)
        self.passed: list[SkipAt] = []  # skips right before, or between, the wanted steps
        num_bytes = {plan.source: plan.manifest.num_bytes for plan in spec.plans}
        self._rules = {
            event.attempt: rule_of(event.fields["config"], num_bytes)
            for event in seen.journal.events
            if event.kind == "attempt" and len(spec.plans) > 1
        }
        self.newest: WalkedStep | None = None
        self._mixture: ReferenceMixture | None = None
        self._mixed_in = 0  # the attempt whose rule the mixture follows
        self._walked = False
        self._accepting, self._accepted_text = _accepting(seen), accepted_text(seen)

    def differences(self, wanted: range) -> Iterator[dict[str, Any]]:
        """The wanted steps whose digest or counts are not those of the stream, whose samples are none that
        can be trained, or that end at another cursor than the journal's.
        """
        samples, tokens = self._begin.consumed_samples, self._begin.consumed_tokens
        for index in range(self._first, wanted.stop):
            record, self.newest = self._records[index], None
            num_samples, num_tokens = record.consumed_samples - samples, record.consumed_tokens - tokens
            if index == wanted.start:
                for source in self._sources.values():
                    source.skipped_before = source.place().bad_documents
            for at in (at for at in self._skips if at.index == index):
                if index >= wanted.start:
                    self.passed.append(at)
                if reason := self._pass(at, samples, tokens):
                    self._require_not_accepted(index, at.attempt, reason)
                    yield {"step": step_name(self._records, index), "reason": reason}
                    return
            turns = self._turns(record, num_samples, num_tokens)
            if isinstance(turns, str):
                yield {"step": step_name(self._records, index), "reason": turns}
                return  # what follows it stands at no place of the stream
            found, wrong = self._samples(turns, self._seq_lens[record.attempt, record.generation])
            self.newest = WalkedStep(first_index=samples + self._skipped[0], turns=turns, samples=found[1])
            self._walked = True
            differs = self._difference(index, samples, num_tokens, found)
            reason = differs or wrong
            samples, tokens = record.consumed_samples, record.consumed_tokens
            if reason is not None and index >= wanted.start:
                if differs is not None:
                    self._require_not_accepted(index, record.attempt, differs)
                yield {"step": step_name(self._records, index), "reason": reason}

    def _require_not_accepted(self, index: int, attempt: int, differs: str) -> None:
        if attempt in self._accepting:
            name = step_name(self._records, index)
            raise DataIdentityError(f"nothing can be shown of step {name}: {differs}" + self._accepted_text)

    def _pass(self, at: SkipAt, samples: int, tokens: int) -> str | None:
        """Draws what a claim says to have skipped; how it differs from what the stream holds there."""
        skip, drawn, done = at.skip, 0, 0
        seq_len = skip.seq_len
        said = f"attempt {at.attempt} says in its claim to have skipped {skip.samples:,} samples"
        if len(self._sources) > 1:
            before = self._begin.mixture if self._mixture is None else self._mixture.shares
            num_bytes = {name: source.plan.manifest.num_bytes for name, source in self._sources.items()}
            rule = rule_of(skip.settings, num_bytes)
            self._mixture, self._mixed_in = ReferenceMixture(rule, before), 0

            def left(source: str, num: int) -> int:
                return self._sources[source].packer.left(num, rule.limits[source], seq_len)

        while done < skip.samples:
            num = min(max(1, _RUN_TOKENS // seq_len), skip.samples - done)
            if self._mixture is not None and len(self._sources) > 1:
                turns = self._mixture.turns(num, None, seq_len, left)
                if isinstance(turns, str):
                    return f"{said}: {turns}"
            else:
                turns = [(next(iter(self._sources)), seq_len)] * num
            _, wrong = self._samples(turns, seq_len)
            self._walked = True
            if wrong is not None:
                return f"{said}: {wrong}"
            done += num
            drawn += sum(length for _, length in turns)
        before_it = (skip.begin.skipped_samples, skip.begin.skipped_tokens)
        if before_it != self._skipped:
            return f"{said} after {before_it}, but the history had skipped {self._skipped} (samples, tokens)"
        self._skipped = (self._skipped[0] + skip.samples, self._skipped[1] + drawn)
        cursor = self._cursor(samples, tokens, skip.end)
        if skip.end.agrees_with(cursor):
            return None
        return f"{said}, and to go on at {skip.end}; the stream is at {cursor}"

    def _cursor(self, samples: int, tokens: int, known: Cursor) -> Cursor:
        """Where the stream is, with what `known` knows the place of."""
        return Cursor(
            consumed_samples=samples,
            consumed_tokens=tokens,
            target_tokens=self._targets,
            skipped_samples=self._skipped[0],
            skipped_tokens=self._skipped[1],
            sources={name: walk.place() for name, walk in self._sources.items() if name in known.sources},
            mixture=self._mixture.shares if self._mixture is not None else {},
        )

    def _turns(self, record: StepRecord, num_samples: int, num_tokens: int) -> list[tuple[str, int]] | str:
        """(source, positions) of each of the step's samples, or why there are no such samples."""
        seq_len = self._seq_lens[record.attempt, record.generation]
        if len(self._sources) > 1:
            if num_tokens < 1 or not 0 < num_samples <= num_tokens:
                return f"the step took {num_samples} samples of {seq_len} for {num_tokens} tokens"
            rule = self._rules[record.attempt]
            if self._mixture is None or self._mixed_in != record.attempt:
                before = self._begin.mixture if self._mixture is None else self._mixture.shares
                self._mixture, self._mixed_in = ReferenceMixture(rule, before), record.attempt

            def left(source: str, num: int) -> int:
                return self._sources[source].packer.left(num, rule.limits[source], seq_len)

            return self._mixture.turns(num_samples, num_tokens, seq_len, left)
        if num_tokens < 1 or num_samples != ceil_div(num_tokens, seq_len):
            return f"the step took {num_samples} samples of {seq_len} for {num_tokens} tokens"
        (source,) = self._sources
        whole, rest = divmod(num_tokens, seq_len)
        return [(source, seq_len)] * whole + ([(source, rest)] if rest else [])

    def _samples(
        self, turns: list[tuple[str, int]], seq_len: int
    ) -> tuple[tuple[Int32Array, Samples], str | None]:
        """The source's number of each sample, the samples, and what is wrong with them in themselves."""
        numbers = np.array([self._numbers[source] for source, _ in turns], np.int32)
        parts, wrong = list[tuple[Any, Samples]](), None
        for source, walk in self._sources.items():
            mine = numbers == self._numbers[source]
            if mine.any():
                found, reason = walk.take(sum(length for name, length in turns if name == source), seq_len)
                parts.append((mine, found))
                wrong = wrong or reason
        if len(parts) == 1:
            return (numbers, parts[0][1]), wrong
        shape = (len(turns), seq_len)
        tables: dict[str, Any] = {
            name: np.empty(shape, np.bool_ if name == "masked" else np.int32)
            for name in ("input_ids", "labels", "document_ids", "masked")
        }
        for mine, found in parts:
            for name, table in tables.items():
                table[mine] = getattr(found, name)
        return (numbers, Samples(**tables)), wrong

    def _difference(
        self, index: int, first_sample: int, num_tokens: int, drawn: tuple[Int32Array, Samples]
    ) -> str | None:
        """How the record differs from the samples that the stream gives."""
        record, known, (numbers, found) = self._records[index], self._known.get(index + 1), drawn
        arrays = found.input_ids, found.labels_of_loss, found.document_ids
        if self._spec.settings.pack_mode != "concat":  # where padding counts as positions
            num_tokens = int((found.labels != NO_TARGET).sum())
        self._targets += num_tokens - int(found.masked.sum())
        first_index = first_sample + self._skipped[0]
        digest = f"{batch_digest(first_index, numbers, *arrays):016x}"
        if digest != record.digest:
            return (
                f"trained samples have digest {record.digest}, the stream gives {digest} (or a file was "
                "changed in place since, with its size, its time or its ends kept)"
            )
        if known is None:
            return None
        cursor = self._cursor(record.consumed_samples, record.consumed_tokens, known)
        if known.agrees_with(cursor):
            return None
        return f"the journal's cursor after it is {known}, the stream's {cursor}"

    def packer(self, source: str) -> ReferencePacker | ReferenceWindows:
        """What makes the samples of a source."""
        return self._sources[source].packer

    def skipped(self) -> dict[str, int]:
        """How many bad documents of each source the wanted steps passed."""
        return {
            name: walk.place().bad_documents - walk.skipped_before for name, walk in self._sources.items()
        }

    def epochs(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The first epoch that held a record twice, or other documents than the files, and what of the epochs
        is not verified.
        """
        not_shown: list[str] = []
        for name, walk in self._sources.items():
            of = f"source {name}: " if len(self._sources) > 1 else ""
            reason, texts = walk.epochs()
            if reason is not None:
                return {"step": None, "reason": of + reason}, not_shown
            not_shown += [of + text for text in texts]
        return None, not_shown


def _known_cursors(seen: Survey, records: tuple[StepRecord, ...]) -> Mapping[int, Cursor]:
    """The journal's cursors by how many of the records lie before them."""
    after = {(r.attempt, r.consumed_samples, r.consumed_tokens): i + 1 for i, r in enumerate(records)}
    known = {0: seen.fork.origin.cursor} if seen.fork is not None and seen.fork.origin is not None else {}
    for event in seen.journal.events:
        if "cursor" in event.fields:
            cursor = decode(Cursor, event.fields["cursor"])
            at = after.get((event.attempt, cursor.consumed_samples, cursor.consumed_tokens))
            if at is not None:
                known[at] = cursor
    return known


def _at_border(cursor: SourceCursor) -> bool:
    place = (cursor.block, cursor.window, cursor.record, cursor.piece, cursor.token, cursor.packs)
    return not any(place)
