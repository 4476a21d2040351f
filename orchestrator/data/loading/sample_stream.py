"""The stream that `orchestrator.open_stream` returns: canonical samples one by one, or a rank's batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.data.loading.lists import (
    StreamData,
    StreamReading,
    changes_of,
    frozen_folder,
    reading_of,
    stream_data,
)
from orchestrator.data.loading.loader import Batch, Drawing, Loader, Opened, Share, Tensors
from orchestrator.data.loading.state import StreamState, continue_from, read_state, state_of
from orchestrator.data.packing.samples import Sample
from orchestrator.data.tokens.encoder import TOKENIZERS
from orchestrator.errors import RefusedError
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

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
