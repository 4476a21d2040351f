"""Determines which lists of files a stream without a run reads from a place on.

They are the lists that its state names, with the sources that the configuration restarts and refreshes (data
rules 23 and 24). `lists` reads and lists the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import orjson
from blake3 import blake3

from orchestrator.data.common.settings import wanted_of
from orchestrator.data.loading.state import StreamState
from orchestrator.errors import RefusedError
from orchestrator.json_form import encode
from orchestrator.planning.resume.skipping import LATEST
from orchestrator.planning.resume.source_lists import (
    RestartRequest,
    SourceLists,
    Wanted,
    moved,
    next_sources,
    order_of,
    restart_request,
    source_changes,
)
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import SourceConfig
    from orchestrator.data.spec import DataSpec

# bytes of a hash: few enough that every JSON reader keeps the number an integer
_START_BYTES = 6
_NO_FOLDER = "command.no_frozen_dir"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReading:
    """What an opening reads.

    `sources` and `cursor`: the sources, and the place in them. `restarted`: the sources that start again
    here. `restart`: the restart that states from here on record. `before`: the sources of the state that it
    continues (empty: none).
    """

    sources: tuple[SourceLists, ...]
    cursor: Cursor
    before: tuple[SourceLists, ...] = ()
    restarted: frozenset[str] = frozenset()
    restart: RestartRequest | None = None
    notes: tuple[str, ...] = ()

    def of(self, source: str) -> SourceLists:
        """The lists of one source."""
        return next(each for each in self.sources if each.name == source)

    def version(self, source: str) -> str:
        """The version of the current epoch's list."""
        at = self.cursor.sources.get(source)
        return self.of(source).version(0 if at is None else at.epoch)

    def is_refreshed(self, source: str) -> bool:
        """Whether the current list was made for its epoch: then it exists only in the folder of lists."""
        return order_of(self.version(source))[1] >= 0


def reading_of(config: JobConfig, at: Cursor | StreamState | None, keeps_lists: bool) -> StreamReading:
    """What a job reads from a place on. `keeps_lists`: there is a folder for lists.

    A list is identified by a number, a hash of its place and of how it is listed. Every rank computes the
    same number without communication. A restart is carried out once: a state records the restart that it was
    opened with, for as long as the configuration has it. Raises `RefusedError` for a restart at a bare
    cursor, which records none, and for refreshed lists without a folder.
    """
    if config.data.refresh is not None and not keeps_lists:
        raise RefusedError(
            f"data.refresh={config.data.refresh} lists the files again for each epoch, and all ranks and all "
            "later streams must read the same lists; give open_stream a frozen_dir=, a folder for the lists "
            "that every rank can read and write",
            code=_NO_FOLDER,
        )
    first = _numbers(config, b"")
    begun = next_sources((), Cursor(), wanted_of(config), first)
    request = restart_request(config, LATEST)
    if not isinstance(at, StreamState):
        if request is not None and at not in (None, Cursor()):
            raise RefusedError(
                f"{request} is set, but a cursor does not record whether this restart is already done; open "
                "the stream with what state_dict() returned, or remove the setting",
                code="command.restart_at_cursor",
            )
        return StreamReading(sources=begun, cursor=at or Cursor(), restart=request)
    before = at.sources or next_sources((), Cursor(), _plain(config), first)
    asked, restart, notes = frozenset[str](), request, tuple[str, ...]()
    if request is not None and at.restart is not None and request.repeats(at.restart):
        restart = at.restart
        notes = (
            f"{request} is already done: the stream that made the state began so, and this one continues in "
            "its files; to restart again, open the state without the restart, and that one's state with it",
        )
    elif request is not None:
        asked = frozenset(request.paths) & {source.name for source in before}
    wanted = wanted_of(config, asked)
    sources = next_sources(before, at.cursor, wanted, _numbers(config, b"restart" + _bytes(at.cursor)))
    found = StreamReading(
        sources=sources,
        cursor=moved(sources, at.cursor),
        before=before,
        restarted=asked,
        restart=restart,
        notes=notes,
    )
    if not keeps_lists:
        _require_no_refreshed(found, wanted.names)
    return found


def changes_of(reading: StreamReading, state: StreamState | None, spec: DataSpec) -> tuple[str, ...]:
    """Describes, for the user, how the sources of a state continue."""
    if state is None:
        return ()
    seen = {name: files.num for name, files in state.files.items()}
    num_files = {plan.source: (seen.get(plan.source), len(plan.manifest.files)) for plan in spec.plans}
    changes = source_changes(reading.before, reading.sources, reading.cursor, num_files)
    return tuple(map(str, changes))


def _require_no_refreshed(reading: StreamReading, names: Iterable[str]) -> None:
    refreshed = sorted(name for name in names if reading.is_refreshed(name))
    if refreshed:
        raise RefusedError(
            "the state needs the lists of files that data.refresh made for an epoch (sources "
            f"{', '.join(refreshed)}); give open_stream the frozen_dir= that the state was made with",
            code=_NO_FOLDER,
        )


def _plain(config: JobConfig) -> Wanted:
    """The request of a state that was made before states named lists."""
    return replace(wanted_of(config), refresh=frozenset())


def _bytes(place: Cursor) -> bytes:
    return orjson.dumps(encode(place), option=orjson.OPT_SORT_KEYS)


def _numbers(config: JobConfig, place: bytes) -> Mapping[str, int]:
    """By source, the number of a list that begins at this place."""
    sizes = [config.data.fragment_bytes, config.data.window_bytes]
    return {source.name: _number(place, source, sizes) for source in config.data.sources}


def _number(place: bytes, source: SourceConfig, sizes: list[int]) -> int:
    listed_by = source.model_dump(mode="json", include=_LISTED_BY)
    how = orjson.dumps([listed_by, sizes], option=orjson.OPT_SORT_KEYS)
    return 1 + int.from_bytes(blake3(how + place).digest(_START_BYTES), "big")


_LISTED_BY = {"name", "path", "format", "content", "text_field", "messages_field", "prompt_field"}
_LISTED_BY |= {"completion_field"}
