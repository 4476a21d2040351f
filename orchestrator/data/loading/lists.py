"""The data of a stream without a run, with the lists of files that it reads.

The lists come from the stream's folder, or are made from the files as they are now. `reading` determines
which list an epoch reads, `state` whether a state may continue with these lists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.data.common.settings import has_list_to_come, mixture_of, settings_of
from orchestrator.data.freeze import first_start
from orchestrator.data.frozen import GONE, LaterList, has_record, manifest_path, read_later, write_later
from orchestrator.data.loading.reading import StreamReading
from orchestrator.data.source_refresh import Found, Refreshing, later_plan, listed_as
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.lists.source_diff import compare_files
from orchestrator.data.spec import DataSpec
from orchestrator.errors import ConfigError, DataIdentityError, RefusedError
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import SourceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamData:
    """A stream's data. `spec` reads the lists of a `StreamReading`.

    `kept`: the sources whose list was in the folder. `unwritten`: the lists to write there before they are
    read.
    """

    spec: DataSpec
    kept: frozenset[str] = frozenset()
    unwritten: tuple[LaterList, ...] = ()

    def write(self, storage: Storage) -> bool:
        """Writes these lists. Returns False if another process first wrote lists of other files, which then
        apply.
        """
        written = [write_later(storage, each) for each in self.unwritten]
        return all(
            there.manifest.digest == mine.manifest.digest
            and there.fragments_per_block == mine.fragments_per_block
            for there, mine in zip(written, self.unwritten, strict=True)
        )


def frozen_folder(given: str | os.PathLike[str] | None) -> Storage | None:
    """The storage of a stream's lists: a folder, or a prefix of a bucket.

    Raises `RefusedError` for the folder of a run, and as `open_storage`.
    """
    if given is None:
        return None
    try:
        storage = open_storage(os.fspath(given))
    except ConfigError as error:
        raise ConfigError(f"frozen_dir: {error}", code=error.code) from error
    if storage.exists("run.json") or has_record(storage):
        raise RefusedError(
            f"frozen_dir={storage.root} is the folder of a run, and only the run may use its lists; give "
            "another folder",
            code="command.folder_of_run",
        )
    return storage


def stream_data(config: JobConfig, reading: StreamReading, storage: Storage | None) -> StreamData:
    """The data with these lists. A list that is not kept is made from the files as they are now.

    Raises as `data.dataset.prepare_data`. Raises `DataIdentityError` also for a list that was made for its
    epoch and is missing from the folder.
    """
    found = _Finding(config=config, reading=reading, storage=storage)
    spec = first_start(config, settings_of(config), found.list_of)
    lists = {plan.source: {reading.version(plan.source): plan} for plan in spec.plans}
    for name, of in lists.items():
        if (begun := reading.of(name).begun_with) not in of:
            of[begun] = found.kept_plan(name, begun)
    spec = replace(
        spec,
        sources=reading.sources,
        lists=lists,
        refreshing=_refreshing(config, storage, found.bases),
        unfrozen=None,
    )
    spec = replace(spec, mixture=mixture_of(config, spec.num_bytes))
    return StreamData(spec=spec, kept=frozenset(found.kept), unwritten=tuple(found.unwritten))


def _refreshing(config: JobConfig, storage: Storage | None, bases: dict[str, str]) -> Refreshing | None:
    if config.data.refresh is None:
        return None
    assert storage is not None, "what refreshes its lists has a folder"
    sizes = config.data.fragment_bytes, config.data.window_bytes
    return Refreshing(
        storage=storage.root,
        sources=tuple(listed_as(each, *sizes) for each in config.data.sources),
        bases=bases,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """Finds the list of each source in turn, and collects notes about them."""

    config: JobConfig
    reading: StreamReading
    storage: Storage | None
    kept: set[str] = field(default_factory=set)
    unwritten: list[LaterList] = field(default_factory=list)
    bases: dict[str, str] = field(default_factory=dict)

    def list_of(self, source: SourceConfig) -> Found:
        """The list of the current epoch."""
        version = self.reading.version(source.name)
        there = None if self.storage is None else read_later(self.storage, source.name, version)
        if there is None:
            return self._now(source, version)
        assert self.storage is not None, "it was read from there"
        self.kept.add(source.name)
        accept = self.config.resume.accept_changed
        more = has_list_to_come(self.config, self.reading.cursor, self.reading.of(source.name))
        manifest, _, notes = compare_files(source, there.manifest, there.paths, accept, more)
        self.bases[there.manifest.base] = manifest.base
        plan = later_plan(self.storage, there, manifest.base)
        return Found(plan=plan, paths=there.paths, notes=notes)

    def _now(self, source: SourceConfig, version: str) -> Found:
        sizes = self.config.data.fragment_bytes, self.config.data.window_bytes
        if self.storage is not None and self.reading.is_refreshed(source.name):
            raise DataIdentityError(
                f"{self.storage.root}/{manifest_path(source.name, version)} is gone: it lists the files "
                f"of source {source.name} for its current epoch; restore the file, or give the frozen_dir= "
                "that the state was made with",
                code=GONE,
            )
        now = listed_as(source, *sizes).now()
        if self.storage is None:
            return now
        later = now.later(version, *sizes)
        self.unwritten.append(later)
        return replace(now, plan=later_plan(self.storage, later))

    def kept_plan(self, source: str, version: str) -> SourcePlan:
        """A list that must be in the folder."""
        assert self.storage is not None, "without a folder a source has one list"
        there = read_later(self.storage, source, version)
        if there is None:
            raise DataIdentityError(
                f"{self.storage.root}/{manifest_path(source, version)} is gone: source {source} continues "
                "from this list; restore the file",
                code=GONE,
            )
        return later_plan(self.storage, there, self.bases.get(there.manifest.base))
