"""The proof of what a run was trained on: its stream, recomputed from the files, against its journal.

It reads the files and what `attempt.survey` found; it knows neither cluster nor points' contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from orchestrator.attempt import Survey
from orchestrator.data.spec import DataSpec
from orchestrator.data.stream import open_samples
from orchestrator.data.tally import Tallies, Tally, tally_files
from orchestrator.plan.encoders import EncoderChoice, encoder_of_epoch
from orchestrator.plan.step_names import find_steps, step_name
from orchestrator.records import Cursor, SourceCursor, StepRange, StepRecord, TokenChunk, decode
from orchestrator.resume.points import parse_point_name

_ALL = "that epoch {} holds every document of the files, for these steps are a part of it: it "


def audit_history(spec: DataSpec, seen: Survey, steps: str | None = None) -> dict[str, Any]:
    """The document of `audit --json`, without the number of attempts.

    It shows that each step trained exactly the samples that the plan gives it, each once, in order, and that
    every epoch that was read from its first to its last document held what the files hold, read in their own
    order (DATA.md rules 26 and 27). `steps` (`A:B`) limits it to these; it is read from the nearest cursor in
    the journal on. Audits of adjacent steps join, because a cursor that is passed is compared.
    `not_shown` says what this audit leaves open.
    """
    records = seen.lineage.records
    wanted = range(len(records)) if steps is None else find_steps(records, steps)
    walk = _Walk(spec, seen, records)
    first = None
    if steps is None and seen.lineage.gaps:
        first = {"step": None, "reason": seen.lineage.gaps[0]}
    first = first or next(walk.differences(wanted), None)
    not_shown: list[str] = []
    if first is None:
        first, not_shown = walk.epochs()
    before = records[wanted.start - 1] if wanted.start else None
    last = records[wanted.stop - 1] if wanted else None
    newest = parse_point_name(seen.points[-1]) if seen.points else None
    return {
        "exactly_once": first is None,
        "samples": (last.consumed_samples if last else 0) - (before.consumed_samples if before else 0),
        "tokens": (last.consumed_tokens if last else 0) - (before.consumed_tokens if before else 0),
        "steps": len(wanted),
        "first_step": step_name(records, wanted.start) if wanted else None,
        "last_step": step_name(records, wanted.stop - 1) if wanted else None,
        "final_up_to_step": newest.step if newest else None,
        "first_difference": first,
        "not_shown": not_shown,
    }


class _Walk:
    """The stream beside the records, from the nearest known cursor on."""

    def __init__(self, spec: DataSpec, seen: Survey, records: tuple[StepRecord, ...]) -> None:
        # the last attempt's num_epochs may be smaller than an earlier one's; every step says itself how much
        # it took
        self._spec = replace(spec, settings=replace(spec.settings, num_epochs=None))
        self._records = records
        self._seq_lens = {start.id: start.seq_len for start in seen.journal.generations}
        self._known = _known_cursors(seen, records)
        self._tallies = Tallies()
        self._begin = self._cursor = Cursor()
        self._chunks: Iterator[TokenChunk] = iter(())

    def differences(self, wanted: range) -> Iterator[dict[str, Any]]:
        """The wanted steps whose digest or counts are not those of the stream, or that end at another cursor
        than the journal's.
        """
        first = max((i for i in self._known if i <= wanted.start), default=0)
        self._begin = self._cursor = self._known.get(first, Cursor())
        packer = self._spec.packer(self._cursor)
        self._chunks = self._tallies.watch(self._spec.chunks(self._cursor))
        for index in range(first, wanted.stop):
            record = self._records[index]
            step = StepRange(
                first_sample=self._cursor.consumed_samples,
                num_samples=record.consumed_samples - self._cursor.consumed_samples,
                num_tokens=record.consumed_tokens - self._cursor.consumed_tokens,
                seq_len=self._seq_lens[record.attempt, record.generation],
            )
            while (drawn := packer.draw(step)) is None:
                chunk = next(self._chunks, None)
                if chunk is None:
                    packer.finish()
                else:
                    packer.feed(chunk)
            self._cursor = drawn.cursor
            found, journal = f"{drawn.digest:016x}", self._known.get(index + 1, drawn.cursor)
            reason = None
            if index < wanted.start:
                continue
            if drawn.step != step:
                reason = f"the step took {step}, the stream gives {drawn.step}"
            elif found != record.digest:
                reason = (
                    f"trained samples have digest {record.digest}, the stream gives {found} (or a file was "
                    "changed in place since, with its size, its time or its ends kept)"
                )
            elif not journal.agrees_with(drawn.cursor):
                reason = f"the journal's cursor behind it is {journal}, the stream's {drawn.cursor}"
            if reason is not None:
                yield {"step": step_name(self._records, index), "reason": reason}

    def epochs(self) -> tuple[dict[str, Any] | None, list[str]]:
        """The first epoch that held a record twice, or other documents than the files, and what of the epochs
        is not shown.
        """
        plan = self._spec.plans[0]
        begin, end = (c.sources.get(plan.source, SourceCursor()) for c in (self._begin, self._cursor))
        not_shown: list[str] = []
        for epoch in range(begin.epoch, end.epoch + (0 if _at_border(end) else 1)):
            twice = self._tallies.twice(epoch)
            if twice is not None:
                reason = (
                    f"epoch {epoch} held the record at {twice[1]} of {plan.manifest.path(twice[0])} twice"
                )
                return {"step": None, "reason": reason}, not_shown
            if epoch == begin.epoch and not _at_border(begin):
                not_shown.append(_ALL.format(epoch) + "begins before them; no record came twice")
            elif not self._is_read_to_its_end(epoch, end):
                not_shown.append(_ALL.format(epoch) + "goes on after them; no record came twice")
            else:
                encoder = encoder_of_epoch(self._spec.encoders, plan.source, epoch)
                found, files = (
                    self._tallies.of(epoch),
                    self._files(encoder or self._spec.encoders[-1].encoder),
                )
                if encoder is None:
                    not_shown.append(f"epoch {epoch}'s tokens against the files: two encoders made them")
                    found, files = found.without_tokens(), files.without_tokens()
                if found != files:
                    reason = f"epoch {epoch} held {found}; the files hold {files}"
                    return {"step": None, "reason": reason}, not_shown
        return None, not_shown

    def _is_read_to_its_end(self, epoch: int, end: SourceCursor) -> bool:
        """Also at the end of the data, where the last token is no input any more; what follows it (empty
        documents) is read then.
        """
        if epoch < end.epoch:
            return True
        until_here = replace(self._spec.settings, num_epochs=epoch + 1)
        if next(open_samples(replace(self._spec, settings=until_here), self._cursor, 1), None) is not None:
            return False
        while next(self._chunks).epoch == epoch:
            pass
        return True

    @cache  # noqa: B019  one walk, and at most as many entries as a run had encoders
    def _files(self, encoder: EncoderChoice) -> Tally:
        return tally_files(self._spec, encoder)


def _known_cursors(seen: Survey, records: tuple[StepRecord, ...]) -> Mapping[int, Cursor]:
    """The journal's cursors by how many of the records lie before them."""
    behind = {(r.attempt, r.consumed_samples, r.consumed_tokens): i + 1 for i, r in enumerate(records)}
    known = {}
    for event in seen.journal.events:
        if "cursor" in event.fields:
            cursor = decode(Cursor, event.fields["cursor"])
            at = behind.get((event.attempt, cursor.consumed_samples, cursor.consumed_tokens))
            if at is not None:
                known[at] = cursor
    return known


def _at_border(cursor: SourceCursor) -> bool:
    return (cursor.block, cursor.window, cursor.record, cursor.piece, cursor.token) == (0, 0, 0, 0, 0)
