"""A run's first start: reads the data as they are now, and makes all choices that are frozen afterwards.

It writes nothing. `dataset` freezes the result. It also makes notes about a source for the user: exceptions
and broken promises of its files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import TYPE_CHECKING

from orchestrator.data.common.settings import (
    StreamSettings,
    TransformRef,
    limits_of,
    mixture_of,
    transforms_of,
    wanted_of,
    with_transforms,
)
from orchestrator.data.frozen import RULES, DataRecord, Found, FrozenData, listed_as
from orchestrator.data.packing.packed_window import few_packs
from orchestrator.data.sources.formats import user_format
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.data.sources.lists.fragments import (
    DECODED_RATIO,
    SourcePlan,
    decoded_bytes,
    num_window_shuffled,
)
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.sources.records.content import BadRecordError
from orchestrator.data.sources.records.line_records import before_a_start
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import TOKENIZERS, choose_encoder, installed_encoders
from orchestrator.data.tokens.loss_mask import plain_text, require_masks
from orchestrator.data.tokens.tokenizer_files import TokenizerFacts, examine, fetch, ids_around
from orchestrator.data.tokens.tokenizer_json import ADVERSARIAL_VERSION
from orchestrator.data.tokens.transforms import find_transform
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan
from orchestrator.planning.order import ORDER_VERSION
from orchestrator.planning.resume.identity import FORMAT_VERSION, RunIdentity, stream_settings
from orchestrator.planning.resume.source_lists import FIRST, first_sources, restart_text
from orchestrator.records.steps import PREFERENCE
from orchestrator.storage.home import remembered

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import SourceConfig

__all__ = [
    "choose",
    "find_transforms",
    "first_start",
    "identity_of",
    "notes_of",
    "reads_chats",
    "shared_files",
    "with_ids",
]

# The encoders are compared at the first start, on this many of the run's own documents, and at most this many
# characters of each.
_SAMPLE_DOCUMENTS = 64
_SAMPLE_CHARACTERS = 8192


def first_start(
    config: JobConfig, settings: StreamSettings, list_of: Callable[[SourceConfig], Found] | None = None
) -> DataSpec:
    """The run's data as they are now. Writes nothing.

    `list_of` returns the list of a source (None: its current files). Raises as `prepare_data`.
    """
    files = fetch(config.data.tokenizer)
    facts = examine(config.data.tokenizer, files, reads_chats(config))
    refs = find_transforms(config)
    settings = with_transforms(config, with_ids(config, settings, facts), refs)
    plans, paths, notes = [], dict[str, tuple[str, ...]](), list[str]()
    for source in config.data.sources:
        listed = listed_as(source, settings.fragment_bytes, settings.window_bytes)
        found = listed.now() if list_of is None else list_of(source)
        plans.append(found.plan)
        paths[source.name] = found.paths
        notes += [*found.notes, *notes_of(found.plan, settings)]
    with before_a_start():
        encoder, compared = choose(config, settings, facts, plans)
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
        transforms={name: ref.source for name, ref in refs.items()},
        rules=RULES,
    )
    return DataSpec(
        plans=tuple(plans),
        sources=first_sources(wanted_of(config)),
        lists={plan.source: {FIRST: plan} for plan in plans},
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=None,
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=identity_of(config, facts.digest, encoder, [p.manifest for p in plans], plans, refs),
        mixture=mixture_of(config, {plan.source: plan.manifest.num_bytes for plan in plans}),
        max_epochs=limits_of(config),
        notes=(*facts.notes, *notes, *shared_files(plans), *compared),
        unfrozen=FrozenData(
            record=record,
            manifests={plan.source: plan.manifest for plan in plans},
            tokenizer_files=files,
        ),
    )


def choose(
    config: JobConfig, settings: StreamSettings, facts: TokenizerFacts, plans: Sequence[SourcePlan]
) -> tuple[EncoderChoice, tuple[str, ...]]:
    """Chooses the encoder by `data.encoder`, comparing both on a sample of the documents.

    Returns the encoder and notes for the user.
    """
    wanted, mode = config.data.encoder, settings.special_tokens_in_text

    def compare() -> _Verdict:
        documents = [] if wanted == TOKENIZERS else _sample_documents(plans, settings)
        choice, notes = choose_encoder(facts.model, wanted, mode, documents)
        return _Verdict(name=choice.name, version=choice.version, notes=notes)

    # the same files, tokenizer and libraries give the same result, which is cached
    digests = [plan.manifest.digest for plan in plans]
    content = [facts.digest, wanted, digests, stream_settings(config.flat()), installed_encoders()]
    verdict = remembered(_Verdict, [*content, ADVERSARIAL_VERSION], compare)
    return EncoderChoice(name=verdict.name, version=verdict.version), verdict.notes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Verdict:
    """The result of comparing the encoders."""

    name: str
    version: str
    notes: tuple[str, ...]


def _sample_documents(plans: Sequence[SourcePlan], settings: StreamSettings) -> list[str]:
    """Beginnings of some documents of each source's first window; of a chat, its messages' text.

    Bad documents are left for the stream to report.
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


def identity_of(
    config: JobConfig,
    tokenizer_digest: str,
    encoder: EncoderChoice,
    now: Sequence[Manifest],
    plans: Sequence[SourcePlan],
    transforms: Mapping[str, TransformRef],
) -> RunIdentity:
    """The run identity of a job with these files and transforms."""
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
        transforms={name: ref.source for name, ref in transforms.items()},
    )


def find_transforms(config: JobConfig) -> dict[str, TransformRef]:
    """All sources' transforms and own formats by name, with their current code.

    Raises `ConfigError` if an import fails.
    """
    names = dict.fromkeys(name for of in transforms_of(config).values() for name in of)
    found = {name: find_transform(name) for name in names}
    for source in config.data.sources:
        if (own := user_format(source.format)) is not None:
            found[source.format] = TransformRef(name=source.format, source=own.code)
    return found


def reads_chats(config: JobConfig) -> bool | None:
    """Whether the tokenizer needs a chat template. None: only if the answers of preferences are messages."""
    contents = {source.content for source in config.data.sources}
    return None if PREFERENCE in contents else "chat" in contents


def with_ids(config: JobConfig, settings: StreamSettings, facts: TokenizerFacts) -> StreamSettings:
    """The settings with the ids that are inserted around a document.

    Raises `ConfigError` if the tokenizer lacks one of them, or cannot encode the content of a source.
    """
    content = {source.name: source.content for source in config.data.sources}
    require_masks(config.data.tokenizer, facts.model, content)
    bos, eos = ids_around(config.data.tokenizer, facts, config.data.bos, config.data.eos)
    return replace(settings, bos_id=bos, eos_id=eos)


# ------------------------------------------------------------------------------------------------------ notes
def notes_of(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """The notes for the start and for `plan`. Most sources have none."""
    return (
        *_index_notes(plan),
        *_window_notes(plan, settings),
        *_fill_notes(plan, settings),
        *_chat_notes(plan),
    )


def shared_files(plans: Sequence[SourcePlan]) -> tuple[str, ...]:
    """Reports files that several sources share.

    Each source reads and trains them by itself, so one may train what another holds out. Files are compared
    by path; a link with another name is not resolved.
    """
    notes = []
    for one, other in combinations(plans, 2):
        bases = sorted(os.path.join(plan.manifest.base, "") for plan in (one, other))
        if not bases[1].startswith(bases[0]):
            continue
        few, many = sorted((one.manifest, other.manifest), key=lambda manifest: len(manifest.files))
        paths = {few.path(file) for file in range(len(few.files))}
        found = [path for file in range(len(many.files)) if (path := many.path(file)) in paths]
        if found:
            notes.append(
                f"warning: sources {one.source} and {other.source} have {len(found)} of their files in "
                f"common, e.g. {found[0]}: each trains all of its own, so these documents are trained by "
                "both, also those that one of them holds out"
            )
    return tuple(notes)


def _index_notes(plan: SourcePlan) -> tuple[str, ...]:
    """Notes on an index beside the files whose counts may be wrong."""
    form, manifest = plan.manifest.form, plan.manifest
    if not form.has_index:
        return ()
    num_rows = sum(sum(row.group_rows) for row in manifest.files)
    return form.index_notes(plan.source, manifest.base, num_rows)


def _window_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Notes on files that break the constant cost of re-opening (data rule 8)."""
    large = num_window_shuffled(plan, settings.window_bytes)
    if not large:
        return ()
    streamed = plan.manifest.cut is Cut.STREAM
    what = "are never cut," if streamed else "are compressed, or have row groups,"
    return (
        f"{large} of {len(plan.manifest.files)} files of source {plan.source} {what} in blocks that decode "
        f"to more than data.window_bytes={settings.window_bytes} (compressed files at {DECODED_RATIO} times "
        "their size, row groups with all their columns): they are shuffled within windows of that size only, "
        "of which one is held at a time, and a resume inside such a block decodes it up to there",
    )


def _fill_notes(plan: SourcePlan, settings: StreamSettings) -> tuple[str, ...]:
    """Notes on windows with too few documents to fill their packs (data rule 21), estimated from file
    sizes.
    """
    if settings.pack_mode != "bestfit":
        return ()
    typical = plan.num_blocks // 2
    parts = [part for fragment in plan.fragments(typical) for part in plan.parts(fragment)]
    in_block = sum(decoded_bytes(plan.manifest, part) for part in parts)
    return few_packs(plan.source, min(settings.window_bytes, in_block), settings.seq_len)


def _chat_notes(plan: SourcePlan) -> tuple[str, ...]:
    """Notes on chats that are read by the rules of an earlier version, so that the run keeps its stream."""
    if not plan.manifest.content.as_stored:
        return ()
    return (
        f"source {plan.source} keeps the chats of a list that an earlier version froze: values such as tools "
        "are rendered as they are stored, also as JSON text, and weights of messages mean nothing; "
        f"{restart_text(plan.source)} to read them by today's rules",
    )
