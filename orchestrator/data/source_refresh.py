"""Lists of files that come after a run's first start: their current state and their frozen state.

They come with a restart, an added source or a refreshed epoch. `planning.resume.source_lists` defines which
list an epoch reads.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from orchestrator.data.frozen import LaterList, manifest_path, read_later, write_later
from orchestrator.data.sources.lists import manifest as manifests
from orchestrator.data.sources.lists.fragments import SourcePlan, frozen_at, plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.records.content import Content
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.resume.identity import OTHER_VERSION
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

if TYPE_CHECKING:
    from orchestrator.config.sections import SourceConfig


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
        found = _known.get(key)
        if found is None:
            found = _refreshed(*key)
            with _lock:
                _known[key] = found
                while len(_known) > _KEPT:
                    del _known[next(iter(_known))]
        return found

    def has(self, source: str, version: str) -> bool:
        """Whether the list is cached in this process: then `plan` neither lists nor reads files."""
        return self._key(source, version) in _known

    def _key(self, source: str, version: str) -> _Key:
        listed = next(each for each in self.sources if each.name == source)
        return self.storage, listed, version, tuple(self.bases.items())


_Key = tuple[str, Listed, str, tuple[tuple[str, str], ...]]
# A process has few sources, and needs each one's list for the current and the next epoch. Oldest first.
_known: dict[_Key, SourcePlan] = {}
_KEPT = 64
_lock = threading.Lock()


def _refreshed(location: str, listed: Listed, version: str, bases: tuple[tuple[str, str], ...]) -> SourcePlan:
    storage = open_storage(location)
    found = read_later(storage, listed.name, version)
    if found is None:
        now = listed.now().later(version, listed.fragment_bytes, listed.window_bytes)
        found = write_later(storage, now)
    return later_plan(storage, found, dict(bases).get(found.manifest.base))
