"""Parts of a plan's report: the progress of each source, a skip, the objective, evaluations and callbacks.

How much of the data is left is known if a launch of the run has reached their end before. An epoch then is as
long as it was at that time. Nothing is estimated: if the length of an epoch may have changed, the result is
unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from orchestrator.planning.resume.identity import value_text
from orchestrator.records.cursor import Cursor, SourceCursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownEpochs:
    """`attempt` has drawn the `num_epochs` epochs of its only source to their end: `drawn` positions.

    The stream continues across epochs, and all tokens except the first are targets once (data rule 1).
    """

    attempt: int
    source: str
    num_epochs: int
    drawn: int

    @property
    def tokens(self) -> int:
        """The tokens of an epoch."""
        return (self.drawn + 1) // self.num_epochs

    def left(self, num_epochs: int | None, cursor: Cursor) -> int | None:
        """Returns the positions from the cursor to the end of `num_epochs` epochs; None: endless."""
        if num_epochs is None:
            return None
        return max(0, self.tokens * num_epochs - 1 - _drawn(cursor))

    def epochs(self, cursor: Cursor) -> float:
        """Returns how many epochs were drawn up to the cursor."""
        return (_drawn(cursor) + 1) / self.tokens if _drawn(cursor) else 0.0


def known_epochs(attempt: int, flat: Mapping[str, Any], end: Cursor) -> KnownEpochs | None:
    """Returns the epochs' length from an attempt that reached the end of its data at `end`.

    `flat` is its configuration. None if another pass may have another length: several sources, packed whole
    documents, transforms (they draw anew in each epoch), lists that are refreshed, changed files that were
    accepted.
    """
    num_epochs = epochs_of(flat)
    if num_epochs is None or (_drawn(end) + 1) % num_epochs:
        return None
    (source,) = flat["data.sources"]
    return KnownEpochs(attempt=attempt, source=source["name"], num_epochs=num_epochs, drawn=_drawn(end))


def nothing_left(flat: Mapping[str, Any], cursor: Cursor) -> bool:
    """Whether the cursor itself shows that the data are at their end.

    If whole documents are packed, the cursor is after a source's last epoch once that is taken. Under
    `concat` it stays in it, at the last token.
    """
    if flat["pack.mode"] == "concat":
        return False
    for source in flat["data.sources"]:
        limit = source.get("max_epochs")
        if limit is None:
            limit = None if flat.get("data.on_end") == "repeat" else flat["data.num_epochs"]
        at = cursor.sources.get(source["name"])
        if limit is None or at is None or at.epoch < limit:
            return False
    return True


def epochs_of(flat: Mapping[str, Any]) -> int | None:
    """Returns how many epochs of equal length a job reads; None if unknown or unlimited."""
    sources = flat["data.sources"]
    if len(sources) != 1 or flat["pack.mode"] != "concat":
        return None
    (source,) = sources
    transforms = source.get("transforms")
    if flat.get("data.transforms") if transforms is None else transforms:
        return None
    if flat.get("data.refresh") is not None or flat.get("resume.accept_changed"):
        return None
    limit = source.get("max_epochs")
    num_epochs: int | None = flat["data.num_epochs"] if limit is None else limit
    return num_epochs


def _drawn(cursor: Cursor) -> int:
    return cursor.consumed_tokens + cursor.skipped_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSeen:
    """One source at a cursor.

    `samples` and `tokens` (positions) are everything that was drawn of it, including skipped samples.
    `epochs` are those passed since its newest start, as limits of epochs count, with the passed part of the
    current epoch in whole blocks. `epochs_at_most` counts the current block as passed, because the progress
    within it is not examined. Both are equal if the length of an epoch is known (`known_epochs`).

    `actual` is its share of what was drawn since weights or live sources last changed, `target` the share
    that the job requests, `target_before` that of the point (None: unknown, or nothing was drawn). Shares are
    of tokens, or of samples under `weight_by: samples`, among the sources that have not ended.
    """

    source: str
    samples: int
    tokens: int
    epochs: float
    epochs_at_most: float
    ended: bool
    target_before: float | None
    target: float | None
    actual: float | None

    def __str__(self) -> str:
        alone = self.ended or (self.target == 1 and self.target_before in (None, 1))
        share = "" if self.actual is None or alone else f", {self.actual:.2%} of what was drawn"
        wanted = "" if self.target is None or alone else f", wanted {_percent(self.target)}"
        if not self.ended and self.target is not None and self.target_before not in (None, self.target):
            wanted = f", wanted {_percent(self.target_before)} -> {_percent(self.target)}"
        over = ", at its end" if self.ended else ""
        return (
            f"source {self.source}: {self.tokens:,} tokens in {self.samples:,} samples seen, "
            f"{self._epochs_text()}{share}{wanted}{over}"
        )

    def _epochs_text(self) -> str:
        """The epochs that have passed, or the block of an epoch in which the source is."""
        least, most = f"{self.epochs:.2f}", f"{self.epochs_at_most:.2f}"
        if least == most:
            return f"{least} epochs"
        num_blocks = round(1 / (self.epochs_at_most - self.epochs))
        epoch, block = divmod(round(self.epochs * num_blocks), num_blocks)
        where = "" if num_blocks == 1 else f"the {_ordinal(block + 1)} of {num_blocks:,} blocks of "
        return f"in {where}its {_ordinal(epoch + 1)} epoch"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSkip:
    """What a start would leave out after its point, from index `first_index` on.

    It leaves out `samples` of the point's `seq_len`, or `steps` of its batch size if the job requests steps.
    `tokens` are `samples` · `seq_len` until they have been drawn (fewer if a source ends between). After that
    `cursor` is the place after them, and `seconds` is how long drawing them took.
    """

    samples: int
    steps: int | None
    tokens: int
    seq_len: int
    first_index: int
    cursor: Cursor | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        of = "" if self.steps is None else f" ({self.steps:,} steps at the point's batch size)"
        tokens = f"{'' if self.cursor is not None else 'at most '}{self.tokens:,} tokens"
        last = self.first_index + self.samples - 1
        took = "" if self.seconds is None else f"; drawing them takes about {self.seconds:.1f} s"
        return (
            f"skips {self.samples:,} samples{of}, {tokens}: samples {self.first_index:,} to {last:,} are not "
            f"trained; counts, budgets and schedule stay{took}"
        )


def sources_seen(
    cursor: Cursor,
    weights: Mapping[str, int],
    num_blocks: Mapping[str, int],
    known: KnownEpochs | None = None,
    began: Mapping[str, int] = MappingProxyType({}),
) -> tuple[SourceSeen, ...]:
    """Returns each source of the job (`weights`, as whole numbers) at a cursor.

    `known`: the length of the only source's epochs. `began`: the first epoch of each source's newest start
    (missing: 0).
    """
    drawn = cursor.drawn_from(tuple(weights))
    had = {name: share.weight for name, share in cursor.mixture.items() if share.weight and not share.ended}
    counts = {name: cursor.mixture[name].count for name in had}
    if not cursor.mixture and len(cursor.sources) == 1:
        (only,) = cursor.sources
        had, counts = {only: 1}, {only: cursor.drawn_samples}
    ended = {name for name, share in cursor.mixture.items() if share.weight and share.ended}
    live = {name: weight for name, weight in weights.items() if name not in ended}
    found = []
    for name, (samples, tokens) in drawn.items():
        at = cursor.sources.get(name, SourceCursor())
        if name in ended:
            least = most = float(cursor.mixture[name].ended)
        elif known is not None and known.source == name:
            least = most = known.epochs(cursor)
        else:
            least, most = _passed(at, num_blocks[name])
        found.append(
            SourceSeen(
                source=name,
                samples=samples,
                tokens=tokens,
                epochs=least - began.get(name, 0),
                epochs_at_most=most - began.get(name, 0),
                ended=name in ended,
                target_before=_share(had, name),
                target=_share(live, name),
                actual=_share(counts, name),
            )
        )
    return tuple(found)


def _passed(at: SourceCursor, num_blocks: int) -> tuple[float, float]:
    """Returns the minimum and maximum of the passed epochs."""
    least = at.epoch + at.block / num_blocks
    begun = any((at.window, at.record, at.output, at.piece, at.token, at.packs))
    return least, at.epoch + (at.block + begun) / num_blocks


def _ordinal(number: int) -> str:
    """`1st`, `2nd`, `11th`."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{'th' if number % 100 in (11, 12, 13) else ending}"


def _share(parts: Mapping[str, int], name: str) -> float | None:
    total = sum(parts.values())
    return parts.get(name, 0) / total if total else None


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.2%}"


# -------------------------------------------------------------------------------------- notes on the training
def training_notes(config: JobConfig, epochs: KnownEpochs | None) -> Iterator[str]:
    """Yields notes on objective, evaluations and callbacks; none where these have their defaults.

    `epochs`: the length of an epoch of the job's only source, if it is known.
    """
    train = config.train
    if {"objective", "objective_args", "objective_units"} & train.model_dump(exclude_defaults=True).keys():
        yield _objective(train)
    if config.eval.is_wanted:
        yield f"eval: {_parts(config)} {_when(config)}, {_size(config, epochs)}"
    if train.callbacks:
        listed = ", ".join(train.callbacks)
        yield f"train.callbacks: {listed} (train.on_callback_error={train.on_callback_error})"


def _objective(train: TrainConfig) -> str:
    arguments = f" with {value_text(train.objective_args)}" if train.objective_args else ""
    return (
        f"train.objective: {train.objective}{arguments}, its loss divided by the units of the step "
        f"(train.objective_units={train.objective_units})"
    )


def _parts(config: JobConfig) -> str:
    names = []
    for name in config.eval.part_names:
        part = config.eval.parts.get(name)
        names.append(f"{name} ({_held_out(config)})" if part is None or part.holdout else name)
    return ", ".join(names)


def _held_out(config: JobConfig) -> str:
    """The share of the records that is held out, of each source if they differ."""
    shares = {name: f"{100 * share:g}%" for name, share in _shares(config).items()}
    if len(set(shares.values())) == 1:
        return f"{next(iter(shares.values()))} of the records"
    return ", ".join(f"{share} of source {name}" for name, share in shares.items())


def _shares(config: JobConfig) -> Mapping[str, float]:
    everywhere = config.data.holdout
    return {
        source.name: everywhere if source.holdout is None else source.holdout
        for source in config.data.sources
    }


def _when(config: JobConfig) -> str:
    asked, when = config.eval, []
    if asked.every_steps is not None:
        when.append("after each step" if asked.every_steps == 1 else f"every {asked.every_steps:,} steps")
    if asked.every_tokens is not None:
        when.append(f"every {asked.every_tokens:,} tokens")
    if asked.at_end:
        when.append("at the end")
    return " and ".join(when)


def _size(config: JobConfig, epochs: KnownEpochs | None) -> str:
    """How much one evaluation reads of each part."""
    most, batch = config.eval.max_samples, config.train.global_batch_size
    if most is not None:
        part = " of each part" if len(config.eval.part_names) > 1 else ""
        num = -(-most // batch)
        batches = f"up to {num:,} batches of {batch:,}" if num > 1 else "one batch"
        return f"the first {most:,} samples{part} in {batches}"
    text = f"all samples in batches of {batch:,}"
    if epochs is None or config.eval.parts:
        return text
    (share,) = _shares(config).values()  # the only source's
    held = epochs.tokens * share / (1 - share) / config.sample_len
    return f"{text}, about {max(1, round(held / batch)):,} each time"
