"""Decides whether and how a resume point may continue under a configuration.

`orchestrator plan` prints the result, and a start acts on it. All inputs are values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.errors import Refusal, RefusedError
from orchestrator.json_form import encode
from orchestrator.planning.batches import (
    Remaining,
    idle_share,
    micro_batches_per_rank,
    next_range,
    num_micro_batches,
    rebase_step,
    remaining,
)
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, choose_next
from orchestrator.planning.resume.identity import (
    CHANGED_SETTING,
    OF_A_SOURCE,
    Difference,
    OptimizerChange,
    RunIdentity,
    compare,
    differences,
    names_of_sources,
    optimizer_change,
    refusals,
    value_text,
    with_defaults,
)
from orchestrator.planning.resume.plan_report import (
    KnownEpochs,
    PlannedSkip,
    SourceSeen,
    epochs_of,
    nothing_left,
    sources_seen,
    training_notes,
)
from orchestrator.planning.resume.skipping import Skip, SkipDecision
from orchestrator.planning.resume.source_lists import RestartDecision, SourceChange, SourceLists
from orchestrator.planning.schedule import Budgets, Rate, RateSettings, budgets_for, learning_rate
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage
from orchestrator.records.steps import StateKey, rows_per_sample
from orchestrator.text import html_facts, html_lines, html_page, html_table

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

# Notes of a plan besides its decision: how the batch is divided among workers, and where the data end.
def world_size_notes(config: JobConfig, saved_at: int | None) -> Iterator[str]:
    """Describes the division of the global batch (data rule 16), for the fewest and the most workers.

    `saved_at`: the number of workers at which the point was saved (None: there is no point).
    """
    train, cluster = config.train, config.cluster
    num_micro = num_micro_batches(train.global_batch_size, train.micro_batch_size)
    for world in sorted({cluster.start_workers, cluster.max_workers}):
        idle = idle_share(num_micro, world)
        yield (
            f"world size {world}: a step of {train.global_batch_size} samples is cut into {num_micro} "
            f"micro-batches of at most {train.micro_batch_size}, up to "
            f"{micro_batches_per_rank(num_micro, world)} for a worker; workers are idle for {idle:.0%} of it"
        )
    worlds = {cluster.start_workers, cluster.max_workers} - {saved_at}
    if saved_at is not None and worlds:
        fast = train.is_fast(cluster.use_gpu)
        # with shards, which `auto` may choose, `numerics: auto` is fast
        open_ = not fast and (train.numerics, train.parallel) == ("auto", "auto")
        same = "stay the same, to the last bit" + (
            ", while train.parallel=auto is replicate" if open_ else ""
        )
        yield (
            f"the point was saved at world size {saved_at}; at another one losses and weights "
            + ("differ in their last bits (numerics: fast)" if fast else same)
        )


def end_notes(epochs: KnownEpochs | None, data_tokens: int | None) -> Iterator[str]:
    """Describes how much the data still hold, if known."""
    if epochs is not None and data_tokens is not None:
        left = f"{data_tokens:,} more tokens" if data_tokens else "no more tokens"
        yield (
            f"the data hold {left}: an epoch of source {epochs.source} has {epochs.tokens:,} tokens, which "
            f"is known since attempt {epochs.attempt} reached the end of the data"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PointInfo:
    """What the decision needs of a committed resume point.

    `world_size` is that of the generation that saved it. Without `encoders`, the run's first one made all of
    it. Without `sources`, it has the lists of its first start.
    """

    name: str
    key: StateKey
    cursor: Cursor
    global_batch_size: int
    seq_len: int
    world_size: int
    optimizer_steps: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...] = ()
    sources: tuple[SourceLists, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePlan:
    """What a start would do. `action` is start, resume or refuse. Unknown counts are None.

    `lr_before`, `lr_after`: the learning rates at the point's place in the schedule, under the point's
    configuration and the new one; for a start, `lr_after` is that of the first step.
    `notes`: sentences about how the batch is divided among workers, what another number of them means, and
    what is special about the data.
    `rewind`: what `resume.from` sets aside.
    `sources`: how much of each source the run has had (empty if the data are unknown).
    `skip`: what is left out after the point (`cursor` is the point's own).
    `lists`: how the sources change (`cursor` is then where they restart).
    `skip_note`, `restart_note`: why a requested skip or restart is already done, or why the sources do not
    change.
    `data_tokens`: the positions that the data still hold, if a launch has reached their end before (None:
    unknown).
    `where`: on what other machine this holds, if this one cannot start it (empty: it can).
    `codes`: the error code of each of `refusals`.

    Not part of the JSON are:
    `budgets`: stored in the claim.
    `encoders`: those until now; `encoder`: the one from the next whole document on (None: the run is not
    begun, and none is chosen).
    `drawn`: the `skip` in a claim (None: not drawn).
    `damages`: what this start found wrong with points that it or its workers have read.
    `code_changed`: the user's code differs from the code that trained the point.
    """

    action: str
    point: str | None
    step_before: int | None
    step_after: int
    consumed_samples: int
    consumed_tokens: int
    cursor: Cursor
    remaining_steps: int | None
    remaining_samples: int | None
    remaining_tokens: int | None
    lr_before: float | None
    lr_after: float
    differences: tuple[Difference, ...]
    refusals: tuple[str, ...]
    codes: tuple[str | None, ...]
    notes: tuple[str, ...]
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    encoder: EncoderChoice | None
    rewind: str = ""
    sources: tuple[SourceSeen, ...] = ()
    skip: PlannedSkip | None = None
    skip_note: str = ""
    lists: tuple[SourceChange, ...] = ()
    restart_note: str = ""
    drawn: Skip | None = None
    data_tokens: int | None = None
    damages: tuple[Damage, ...] = ()
    where: str = ""
    code_changed: bool = False

    def __post_init__(self) -> None:
        assert len(self.codes) == len(self.refusals), "a code for each refusal"

    def refused(self, texts: Sequence[str], code: str | None) -> ResumePlan:
        """Returns this plan with these refusals added, if there are any. `code` is that of each of them."""
        return replace(
            self,
            action="refuse" if texts else self.action,
            refusals=(*self.refusals, *texts),
            codes=(*self.codes, *[code] * len(texts)),
        )

    @property
    def refusal(self) -> RefusedError:
        """The error of a start that this plan refuses: all reasons, and the first code."""
        return RefusedError("\n".join(self.refusals), code=next(filter(None, self.codes), None))

    def to_json(self) -> dict[str, Any]:
        """Returns the document of `orchestrator plan --json`."""
        document: dict[str, Any] = encode(self)
        of_notes = ("rewind", "skip_note", "restart_note", "where")
        for name in ("budgets", "encoders", "encoder", "drawn", "damages", "code_changed", *of_notes):
            del document[name]
        return {**document, "notes": list(self.all_notes)}

    def _repr_html_(self) -> str:
        """For notebooks: what would happen, what differs, and why it would be refused."""
        title = self.headline
        label = None if self.step_before is None else f"{self.step_before:,} → {self.step_after:,}"
        rate = f"{self.lr_after:.3e}"
        if self.lr_before is not None:
            rate = f"{self.lr_before:.3e} → {rate}"
        pairs = [
            ("step label", label),
            ("consumed samples", self.consumed_samples),
            ("consumed tokens", self.consumed_tokens),
            ("remaining steps", self.remaining_steps),
            ("learning rate", rate),
        ]
        rows = [
            (d.field, value_text(d.old), value_text(d.new), d.rule.replace("_", " "))
            for d in self.changes
        ]
        return html_page(
            title,
            html_lines(f"refused: {text}" for text in self.refusals),
            html_facts(pairs),
            html_table(("field", "old", "new", "on resume"), rows),
            html_lines(map(str, (*self.sources, *self.lists, *([self.skip] if self.skip else ())))),
            html_lines(self.all_notes),
        )

    @property
    def label_text(self) -> str:
        """The step label before and after the start, and why they differ."""
        text = f"step label {self.step_before} -> {self.step_after}"
        if self.step_before in (None, self.step_after):
            return text
        tokens = f"{self.consumed_tokens:,} tokens"
        return f"{text}: labels count steps of the new size, and both stand for {tokens}"

    @property
    def changes(self) -> tuple[Difference, ...]:
        """For people: what differs inside the values of `differences` (`Difference.parts`)."""
        return tuple(part for each in self.differences for part in each.parts())

    @property
    def headline(self) -> str:
        """What would happen, in a few words."""
        if self.action == "refuse":
            return "would be refused"
        begins = "start from the beginning" if self.point is None else f"resume from {self.point}"
        return f"would {begins}" + (f", {self.where}" if self.where else "")

    @property
    def all_notes(self) -> tuple[str, ...]:
        """First what a rewind sets aside, then that a skip or a restart is done, and `notes`."""
        done = [f"note: {note}" for note in (self.skip_note, self.restart_note) if note]
        where = [f"note: this holds {self.where}"] if self.where else []
        return (*filter(None, [self.rewind]), *done, *where, *self.notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownData:
    """What is known of the job's data, and of this machine's encoders. None is unknown.

    `identities`: (the run's, the job's).
    `epochs`: the length of an epoch of the job's only source.
    `installed`: the encoders here (see `encoders.choose_next`).
    `weights`, `num_blocks`: those of the job's sources.
    `began`: the first epoch of each source's newest start.
    `moved`: as in `identity.refusals`.
    """

    identities: tuple[RunIdentity, RunIdentity] | None = None
    epochs: KnownEpochs | None = None
    installed: Mapping[str, str | None] | None = None
    weights: Mapping[str, int] | None = None
    num_blocks: Mapping[str, int] | None = None
    began: Mapping[str, int] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataChanges:
    """What a start changes in the stream.

    `skip`, `restart`: the decisions about a requested skip and restart. `lists`: how the job's sources differ
    from the point's, whose cursor refers to the job's.
    """

    skip: SkipDecision = SkipDecision()
    lists: tuple[SourceChange, ...] = ()
    restart: RestartDecision = RestartDecision()


def plan_resume(
    config: JobConfig,
    rules: Mapping[str, str],
    point: PointInfo | None,
    old_flat: Mapping[str, Any] | None = None,
    data: KnownData = KnownData(),  # noqa: B008  frozen
    changes: DataChanges = DataChanges(),  # noqa: B008  frozen
) -> ResumePlan:
    """Decides whether and how `config` continues `point` (None: a fresh start, or a run without any point).

    `rules` maps a field's dotted path to its resume rule (of `config.field_rules()`).
    `old_flat`: the flat configuration that the point (or, without one, the run) was made with.
    `data`: what is known of the job's data. `changes`: what this start changes in the stream.

    A refusal names the run, both values and what to do. A stop that is already reached is not a refusal, but
    a resume with nothing remaining. Raises `ConfigError` for a schedule without an end.
    """
    cursor, epochs, identities = point.cursor if point else Cursor(), data.epochs, data.identities
    skip, lists, restart = changes.skip, changes.lists, changes.restart
    old = with_defaults(old_flat) if old_flat is not None else config.flat()
    different = differences(old, config.flat(), rules, restart.sources)
    changed = _optimizer_change(config, point, old)
    refused = [
        *refusals(different, point.name if point else "", identities is not None, data.moved),
        *_identity_refusals(identities, config, old_flat),
        *_asked_refusals(skip, restart, lists),
        *_pack_refusals(config, point),
        *_rows_refusals(config, old),
        *([changed.refusal] if changed and changed.refusal else []),
    ]
    run = config.run.run_uri  # which run, if several are in progress
    refused = [replace(each, text=f"{run}: {each.text}") for each in refused]
    spans, encoder = _spans(point, identities), None
    if spans:
        encoder, missing = choose_next(spans, config.data.encoder, cursor, data.installed or {})
        refused += missing
        different = _with_encoders_named(different, spans[-1].encoder, encoder)
        if encoder != spans[-1].encoder:
            epochs = None  # of other tokens
    budgets = budgets_for(config, point.budgets if point else None, cursor, old if point else None)
    data_tokens = _data_left(config, point, epochs if skip.request is None else None)
    left = _remaining(config, cursor, budgets, data_tokens)
    return ResumePlan(
        action="refuse" if refused else "resume" if point else "start",
        point=point.name if point else None,
        step_before=point.key.step if point else None,
        step_after=step_label(point, config.train.global_batch_size, config.sample_len),
        consumed_samples=cursor.consumed_samples,
        consumed_tokens=cursor.consumed_tokens,
        cursor=cursor,
        remaining_steps=left.steps if left else None,
        remaining_samples=left.samples if left else None,
        remaining_tokens=left.tokens if left else None,
        lr_before=learning_rate(_old_rate(old), point.budgets, cursor.consumed_tokens) if point else None,
        lr_after=learning_rate(config.train, budgets, _place(config, point, budgets)),
        differences=different,
        refusals=tuple(each.text for each in refused),
        codes=tuple(each.code for each in refused),
        notes=(
            *world_size_notes(config, point.world_size if point else None),
            *end_notes(epochs, data_tokens),
            *training_notes(config, epochs),
            *([changed.note] if changed else []),
            *_scaled_rate_note(config, budgets),
        ),
        data_tokens=data_tokens,
        budgets=budgets,
        encoders=spans,
        encoder=encoder,
        sources=_sources_seen(cursor, data, epochs),
        skip=_planned_skip(skip, point),
        skip_note=skip.note,
        lists=lists,
        restart_note=restart.note,
    )


def _sources_seen(cursor: Cursor, data: KnownData, epochs: KnownEpochs | None) -> tuple[SourceSeen, ...]:
    if not data.weights or not data.num_blocks:
        return ()
    return sources_seen(cursor, data.weights, data.num_blocks, epochs, data.began)


def _asked_refusals(
    skip: SkipDecision, restart: RestartDecision, lists: Iterable[SourceChange]
) -> Iterator[Refusal]:
    """Yields the refusals of a requested skip and restart, and of a skip together with changed sources.

    A skip is drawn from the sources of the point.
    """
    yield from filter(None, (skip.refusal, restart.refusal))
    changed = [each for each in lists if each.change != "refreshed"]
    if skip.request is not None and changed:
        yield Refusal(
            "resume.skip_with_changed_sources",
            f"{skip.request} leaves out samples of the point's sources, and this start changes them "
            f"({'; '.join(map(str, changed))}); skip at one start, change the sources at the next",
        )


def _planned_skip(skip: SkipDecision, point: PointInfo | None) -> PlannedSkip | None:
    if skip.request is None or point is None:
        return None
    samples = skip.request.num_samples(point.global_batch_size)
    return PlannedSkip(
        samples=samples,
        steps=skip.request.steps,
        tokens=samples * point.seq_len,
        seq_len=point.seq_len,
        first_index=point.cursor.drawn_samples,
    )


def _spans(
    point: PointInfo | None, identities: tuple[RunIdentity, RunIdentity] | None
) -> tuple[EncoderSpan, ...]:
    if point is not None and point.encoders:
        return point.encoders
    if identities is None:
        return ()
    first = EncoderChoice(name=identities[0].encoder_name, version=identities[0].encoder_version)
    return (EncoderSpan(encoder=first),)


def _with_encoders_named(
    different: tuple[Difference, ...], old: EncoderChoice, new: EncoderChoice
) -> tuple[Difference, ...]:
    """Names the encoders in the differences.

    `data.encoder` may name another library, another version of it, or (auto) the current one.
    """
    if old == new:
        return different
    named = Difference(field="data.encoder", old=str(old), new=str(new), rule="may_change")
    return (*(d for d in different if d.field != named.field), named)


def step_label(point: PointInfo | None, global_batch_size: int, seq_len: int) -> int:
    """Returns the label of the last finished step.

    It is the point's own, and re-based only if the batch size or seq_len differs (data rule 18).
    """
    if point is None:
        return 0
    if (point.global_batch_size, point.seq_len) == (global_batch_size, seq_len):
        return point.key.step
    return rebase_step(point.cursor.consumed_tokens, global_batch_size, seq_len)


def _identity_refusals(
    identities: tuple[RunIdentity, RunIdentity] | None,
    config: JobConfig,
    old_flat: Mapping[str, Any] | None,
) -> tuple[Refusal, ...]:
    if identities is None:
        return ()
    old, new = identities
    # the differences already name the settings, except of sources that are added again
    if old_flat is not None:
        back = names_of_sources(config.flat()) - names_of_sources(old_flat)
        prefixes = tuple(f"{OF_A_SOURCE}{name}." for name in back)
        of_these = {name: value for name, value in new.settings.items() if name.startswith(prefixes)}
        new = replace(new, settings=old.settings | of_these)
    return compare(old, new, accept_changed=config.resume.accept_changed)


def _pack_refusals(config: JobConfig, point: PointInfo | None) -> Iterator[Refusal]:
    """Refuses another seq_len while packs of a window are still to come (data rule 21).

    These packs cannot be made for another length.
    """
    if point is None:
        return
    new = config.sample_len
    for name, at in point.cursor.sources.items():
        if at.packs and at.pack_seq_len != new:
            kept = at.pack_seq_len // config.data.rows_per_sample
            yield Refusal(
                "resume.seq_len_within_window",
                f"resume point {point.name} lies behind {at.packs} packs of {at.pack_seq_len} positions of a "
                f"window of source {name}, the job asks for pack.seq_len={config.pack.seq_len}: the window's "
                f"other documents cannot be packed again; keep pack.seq_len={kept}, or resume from a point "
                "at the beginning of a window, or start a new run under another run.name",
            )


def _rows_refusals(config: JobConfig, old: Mapping[str, Any]) -> Iterator[Refusal]:
    """Refuses samples of another number of rows: no objective takes both."""
    contents = sorted({source.get("content", "text") for source in old.get("data.sources", ())})
    new = config.data.rows_per_sample
    if contents and rows_per_sample(contents) != new:
        yield Refusal(
            CHANGED_SETTING,
            f"the run was started with content: {', '.join(contents)}, whose samples have "
            f"{rows_per_sample(contents)} rows, the job asks for samples of {new}; keep such sources, or "
            "start a new run under another run.name",
        )


def _optimizer_change(
    config: JobConfig, point: PointInfo | None, old: Mapping[str, Any]
) -> OptimizerChange | None:
    return None if point is None else optimizer_change(old, config, point.name, point.optimizer_steps)


def _data_left(config: JobConfig, point: PointInfo | None, epochs: KnownEpochs | None) -> int | None:
    """Returns the positions that the data still hold; None: unknown."""
    if epochs is not None:
        return epochs.left(epochs_of(config.flat()), point.cursor if point else Cursor())
    return 0 if point is not None and nothing_left(config.flat(), point.cursor) else None


def _remaining(
    config: JobConfig, cursor: Cursor, budgets: Budgets, data_tokens: int | None
) -> Remaining | None:
    return remaining(
        cursor.consumed_samples,
        cursor.consumed_tokens,
        config.train.global_batch_size,
        config.sample_len,
        budgets.stop_tokens,
        budgets.stop_samples,
        data_tokens,
    )


def _old_rate(old: Mapping[str, Any]) -> RateSettings:
    names = ("lr", "min_lr_ratio", "schedule", "decay_power")
    return Rate(**{name: old[f"train.{name}"] for name in names})


def _scaled_rate_note(config: JobConfig, budgets: Budgets) -> Iterator[str]:
    if budgets.lr_factor_squared is not None:
        yield (
            f"changes of the batch scale train.lr={config.train.lr:g} by {budgets.lr_factor:g} "
            f"(train.lr_on_batch_change, now {config.train.lr_on_batch_change}), until train.lr is changed"
        )


def _place(config: JobConfig, point: PointInfo | None, budgets: Budgets) -> int:
    """Returns the place in the schedule for the plan's learning rate: at the point, or after the
    first step.
    """
    if point is not None:
        return point.cursor.consumed_tokens
    batch, seq_len = config.train.global_batch_size, config.sample_len
    first = next_range(0, 0, batch, seq_len, budgets.stop_tokens, budgets.stop_samples)
    return first.num_tokens if first else 0
