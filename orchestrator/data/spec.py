"""All that a process needs to read a run's stream, as one frozen value: files, tokenizer, encoder, settings.

`prepare_data` makes it, at a run's first start by freezing what is there, later from what was frozen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from decimal import Decimal
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.data.frozen import (
    TOKENIZER_FOLDER,
    DataRecord,
    FrozenData,
    manifest_path,
    read_frozen,
    write_frozen,
)
from orchestrator.data.packing.arrangement import few_packs
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.data.settings import MixtureSettings, StreamSettings
from orchestrator.data.sources import manifest as manifests
from orchestrator.data.sources.documents import Content
from orchestrator.data.sources.formats import Cut, format_of
from orchestrator.data.sources.fragments import (
    DECODED_RATIO,
    SourcePlan,
    decoded_bytes,
    frozen_at,
    num_window_shuffled,
    plan_source,
)
from orchestrator.data.sources.listing import list_files
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.sources.unchanged import compare_files, find_unchanged
from orchestrator.data.sources.windows import BadRecordError, OrderedWindow, read_windows
from orchestrator.data.tokens.adversarial import ADVERSARIAL_VERSION
from orchestrator.data.tokens.chunks import tokenize_block
from orchestrator.data.tokens.encoder import (
    GIGATOKEN,
    TOKENIZERS,
    choose_encoder,
    installed_encoders,
    installed_version,
)
from orchestrator.data.tokens.encoders import Encoders
from orchestrator.data.tokens.masked import plain_text
from orchestrator.data.tokens.remembered import remembered
from orchestrator.data.tokens.tokenizer_files import (
    TokenizerFacts,
    TokenizerModel,
    examine,
    fetch,
    ids_around,
)
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, Place
from orchestrator.planning.identity import FORMAT_VERSION, RunIdentity, stream_settings
from orchestrator.planning.mixture import whole_weights
from orchestrator.planning.order import ORDER_VERSION
from orchestrator.records import Cursor, SourceCursor, TokenChunk, WindowTask

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig, SourceConfig

__all__ = ["DataSpec", "freeze_data", "prepare_data", "prepare_trained"]

# The encoders are compared on so many of the run's own documents, and so much of each, at the first start.
_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """A run's data and how they become tokens. Pickles; goes to the feeder and to every tokenizer process.

    The sources are numbered in the order of `plans`; `mixture` says how they take turns (None for one
    source). `max_epochs` are the limits of sources that have one of their own (None: endless).
    `encoders` are those of the attempt (`made_by`), before there is one the run's first alone.
    `tokenizer_folder` is the run's own copy of the tokenizer (None without a run), `vocab_size` its highest
    id plus one. `notes` are to be said aloud and journalled at the start. `unfrozen` is what is to be frozen,
    None where it is.
    """

    plans: tuple[SourcePlan, ...]
    settings: StreamSettings
    tokenizer: TokenizerModel
    tokenizer_folder: str | None
    vocab_size: int
    encoders: tuple[EncoderSpan, ...]
    run_identity: RunIdentity
    mixture: MixtureSettings | None = None
    max_epochs: dict[str, int | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unfrozen: FrozenData | None = None

    def identity(self) -> RunIdentity:
        """What must stay the same, as this job finds it: files and tokenizer as they are now."""
        return self.run_identity

    def source_plan(self, source: str) -> SourcePlan:
        """The files, fragments and blocks of a source."""
        return next(plan for plan in self.plans if plan.source == source)

    @property
    def only_source(self) -> str:
        """Of a run with one source, its name."""
        (plan,) = self.plans
        return plan.source

    @property
    def weights(self) -> dict[str, int]:
        """The sources' shares in the mixture, as whole numbers."""
        return dict(self.mixture.weights) if self.mixture is not None else {self.only_source: 1}

    def made_by(self, encoders: tuple[EncoderSpan, ...]) -> DataSpec:
        """The same data, encoded so."""
        return replace(self, encoders=encoders or self.encoders)

    def mixed_as(self, config: JobConfig) -> DataSpec:
        """The same data in the mixture, and to the limits, of another configuration of the same sources."""
        settings = replace(self.settings, num_epochs=config.data.num_epochs)
        return replace(
            self, settings=settings, mixture=_mixture(config, self.plans), max_epochs=_limits(config)
        )

    def build_encoders(self) -> Encoders:
        """What `tokenize_block` encodes with. It raises `DataIdentityError` if this machine has another
        version of what it needs.
        """
        return Encoders(self.tokenizer, self.encoders, self.settings.special_tokens_in_text)

    def num_epochs(self, source: str) -> int | None:
        """How often a source is read; None: endlessly."""
        return self.max_epochs.get(source, self.settings.num_epochs)

    def endless(self) -> DataSpec:
        """The same data without an end: a history says itself how far it went."""
        settings = replace(self.settings, num_epochs=None)
        return replace(self, settings=settings, max_epochs=dict.fromkeys(self.max_epochs))

    def tasks_from(self, cursor: Cursor, source: str | None = None) -> Iterator[WindowTask]:
        """A source's block tasks from a cursor on, over all its epochs; endless without a limit. None: that
        of the only one.
        """
        plan = self.source_plan(source or self.only_source)
        source = plan.source
        start = cursor.sources.get(source, SourceCursor())
        num_epochs = self.num_epochs(source)
        epochs = count(start.epoch) if num_epochs is None else range(start.epoch, num_epochs)
        first = WindowTask(
            source=plan.source,
            epoch=start.epoch,
            block=start.block,
            window=start.window,
            record=start.record,
            # the earlier pieces are read once more where the cursor can show whether they are the same
            piece=0 if start.earlier_digest else start.piece,
        )
        for epoch in epochs:
            begin = start.block if epoch == start.epoch else 0
            if begin >= plan.num_blocks:
                raise DataIdentityError(
                    f"the cursor names block {begin} of source {plan.source}, which has {plan.num_blocks} "
                    "blocks; the data are not those that the run was trained with"
                )
            for block in range(begin, plan.num_blocks):
                task = WindowTask(source=plan.source, epoch=epoch, block=block)
                yield first if (epoch, block) == (start.epoch, start.block) else task

    def chunks(
        self, cursor: Cursor, source: str | None = None, encoders: Encoders | None = None
    ) -> Iterator[TokenChunk]:
        """The chunks of all of a source's tasks from a cursor on, tokenized in this process. None: of the
        only one.
        """
        encoders = encoders or self.build_encoders()
        for task in self.tasks_from(cursor, source):
            yield from tokenize_block(task, self.source_plan(task.source), encoders, self.settings)

    def next_documents(self, cursor: Cursor) -> dict[str, Place]:
        """Per source the first document with text of which the stream before `cursor` has trained no token.
        Where whole documents are packed, that is the first one of the first window of which no pack is taken.

        Else that is the one after the document of the cursor's token, for that token has been a target
        already (data rule 1). Both are read, because at an epoch's border the cursor does not name the first;
        the second may be the next epoch's, whether or not the job goes so far.
        """
        endless, encoders = self.endless(), self.build_encoders()
        return {
            plan.source: endless.next_document(cursor, plan.source, encoders)
            for plan in self.plans
            if plan.source in cursor.sources or len(self.plans) == 1
        }

    def next_document(self, cursor: Cursor, source: str, encoders: Encoders) -> Place:
        """The same for one source, of a specification without an end."""
        at_hand, at = None, cursor.sources.get(source, SourceCursor())
        packed = self.settings.pack_mode != "concat"
        for chunk in self.chunks(cursor, source, encoders):
            if at.packs and (chunk.epoch, chunk.block, chunk.window) == (at.epoch, at.block, at.window):
                continue
            for record in chunk.record[chunk.num_tokens > 0].tolist():
                place = (chunk.epoch, chunk.block, chunk.window, record)
                if packed or at_hand not in (None, place):
                    return place
                at_hand = place
        raise AssertionError("an endless stream has a next document")

    def stream(self, cursor: Cursor, seq_len: int | None = None) -> Stream:
        """What takes those chunks and draws steps from them, of samples of `seq_len` (None: the job's)."""
        sources = [
            StreamSource(
                name=plan.source,
                num_blocks=plan.num_blocks,
                num_epochs=self.num_epochs(plan.source),
                path_of=plan.manifest.path,
            )
            for plan in self.plans
        ]
        settings = replace(self.settings, seq_len=seq_len or self.settings.seq_len)
        return Stream(cursor, sources, settings, self.mixture)


def prepare_data(config: JobConfig, folder: Path | None = None) -> DataSpec:
    """The data of a job: frozen in the run's `folder` if that has none yet, else as they were frozen there.

    Without a folder nothing is written. Raises `ConfigError` for missing files or a missing or unfit
    tokenizer, `DataError` for unreadable files, `DataIdentityError` (with both values) if files are gone or
    changed since the run's start and `resume.accept_changed` is not set.
    """
    settings = _settings(config)
    frozen = None if folder is None else read_frozen(folder)
    if frozen is None:
        looked_at = _first_start(config, settings)
        return looked_at if folder is None else freeze_data(config, folder, looked_at)
    assert folder is not None, "frozen data lie in a folder"
    return _from_frozen(config, settings, folder, frozen)


def prepare_trained(config: JobConfig, folder: Path) -> DataSpec:
    """The data that the run in `folder` was started with, to read them once more: as they were frozen and no
    others, whatever `resume.accept_changed` says, and wherever the job's paths lead today. Of a run that has
    frozen none yet, the job's.

    Raises `DataIdentityError` (with both values) if files are gone or changed since the run's start.
    """
    settings, frozen = replace(_settings(config), accept_changed=False), read_frozen(folder)
    if frozen is None:
        return prepare_data(config)
    facts, settings = _frozen_tokenizer(config, settings, folder, frozen)
    sources = {source.name: source for source in config.data.sources}
    manifests = [find_unchanged(sources[name], frozen.manifests[name]) for name in sources]
    return _frozen_spec(config, settings, folder, frozen.record, facts, manifests)


def freeze_data(config: JobConfig, folder: Path, looked_at: DataSpec) -> DataSpec:
    """`looked_at` with its data frozen in the run's `folder`: exactly what `prepare_data` saw, for the run's
    identity is made of that. Files that came since are not the run's; one that changed since is refused when
    it is opened. What is frozen already is left as it is.
    """
    found = looked_at.unfrozen
    if found is None:
        return looked_at
    if not write_frozen(folder, found.record, list(found.manifests.values()), found.tokenizer_files):
        return prepare_data(config, folder)  # another process was quicker: what it froze counts
    plans = tuple(_frozen_at(plan, looked_at.settings, folder) for plan in looked_at.plans)
    return replace(looked_at, plans=plans, tokenizer_folder=str(folder / TOKENIZER_FOLDER), unfrozen=None)


def _frozen_at(plan: SourcePlan, settings: StreamSettings, folder: Path) -> SourcePlan:
    """The plan, which pickles as the name of its list in the run's folder: it goes to many processes."""
    path = os.path.abspath(folder / manifest_path(plan.source))
    return frozen_at(plan, path, settings.fragment_bytes, settings.window_bytes)


def _settings(config: JobConfig) -> StreamSettings:
    data = config.data
    return StreamSettings(
        seed=data.seed,
        shuffle=data.shuffle,
        num_epochs=data.num_epochs,
        special_tokens_in_text=data.special_tokens_in_text,
        on_bad_document=data.on_bad_document,
        max_bad_share=data.max_bad_share,
        window_bytes=data.window_bytes,
        fragment_bytes=data.fragment_bytes,
        accept_changed=config.resume.accept_changed,
        loss={source.name: source.loss for source in data.sources},
        pack_mode=config.pack.mode,
        seq_len=config.pack.seq_len,
        long_document=config.pack.long_document,
    )


def _reads_chats(config: JobConfig) -> bool:
    return any(source.content == "chat" for source in config.data.sources)


def _first_start(config: JobConfig, settings: StreamSettings) -> DataSpec:
    files = fetch(config.data.tokenizer)
    facts = examine(config.data.tokenizer, files, _reads_chats(config))
    settings = _with_ids(config, settings, facts)
    plans, paths, notes = [], dict[str, tuple[str, ...]](), list[str]()
    for source in config.data.sources:
        listing = list_files(source.name, source.path, source.format)
        manifest = manifests.freeze_listed(source.name, listing, source.format, _content(source))
        plan = plan_source(manifest, settings.fragment_bytes, settings.window_bytes)
        if not plan.num_blocks:
            raise ConfigError(
                f"data.sources {source.name}: the {len(manifest.files)} files of {source.path!r} hold no "
                "records; fix the path"
            )
        plans.append(plan)
        paths[source.name] = listing.paths
        notes += [*listing.notes(source.name), *_window_notes(plan, settings), *_fill_notes(plan, settings)]
    encoder, compared = _choose(config, settings, facts, plans)
    record = DataRecord(
        tokenizer=config.data.tokenizer,
        tokenizer_digest=facts.digest,
        encoder_name=encoder.name,
        encoder_version=encoder.version,
        fragment_bytes=settings.fragment_bytes,
        window_bytes=settings.window_bytes,
        fragments_per_block={plan.source: plan.fragments_per_block for plan in plans},
        manifests={plan.source: plan.manifest.digest for plan in plans},
        paths={name: found[0] for name, found in paths.items()},
        more_paths={name: found[1:] for name, found in paths.items() if found[1:]},
    )
    return DataSpec(
        plans=tuple(plans),
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=None,
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=_identity(config, facts.digest, encoder, [plan.manifest for plan in plans], plans),
        mixture=_mixture(config, plans),
        max_epochs=_limits(config),
        notes=(*facts.notes, *notes, *compared),
        unfrozen=FrozenData(
            record=record,
            manifests={plan.source: plan.manifest for plan in plans},
            tokenizer_files=files,
        ),
    )


def _content(source: SourceConfig) -> Content:
    """What the source's records hold."""
    return Content(
        kind=source.content,
        text_field=source.text_field,
        messages_field=source.messages_field,
        prompt_field=source.prompt_field,
        completion_field=source.completion_field,
    )


def _from_frozen(config: JobConfig, settings: StreamSettings, folder: Path, frozen: FrozenData) -> DataSpec:
    facts, settings = _frozen_tokenizer(config, settings, folder, frozen)
    record, found, now, notes = frozen.record, [], [], list[str]()
    for source in config.data.sources:
        manifest, as_it_is, said = compare_files(
            source,
            frozen.manifests[source.name],
            record.paths_of(source.name),
            config.resume.accept_changed,
        )
        found.append(manifest)
        now.append(as_it_is)
        notes += said
    spec = _frozen_spec(config, settings, folder, record, facts, found)
    encoder = spec.encoders[0].encoder
    if config.data.encoder == GIGATOKEN and (GIGATOKEN, installed_version(GIGATOKEN)) != astuple(encoder):
        _choose(config, settings, facts, spec.plans)  # raises if it does not take this tokenizer
    asked = _tokenizer_now(config, frozen, facts)
    windows = [
        note for plan in spec.plans for note in (*_window_notes(plan, settings), *_fill_notes(plan, settings))
    ]
    return replace(
        spec,
        run_identity=_identity(config, asked, encoder, now, spec.plans),
        notes=(*facts.notes, *notes, *windows),
    )


def _frozen_tokenizer(
    config: JobConfig, settings: StreamSettings, folder: Path, frozen: FrozenData
) -> tuple[TokenizerFacts, StreamSettings]:
    """The run's copy of its tokenizer, and the settings with its ids."""
    record, asked = frozen.record, [source.name for source in config.data.sources]
    if asked != list(frozen.manifests):
        raise DataIdentityError(
            f"the run was started with data.sources {list(frozen.manifests)}, the job asks for {asked}; keep "
            "the sources, their names and their order, or start a new run under another run.name"
        )
    try:
        facts = examine(str(folder / TOKENIZER_FOLDER), frozen.tokenizer_files, _reads_chats(config))
    except ConfigError as error:  # it was one when it was copied
        raise DataIdentityError(
            f"the run's copy of its tokenizer in {folder / TOKENIZER_FOLDER} is damaged: {error.__cause__}; "
            "restore these files"
        ) from error
    if facts.digest != record.tokenizer_digest:
        raise DataIdentityError(
            f"the run's copy of its tokenizer in {folder / TOKENIZER_FOLDER} was made with digest "
            f"{record.tokenizer_digest} and has {facts.digest}; restore these files"
        )
    return facts, _with_ids(config, settings, facts)


def _frozen_spec(
    config: JobConfig,
    settings: StreamSettings,
    folder: Path,
    record: DataRecord,
    facts: TokenizerFacts,
    found: Sequence[Manifest],
) -> DataSpec:
    """What was frozen, with the files where the manifests say."""
    plans = tuple(plan_source(each, settings.fragment_bytes, settings.window_bytes) for each in found)
    for plan in plans:
        _require_same_blocks(plan, settings, record)
    encoder = EncoderChoice(name=record.encoder_name, version=record.encoder_version)
    return DataSpec(
        plans=tuple(_frozen_at(plan, settings, folder) for plan in plans),
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=str(folder / TOKENIZER_FOLDER),
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=_identity(config, facts.digest, encoder, found, plans),
        mixture=_mixture(config, plans),
        max_epochs=_limits(config),
    )


def _require_same_blocks(plan: SourcePlan, settings: StreamSettings, record: DataRecord) -> None:
    """The number of fragments per block is frozen. Where the settings differ, `identity` says so instead."""
    same = (settings.fragment_bytes, settings.window_bytes) == (record.fragment_bytes, record.window_bytes)
    was = record.fragments_per_block[plan.source]
    if same and was != plan.fragments_per_block:
        raise DataIdentityError(
            f"source {plan.source} was frozen with {was} fragments per block, this program makes "
            f"{plan.fragments_per_block}; use the version of orchestrator that the run was started with"
        )


def _tokenizer_now(config: JobConfig, frozen: FrozenData, facts: TokenizerFacts) -> str:
    """The digest of the tokenizer that the job names; the run's own copy stands for a name it cannot find."""
    name = config.data.tokenizer
    if name == frozen.record.tokenizer and not Path(name).expanduser().is_dir():
        return facts.digest
    files = fetch(name, frozen.tokenizer_files)
    same = files == frozen.tokenizer_files
    return facts.digest if same else examine(name, files, _reads_chats(config)).digest


def _with_ids(config: JobConfig, settings: StreamSettings, facts: TokenizerFacts) -> StreamSettings:
    bos, eos = ids_around(config.data.tokenizer, facts, config.data.bos, config.data.eos)
    return replace(settings, bos_id=bos, eos_id=eos)


def _mixture(config: JobConfig, plans: Sequence[SourcePlan]) -> MixtureSettings | None:
    """How the sources take turns; without weights by their bytes, and one that has ended is dropped."""
    data = config.data
    if len(plans) == 1:
        return None
    given = {source.name: source.weight for source in data.sources}
    if None in given.values():
        weights = {plan.source: Decimal(max(1, plan.manifest.num_bytes)) for plan in plans}
    else:
        weights = {name: Decimal(repr(weight)) for name, weight in given.items()}
    on_end = data.on_end or ("drop" if None in given.values() else "stop")
    return MixtureSettings(
        weights=whole_weights(weights),
        on_end="drop" if on_end == "repeat" else on_end,
        by=data.weight_by,
    )


def _limits(config: JobConfig) -> dict[str, int | None]:
    """Limits of epochs of the sources that have other ones than `data.num_epochs`."""
    data = config.data
    limits: dict[str, int | None] = {s.name: s.max_epochs for s in data.sources if s.max_epochs is not None}
    if len(data.sources) > 1 and data.on_end == "repeat":
        limits = {s.name: limits.get(s.name) for s in data.sources}
    return limits


def _choose(
    config: JobConfig, settings: StreamSettings, facts: TokenizerFacts, plans: Sequence[SourcePlan]
) -> tuple[EncoderChoice, tuple[str, ...]]:
    wanted, mode = config.data.encoder, settings.special_tokens_in_text

    def compare() -> _Verdict:
        documents = [] if wanted == TOKENIZERS else _sample_documents(plans, settings)
        choice, notes = choose_encoder(facts.model, wanted, mode, documents)
        return _Verdict(name=choice.name, version=choice.version, notes=notes)

    # the same files, tokenizer and libraries give the same answer: it is not looked for again
    digests = [plan.manifest.digest for plan in plans]
    content = [facts.digest, wanted, digests, stream_settings(config.flat()), installed_encoders()]
    verdict = remembered(_Verdict, [*content, ADVERSARIAL_VERSION], compare)
    return EncoderChoice(name=verdict.name, version=verdict.version), verdict.notes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What a comparison of the encoders said."""

    name: str
    version: str
    notes: tuple[str, ...]


def _sample_documents(plans: Sequence[SourcePlan], settings: StreamSettings) -> list[str]:
    """Beginnings of some documents of each source's first window, of a chat what is said in it; bad ones are
    left for the stream to report.
    """
    found = []
    for plan in plans:
        ordered = OrderedWindow(next(read_windows(plan, settings, 0, 0)), plan, settings, 0)
        here = []
        for position in islice(range(len(ordered)), 4 * _SAMPLE_DOCUMENTS):
            try:
                document = ordered.document(position)
            except BadRecordError:
                continue
            if text := "" if document is None else plain_text(document):
                here.append(text[:_SAMPLE_CHARACTERS])
        found += here[: max(1, _SAMPLE_DOCUMENTS // len(plans))]
    return found


def _window_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """The one exception to the flat cost of re-opening, where this source makes it (data rule 8)."""
    large = num_window_shuffled(plan, settings.window_bytes)
    if not large:
        return ()
    streamed = format_of(plan.manifest.format).cut is Cut.STREAM
    what = "are never cut," if streamed else "are compressed, or have row groups,"
    return (
        f"{large} of {len(plan.manifest.files)} files of source {plan.source} {what} in blocks that decode "
        f"to more than data.window_bytes={settings.window_bytes} (compressed files at {DECODED_RATIO} times "
        "their size, row groups with all their columns): they are shuffled within windows of that size only, "
        "of which one is held at a time, and a resume inside such a block decodes it up to there",
    )


def _fill_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Where a window has too few documents to fill its packs (data rule 21), by the bytes of the files."""
    if settings.pack_mode != "bestfit":
        return ()
    typical = plan.num_blocks // 2
    parts = [part for fragment in plan.fragments(typical) for part in plan.parts(fragment)]
    in_block = sum(decoded_bytes(plan.manifest, part) for part in parts)
    return few_packs(plan.source, min(settings.window_bytes, in_block), settings.seq_len)


def _identity(
    config: JobConfig,
    tokenizer_digest: str,
    encoder: EncoderChoice,
    now: Sequence[Manifest],
    plans: Sequence[SourcePlan],
) -> RunIdentity:
    settings = stream_settings(config.flat())
    for plan in plans:
        settings[f"data.sources.{plan.source}.fragments_per_block"] = str(plan.fragments_per_block)
    return RunIdentity(
        format_version=FORMAT_VERSION,
        order_version=ORDER_VERSION,
        tokenizer=config.data.tokenizer,
        tokenizer_digest=tokenizer_digest,
        encoder_name=encoder.name,
        encoder_version=encoder.version,
        settings=settings,
        manifests={manifest.source: manifest.digest for manifest in now},
    )
