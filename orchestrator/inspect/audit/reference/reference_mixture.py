"""Recomputes for an audit the order of a mixture's samples, and which list of files each epoch read.

Data rule 20 in fractions, and rules 23 and 24 by comparing each claim with the one before. It shares no code
with `planning.mixture`, `data.packing.stream` and `planning.resume.source_lists`, which decide these. So a
fault there cannot hide here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from orchestrator.planning.resume.source_lists import SourceLists
from orchestrator.records.cursor import MixtureShare, SourceCursor

_NONE = MixtureShare(weight=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRule:
    """The mixture rule of an attempt's configuration; limits are in epochs, None: endless."""

    weights: dict[str, Fraction]
    limits: dict[str, int | None]
    stops: bool  # before the first sample that its source cannot fill
    by_samples: bool


def rule_of(config: Mapping[str, Any], num_bytes: Mapping[str, int]) -> MixtureRule:
    """The rule of a flat configuration in the journal's form. `num_bytes` are the weights if none are
    given.
    """
    sources: Sequence[Mapping[str, Any]] = config["data.sources"]
    weights = {each["name"]: each.get("weight") for each in sources}
    by_bytes = None in weights.values()
    on_end = config.get("data.on_end") or ("drop" if by_bytes else "stop")
    common = None if on_end == "repeat" and len(sources) > 1 else config.get("data.num_epochs")
    return MixtureRule(
        weights={
            name: Fraction(max(1, num_bytes[name])) if by_bytes else Fraction(str(weight))
            for name, weight in weights.items()
        },
        limits={each["name"]: each.get("max_epochs") or common for each in sources},
        stops=on_end == "stop" and len(sources) > 1,
        by_samples=config.get("data.weight_by") == "samples",
    )


class ReferenceMixture:
    """The source of each sample, from the counts of a cursor on."""

    def __init__(self, rule: MixtureRule, before: Mapping[str, MixtureShare]) -> None:
        self._rule = rule
        scale = lcm(*(weight.denominator for weight in rule.weights.values()))
        whole = {name: int(weight * scale) for name, weight in rule.weights.items()}
        common = gcd(*whole.values())
        self._whole = {name: weight // common for name, weight in whole.items()}
        had = {name: share.weight for name, share in before.items() if share.weight > 0}
        self._ended: dict[str, int] = {}
        back = False  # an ended source is active again
        for name, share in before.items():
            if share.weight and share.ended:
                if name in whole and rule.limits[name] == share.ended:
                    self._ended[name] = share.ended
                else:
                    back = True
        going_on = had == self._whole and not back
        self._counts = {
            name: before[name].count if going_on else 0 for name in whole if name not in self._ended
        }
        self._drawn = {name: [share.samples, share.tokens] for name, share in before.items()}
        for name in whole:
            self._drawn.setdefault(name, [0, 0])

    @property
    def shares(self) -> dict[str, MixtureShare]:
        """The shares, in a cursor's form."""
        return {
            name: replace(
                _NONE,
                weight=self._whole.get(name, 0),
                count=self._counts.get(name, 0),
                ended=self._ended.get(name, 0),
                samples=samples,
                tokens=tokens,
            )
            for name, (samples, tokens) in self._drawn.items()
        }

    def turns(
        self, num_samples: int, num_tokens: int | None, seq_len: int, left: Callable[[str, int], int]
    ) -> list[tuple[str, int]] | str:
        """(source, positions) of the next samples of a step that counted so many positions (None: of samples
        as long as the data make them); a text if the rule gives no such step. `left(source, n)` is how many
        of the next n positions the source has, those that this step took included.
        """
        found, taken = list[tuple[str, int]](), dict.fromkeys(self._counts, 0)
        while len(found) < num_samples:
            wanted = seq_len if num_tokens is None else min(seq_len, num_tokens - sum(taken.values()))
            name = self._next(seq_len)
            if name is None or wanted <= 0:
                return f"the mixture gives {len(found)} samples of its {num_samples}"
            there = left(name, taken[name] + wanted) - taken[name]
            if there < wanted and self._rule.stops:
                return (
                    f"source {name}, whose turn it was, has {there} positions left for a sample of {wanted}"
                )
            if there <= 0:
                limit = self._rule.limits[name]
                assert limit is not None, "an endless source has more"
                del self._counts[name]
                self._ended[name] = limit
                self._counts = dict.fromkeys(self._counts, 0)
                continue
            length = min(there, wanted)
            found.append((name, length))
            taken[name] = taken.get(name, 0) + length
            self._counts[name] += 1 if self._rule.by_samples else length
            self._drawn[name][0] += 1
            self._drawn[name][1] += length
        if num_tokens is not None and sum(taken.values()) != num_tokens:
            return f"its {num_samples} samples hold {sum(taken.values())} tokens, it counted {num_tokens}"
        return found

    def _next(self, seq_len: int) -> str | None:
        length = 1 if self._rule.by_samples else seq_len
        total, weights = sum(self._counts.values()), self._rule.weights
        whole = sum((weights[name] for name in self._counts), Fraction(0))
        due = [
            (Fraction(count + length) / weights[name], name)
            for name, count in self._counts.items()
            if count < weights[name] / whole * (total + length)
        ]
        return min(due)[1] if due else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedLists:
    """What the claim of an attempt says: its sources, and those of which it says that they were to begin
    anew. `launch` is the claim's.
    """

    attempt: int
    launch: str
    sources: tuple[SourceLists, ...]
    restarted: frozenset[str]

    def of(self, name: str) -> SourceLists | None:
        """The lists of one source."""
        return next((source for source in self.sources if source.name == name), None)

    @property
    def active(self) -> list[str]:
        """The sources that the attempt reads."""
        return [source.name for source in self.sources if source.active]


def began(source: SourceLists) -> int:
    """The first epoch of a source's newest start."""
    start = source.spans[-1].start
    return min(span.begin for span in source.spans if span.start == start)


def begins_anew(source: SourceLists, at: SourceCursor) -> int | None:
    """The epoch with which a source in a list of an earlier start continues; None: it is in no such list."""
    start = next((span.start for span in source.spans[::-1] if span.begin <= at.epoch), source.spans[0].start)
    return None if start == source.spans[-1].start else began(source)


def _list_of(source: SourceLists, epoch: int) -> tuple[int, int | None]:
    """(start, epoch for which it was refreshed) of the list that an epoch reads."""
    span = max((span for span in source.spans if span.begin <= epoch), key=lambda span: span.begin)
    return span.start, epoch if span.refresh and epoch > span.begin else span.refreshed


def lists_fault(before: ClaimedLists, now: ClaimedLists, at: Mapping[str, SourceCursor]) -> str | None:
    """Why the lists of an attempt cannot follow those of the attempt before it on the history, which left the
    sources `at` these places; None if they can.
    """
    numbers = [source.number for source in now.sources]
    if len(set(numbers)) < len(numbers):
        return f"attempt {now.attempt} has two sources of one number: {sorted(numbers)}"
    for old in before.sources:
        new = now.of(old.name)
        if new is None or new.number != old.number:
            found = "none" if new is None else str(new.number)
            return (
                f"source {old.name} had number {old.number} in attempt {before.attempt} and has {found} in "
                f"attempt {now.attempt}: a source's number never changes, for digests hold it"
            )
        place = at.get(old.name, SourceCursor())
        if place == SourceCursor():
            continue  # nothing of it was trained
        for epoch in range(place.epoch + 1):
            was, is_now = _list_of(old, epoch), _list_of(new, epoch)
            if was != is_now:
                return (
                    f"epoch {epoch} of source {old.name} read list {was} (start, refreshed for) in attempt "
                    f"{before.attempt}, attempt {now.attempt} says {is_now}: an epoch that has begun keeps "
                    "its list"
                )
        if new.spans[-1].start == old.spans[-1].start:
            continue
        if before.launch == now.launch:
            return (
                f"source {old.name} begins anew in attempt {now.attempt}, which is of the same launch as "
                f"attempt {before.attempt}: a launch restarts once"
            )
        if old.name not in now.restarted:
            return f"source {old.name} begins anew in attempt {now.attempt}, whose claim asks for no restart"
        if began(new) <= place.epoch:
            return (
                f"source {old.name} begins anew in attempt {now.attempt} with epoch {began(new)}, and stands "
                f"in epoch {place.epoch} already"
            )
    return None
