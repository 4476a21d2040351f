"""The stream that `orchestrator.open_stream` returns: canonical samples one by one, or a rank's batches.

A state of the stream names lists of files. The configuration may restart or refresh sources (data rules 23
and 24). A list comes from the stream's folder, or is made from the files as they are now. `loading.state`
decides whether a state may continue with these lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import orjson
from blake3 import blake3

from orchestrator.data.common.settings import has_list_to_come, mixture_of, settings_of, wanted_of
from orchestrator.data.freeze import first_start
from orchestrator.data.frozen import (
    GONE,
    Found,
    LaterList,
    has_record,
    later_plan,
    listed_as,
    manifest_path,
    read_later,
    refreshing,
    write_later,
)
from orchestrator.data.loading.loader import Batch, Drawing, Loader, Opened, Share, Tensors
from orchestrator.data.loading.state import StreamState, continue_from, read_state, state_of
from orchestrator.data.packing.samples import Sample
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.lists.source_diff import compare_files
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import TOKENIZERS
from orchestrator.errors import ConfigError, DataIdentityError, RefusedError
from orchestrator.json_form import encode
from orchestrator.planning.resume.skipping import LATEST
from orchestrator.planning.resume.source_lists import (
    RestartRequest,
    SourceLists,
    SourceRequest,
    moved,
    next_sources,
    order_of,
    restart_request,
    source_changes,
)
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import PREFERENCE
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.config.sections import SourceConfig

Place = Cursor | Mapping[str, Any] | None
Part = Literal["train", "holdout"]
_ARGUMENT = "command.argument_value"


class SampleStream:
    """An iterator of samples from a place on, in this process. `batches` returns a loader of batches.

    Samples have `index, source, input_ids, labels, document_ids, cursor`. `state_dict` returns the position
    of the next sample. Not thread-safe.
    """

    def __init__(
        self,
        config: JobConfig,
        at: Place = None,
        rank: int = 0,
        world_size: int = 1,
        part: Part = "train",
        frozen_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Raises `RefusedError` for a rank outside the world size, a missing hold-out, and a restart or a
        refresh that cannot be followed from there (`reading_of`). Raises as `stream_data` and `Drawing`.
        """
        if part not in ("train", "holdout"):
            raise RefusedError(f"part={part!r}: it must be 'train' or 'holdout'", code=_ARGUMENT)
        if not (_is_int(rank) and _is_int(world_size) and 0 <= rank < world_size):
            raise RefusedError(
                f"rank={rank!r} of world_size={world_size!r}: a rank is a whole number from 0 to "
                "world_size - 1",
                code=_ARGUMENT,
            )
        self._config, self._rank, self._world_size, self._part = config, rank, world_size, part
        self._folder = frozen_folder(frozen_dir)
        self._data: StreamData | None = None
        self._open(at)

    def _open(self, at: Place) -> None:
        opened = self._resolved(at)
        drawing = Drawing(opened.spec, opened.cursor)
        self._opened = opened
        self._drawing: Drawing | None = drawing  # until a consumer draws from it
        self._samples: Iterator[Sample] | None = None
        self._last: Sample | None = None

    def _resolved(self, at: Place) -> Opened:
        if not (at is None or isinstance(at, Cursor | Mapping)):
            raise RefusedError(
                f"a stream cannot be opened at a {type(at).__name__}; give what state_dict() returned "
                "(json.loads of a text), or a sample's cursor",
                code=_ARGUMENT,
            )
        config = self._config
        place = read_state(at) if isinstance(at, Mapping) else at
        state = place if isinstance(place, StreamState) else None
        reading = reading_of(config, place, self._folder is not None)
        data = self._data_of(reading, any_encoder=state is not None)
        spec = data.spec.held_out() if self._part == "holdout" else data.spec
        if state is not None:
            how = {"kept": data.kept, "restarted": reading.restarted}
            spec = continue_from(spec, state, config.data.encoder, config.resume.accept_changed, **how)
        if self._folder is not None and not data.write(self._folder):
            return self._resolved(at)
        self._data = data if self._folder is None else None  # kept lists are checked again
        notes = (*reading.notes, *changes_of(reading, state, spec))
        return Opened(spec=spec, cursor=reading.cursor, restart=reading.restart, notes=notes)

    def _data_of(self, reading: StreamReading, any_encoder: bool) -> StreamData:
        """The data with these lists. Prepared once, unless its lists may have changed."""
        there = self._data
        if there is not None and all(
            reading.version(plan.source) in there.spec.lists[plan.source] for plan in there.spec.plans
        ):
            return replace(there, spec=replace(there.spec, sources=reading.sources))
        config = _with_any_encoder(self._config) if any_encoder else self._config
        return stream_data(config, reading, self._folder)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes that a run would print about these data at its start."""
        return (*self._opened.notes, *self._opened.spec.notes)

    @property
    def cursor(self) -> Cursor:
        """The place of the next sample."""
        return self._opened.cursor if self._last is None else self._last.cursor

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Sample:
        if self._samples is None:
            if self._world_size > 1:
                raise RefusedError(
                    "iterating over a stream gives each rank all samples, and this is rank "
                    f"{self._rank} of {self._world_size}; call .batches(), which gives each rank its share",
                    code="command.samples_with_ranks",
                )
            self._samples = self._take_drawing().samples(self._config.sample_len)
        self._last = next(self._samples)
        return self._last

    def batches(
        self,
        *,
        micro_batches: bool = False,
        tensors: Tensors = "numpy",
        collate: Callable[[Batch], Any] | None = None,
        prefetch: int = 2,
    ) -> Loader:
        """A loader of this rank's batches from the next sample on.

        A step is `train.global_batch_size` samples of `pack.seq_len`. A rank gets the same whole
        micro-batches of `train.micro_batch_size` as in a run of this world size, so a step trains on the same
        samples at every world size. The loader yields one batch for each step, or with `micro_batches` each
        micro-batch (see `data.loading.loader.rank_batches`). `collate` converts a batch to the input of your
        loop, in the loader's thread. At most `prefetch` steps are buffered there.
        """
        if tensors not in ("numpy", "torch"):
            raise RefusedError(f"tensors={tensors!r}: it must be 'numpy' or 'torch'", code=_ARGUMENT)
        if not _is_int(prefetch) or prefetch < 1:
            raise RefusedError(
                f"prefetch={prefetch!r}: it must be a whole number of steps, at least 1", code=_ARGUMENT
            )
        train = self._config.train
        share = Share(
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            seq_len=self._config.sample_len,
            rank=self._rank,
            world_size=self._world_size,
            micro_batches=micro_batches,
        )
        opened = replace(self._opened, cursor=self.cursor)
        return Loader(
            self._take_drawing(),
            opened,
            share=share,
            tensors=tensors,
            collate=collate,
            prefetch=prefetch,
            reopen=self._resolved,
        )

    def _take_drawing(self) -> Drawing:
        """A drawing at the next sample, without another consumer."""
        drawing, self._drawing = self._drawing, None
        return drawing or Drawing(self._opened.spec, self.cursor)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next sample and the identity of the stream, as plain JSON values.

        `open_stream(config, cursor=state)` opens it with any world size, batch size and seq_len.
        """
        return state_of(self._opened.spec, self.cursor, self._opened.restart)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at exactly the next unread token of `state`.

        Raises `DataIdentityError` with both values if it is a state of another stream.
        """
        self._open(state)


def _with_any_encoder(config: JobConfig) -> JobConfig:
    """The job without a comparison of encoders, which takes seconds.

    A state names the encoder of its stream, which `continue_from` uses.
    """
    return config.model_copy(update={"data": config.data.model_copy(update={"encoder": TOKENIZERS})})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
        refreshing=None if storage is None else refreshing(config, storage, found.bases),
        unfrozen=None,
    )
    spec = replace(spec, mixture=mixture_of(config, spec.num_bytes))
    return StreamData(spec=spec, kept=frozenset(found.kept), unwritten=tuple(found.unwritten))


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


# ------------------------------------------------------------------------------------------------ which lists
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


def _plain(config: JobConfig) -> SourceRequest:
    """The request of a state that was made before states named lists."""
    return replace(wanted_of(config), refresh=frozenset())


def _bytes(place: Cursor) -> bytes:
    return orjson.dumps(encode(place), option=orjson.OPT_SORT_KEYS)


def _numbers(config: JobConfig, place: bytes) -> Mapping[str, int]:
    """By source, the number of a list that begins at this place."""
    sizes = [config.data.fragment_bytes, config.data.window_bytes]
    return {source.name: _number(place, source, sizes) for source in config.data.sources}


def _number(place: bytes, source: SourceConfig, sizes: list[int]) -> int:
    fields = _LISTED_BY | _OF_PREFERENCES if source.content == PREFERENCE else _LISTED_BY
    listed_by = source.model_dump(mode="json", include=fields)
    how = orjson.dumps([listed_by, sizes], option=orjson.OPT_SORT_KEYS)
    return 1 + int.from_bytes(blake3(how + place).digest(_START_BYTES), "big")


_LISTED_BY = {"name", "path", "format", "content", "text_field", "messages_field", "prompt_field"}
_LISTED_BY |= {"completion_field"}
_OF_PREFERENCES = {"chosen_field", "rejected_field"}
