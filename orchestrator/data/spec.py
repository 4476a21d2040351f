"""Everything a process needs to read a run's stream, as one frozen value: files, tokenizer, encoder, settings.

`prepare_data` makes it, at a run's first start by freezing what is there, later from what was frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.data import manifest as manifests
from orchestrator.data.chunks import tokenize_block
from orchestrator.data.encoder import Encoder, EncoderChoice, choose_encoder
from orchestrator.data.fragments import SourcePlan, plan_source
from orchestrator.data.frozen import FrozenData, read_frozen, write_frozen
from orchestrator.data.settings import StreamSettings
from orchestrator.data.sources import BadRecordError, OrderedWindow, read_windows
from orchestrator.data.stream import Packer, Sample, open_samples
from orchestrator.data.tokenizer_files import TokenizerFacts, TokenizerModel, examine, fetch, ids_around
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.plan.identity import FORMAT_VERSION, RunIdentity, stream_settings
from orchestrator.plan.order import ORDER_VERSION
from orchestrator.records import Cursor, SourceCursor, TokenChunk, WindowTask

if TYPE_CHECKING:
    from orchestrator.config import JobConfig

__all__ = ["DataSpec", "prepare_data", "public_stream"]

# The encoders are compared on so many of the run's own documents, and so much of each, at the first start.
_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """A run's data and how they become tokens. Pickles; goes to the feeder and to every tokenizer process.

    `tokenizer_folder` is the run's own copy of the tokenizer (None without a run), `vocab_size` its highest
    id plus one. `notes` are to be said aloud and journalled at the start.
    """

    plans: tuple[SourcePlan, ...]
    settings: StreamSettings
    tokenizer: TokenizerModel
    tokenizer_folder: str | None
    vocab_size: int
    encoder: EncoderChoice
    run_identity: RunIdentity
    notes: tuple[str, ...] = ()

    def identity(self) -> RunIdentity:
        """What must stay the same, as this job finds it: files and tokenizer as they are now."""
        return self.run_identity

    def source_plan(self, source: str) -> SourcePlan:
        """The files, fragments and blocks of a source."""
        return next(plan for plan in self.plans if plan.source == source)

    def build_encoder(self) -> Encoder:
        """The run's encoder. Raises `DataIdentityError` if this machine has another version of it."""
        return Encoder(self.tokenizer, self.encoder, self.settings.special_tokens_in_text)

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
            piece=start.piece,
        )
        for epoch in epochs:
            begin = start.block if epoch == start.epoch else 0
            if begin >= plan.num_blocks:
                raise DataIdentityError(
                    f"the cursor names block {begin} of source {plan.source}, which has {plan.num_blocks} blocks; the data are not those "
                    "that the run was trained with"
                )
            for block in range(begin, plan.num_blocks):
                task = WindowTask(source=plan.source, epoch=epoch, block=block)
                yield first if (epoch, block) == (start.epoch, start.block) else task

    def chunks(self, cursor: Cursor) -> Iterator[TokenChunk]:
        """The chunks of all tasks from a cursor on, tokenized in this process."""
        encoder = self.build_encoder()
        for task in self.tasks_from(cursor):
            yield from tokenize_block(task, self.source_plan(task.source), encoder, self.settings)

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
        return _first_start(config, settings, folder)
    return _from_frozen(config, settings, frozen)


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
    )


def _first_start(config: JobConfig, settings: StreamSettings, folder: Path | None) -> DataSpec:
    source = config.data.sources[0]
    files = fetch(config.data.tokenizer)
    facts = examine(config.data.tokenizer, files)
    settings = _with_ids(config, settings, facts)
    manifest = manifests.freeze(source.name, source.path, source.format, source.text_field)
    plan = plan_source(manifest, settings.fragment_bytes, settings.window_bytes)
    if not plan.num_blocks:
        raise ConfigError(
            f"data.sources {source.name}: the {len(manifest.files)} files of {source.path!r} hold no records; mend the path"
        )
    documents = _sample_documents(plan, settings) if config.data.encoder != "tokenizers" else []
    encoder, notes = choose_encoder(
        facts.model, config.data.encoder, settings.special_tokens_in_text, documents
    )
    frozen = FrozenData(
        tokenizer=config.data.tokenizer,
        tokenizer_digest=facts.digest,
        encoder_name=encoder.name,
        encoder_version=encoder.version,
        fragment_bytes=settings.fragment_bytes,
        window_bytes=settings.window_bytes,
        fragments_per_block={source.name: plan.fragments_per_block},
        manifests={source.name: manifest.digest},
    )
    if folder is not None and not write_frozen(folder, frozen, (manifest,), files):
        return prepare_data(config, folder)  # another process was quicker: what it froze counts
    return _spec(config, settings, frozen, plan, facts, folder, (*facts.notes, *notes, *_window_notes(plan, settings)))


def _from_frozen(config: JobConfig, settings: StreamSettings, stored: StoredData) -> DataSpec:
    raise NotImplementedError


def _with_ids(config: JobConfig, settings: StreamSettings, facts: TokenizerFacts) -> StreamSettings:
    bos, eos = ids_around(config.data.tokenizer, facts, config.data.bos, config.data.eos)
    return replace(settings, bos_id=bos, eos_id=eos)
