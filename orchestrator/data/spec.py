"""All that a process needs to read a run's stream, as one frozen value: files, tokenizer, encoder, settings.

`prepare_data` makes it, at a run's first start by freezing what is there, later from what was frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.data.frozen import TOKENIZER_FOLDER, DataRecord, FrozenData, read_frozen, write_frozen
from orchestrator.data.packing.stream import Packer, Sample, open_samples
from orchestrator.data.settings import StreamSettings
from orchestrator.data.sources import manifest as manifests
from orchestrator.data.sources.fragments import (
    DECODED_RATIO,
    SourcePlan,
    decoded_bytes,
    is_plain,
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
from orchestrator.planning.order import ORDER_VERSION
from orchestrator.records import Cursor, SourceCursor, TokenChunk, WindowTask

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

__all__ = ["DataSpec", "Sample", "freeze_data", "prepare_data", "prepare_trained", "public_stream"]

# The encoders are compared on so many of the run's own documents, and so much of each, at the first start.
_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """A run's data and how they become tokens. Pickles; goes to the feeder and to every tokenizer process.

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
    notes: tuple[str, ...] = ()
    unfrozen: FrozenData | None = None

    def identity(self) -> RunIdentity:
        """What must stay the same, as this job finds it: files and tokenizer as they are now."""
        return self.run_identity

    def source_plan(self, source: str) -> SourcePlan:
        """The files, fragments and blocks of a source."""
        return next(plan for plan in self.plans if plan.source == source)

    def made_by(self, encoders: tuple[EncoderSpan, ...]) -> DataSpec:
        """The same data, encoded so."""
        return replace(self, encoders=encoders or self.encoders)

    def build_encoders(self) -> Encoders:
        """What `tokenize_block` encodes with. It raises `DataIdentityError` if this machine has another
        version of what it needs.
        """
        return Encoders(self.tokenizer, self.encoders, self.settings.special_tokens_in_text)

    def tasks_from(self, cursor: Cursor) -> Iterator[WindowTask]:
        """The block tasks from a cursor on, over all epochs; endless for `num_epochs` None."""
        plan = self.plans[0]
        start = cursor.sources.get(plan.source, SourceCursor())
        num_epochs = self.settings.num_epochs
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

    def chunks(self, cursor: Cursor) -> Iterator[TokenChunk]:
        """The chunks of all tasks from a cursor on, tokenized in this process."""
        encoders = self.build_encoders()
        for task in self.tasks_from(cursor):
            yield from tokenize_block(task, self.source_plan(task.source), encoders, self.settings)

    def next_documents(self, cursor: Cursor) -> dict[str, Place]:
        """Per source the first document with text of which the stream before `cursor` has trained no token.

        That is the one after the document of the cursor's token, for that token has been a target already
        (data rule 1). Both are read, because at an epoch's border the cursor does not name the first; the
        second may be the next epoch's, whether or not the job goes so far.
        """
        endless = replace(self, settings=replace(self.settings, num_epochs=None))
        at_hand = None
        for chunk in endless.chunks(cursor):
            for record in chunk.record[chunk.num_tokens > 0].tolist():
                place = (chunk.epoch, chunk.block, chunk.window, record)
                if at_hand not in (None, place):
                    return {chunk.source: place}
                at_hand = place
        raise AssertionError("an endless stream has a next document")

    def packer(self, cursor: Cursor) -> Packer:
        """A packer that takes those chunks."""
        plan = self.plans[0]
        return Packer(cursor, plan.source, plan.num_blocks, self.settings)


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
    source = config.data.sources[0]
    manifest = find_unchanged(source, frozen.manifests[source.name])
    return _frozen_spec(config, settings, folder, frozen.record, facts, manifest)


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
    return replace(looked_at, tokenizer_folder=str(folder / TOKENIZER_FOLDER), unfrozen=None)


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
    )


def _reads_chats(config: JobConfig) -> bool:
    return any(source.content == "chat" for source in config.data.sources)


def _first_start(config: JobConfig, settings: StreamSettings) -> DataSpec:
    source = config.data.sources[0]
    files = fetch(config.data.tokenizer)
    facts = examine(config.data.tokenizer, files, _reads_chats(config))
    settings = _with_ids(config, settings, facts)
    listing = list_files(source.name, source.path, source.format)
    manifest = manifests.freeze_listed(source.name, listing, source.format, source.text_field)
    plan = plan_source(manifest, settings.fragment_bytes, settings.window_bytes)
    if not plan.num_blocks:
        raise ConfigError(
            f"data.sources {source.name}: the {len(manifest.files)} files of {source.path!r} hold no "
            "records; fix the path"
        )
    encoder, notes = _choose(config, settings, facts, plan)
    record = DataRecord(
        tokenizer=config.data.tokenizer,
        tokenizer_digest=facts.digest,
        encoder_name=encoder.name,
        encoder_version=encoder.version,
        fragment_bytes=settings.fragment_bytes,
        window_bytes=settings.window_bytes,
        fragments_per_block={source.name: plan.fragments_per_block},
        manifests={source.name: manifest.digest},
        paths={source.name: listing.path},
    )
    return DataSpec(
        plans=(plan,),
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=None,
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=_identity(config, facts.digest, encoder, manifest, plan),
        notes=(*facts.notes, *listing.notes(source.name), *notes, *_window_notes(plan, settings)),
        unfrozen=FrozenData(record=record, manifests={source.name: manifest}, tokenizer_files=files),
    )


def _from_frozen(config: JobConfig, settings: StreamSettings, folder: Path, frozen: FrozenData) -> DataSpec:
    facts, settings = _frozen_tokenizer(config, settings, folder, frozen)
    source, record = config.data.sources[0], frozen.record
    manifest, now, notes = compare_files(
        source, frozen.manifests[source.name], record.paths.get(source.name), config.resume.accept_changed
    )
    spec = _frozen_spec(config, settings, folder, record, facts, manifest)
    plan, encoder = spec.plans[0], spec.encoders[0].encoder
    if config.data.encoder == GIGATOKEN and (GIGATOKEN, installed_version(GIGATOKEN)) != astuple(encoder):
        _choose(config, settings, facts, plan)  # raises if it does not take this tokenizer
    asked = _tokenizer_now(config, frozen, facts)
    return replace(
        spec,
        run_identity=_identity(config, asked, encoder, now, plan),
        notes=(*facts.notes, *notes, *_window_notes(plan, settings)),
    )


def _frozen_tokenizer(
    config: JobConfig, settings: StreamSettings, folder: Path, frozen: FrozenData
) -> tuple[TokenizerFacts, StreamSettings]:
    """The run's copy of its tokenizer, and the settings with its ids."""
    source, record = config.data.sources[0], frozen.record
    if source.name not in frozen.manifests:
        raise DataIdentityError(
            f"the run was started with data.sources {sorted(frozen.manifests)}, the job asks for "
            f"{source.name}; keep the source's name, or start a new run"
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
    manifest: Manifest,
) -> DataSpec:
    """What was frozen, with the files where `manifest` says."""
    plan = plan_source(manifest, settings.fragment_bytes, settings.window_bytes)
    _require_same_blocks(plan, settings, record)
    encoder = EncoderChoice(name=record.encoder_name, version=record.encoder_version)
    return DataSpec(
        plans=(plan,),
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=str(folder / TOKENIZER_FOLDER),
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=_identity(config, facts.digest, encoder, manifest, plan),
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


def _choose(
    config: JobConfig, settings: StreamSettings, facts: TokenizerFacts, plan: SourcePlan
) -> tuple[EncoderChoice, tuple[str, ...]]:
    wanted, mode = config.data.encoder, settings.special_tokens_in_text

    def compare() -> _Verdict:
        documents = [] if wanted == TOKENIZERS else _sample_documents(plan, settings)
        choice, notes = choose_encoder(facts.model, wanted, mode, documents)
        return _Verdict(name=choice.name, version=choice.version, notes=notes)

    # the same files, tokenizer and libraries give the same answer: it is not looked for again
    asked = [facts.digest, wanted, plan.manifest.digest, stream_settings(config.flat())]
    content = [*asked, installed_encoders(), ADVERSARIAL_VERSION]
    verdict = remembered(_Verdict, content, compare)
    return EncoderChoice(name=verdict.name, version=verdict.version), verdict.notes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """What a comparison of the encoders said."""

    name: str
    version: str
    notes: tuple[str, ...]


def _sample_documents(plan: SourcePlan, settings: StreamSettings) -> list[str]:
    """Beginnings of some documents of the stream's first window, of a chat what is said in it; bad ones are
    left for the stream to report.
    """
    ordered = OrderedWindow(next(read_windows(plan, settings, 0, 0)), plan, settings, 0)
    found = []
    for position in islice(range(len(ordered)), 4 * _SAMPLE_DOCUMENTS):
        try:
            document = ordered.document(position)
        except BadRecordError:
            continue
        if text := "" if document is None else plain_text(document):
            found.append(text[:_SAMPLE_CHARACTERS])
    return found[:_SAMPLE_DOCUMENTS]


def _window_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """The one exception to the flat cost of re-opening, where this source makes it (data rule 8)."""
    files = plan.manifest.files
    if plan.manifest.format != "parquet" and not any(
        row.path.endswith(manifests.COMPRESSED) for row in files
    ):
        return ()
    large = set[int]()
    for block in range(plan.num_blocks):
        parts = [part for fragment in plan.fragments(block) for part in plan.parts(fragment)]
        if sum(decoded_bytes(plan.manifest, part) for part in parts) > settings.window_bytes:
            large |= {part.file for part in parts if not is_plain(plan.manifest, part)}
    if not large:
        return ()
    return (
        f"{len(large)} of {len(files)} files of source {plan.source} are compressed, or have row groups, in "
        f"blocks that decode to more than data.window_bytes={settings.window_bytes} (compressed files at "
        f"{DECODED_RATIO} times their size, row groups with all their columns): they are shuffled within "
        "windows of that size only, of which one is held at a time, and a resume inside such a block decodes "
        "it up to there",
    )


def _identity(
    config: JobConfig, tokenizer_digest: str, encoder: EncoderChoice, now: Manifest, plan: SourcePlan
) -> RunIdentity:
    settings = stream_settings(config.flat())
    settings[f"data.sources.{plan.source}.fragments_per_block"] = str(plan.fragments_per_block)
    return RunIdentity(
        format_version=FORMAT_VERSION,
        order_version=ORDER_VERSION,
        tokenizer=config.data.tokenizer,
        tokenizer_digest=tokenizer_digest,
        encoder_name=encoder.name,
        encoder_version=encoder.version,
        settings=settings,
        manifests={plan.source: now.digest},
    )


def public_stream(config: JobConfig, cursor: Cursor | None = None) -> Iterator[Sample]:
    """The canonical samples of a job from `cursor` on (None: from the start), without a run and a cluster.

    The files are taken as they are now. Raises as `prepare_data` and `open_samples` do.
    """
    return open_samples(prepare_data(config), cursor or Cursor(), config.pack.seq_len)
