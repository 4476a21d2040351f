"""Compares a part of a history with the stream, from its cursor on.

Each step's samples are made anew and compared with what the journal says was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from orchestrator.data.spec import DataSpec
from orchestrator.history.claims.lineage import SkipAt
from orchestrator.inspect.audit.history_parts import HistoryPart, rule_at
from orchestrator.inspect.audit.reference.reference_mixture import (
    ClaimedLists,
    ReferenceMixture,
    begins_anew,
    lists_fault,
)
from orchestrator.inspect.audit.reference.reference_packing import NO_TARGET, ReferencePacker, Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.source_walk import SourceWalk, Stretches
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.digest import batch_digest
from orchestrator.records.cursor import Cursor, MixtureShare, SourceCursor
from orchestrator.records.steps import StepRecord
from orchestrator.records.tokens import Int32Array

_COUNTED = ("documents", "special_texts")  # counts in a source's cursor that do not begin anew
_RUN_TOKENS = 1 << 18  # skipped samples are drawn by so many tokens at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedStep:
    """A step made from the stream."""

    first_index: int  # index of its first sample
    turns: list[tuple[str, int]]  # (source, positions) of each sample
    samples: Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """Where a step differs from the stream; `index`: so many records of the history lie before it.
    `accepted`: files may have changed under its attempt, which was configured to accept that.
    """

    index: int
    reason: str
    accepted: bool = False


class PartWalk:
    """Compares a part of the history with the stream."""

    def __init__(
        self,
        spec: DataSpec,
        part: HistoryPart,
        packer: type[ReferencePacker] = ReferencePacker,
        windows: type[ReferenceWindows] = ReferenceWindows,
        by_reference: bool = False,
    ) -> None:
        """`packer` makes the samples, `windows` those of whole documents; `by_reference`: `tokenizers`
        encodes each document, too.
        """
        self._spec, self._part, self._begin = spec, part, part.begin
        self._open = partial(SourceWalk, spec, packer=packer, windows=windows, by_reference=by_reference)
        # a history has its own end: the last attempt's num_epochs may be smaller than an earlier one's
        self._sources = {
            each.name: self._open(each.name, part.begin.sources.get(each.name, SourceCursor()))
            for each in spec.sources
        }
        self._numbers = {each.name: each.number for each in spec.sources}
        self._lists = part.lists.get(part.before) if part.before is not None else None
        self._closed: Stretches = {}  # of starts that another one has followed
        self._targets = part.begin.target_tokens
        self._skipped = (part.begin.skipped_samples, part.begin.skipped_tokens)
        self.passed: list[SkipAt] = []  # skips right before, or between, the wanted steps
        self.newest: WalkedStep | None = None
        self._mixture: ReferenceMixture | None = None
        self._mixed_in = 0  # the attempt whose rule the mixture follows

    def differences(self, compared: Callable[[int], None] = lambda tokens: None) -> Iterator[StepDifference]:
        """Yields the wanted steps that differ from the stream: in digest, counts or end cursor, or with
        samples that cannot be trained.

        `compared` is called after each other wanted step, with its positions.
        """
        part = self._part
        samples, tokens = self._begin.consumed_samples, self._begin.consumed_tokens
        for index in range(part.first, part.wanted.stop):
            record, self.newest = part.record(index), None
            num_samples, num_tokens = record.consumed_samples - samples, record.consumed_tokens - tokens
            if index == part.wanted.start:
                for source in self._sources.values():
                    source.before_wanted = source.place()
            if reason := self._follow(part.lists[record.attempt], index):
                yield StepDifference(index=index, reason=reason)
                return
            for at in (at for at in part.skips if at.index == index):
                if index >= part.wanted.start:
                    self.passed.append(at)
                if reason := self._pass(at, samples, tokens):
                    yield StepDifference(index=index, reason=reason, accepted=at.attempt in part.accepting)
                    return
            turns = self._turns(record, num_samples, num_tokens)
            if isinstance(turns, str):
                yield StepDifference(index=index, reason=turns)
                return  # what follows it has no place in the stream
            found, wrong = self._samples(turns, part.seq_lens[record.attempt, record.generation])
            self.newest = WalkedStep(first_index=samples + self._skipped[0], turns=turns, samples=found[1])
            differs = self._difference(index, samples, num_tokens, found)
            samples, tokens = record.consumed_samples, record.consumed_tokens
            if index < part.wanted.start:
                continue
            if differs is not None:
                yield StepDifference(index=index, reason=differs, accepted=record.attempt in part.accepting)
            elif wrong is not None:
                yield StepDifference(index=index, reason=wrong)
            else:
                compared(num_tokens)

    def _follow(self, lists: ClaimedLists, index: int) -> str | None:
        """Continues with the lists of the next step's attempt. Returns why they cannot follow those
        before.
        """
        before, self._lists = self._lists, lists
        if before is lists:
            return None
        places = {name: walk.place() for name, walk in self._sources.items()}
        if before is not None and (fault := lists_fault(before, lists, places)):
            return fault
        for source in lists.sources:
            at, walk = places[source.name], self._sources[source.name]
            first = begins_anew(source, at) if source.active and at != SourceCursor() else None
            if first is None:
                continue
            if index <= self._part.wanted.start:
                walk.before_wanted = at
            self._closed[source.name, self._start(source.name, at)] = walk.stretch(may_be_last=True)
            counts = {name: getattr(at, name) for name in SourceCursor.__slots__ if name.endswith(_COUNTED)}
            anew = SourceCursor(epoch=first, **counts)
            self._sources[source.name] = self._open(source.name, anew)
            self._sources[source.name].before_wanted = anew
        return None

    def _start(self, source: str, at: SourceCursor) -> int:
        return self._spec.lists_of(source).span(at.epoch).start

    def _pass(self, at: SkipAt, samples: int, tokens: int) -> str | None:
        """Draws what a claim says was skipped. Returns how it differs from the stream."""
        skip, drawn, done = at.skip, 0, 0
        seq_len = skip.seq_len
        said = f"attempt {at.attempt} says in its claim to have skipped {skip.samples:,} samples"
        mixed, lists = bool(skip.settings), self._part.lists[at.attempt]
        if mixed:
            before = self._shares(samples, tokens)
            rule = rule_at(skip.settings, lists, self._part.num_bytes)
            self._mixture, self._mixed_in = ReferenceMixture(rule, before), 0

            def left(source: str, num: int) -> int:
                return self._sources[source].packer.left(num, rule.limits[source], seq_len)

        while done < skip.samples:
            num = min(max(1, _RUN_TOKENS // seq_len), skip.samples - done)
            if self._mixture is not None and mixed:
                turns = self._mixture.turns(num, None, seq_len, left)
                if isinstance(turns, str):
                    return f"{said}: {turns}"
            else:
                turns = [(lists.active[0], seq_len)] * num
            _, wrong = self._samples(turns, seq_len)
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
        """The stream's position, with the source positions that `known` has."""
        return Cursor(
            consumed_samples=samples,
            consumed_tokens=tokens,
            target_tokens=self._targets,
            skipped_samples=self._skipped[0],
            skipped_tokens=self._skipped[1],
            sources={name: walk.place() for name, walk in self._sources.items() if name in known.sources},
            mixture=self._mixture.shares if self._mixture is not None else {},
        )

    def _others(self, active: Collection[str]) -> bool:
        """Whether a source was trained that is not read any more."""
        gone = (walk for name, walk in self._sources.items() if name not in active)
        return any(walk.place() != SourceCursor() for walk in gone)

    def _shares(self, samples: int, tokens: int) -> Mapping[str, MixtureShare]:
        """The mixture's counts so far. While there was one source, all came from it."""
        if self._mixture is not None:
            return self._mixture.shares
        drawn = samples + self._skipped[0], tokens + self._skipped[1]
        only = [name for name, walk in self._sources.items() if walk.place() != SourceCursor()]
        if self._begin.mixture or len(only) != 1:
            return self._begin.mixture
        return {only[0]: MixtureShare(weight=1, samples=drawn[0], tokens=drawn[1])}

    def _turns(self, record: StepRecord, num_samples: int, num_tokens: int) -> list[tuple[str, int]] | str:
        """(source, positions) of each of the step's samples, or why there are no such samples."""
        seq_len = self._part.seq_lens[record.attempt, record.generation]
        active = self._part.lists[record.attempt].active
        if len(active) > 1 or self._mixture is not None or self._begin.mixture or self._others(active):
            if num_tokens < 1 or not 0 < num_samples <= num_tokens:
                return f"the step took {num_samples} samples of {seq_len} for {num_tokens} tokens"
            rule = self._part.rules[record.attempt]
            if self._mixture is None or self._mixed_in != record.attempt:
                before = self._shares(
                    record.consumed_samples - num_samples, record.consumed_tokens - num_tokens
                )
                self._mixture, self._mixed_in = ReferenceMixture(rule, before), record.attempt

            def left(source: str, num: int) -> int:
                return self._sources[source].packer.left(num, rule.limits[source], seq_len)

            return self._mixture.turns(num_samples, num_tokens, seq_len, left)
        if num_tokens < 1 or num_samples != ceil_div(num_tokens, seq_len):
            return f"the step took {num_samples} samples of {seq_len} for {num_tokens} tokens"
        (source,) = active
        whole, rest = divmod(num_tokens, seq_len)
        return [(source, seq_len)] * whole + ([(source, rest)] if rest else [])

    def _samples(
        self, turns: list[tuple[str, int]], seq_len: int
    ) -> tuple[tuple[Int32Array, Samples], str | None]:
        """The source's number of each sample, the samples, and a fault within them, if any."""
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
        """How the record differs from the samples of the stream; None if it does not."""
        record, known, (numbers, found) = self._part.record(index), self._part.known.get(index + 1), drawn
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
        """The packer of a source's samples."""
        return self._sources[source].packer

    def stretches(self) -> Stretches:
        """The amount that the part took of each source, after its last step."""
        may_be_last = self._part.is_last or len(self._sources) > 1
        last = {
            (name, self._start(name, walk.place())): walk.stretch(may_be_last)
            for name, walk in self._sources.items()
        }
        return self._closed | last
