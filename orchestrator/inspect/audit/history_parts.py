"""The history of a run for an audit, and its parts: stretches between cursors of the journal.

Each part can be walked by another process. It reads no data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.coordinator.attempt.survey import Survey
from orchestrator.data.spec import DataSpec
from orchestrator.history.claims.lineage import SkipAt, skips_of
from orchestrator.inspect.audit.reference.reference_mixture import ClaimedLists, MixtureRule, began, rule_of
from orchestrator.json_form import decode
from orchestrator.planning.resume.source_lists import FIRST, ListSpan, SourceLists, start_of
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPart:
    """Consecutive steps, and the cursor at which they begin. Steps, cursors and skips are named by how many
    records of the whole history lie before them. Pickles.
    """

    first: int  # the first step that is walked
    wanted: range  # steps that are compared; they end the part
    records: tuple[StepRecord, ...]  # from `first` on
    begin: Cursor
    known: Mapping[int, Cursor]  # the journal's cursors
    skips: tuple[SkipAt, ...]
    seq_lens: Mapping[tuple[int, int], int]  # by attempt and generation
    rules: Mapping[int, MixtureRule]  # by attempt
    lists: Mapping[int, ClaimedLists]  # by attempt
    num_bytes: Mapping[tuple[str, int], int]  # of a source's list by its start
    accepting: frozenset[int]  # attempts with permission to continue with changed files
    before: int | None = None  # the attempt of the step before `first`
    is_last: bool = True

    def record(self, index: int) -> StepRecord:
        """The step with this number."""
        return self.records[index - self.first]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The whole history."""

    records: tuple[StepRecord, ...]
    known: Mapping[int, Cursor]
    skips: tuple[SkipAt, ...]
    seq_lens: Mapping[tuple[int, int], int]
    rules: Mapping[int, MixtureRule]
    lists: Mapping[int, ClaimedLists]
    num_bytes: Mapping[tuple[str, int], int]
    accepting: frozenset[int]

    def part(self, wanted: range, is_last: bool = True) -> HistoryPart:
        """The steps `wanted`, from the nearest cursor before them on."""
        first = max((i for i in self.known if i <= wanted.start), default=0)
        return HistoryPart(
            first=first,
            wanted=wanted,
            records=self.records[first : wanted.stop],
            begin=self.known.get(first, Cursor()),
            known={i: cursor for i, cursor in self.known.items() if first < i <= wanted.stop},
            skips=tuple(at for at in self.skips if first <= at.index < wanted.stop),
            seq_lens=self.seq_lens,
            rules=self.rules,
            lists=self.lists,
            num_bytes=self.num_bytes,
            accepting=self.accepting,
            before=self.records[first - 1].attempt if first else None,
            is_last=is_last,
        )

    def parts(self, wanted: range, least_tokens: int) -> list[HistoryPart]:
        """The steps `wanted` in parts of at least so many tokens (the last may have fewer). Parts are cut at
        cursors from which a begun document can be read from its beginning.
        """
        borders, at = [wanted.start], wanted.start
        inside = (i for i in sorted(self.known) if wanted.start < i < wanted.stop)
        for index in (i for i in inside if _whole(self.known[i])):
            if self.tokens(range(at, index)) >= least_tokens:
                borders.append(index)
                at = index
        stops = [*borders[1:], wanted.stop]
        last = len(stops) - 1
        return [
            self.part(range(start, stop), number == last)
            for number, (start, stop) in enumerate(zip(borders, stops, strict=True))
        ]

    def tokens(self, steps: range) -> int:
        """The positions of these steps."""
        if not steps:
            return 0
        origin = self.known[0].consumed_tokens if 0 in self.known else 0
        before = self.records[steps.start - 1].consumed_tokens if steps.start else origin
        return self.records[steps.stop - 1].consumed_tokens - before


def _whole(cursor: Cursor) -> bool:
    """Whether the cursor has the digest of a begun document's earlier pieces (older versions' have not)."""
    return all(at.piece == 0 or at.earlier_digest for at in cursor.sources.values())


def history_of(spec: DataSpec, seen: Survey) -> History:
    """The history of a run, from its journal and claims."""
    records, lists = seen.lineage.records, _claimed_lists(spec, seen)
    num_bytes = {
        (name, start_of(version)): plan.manifest.num_bytes
        for name, plans in spec.lists.items()
        for version, plan in reversed(plans.items())  # a start's own list comes first, and counts
    }
    return History(
        records=records,
        known=_known_cursors(seen, records),
        skips=skips_of(seen.lineage),
        seq_lens={start.id: start.seq_len for start in seen.journal.generations},
        rules={
            event.attempt: rule_at(event.fields["config"], lists[event.attempt], num_bytes)
            for event in seen.journal.events
            if event.kind == "attempt" and event.attempt in lists
        },
        lists=lists,
        num_bytes=num_bytes,
        accepting=accepting(seen),
    )


def rule_at(
    config: Mapping[str, Any], lists: ClaimedLists, num_bytes: Mapping[tuple[str, int], int]
) -> MixtureRule:
    """The mixture rule of a configuration for the sources of these lists. Limits of epochs count from a
    source's newest start; bytes are those of the list that it began with.
    """
    sources = [source for source in lists.sources if source.active]
    rule = rule_of(config, {each.name: num_bytes[each.name, each.spans[-1].start] for each in sources})
    first = {each.name: began(each) for each in sources}
    limits = {name: None if limit is None else limit + first[name] for name, limit in rule.limits.items()}
    return replace(rule, limits=limits)


def _claimed_lists(spec: DataSpec, seen: Survey) -> dict[int, ClaimedLists]:
    """The lists in the claims of the history. Older claims have none: theirs are those of the first start."""
    launches = {
        event.attempt: event.fields["launch"] for event in seen.journal.events if event.kind == "attempt"
    }
    first = tuple(
        SourceLists(name=each.name, number=each.number, spans=(ListSpan(begin=0),))
        for each in spec.sources
        if FIRST in spec.lists.get(each.name, ())
    )
    return {
        claim.attempt: ClaimedLists(
            attempt=claim.attempt,
            launch=launches.get(claim.attempt, ""),
            sources=claim.sources or first,
            restarted=frozenset(claim.restart.paths if claim.restart is not None else ()),
        )
        for claim in seen.lineage.attempts
    }


def accepting(seen: Survey) -> frozenset[int]:
    """The attempts with permission to continue with changed files, even if no files changed."""
    return frozenset(
        event.attempt
        for event in seen.journal.events
        if event.kind == "attempt" and event.fields["config"].get("resume.accept_changed")
    )


def _known_cursors(seen: Survey, records: tuple[StepRecord, ...]) -> Mapping[int, Cursor]:
    """The journal's cursors, each by the number of records before it."""
    after = {(r.attempt, r.consumed_samples, r.consumed_tokens): i + 1 for i, r in enumerate(records)}
    known = {0: seen.fork.origin.cursor} if seen.fork is not None and seen.fork.origin is not None else {}
    for event in seen.journal.events:
        if "cursor" in event.fields:
            cursor = decode(Cursor, event.fields["cursor"])
            at = after.get((event.attempt, cursor.consumed_samples, cursor.consumed_tokens))
            if at is not None:
                known[at] = cursor
    return known
