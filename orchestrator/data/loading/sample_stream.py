"""What `orchestrator.open_stream` returns: the canonical samples one by one, or a rank's batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.data.loading.drawing import Drawing
from orchestrator.data.loading.loader import Loader
from orchestrator.data.loading.rank_batches import Batch, Share, Tensors
from orchestrator.data.loading.state import continue_from, state_of
from orchestrator.data.packing.samples import Sample
from orchestrator.data.preparing import prepare_data
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import TOKENIZERS
from orchestrator.errors import RefusedError
from orchestrator.records import Cursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

Place = Cursor | Mapping[str, Any] | None
Part = Literal["train", "holdout"]


class SampleStream:
    """An iterator of samples from a place on, in this process; `batches` makes a loader of it.

    Samples have `index, source, input_ids, labels, document_ids, cursor`. `state_dict` is the place of the
    next sample, whoever takes it. Not for several threads.
    """

    def __init__(
        self,
        config: JobConfig,
        at: Place = None,
        rank: int = 0,
        world_size: int = 1,
        part: Part = "train",
    ) -> None:
        """Raises `RefusedError` for a rank that the world size does not have, or a hold-out that there is
        not, and as `prepare_data` and `Drawing` do.
        """
        if part not in ("train", "holdout"):
            raise RefusedError(f"part={part!r}: there are train and holdout; nothing is read")
        if not (_is_int(rank) and _is_int(world_size) and 0 <= rank < world_size):
            raise RefusedError(
                f"rank={rank!r} of world_size={world_size!r}: a rank is a whole number from 0 to "
                "world_size - 1; nothing is read"
            )
        _require_one_list(config, at)
        self._config, self._rank, self._world_size = config, rank, world_size
        # what prepares the data reads them; every other place in them is opened without that
        prepared = prepare_data(_with_any_encoder(config) if isinstance(at, Mapping) else config)
        self._prepared = prepared.held_out() if part == "holdout" else prepared
        self._open(at)

    def _open(self, at: Place) -> None:
        spec, cursor = self._resolved(at)
        drawing = Drawing(spec, cursor)
        self._spec, self._cursor = spec, cursor
        self._drawing: Drawing | None = drawing  # until somebody draws from it
        self._samples: Iterator[Sample] | None = None
        self._last: Sample | None = None

    def _resolved(self, at: Place) -> tuple[DataSpec, Cursor]:
        if at is None or isinstance(at, Cursor):
            return self._prepared, at or Cursor()
        if not isinstance(at, Mapping):
            raise RefusedError(
                f"the place is given as {type(at).__name__}; give what state_dict() returned (json.loads of "
                "a text), or a sample's cursor"
            )
        config = self._config
        return continue_from(self._prepared, at, config.data.encoder, config.resume.accept_changed)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a run would say aloud of these data at its start."""
        return self._spec.notes

    @property
    def cursor(self) -> Cursor:
        """The place of the next sample."""
        return self._cursor if self._last is None else self._last.cursor

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Sample:
        if self._samples is None:
            if self._world_size > 1:
                raise RefusedError(
                    f"samples one by one are the whole stream, and this is rank {self._rank} of "
                    f"{self._world_size}: every rank would train the same; take .batches(), which gives each "
                    "rank its share"
                )
            self._samples = self._take_drawing().samples(self._config.pack.seq_len)
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

        A step is `train.global_batch_size` samples of `pack.seq_len`; a rank gets the whole micro-batches of
        `train.micro_batch_size` that a run of this world size would give it: the world size changes nothing
        of what a step trains. One batch for each step, or with `micro_batches` each of them alone; see
        `data.loading.rank_batches`. `collate` makes of a batch what your loop takes, in the loader's thread;
        `prefetch` is how many steps wait there at most.
        """
        if tensors not in ("numpy", "torch"):
            raise RefusedError(f"tensors={tensors!r}: there are numpy and torch")
        if not _is_int(prefetch) or prefetch < 1:
            raise RefusedError(f"prefetch={prefetch!r}: at least 1 step is made ahead")
        train = self._config.train
        share = Share(
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            seq_len=self._config.pack.seq_len,
            rank=self._rank,
            world_size=self._world_size,
            micro_batches=micro_batches,
        )
        cursor = self.cursor
        return Loader(
            self._take_drawing(),
            self._spec,
            cursor,
            share=share,
            tensors=tensors,
            collate=collate,
            prefetch=prefetch,
            reopen=self._resolved,
        )

    def _take_drawing(self) -> Drawing:
        """One that stands at the next sample and that nobody else draws from."""
        drawing, self._drawing = self._drawing, None
        return drawing or Drawing(self._spec, self.cursor)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next sample, and of which stream it is, as plain JSON values. It opens under any
        world size, batch size and seq_len: `open_stream(config, cursor=state)`.
        """
        return state_of(self._spec, self.cursor)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at exactly the next unread token of `state`. Raises `DataIdentityError` with both values if
        it is a state of another stream, `RefusedError` where the configuration asks for a restart.
        """
        _require_one_list(self._config, state)
        self._open(state)


def _with_any_encoder(config: JobConfig) -> JobConfig:
    """The job without a comparison of encoders, which takes seconds: a state names the one that was chosen
    for its stream, and `continue_from` takes that.
    """
    return config.model_copy(update={"data": config.data.model_copy(update={"encoder": TOKENIZERS})})


def _require_one_list(config: JobConfig, at: Place) -> None:
    """Raises `RefusedError` for what needs a run's folder to keep lists of files in."""
    if config.data.refresh is not None:
        raise RefusedError(
            f"data.refresh={config.data.refresh}: lists of epochs are kept in a run's folder, and a stream "
            "without a run has none; set data.refresh=null, and open a new stream for new files"
        )
    asks = config.resume.data == "restart" or config.resume.restart_sources
    if asks and at is not None:
        raise RefusedError(
            "resume.data=restart or resume.restart_sources is set, and the stream is opened at a place in "
            "its files: only a run can begin sources anew; open it without a state, or leave the restart out"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
