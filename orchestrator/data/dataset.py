"""Prepares the data that a run trains and evaluates: freezes them at the first start, and reads the frozen
data later.

It does not decide about resuming: it returns the job's identity (`DataSpec.identity`), or raises. A part of
`eval.parts` is the run's hold-out, or has sources of its own. These are frozen in the run's folder
`eval/<part>/` as a run freezes its data, and are read once, in the order of the first epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from orchestrator.config.schema import HOLDOUT
from orchestrator.data.code_process import call, names_code
from orchestrator.data.common.settings import (
    SPLIT_WHOLE,
    StreamSettings,
    TransformRef,
    has_list_to_come,
    limits_of,
    mixture_of,
    settings_of,
    transforms_of,
    wanted_of,
    with_transforms,
)
from orchestrator.data.freeze import (
    choose,
    find_transforms,
    first_start,
    identity_of,
    notes_of,
    reads_chats,
    shared_files,
    with_ids,
)
from orchestrator.data.frozen import (
    DAMAGED,
    EVAL_FOLDER,
    EVAL_IDENTITY,
    GONE,
    RULES,
    TOKENIZER_FOLDER,
    DataRecord,
    FrozenData,
    LaterList,
    frozen_sources,
    later_plan,
    later_versions,
    listed_as,
    manifest_path,
    read_frozen,
    read_later,
    refreshing,
    write_frozen,
    write_later,
)
from orchestrator.data.sources.lists.fragments import SourcePlan, frozen_at
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.sources.lists.source_diff import compare_files, find_unchanged
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import GIGATOKEN, installed_version
from orchestrator.data.tokens.resolved import RESOLVED
from orchestrator.data.tokens.tokenizer_files import TokenizerFacts, examine, fetch, is_there
from orchestrator.errors import ConfigError, DataIdentityError, naming_fields
from orchestrator.json_form import SealError, decode, encode, seal, unseal
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan
from orchestrator.planning.resume.identity import RunIdentity, compare
from orchestrator.planning.resume.source_lists import (
    FIRST,
    SourceLists,
    SourceReading,
    SourceRequest,
    first_sources,
    next_sources,
    order_of,
    start_of,
)
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig


def prepare_data(
    config: JobConfig, storage: Storage | None = None, reading: SourceReading | None = None
) -> DataSpec:
    """The data of a job.

    They are frozen in the run's `storage` if it has none yet. Otherwise they are read as they were frozen, by
    the lists of `reading` (None: the lists of a run that has trained nothing). A list of these that does not
    exist yet is made from the files as they are now, and is `unwritten`.

    Without a storage nothing is written. Raises `ConfigError` for missing files, a missing or unfit
    tokenizer, or a module of `data.transforms` that cannot be imported. Raises `DataError` for unreadable
    files. Raises `DataIdentityError` (with both values) if files are missing or changed since their list was
    frozen and `resume.accept_changed` is not set.
    """
    settings = settings_of(config)
    frozen = None if storage is None else read_frozen(storage)
    if frozen is None:
        looked_at = first_start(config, settings)
        return looked_at if storage is None else freeze_data(config, storage, looked_at)
    assert storage is not None, "frozen data lie in a run's storage"
    return _from_frozen(config, settings, storage, frozen, reading or _unread(config, frozen))


def _unread(config: JobConfig, frozen: FrozenData) -> SourceReading:
    """How a job reads frozen data of which nothing was trained yet."""
    first = first_sources(SourceRequest(names=tuple(frozen.manifests)))
    free = {source.name: 1 for source in config.data.sources}
    return SourceReading(sources=next_sources(first, Cursor(), wanted_of(config), free))


def prepare_trained(config: JobConfig, storage: Storage, sources: tuple[SourceLists, ...] = ()) -> DataSpec:
    """The data that the run in `storage` was trained on, to read them again.

    Uses every list of `sources` (empty: those of the first start) exactly as it was frozen, whatever
    `resume.accept_changed` is, and wherever the job's paths lead now. For a run that has frozen no data, it
    prepares the job's.

    Raises `DataIdentityError` (with both values) if files of a source's only list are missing or have
    changed. For a source with several lists, `lacking` reports that for each.
    """
    settings, frozen = replace(settings_of(config), accept_changed=False), read_frozen(storage)
    if frozen is None:
        return prepare_data(config)
    facts, settings = _frozen_tokenizer(config, settings, storage, frozen)
    sources = sources or first_sources(SourceRequest(names=tuple(frozen.manifests)))
    paths = {source.name: source.path for source in config.data.sources}
    found = {each.name: _trained_lists(storage, frozen, each, paths.get(each.name)) for each in sources}
    lists = {name: of for name, (of, _) in found.items()}
    plans = [next(reversed(lists[source.name].values())) for source in config.data.sources]
    refs = {n: TransformRef(name=n, source=text) for n, text in frozen.record.transforms.items()}
    if {name for of in transforms_of(config).values() for name in of} - refs.keys():
        refs = {**find_transforms(config), **refs}  # of sources added later
    spec = _frozen_spec(config, settings, storage, frozen.record, facts, sources, lists, plans, refs)
    return replace(spec, lacking={name: wrong for name, (_, wrong) in found.items() if wrong})


def _trained_lists(
    storage: Storage, frozen: FrozenData, source: SourceLists, path: str | Sequence[str] | None
) -> tuple[dict[str, SourcePlan], dict[str, str]]:
    """All lists of a source that its spans may read, oldest first, with the current paths of their files.

    Also returns the errors of lists whose files are missing or changed, by version.
    """
    starts = {span.start for span in source.spans}
    versions = [FIRST] if 0 in starts and source.name in frozen.manifests else []
    versions += [v for v in later_versions(storage).get(source.name, ()) if start_of(v) in starts]
    found, wrong = dict[str, SourcePlan](), dict[str, str]()
    for version in sorted(versions, key=order_of):
        there = _frozen_list(storage, frozen, source.name, version)
        assert there is not None, "just listed"
        base = None
        try:
            base = find_unchanged(path, there.manifest).base
        except DataIdentityError as error:
            if len(versions) == 1:
                raise
            wrong[version] = str(error)
        found[version] = later_plan(storage, there, base)
    return found, wrong


def freeze_data(config: JobConfig, storage: Storage, looked_at: DataSpec) -> DataSpec:
    """Freezes the data of `looked_at` in the run's `storage`.

    These are exactly the data that `prepare_data` read, because the run's identity is derived from them.
    Files that were added since are not part of the run; a file that changed since is refused when it is
    opened. Data that are already frozen stay as they are.
    """
    found = looked_at.unfrozen
    if found is None:
        return looked_at
    if not write_frozen(storage, found.record, list(found.manifests.values()), found.tokenizer_files):
        return prepare_data(config, storage)  # another process was first: its frozen data apply
    lists = {
        name: {FIRST: _frozen_at(of[FIRST], looked_at.settings, storage)}
        for name, of in looked_at.lists.items()
    }
    return replace(
        looked_at,
        plans=tuple(lists[plan.source][FIRST] for plan in looked_at.plans),
        lists=lists,
        tokenizer_folder=_tokenizer_at(storage),
        unfrozen=None,
        refreshing=refreshing(config, storage, {}),
    )


def num_frozen_files(storage: Storage, source: str, version: str) -> int | None:
    """The number of files of a frozen list; None if there is no such list."""
    if version != FIRST:
        later = read_later(storage, source, version)
        return None if later is None else len(later.manifest.files)
    frozen = read_frozen(storage)
    found = None if frozen is None else frozen.manifests.get(source)
    return None if found is None else len(found.files)


def write_lists(storage: Storage, spec: DataSpec) -> DataSpec:
    """Freezes the lists of a run that are not frozen yet, exactly as `prepare_data` read them.

    A list that another process froze first stays. Returns the spec, whose plans of these lists now pickle as
    the lists' names.
    """
    for found in spec.unwritten:
        write_later(storage, found)

    def written(plan: SourcePlan) -> SourcePlan:
        for found in spec.unwritten:
            if (plan.source, plan.manifest.digest) == (found.manifest.source, found.manifest.digest):
                path = manifest_path(plan.source, found.version)
                return frozen_at(plan, storage, path, found.fragment_bytes, found.window_bytes)
        return plan

    lists = {
        name: {version: written(plan) for version, plan in plans.items()}
        for name, plans in spec.lists.items()
    }
    return replace(spec, plans=tuple(map(written, spec.plans)), lists=lists, unwritten=())


def _tokenizer_at(storage: Storage) -> str:
    return f"{storage.root}/{TOKENIZER_FOLDER}"


def _frozen_at(plan: SourcePlan, settings: StreamSettings, storage: Storage) -> SourcePlan:
    """The plan, which pickles as the name of its list in the run's storage, because it is sent to many
    processes.
    """
    path = manifest_path(plan.source)
    return frozen_at(plan, storage, path, settings.fragment_bytes, settings.window_bytes)


def _frozen_list(storage: Storage, frozen: FrozenData, source: str, version: str) -> LaterList | None:
    """A frozen list of any version; None if there is no such list."""
    if version != FIRST:
        return read_later(storage, source, version)
    record = frozen.record
    return LaterList(
        manifest=frozen.manifests[source],
        version=version,
        fragment_bytes=record.fragment_bytes,
        window_bytes=record.window_bytes,
        fragments_per_block=record.fragments_per_block[source],
        paths=record.paths_of(source),
    )


def _from_frozen(
    config: JobConfig, settings: StreamSettings, storage: Storage, frozen: FrozenData, reading: SourceReading
) -> DataSpec:
    facts, settings = _frozen_tokenizer(config, settings, storage, frozen)
    refs = find_transforms(config)  # the comparison of identities checks that they are the run's
    lists, plans, now = dict[str, dict[str, SourcePlan]](), list[SourcePlan](), list[Manifest]()
    notes, unwritten, bases = list[str](), list[LaterList](), dict[str, str]()
    for source in config.data.sources:
        of = next(each for each in reading.sources if each.name == source.name)
        version = of.version(reading.epoch(source.name))
        there = _frozen_list(storage, frozen, source.name, version)
        if there is None:
            sizes = settings.fragment_bytes, settings.window_bytes
            found = listed_as(source, *sizes).now()
            there = found.later(version, *sizes)
            unwritten.append(there)
            notes += found.notes
            now.append(there.manifest)
        else:
            more = has_list_to_come(config, reading.cursor, of)
            manifest, as_it_is, said = compare_files(
                source, there.manifest, there.paths, config.resume.accept_changed, more
            )
            bases[there.manifest.base] = manifest.base
            now.append(as_it_is)
            notes += said
        plan = later_plan(storage, there, bases.get(there.manifest.base))
        # one that no process can read yet pickles with its files
        is_written = not any(there is each for each in unwritten)
        plans.append(plan if is_written else replace(plan, reference=None))
        lists[source.name] = {version: plans[-1]}
        if of.begun_with != version:
            begun = _frozen_list(storage, frozen, source.name, of.begun_with)
            if begun is None:
                raise DataIdentityError(
                    f"{storage.root}/{manifest_path(source.name, of.begun_with)} is gone: source "
                    f"{source.name} continues from this list; restore the file",
                    code=GONE,
                )
            lists[source.name][of.begun_with] = later_plan(storage, begun, bases.get(begun.manifest.base))
    spec = _frozen_spec(config, settings, storage, frozen.record, facts, reading.sources, lists, plans, refs)
    encoder = spec.encoders[0].encoder
    if config.data.encoder == GIGATOKEN and (GIGATOKEN, installed_version(GIGATOKEN)) != astuple(encoder):
        choose(config, settings, facts, spec.plans)  # raises if it does not support this tokenizer
    asked = _tokenizer_now(config, frozen, facts)
    windows = [note for plan in spec.plans for note in notes_of(plan, settings)]
    return replace(
        spec,
        run_identity=identity_of(config, asked, encoder, now, spec.plans, refs),
        notes=(*facts.notes, *notes, *windows, *shared_files(spec.plans)),
        unwritten=tuple(unwritten),
        refreshing=refreshing(config, storage, bases),
    )


def _frozen_tokenizer(
    config: JobConfig, settings: StreamSettings, storage: Storage, frozen: FrozenData
) -> tuple[TokenizerFacts, StreamSettings]:
    """The run's copy of its tokenizer, and the settings with its ids."""
    record = frozen.record
    try:
        facts = examine(_tokenizer_at(storage), frozen.tokenizer_files, reads_chats(config))
    except ConfigError as error:  # it was valid when it was copied
        raise DataIdentityError(
            f"the run's copy of its tokenizer in {_tokenizer_at(storage)} is damaged: {error.__cause__}; "
            "restore these files",
            code=DAMAGED,
        ) from error
    if facts.digest != record.tokenizer_digest:
        raise DataIdentityError(
            f"the run's copy of its tokenizer in {_tokenizer_at(storage)} was made with digest "
            f"{record.tokenizer_digest} (in manifest/data.json) and has {facts.digest}; restore these "
            "files, or manifest/data.json",
            code=DAMAGED,
        )
    if settings.long_document == "split" and record.rules < RULES:
        settings = replace(settings, long_document=SPLIT_WHOLE)
    return facts, with_ids(config, settings, facts)


def _frozen_spec(
    config: JobConfig,
    settings: StreamSettings,
    storage: Storage,
    record: DataRecord,
    facts: TokenizerFacts,
    sources: tuple[SourceLists, ...],
    lists: dict[str, dict[str, SourcePlan]],
    plans: Sequence[SourcePlan],
    transforms: Mapping[str, TransformRef],
) -> DataSpec:
    """The frozen data, with their files where the plans locate them."""
    settings = with_transforms(config, settings, transforms)
    encoder = EncoderChoice(name=record.encoder_name, version=record.encoder_version)
    manifests = [plan.manifest for plan in plans]
    spec = DataSpec(
        plans=tuple(plans),
        sources=sources,
        lists=lists,
        settings=settings,
        tokenizer=facts.model,
        tokenizer_folder=_tokenizer_at(storage),
        vocab_size=facts.vocab_size,
        encoders=(EncoderSpan(encoder=encoder),),
        run_identity=identity_of(config, facts.digest, encoder, manifests, plans, transforms),
        max_epochs=limits_of(config),
    )
    return replace(spec, mixture=mixture_of(config, spec.num_bytes))


def _tokenizer_now(config: JobConfig, frozen: FrozenData, facts: TokenizerFacts) -> str:
    """The digest of the tokenizer that the job names. A name that is not found stands for the run's own
    copy.
    """
    name = config.data.tokenizer
    if name == frozen.record.tokenizer and not is_there(name):
        return facts.digest
    files = fetch(name, frozen.tokenizer_files)
    if frozen.record.rules < RULES:  # its identity is that of tokenizer.json
        files = {n: content for n, content in files.items() if n != RESOLVED}
    same = files == frozen.tokenizer_files
    return facts.digest if same else examine(name, files, reads_chats(config)).digest


# --------------------------------------------------------------------------------- the parts of an evaluation
def with_parts(job: JobConfig, storage: Storage, spec: DataSpec) -> DataSpec:
    """Returns the run's data with the parts that have sources of their own, frozen or as they are now.

    Raises as `prepare_data`, and `DataIdentityError` if a part is not as it was frozen.
    """
    return replace(spec, evaluated={name: _prepared_part(job, storage, name) for name in _own_parts(job)})


def with_frozen_parts(job: JobConfig, storage: Storage, spec: DataSpec) -> DataSpec:
    """Returns the run's data with the parts frozen. Raises as `with_parts`."""
    found = dict[str, DataSpec]()
    for name in _own_parts(job):
        part, at = spec.evaluated.get(name), _part_folder(storage, name)
        if part is None or part.unfrozen is None:
            part = _prepared_part(job, storage, name)
        if part.unfrozen is not None:
            at.write(EVAL_IDENTITY, seal(encode(part.run_identity)))
            with _naming_part(name):
                part = freeze_data(_part_job(job, name), at, part)
        found[name] = part
    return replace(spec, evaluated=found)


def eval_specs(job: JobConfig, spec: DataSpec) -> dict[str, DataSpec]:
    """The data of each part by name; empty if nothing is evaluated. `spec`: the run's data.

    Raises `RefusedError` if a part is the hold-out and nothing is held out.
    """
    if not job.eval.is_wanted:
        return {}
    if not job.eval.parts:
        return {HOLDOUT: spec.held_out()}
    return {
        name: spec.held_out() if part.holdout else spec.evaluated[name]
        for name, part in job.eval.parts.items()
    }


def _own_parts(job: JobConfig) -> list[str]:
    """The parts with sources of their own."""
    return [name for name, part in job.eval.parts.items() if part.sources is not None]


def _part_folder(storage: Storage, name: str) -> Storage:
    return storage.beside(join(storage.root, EVAL_FOLDER, name))


def _part_job(job: JobConfig, name: str) -> JobConfig:
    """A job whose data are those of the part, each read once."""
    sources = job.eval.parts[name].sources
    assert sources is not None, "the hold-out is part of the run's own data"
    data = {
        "sources": tuple(source.model_copy(update={"max_epochs": None}) for source in sources),
        "holdout": 0.0,
        "num_epochs": 1,
        "on_end": "drop",
        "refresh": None,
    }
    anew = {"data": "continue", "restart_sources": (), "skip_steps": None, "skip_samples": None}
    return job.model_copy(
        update={
            "data": job.data.model_copy(update=data),
            "resume": job.resume.model_copy(update=anew),
        }
    )


def _prepared_part(job: JobConfig, storage: Storage, name: str) -> DataSpec:

    own, at = _part_job(job, name), _part_folder(storage, name)
    with _naming_part(name):
        if frozen_sources(at) is None:
            own = _with_frozen_tokenizer(own, storage)
            return call(names_code(own), prepare_data, own, None)
        try:
            spec = call(names_code(own), prepare_data, own, at)
        except DataIdentityError as error:
            *what, _ = str(error).splitlines() if "\n" in str(error) else (str(error), "")
            # its last line advises what only sources can do
            raise _changed_part(name, " ".join(what)) from error
        try:
            was = decode(RunIdentity, unseal(at.read(EVAL_IDENTITY)))
        except (FileNotFoundError, SealError) as error:
            raise DataIdentityError(
                f"{at.root}/{EVAL_IDENTITY} is gone or damaged ({error}); restore it, or give "
                f"eval.parts.{name} another name",
                code="data.eval_identity",
            ) from error
        if refusals := compare(was, spec.run_identity, job.resume.accept_changed):
            raise _changed_part(name, "; ".join(refusal.text for refusal in refusals))
    return spec


@contextmanager
def _naming_part(name: str) -> Iterator[None]:
    """Within the block, errors about `data.sources` name the sources of the part instead."""
    with naming_fields(f"eval.parts.{name}", {"data.sources": f"eval.parts.{name}.sources"}):
        yield


def _with_frozen_tokenizer(job: JobConfig, storage: Storage) -> JobConfig:
    """The job with the run's copy of its tokenizer, if none is where the job names the run's own."""
    frozen, name = read_frozen(storage), job.data.tokenizer
    if frozen is None or name != frozen.record.tokenizer or is_there(name):
        return job
    copy = join(storage.root, TOKENIZER_FOLDER)
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": copy})})


def _changed_part(name: str, what: str) -> DataIdentityError:
    return DataIdentityError(
        f"the data of eval.parts.{name} are not those that were frozen: {what}; put them back, or "
        "give the part another name, under which it is frozen anew",
        code="data.eval_changed",
    )
