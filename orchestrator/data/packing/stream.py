"""The run's stream: the packers of its sources and the mixture, drawn in steps from one cursor on.

The source of a sample depends only on the cursor and on the content of the sources. It does not depend on the
order in which chunks arrive, or on how samples are divided into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from orchestrator.data.common.settings import MixtureSettings, StreamSettings
from orchestrator.data.packing.packed_window import PathOf
from orchestrator.data.packing.packer import Packer, RunCursors
from orchestrator.data.packing.step_samples import PackedRun, Run, StepSamples
from orchestrator.data.packing.window_packer import PackCursors, WindowPacker
from orchestrator.errors import FeedError
from orchestrator.planning.batches import ceil_div
from orchestrator.planning.mixture import Mixture
from orchestrator.records.cursor import Cursor, MixtureShare, SourceCursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import TokenChunk

__all__ = ["Stream", "StreamSource"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSource:
    """The properties of a source that the stream needs.

    `name`, `number` (in the digests), `num_blocks` of an epoch, and the epoch before which it ends
    (`num_epochs`, None: endless). `path_of` returns a file's path by epoch and number, for messages.
    """

    name: str
    number: int
    num_blocks: Callable[[int], int]
    num_epochs: int | None
    path_of: PathOf | None = None


class Stream:
    """Turns chunks into steps, from a cursor on. Holds the chunks that are not drawn yet. Not thread-safe.

    `feed` each source's chunks from the cursor on, in that source's order, then `finish` the source; `draw`
    consecutive steps. With one source, the last sample is padded if the data do not fill it. With several
    sources, data rule 20 applies. Under `on_end: stop`, the stream ends before the first sample that its
    source cannot fill. Under `drop`, that source gives what it has, and the others continue.
    """

    def __init__(
        self,
        cursor: Cursor,
        sources: Sequence[StreamSource],
        settings: StreamSettings,
        mixture: MixtureSettings | None = None,
    ) -> None:
        """`mixture` is needed for several sources."""
        self._before = cursor
        self._names = [source.name for source in sources]
        self._numbers = {source.name: source.number for source in sources}
        # a single source has no mixture counts, unless it was one of several before
        self._mixed = (
            len(sources) > 1 or bool(cursor.mixture) or not cursor.sources.keys() <= self._numbers.keys()
        )
        self._packers = {
            source.name: _packer(cursor.sources.get(source.name, SourceCursor()), source, settings)
            for source in sources
        }
        self._units_path, self._rows_per_sample = settings.loss_units, settings.rows_per_sample
        self._limits = {source.name: source.num_epochs for source in sources}
        self._stops_at_end = len(sources) > 1 and mixture is not None and mixture.on_end == "stop"
        assert mixture is not None or len(sources) == 1, "several sources take turns by a mixture"
        weights = {source.name: 1 for source in sources} if mixture is None else mixture.weights
        by = "tokens" if mixture is None else mixture.by
        self._mixture = Mixture.at(weights, self._limits, _shares(cursor), by)
        self._asked: StepRange | None = None  # the shape of the last step drawn
        self._needs: frozenset[str] | None = None  # cached until something changes

    @property
    def names(self) -> dict[int, str]:
        """The sources by their numbers."""
        return {number: name for name, number in self._numbers.items()}

    @property
    def cursor(self) -> Cursor:
        """The cursor of the next sample."""
        return self._before

    @property
    def needs(self) -> frozenset[str]:
        """The sources whose next chunk is wanted now.

        They are those that the last requested step needs, or once that is drawn another step like it, so that
        its chunks arrive before it is requested. Before the first step: each source, for its first chunk.
        """
        if self._needs is None:
            if self._asked is None:
                empty = (name for name in self._mixture.live if self._lacks(name))
                self._needs = frozenset(empty)
            else:
                lacking = self._plan(self._asked).needs
                self._needs = frozenset() if lacking is None else frozenset({lacking})
        return self._needs

    def _lacks(self, source: str) -> bool:
        packer = self._packers[source]
        return packer.num_positions == 0 and not packer.finished

    def buffered_tokens(self, source: str) -> int:
        """Positions of a source that are available and not drawn."""
        return self._packers[source].num_positions

    def feed(self, chunk: TokenChunk) -> None:
        """Adds the next chunk of its source. Raises as `Packer.feed`."""
        packer = self._packers.get(chunk.source)
        if packer is None:
            raise FeedError(
                f"a packer got a chunk of source {chunk.source}, expected is one of "
                f"{', '.join(self._names)}",
                code="feed.chunk_order",
            )
        packer.feed(chunk)
        self._needs = None

    def finish(self, source: str) -> None:
        """Ends a source: no chunk of it will follow. Raises `FeedError` if an epoch was not read to its
        end.
        """
        self._packers[source].finish()
        self._needs = None

    def draw(self, step: StepRange, whole: bool = True, with_cursors: bool = False) -> StepSamples | None:
        """The samples of `step`, or those that the data still have. None: chunks of the sources in `needs`
        come first.

        If not `whole`, it also returns fewer samples, as many as are available, but at least one.
        `with_cursors`: the result has the cursor after each sample. Raises `FeedError` if the step does not
        begin where the previous one ended.
        """
        if step.first_sample != self._before.consumed_samples:
            raise FeedError(
                f"a step from sample {step.first_sample} on was requested, the stream is at sample "
                f"{self._before.consumed_samples}; open it at the cursor of that sample",
                code="feed.step_order",
            )
        assert step.num_samples == ceil_div(step.num_tokens, step.seq_len), f"{step} contradicts itself"
        plan = self._plan(step)
        self._asked = step
        if plan.needs is not None and (whole or not plan.sources):
            self._needs = frozenset({plan.needs})
            return None
        self._needs = None
        return self._take(step, plan, with_cursors)

    # ------------------------------------------------------------------------------------ deciding
    def _plan(self, step: StepRange) -> _Plan:
        """Decides the samples of the step, as far as the available data allow. Takes nothing."""
        plan = _Plan(mixture=self._mixture.copy())
        if not self._mixed:
            self._plan_one(step, plan)
            return plan
        while len(plan.sources) < step.num_samples and plan.num_tokens < step.num_tokens:
            wanted = min(step.seq_len, step.num_tokens - plan.num_tokens)
            source = self._next(plan, step.seq_len, wanted)
            if source is None:
                return plan
            plan.add(source, min(wanted, self._left(plan, source, step.seq_len)))
        # whether anything follows: checks the next sample, as a step of whole samples would take it
        self._next(plan, step.seq_len, step.seq_len, ahead=True)
        return plan

    def _plan_one(self, step: StepRange, plan: _Plan) -> None:
        """The same for a single source, without a loop over its samples."""
        (source,) = self._names
        packer = self._packers[source]
        num = packer.left(0, step.seq_len)
        if not packer.finished and num < step.num_tokens + 1:
            # one position is kept, so that the end of the data is never found after a step that did not
            # report it
            plan.needs, num = source, max(0, num - 1) // step.seq_len * step.seq_len
        num = min(num, step.num_tokens)
        plan.positions[source] = plan.num_tokens = num
        plan.sources = [source] * ceil_div(num, step.seq_len)
        plan.ends = packer.finished and packer.left(num, step.seq_len) == 0

    def _next(self, plan: _Plan, seq_len: int, wanted: int, ahead: bool = False) -> str | None:
        """The source of the next sample.

        None: the data end (`plan.ends`), or more of a source is needed to decide (`plan.needs`). `ahead` does
        not change the plan's mixture.
        """
        mixture, ended = plan.mixture, list[tuple[str, int]]()
        while (source := mixture.next(seq_len)) is not None:
            left, finished = self._left(plan, source, seq_len), self._packers[source].finished
            if left >= wanted or (left and finished and not self._stops_at_end):
                if not ahead:
                    plan.mixture = mixture
                    plan.ended += [(len(plan.sources), *each) for each in ended]
                return source
            if not finished:
                plan.needs = source
                return None
            if self._stops_at_end:
                break
            limit = self._limits[source]
            assert limit is not None, f"source {source} has no end and ended"
            # a source ends when its next sample is due, and only if a sample of another source follows
            mixture = mixture.copy()
            mixture.end(source, limit)
            ended.append((source, limit))
        plan.ends = True
        return None

    def _left(self, plan: _Plan, source: str, seq_len: int) -> int:
        return self._packers[source].left(plan.positions.get(source, 0), seq_len)

    # ------------------------------------------------------------------------------------ taking
    def _take(self, step: StepRange, plan: _Plan, with_cursors: bool) -> StepSamples:
        before, several = self._before, self._mixed
        runs, cursors = list[Run | PackedRun](), dict[str, RunCursors | PackCursors]()
        for name, packer in self._packers.items():
            run, of = packer.take(plan.positions.get(name, 0), step.seq_len, with_cursors)
            runs.append(run)
            if of is not None:
                cursors[name] = of
        reasons = tuple(
            (name, reason)
            for name, packer in self._packers.items()
            for reason in packer.passed_reasons(plan.ends and plan.num_tokens > 0)
        )
        drawn = [name for name in self._names if not several or plan.positions.get(name)]
        inside = None
        if with_cursors:
            of_runs = {name: (run, cursors[name]) for name, run in zip(self._names, runs, strict=True)}
            inside = _Inside(before, self._mixture, plan, step.seq_len, of_runs)
        self._mixture = plan.mixture
        self._before = Cursor(
            consumed_samples=before.consumed_samples + len(plan.sources),
            consumed_tokens=before.consumed_tokens + plan.num_tokens,
            target_tokens=before.target_tokens + sum(run.num_targets for run in runs),
            sources={**before.sources, **{name: self._packers[name].cursor for name in drawn}},
            skipped_samples=before.skipped_samples,
            skipped_tokens=before.skipped_tokens,
            mixture=plan.mixture.shares if several else {},
        )
        return StepSamples(
            step=StepRange(
                first_sample=step.first_sample,
                num_samples=len(plan.sources),
                num_tokens=plan.num_tokens,
                seq_len=step.seq_len,
            ),
            runs=dict(zip(self._numbers.values(), runs, strict=True)),
            numbers=np.array([self._numbers[name] for name in plan.sources], np.int32),
            cursor=self._before,
            end_of_data=plan.ends,
            bad_reasons=reasons,
            cursors=inside.after if inside is not None else None,
            units_path=self._units_path,
            rows_per_sample=self._rows_per_sample,
        )


def _packer(start: SourceCursor, source: StreamSource, settings: StreamSettings) -> Packer | WindowPacker:
    """The packer of a source, by `pack.mode`."""
    if settings.pack_mode == "concat":
        return Packer(start, source.name, source.num_blocks, settings, source.num_epochs)
    path_of = {} if source.path_of is None else {"path_of": source.path_of}
    return WindowPacker(start, source.name, source.num_blocks, settings, source.num_epochs, **path_of)


def _shares(cursor: Cursor) -> Mapping[str, MixtureShare]:
    """The mixture's counts. While a run had one source, everything drawn was of that source."""
    if cursor.mixture or len(cursor.sources) != 1:
        return cursor.mixture
    drawn = cursor.drawn_from(tuple(cursor.sources))
    return {name: MixtureShare(weight=1, samples=num, tokens=tokens) for name, (num, tokens) in drawn.items()}


@dataclass(kw_only=True, slots=True)
class _Plan:
    """The samples of a step, decided one after the other."""

    mixture: Mixture  # after these samples
    sources: list[str] = field(default_factory=list)  # of each sample
    lengths: list[int] = field(default_factory=list)  # positions of each, with several sources
    positions: dict[str, int] = field(default_factory=dict)  # by source
    num_tokens: int = 0
    ended: list[tuple[int, str, int]] = field(default_factory=list)  # before sample, source, its limit
    needs: str | None = None  # the next sample cannot be decided before more of this source arrives
    ends: bool = False  # nothing follows

    def add(self, source: str, length: int) -> None:
        """Adds one sample."""
        self.sources.append(source)
        self.lengths.append(length)
        self.positions[source] = self.positions.get(source, 0) + length
        self.num_tokens += length
        self.mixture.charge(source, length)


class _Inside:
    """The run's cursors inside a step, after any of its samples."""

    def __init__(
        self,
        before: Cursor,
        mixture: Mixture,
        plan: _Plan,
        seq_len: int,
        runs: Mapping[str, tuple[Run | PackedRun, RunCursors | PackCursors]],
    ) -> None:
        self._before, self._mixture = before, mixture
        self._plan, self._seq_len, self._runs = plan, seq_len, runs

    def after(self, num_samples: int) -> Cursor:
        """The cursor after `num_samples` of the step's samples."""
        plan, before = self._plan, self._before
        if not plan.lengths:
            positions = {name: min(num_samples * self._seq_len, plan.num_tokens) for name in self._runs}
            shares: dict[str, MixtureShare] = {}
        else:
            positions, shares = self._replayed(num_samples)
        targets = 0
        sources = dict(before.sources)
        for name, num in positions.items():
            run, cursors = self._runs[name]
            targets += run.targets_in(num)
            sources[name] = cursors.after(num)
        return Cursor(
            consumed_samples=before.consumed_samples + num_samples,
            consumed_tokens=before.consumed_tokens + sum(positions.values()),
            target_tokens=before.target_tokens + targets,
            sources=sources,
            skipped_samples=before.skipped_samples,
            skipped_tokens=before.skipped_tokens,
            mixture=shares,
        )

    def _replayed(self, num_samples: int) -> tuple[dict[str, int], dict[str, MixtureShare]]:
        """Positions by source, and the mixture's counts."""
        mixture, positions = self._mixture.copy(), dict[str, int]()
        for number in range(num_samples):
            for at, source, limit in self._plan.ended:
                if at == number:
                    mixture.end(source, limit)
            name, length = self._plan.sources[number], self._plan.lengths[number]
            positions[name] = positions.get(name, 0) + length
            mixture.charge(name, length)
        return positions, mixture.shares
