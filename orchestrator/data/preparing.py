"""A run's data, ready to be read: at its first start by freezing what is there, later from what was frozen.

It decides nothing about resuming: it says what the job finds (`DataSpec.identity`), or refuses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.data.first_start import (
    choose,
    find_transforms,
    first_start,
    identity_of,
    reads_chats,
    with_ids,
)
from orchestrator.data.frozen import (
    TOKENIZER_FOLDER,
    DataRecord,
    FrozenData,
    manifest_path,
    read_frozen,
    write_frozen,
)
from orchestrator.data.settings import StreamSettings, limits_of, mixture_of, settings_of, with_transforms
from orchestrator.data.source_notes import notes_of
from orchestrator.data.sources.fragments import SourcePlan, frozen_at, plan_source
from orchestrator.data.sources.manifest import Manifest
from orchestrator.data.sources.unchanged import compare_files, find_unchanged
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import GIGATOKEN, installed_version
from orchestrator.data.tokens.tokenizer_files import TokenizerFacts, examine, fetch
from orchestrator.data.transforms import TransformRef
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

__all__ = ["freeze_data", "prepare_data", "prepare_trained"]


def prepare_data(config: JobConfig, folder: Path | None = None) -> DataSpec:
    """The data of a job: frozen in the run's `folder` if that has none yet, else as they were frozen there.

    Without a folder nothing is written. Raises `ConfigError` for missing files or a missing or unfit
    tokenizer, `DataError` for unreadable files, `DataIdentityError` (with both values) if files are gone or
    changed since the run's start and `resume.accept_changed` is not set. A module of `data.transforms` that
    cannot be imported is a `ConfigError`, too.
    """
    settings = settings_of(config)
    frozen = None if folder is None else read_frozen(folder)
    if frozen is None:
        looked_at = first_start(config, settings)
        return looked_at if folder is None else freeze_data(config, folder, looked_at)
    assert folder is not None, "frozen data lie in a folder"
    return _from_frozen(config, settings, folder, frozen)


def prepare_trained(config: JobConfig, folder: Path) -> DataSpec:
    """The data that the run in `folder` was started with, to read them once more: as they were frozen and no
    others, whatever `resume.accept_changed` says, and wherever the job's paths lead today. Of a run that has
    frozen none yet, the job's.

    Raises `DataIdentityError` (with both values) if files are gone or changed since the run's start.
    """
    settings, frozen = replace(settings_of(config), accept_changed=False), read_frozen(folder)
    if frozen is None:
        return prepare_data(config)
    facts, settings = _frozen_tokenizer(config, settings, folder, frozen)
    sources = {source.name: source for source in config.data.sources}
    manifests = [find_unchanged(sources[name], frozen.manifests[name]) for name in sources]
    frozen_refs = {n: TransformRef(name=n, source=text) for n, text in frozen.record.transforms.items()}
    return _frozen_spec(config, settings, folder, frozen.record, facts, manifests, frozen_refs)


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


def _from_frozen(config: JobConfig, settings: StreamSettings, folder: Path, frozen: FrozenData) -> DataSpec:
    facts, settings = _frozen_tokenizer(config, settings, folder, frozen)
    record, found, now, notes = frozen.record, [], [], list[str]()
    refs = find_transforms(config)  # that they are the run's, who compares identities sees
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
    spec = _frozen_spec(config, settings, folder, record, facts, found, refs)
    encoder = spec.encoders[0].encoder
    if config.data.encoder == GIGATOKEN and (GIGATOKEN, installed_version(GIGATOKEN)) != astuple(encoder):
        choose(config, settings, facts, spec.plans)  # raises if it does not take this tokenizer
    asked = _tokenizer_now(config, frozen, facts)
    windows = [note for plan in spec.plans for note in notes_of(plan, settings)]
    return replace(
        spec,
        run_identity=identity_of(config, asked, encoder, now, spec.plans, refs),
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
        facts = examine(str(folder / TOKENIZER_FOLDER), frozen.tokenizer_files, reads_chats(config))
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
    return facts, with_ids(config, settings, facts)


def _frozen_spec(
    config: JobConfig,
    settings: StreamSettings,
    folder: Path,
    record: DataRecord,
    facts: TokenizerFacts,
    found: Sequence[Manifest],
    transforms: Mapping[str, TransformRef],
) -> DataSpec:
    """What was frozen, with the files where the manifests say."""
    settings = with_transforms(config, settings, transforms)
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
        run_identity=identity_of(config, facts.digest, encoder, found, plans, transforms),
        mixture=mixture_of(config, {plan.source: plan.manifest.num_bytes for plan in plans}),
        max_epochs=limits_of(config),
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
    return facts.digest if same else examine(name, files, reads_chats(config)).digest
