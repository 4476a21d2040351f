"""Reads and writes a run's frozen data, and makes the lists of files that come after its first start.

The data are `manifest/<source>.parquet`, `tokenizer/`, and, written last, `manifest/data.json`. `spec` and
`planning.resume.identity` compare them. Later lists of a source lie beside them, as
`manifest/<source>@<version>.parquet`. They come with a restart, an added source or a refreshed epoch.
`planning.resume.source_lists` defines which list an epoch reads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import orjson

from orchestrator.data.sources.lists import manifest as manifests
from orchestrator.data.sources.lists.fragments import SourcePlan, frozen_at, plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import Manifest, facts_of, from_parquet, to_parquet
from orchestrator.data.sources.records.content import Content
from orchestrator.data.tokens.resolved import is_template_file
from orchestrator.data.tokens.tokenizer_files import FILES
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.json_form import decode, encode
from orchestrator.planning.resume.identity import OTHER_VERSION
from orchestrator.storage.files import Storage
from orchestrator.storage.open import join, open_storage

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import SourceConfig

EVAL_FOLDER = "eval"  # its folders have the frozen data of parts of `eval.parts`, as those of a run
TOKENIZER_FOLDER = "tokenizer"
_MANIFESTS = "manifest"
EVAL_IDENTITY = f"{_MANIFESTS}/identity.json"  # of a part; that of a run is in run.json
_RECORD = f"{_MANIFESTS}/data.json"
VERSION = 1
RULES = 2
GONE, DAMAGED, LATER_FORMAT = "data.frozen_gone", "data.frozen_damaged", "storage.later_format"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecord:
    """`manifest/data.json`: the choices made at the first start. If it exists, all frozen data exist.

    `tokenizer` is the name in the configuration. Digests are blake3. The maps are keyed by source. `paths`
    are absolute; runs started before they were recorded have none. `more_paths` are those after the first,
    for a source with several. `transforms` are those of `planning.resume.identity`.

    `rules` is the version of the rules of the run's stream: `RULES` is the current one. 1 is that of versions
    that recorded none: they read a tokenizer's folder by its tokenizer.json, and trained stretches without
    loss.
    """

    version: int = VERSION
    tokenizer: str
    tokenizer_digest: str
    encoder_name: str
    encoder_version: str
    fragment_bytes: int
    window_bytes: int
    fragments_per_block: dict[str, int]
    manifests: dict[str, str]
    paths: dict[str, str] = field(default_factory=dict)
    more_paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    transforms: dict[str, str] = field(default_factory=dict)
    rules: int = 1

    def paths_of(self, source: str) -> tuple[str, ...]:
        """The absolute paths that the source's files were listed by; empty if they were not recorded."""
        first = self.paths.get(source)
        return () if first is None else (first, *self.more_paths.get(source, ()))


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenData:
    """All frozen data of a run, as read back or to be written."""

    record: DataRecord
    manifests: dict[str, Manifest]
    tokenizer_files: dict[str, bytes]


def manifest_path(source: str, version: str = "") -> str:
    """The path of a source's list in the run's folder.

    `version` is that of `planning.resume.source_lists`, empty for the list of the first start. A source's
    name contains no `@`.
    """
    return f"{_MANIFESTS}/{source}{'@' if version else ''}{version}.parquet"


def write_frozen(
    storage: Storage,
    record: DataRecord,
    manifests: Sequence[Manifest],
    tokenizer_files: dict[str, bytes],
) -> bool:
    """Writes all frozen data durably, the record last. Returns False if another process wrote its record
    first.

    Files that an interrupted start left without a record are replaced.
    """
    files = {manifest_path(manifest.source): to_parquet(manifest) for manifest in manifests}
    files |= {f"{TOKENIZER_FOLDER}/{name}": content for name, content in tokenizer_files.items()}
    document = orjson.dumps(encode(record), option=orjson.OPT_INDENT_2)
    return _write(storage, files, document)


def _write(storage: Storage, files: Mapping[str, bytes], record: bytes) -> bool:
    # lists first, so that a run can begin on storage that cannot delete
    for name in filter(_is_tokenizers, storage.list(TOKENIZER_FOLDER)):
        if f"{TOKENIZER_FOLDER}/{name}" not in files:
            storage.delete(f"{TOKENIZER_FOLDER}/{name}")
    for path, content in files.items():
        if (there := _read(storage, path)) is None:
            storage.create(path, content)
        elif there != content:
            storage.replace(path, content)
    return storage.create(_RECORD, record)


def _is_tokenizers(name: str) -> bool:
    return name in FILES or is_template_file(name)


def has_record(storage: Storage) -> bool:
    """Whether a run has frozen its data there. Raises `StorageError` if that cannot be determined."""
    return storage.exists(_RECORD)


def frozen_sources(storage: Storage) -> tuple[str, ...] | None:
    """The sources of the run's first start, in the order of their numbers; None if nothing is frozen.

    Raises as `read_frozen`.
    """
    document = _read(storage, _RECORD)
    if document is None:
        return None
    try:
        return tuple(_decoded(storage, document).manifests)
    except orjson.JSONDecodeError as error:
        raise DataIdentityError(
            f"{storage.root}/{_RECORD} is altered: {error}; restore the file", code=DAMAGED
        ) from error


def copy_frozen(source: Storage, target: Storage) -> None:
    """Copies one run's frozen data to another run, byte for byte and durably, the record last.

    So are those of the parts that it evaluates. Files that an interrupted copy left without a record are
    replaced. Raises `DataIdentityError` if `source` has no frozen data, or `target` has frozen other data.
    """
    for name in source.list(EVAL_FOLDER):
        folder = f"{EVAL_FOLDER}/{name}"
        copy_frozen(*(each.beside(join(each.root, folder)) for each in (source, target)))
    folders = (_MANIFESTS, TOKENIZER_FOLDER)
    # skips files that are being written, and NFS's copies of deleted files that are still open
    left_out = (".tmp-", ".nfs")
    paths = [
        f"{folder}/{name}"
        for folder in folders
        for name in source.list(folder)
        if not any(part in name for part in left_out)
    ]
    if _RECORD not in paths:
        raise DataIdentityError(
            f"{source.root}: its frozen data are gone ({_RECORD}); restore manifest/ and tokenizer/",
            code=GONE,
        )
    files = {path: source.read(path) for path in paths}
    record = files.pop(_RECORD)
    if target.exists(_RECORD):
        # a later list may not have existed at the first copy; it is never rewritten
        later = {p: content for p in paths if "@" in p and not target.exists(p) for content in [files.pop(p)]}
        if {_RECORD: record, **files} != {path: _read(target, path) for path in (_RECORD, *files)}:
            raise DataIdentityError(
                f"{target.root} has frozen data ({_RECORD}) other than those of {source.root}; delete the "
                "folders manifest/ and tokenizer/ there if no run needs them, or use another folder",
                code="data.other_frozen",
            )
        for path, content in later.items():
            target.create(path, content)
        return
    _write(target, files, record)


def _decoded(storage: Storage, document: bytes) -> DataRecord:
    content: dict[str, Any] = orjson.loads(document)
    if isinstance(content, dict) and content.get("version", VERSION) != VERSION:
        raise DataIdentityError(
            f"{storage.root}/{_RECORD} has version {content['version']}, this version of orchestrator reads "
            f"{VERSION}; use the one that wrote it, or a later one",
            code=LATER_FORMAT,
        )
    record = decode(DataRecord, content, _RECORD)
    if record.rules > RULES:
        raise DataIdentityError(
            f"{storage.root}/{_RECORD}: the run's stream follows rules {record.rules}, this version of "
            f"orchestrator has rules up to {RULES}; use the one that wrote it, or a later one",
            code=LATER_FORMAT,
        )
    return record


def _read(storage: Storage, path: str) -> bytes | None:
    try:
        return storage.read(path)
    except FileNotFoundError:
        return None


def read_frozen(storage: Storage) -> FrozenData | None:
    """The run's frozen data; None if it has none. Raises `DataIdentityError` if a part is missing or
    altered.
    """
    root = storage.root
    if not storage.exists(_RECORD):
        return None
    try:
        record = _decoded(storage, storage.read(_RECORD))
        names = [name for name in storage.list(TOKENIZER_FOLDER) if _is_tokenizers(name)]
        tokenizer_files = {name: storage.read(f"{TOKENIZER_FOLDER}/{name}") for name in names}
        paths = {source: manifest_path(source) for source in record.manifests}
        manifests = {s: from_parquet(storage.read(p), f"{root}/{p}") for s, p in paths.items()}
    except (FileNotFoundError, orjson.JSONDecodeError) as error:
        raise DataIdentityError(
            f"{root}: a part of the run's frozen data is gone or altered: {error}; restore the run's folder",
            code=GONE if isinstance(error, FileNotFoundError) else DAMAGED,
        ) from error
    if "tokenizer.json" not in tokenizer_files:
        raise DataIdentityError(
            f"{root}/{TOKENIZER_FOLDER}: tokenizer.json is gone; restore the run's folder", code=GONE
        )
    for source, digest in record.manifests.items():
        if manifests[source].digest != digest:
            raise DataIdentityError(
                f"{root}/{paths[source]}: the manifest was frozen with digest {digest} and has "
                f"{manifests[source].digest}; restore the file",
                code="data.damaged_list",
            )
    return FrozenData(record=record, manifests=manifests, tokenizer_files=tokenizer_files)


# -------------------------------------------------------------------------------------- lists that come later
_NUMBERS = ("fragment_bytes", "window_bytes", "fragments_per_block")


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterList:
    """A list that came after the run's first start: by a restart, a refresh, or with an added source.

    `paths` are the absolute paths that it was listed by. It is one file, so it exists completely or not at
    all.
    """

    manifest: Manifest
    version: str
    fragment_bytes: int
    window_bytes: int
    fragments_per_block: int
    paths: tuple[str, ...]


def write_later(storage: Storage, found: LaterList) -> LaterList:
    """Writes the list durably, or reads the existing one.

    Of all processes that ever write a version of a source, one succeeds and the others read its list (data
    rule 24). Raises as `read_later`.
    """
    facts = {name: str(getattr(found, name)) for name in _NUMBERS} | {"list_version": found.version}
    facts["paths"] = orjson.dumps(found.paths).decode()
    path = manifest_path(found.manifest.source, found.version)
    if storage.create(path, to_parquet(found.manifest, facts)):
        return found
    there = read_later(storage, found.manifest.source, found.version)
    assert there is not None, f"{path} is taken, so it is there"
    return there


def read_later(storage: Storage, source: str, version: str) -> LaterList | None:
    """The list of this version; None if there is none.

    Raises `DataIdentityError` if it is altered, or is the list of another source or version.
    """
    assert version, "the first list is in `read_frozen`"
    data, where = _read(storage, path := manifest_path(source, version)), f"{storage.root}/{path}"
    if data is None:
        return None
    manifest, facts = from_parquet(data, where), facts_of(data)
    if (manifest.source, facts.get("list_version")) != (source, version):
        raise DataIdentityError(
            f"{where}: it is list {facts.get('list_version')!r} of source {manifest.source}, expected is "
            f"list {version!r} of source {source}; restore the file",
            code="data.damaged_list",
        )
    numbers = {name: int(facts[name]) for name in _NUMBERS}
    paths = tuple(orjson.loads(facts["paths"]))
    return LaterList(manifest=manifest, version=version, paths=paths, **numbers)


def later_versions(storage: Storage) -> dict[str, tuple[str, ...]]:
    """The versions of each source's later lists, sorted."""
    found: dict[str, list[str]] = {}
    for name in storage.list(_MANIFESTS):
        source, is_later, version = name.removesuffix(".parquet").partition("@")
        if is_later and name.endswith(".parquet"):
            found.setdefault(source, []).append(version)
    return {source: tuple(sorted(versions)) for source, versions in found.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A current list: its plan, the absolute paths that it was listed by, and notes for the user."""

    plan: SourcePlan
    paths: tuple[str, ...]
    notes: tuple[str, ...]

    def later(self, version: str, fragment_bytes: int, window_bytes: int) -> LaterList:
        """The frozen form of the list, under a version."""
        return LaterList(
            manifest=self.plan.manifest,
            version=version,
            fragment_bytes=fragment_bytes,
            window_bytes=window_bytes,
            fragments_per_block=self.plan.fragments_per_block,
            paths=self.paths,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """How a source is listed and divided. `path` is that of the configuration."""

    name: str
    path: str | tuple[str, ...]
    format: str
    content: Content
    fragment_bytes: int
    window_bytes: int

    def now(self) -> Found:
        """Lists the source's files as they are now.

        Raises `ConfigError` if there are none, or if they hold no records or have another format. Raises
        `DataError` if one cannot be read.
        """
        listing = list_files(self.name, self.path, self.format)
        manifest = manifests.freeze_listed(self.name, listing, self.format, self.content)
        plan = plan_source(manifest, self.fragment_bytes, self.window_bytes)
        if not plan.num_blocks:
            raise ConfigError(
                f"data.sources {self.name}: the {len(manifest.files)} files of {self.path!r} hold no "
                "records; fix the path",
                code="data.no_records",
            )
        return Found(plan=plan, paths=listing.paths, notes=tuple(listing.notes(self.name)))


def listed_as(source: SourceConfig, fragment_bytes: int, window_bytes: int) -> Listed:
    """How a source of a configuration is listed."""
    content = Content(
        kind=source.content,
        text_field=source.text_field,
        messages_field=source.messages_field,
        prompt_field=source.prompt_field,
        completion_field=source.completion_field,
        chosen_field=source.chosen_field,
        rejected_field=source.rejected_field,
        transform_fields=source.transform_fields,
    )
    return Listed(
        name=source.name,
        path=source.path,
        format=source.format,
        content=content,
        fragment_bytes=fragment_bytes,
        window_bytes=window_bytes,
    )


def later_plan(storage: Storage, found: LaterList, base: str | None = None) -> SourcePlan:
    """The plan of a frozen list, with its files at `base` (None: where they were).

    Raises `DataIdentityError` if this program divides it into other blocks.
    """
    manifest = found.manifest if base is None else replace(found.manifest, base=base)
    plan = plan_source(manifest, found.fragment_bytes, found.window_bytes)
    if plan.fragments_per_block != found.fragments_per_block:
        raise DataIdentityError(
            f"source {plan.source} was frozen with {found.fragments_per_block} fragments per block, this "
            f"program makes {plan.fragments_per_block}; use the version of orchestrator that the run was "
            "started with",
            code=OTHER_VERSION,
        )
    path = manifest_path(plan.source, found.version)
    return frozen_at(plan, storage, path, found.fragment_bytes, found.window_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refreshing:
    """Lists that are made when their epoch begins (`data.refresh: epoch`), kept in the run's `storage`.

    `storage` is a location for `open_storage`. `bases` maps the folder that a list was frozen with to its
    current place, if it was moved.
    """

    storage: str
    sources: tuple[Listed, ...]
    bases: dict[str, str] = field(default_factory=dict)

    def plan(self, source: str, version: str) -> SourcePlan:
        """The list of a refreshed epoch.

        The first process that reaches the epoch freezes it. It is the same for all others, in any process and
        any attempt (data rule 24). Raises as `Listed.now` and `read_later`.
        """
        key = self._key(source, version)
        found = _known_plans.get(key)
        if found is None:
            found = _refreshed(*key)
            with _plans_lock:
                _known_plans[key] = found
                while len(_known_plans) > _PLANS_KEPT:
                    del _known_plans[next(iter(_known_plans))]
        return found

    def has(self, source: str, version: str) -> bool:
        """Whether the list is cached in this process: then `plan` neither lists nor reads files."""
        return self._key(source, version) in _known_plans

    def _key(self, source: str, version: str) -> _Key:
        listed = next(each for each in self.sources if each.name == source)
        return self.storage, listed, version, tuple(self.bases.items())


def refreshing(config: JobConfig, storage: Storage, bases: dict[str, str]) -> Refreshing | None:
    """The lists of a job's coming epochs; None if they are not refreshed. `bases` as in `Refreshing`."""
    if config.data.refresh is None:
        return None
    sizes = config.data.fragment_bytes, config.data.window_bytes
    sources = tuple(listed_as(source, *sizes) for source in config.data.sources)
    return Refreshing(storage=storage.root, sources=sources, bases=bases)


_Key = tuple[str, Listed, str, tuple[tuple[str, str], ...]]
# A process has few sources, and needs each one's list for the current and the next epoch. Oldest first.
_known_plans: dict[_Key, SourcePlan] = {}
_PLANS_KEPT = 64
_plans_lock = threading.Lock()


def _refreshed(location: str, listed: Listed, version: str, bases: tuple[tuple[str, str], ...]) -> SourcePlan:
    storage = open_storage(location)
    found = read_later(storage, listed.name, version)
    if found is None:
        now = listed.now().later(version, listed.fragment_bytes, listed.window_bytes)
        found = write_later(storage, now)
    return later_plan(storage, found, dict(bases).get(found.manifest.base))
