"""Batches of one rank, made ahead in a thread, with a state that any other shape can go on from."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from orchestrator.data.loading.drawing import Drawing
from orchestrator.data.loading.rank_batches import Batch, Share, Tensors, rank_batches
from orchestrator.data.loading.state import state_of
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError, RefusedError
from orchestrator.planning.resume.source_lists import RestartRequest
from orchestrator.records.cursor import Cursor

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

# An iterator that prefetches a bounded number of items in a thread.
Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Iterates over `items` in its own thread. At most `depth` items are buffered and one is being made. For
    one consumer.

    An error of the iterator is raised by `take` after the items before it, and by every later `take`.
    """

    def __init__(self, items: Iterator[Item], depth: int, name: str) -> None:
        self._items, self._depth = items, depth
        self._waiting: deque[Item] = deque()
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """Waits for the next item. Raises `StopIteration` after the last one, `FeedError` once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._closed)
            if self._closed:
                raise FeedError(
                    "the stream is closed; open it again at the cursor or state that you have",
                    code="command.stream_closed",
                )
            if self._waiting:
                item = self._waiting.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stops the thread after its current item and waits for it. Idempotent, thread-safe."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # garbage collection runs in any thread
            self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._waiting) < self._depth or self._closed)
                    if self._closed:
                        return
                    self._waiting.append(item)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  the consumer's thread raises it
            self._error = error
        finally:
            del self._items  # frees all that it holds
            with self._changed:
                self._ended = True
                self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A stream at a place of it: `restart` is the one that its states say, `notes` what to say of the
    opening.
    """

    spec: DataSpec
    cursor: Cursor
    restart: RestartRequest | None = None
    notes: tuple[str, ...] = ()


Open = Callable[[Mapping[str, Any]], Opened]


def _made(
    drawing: Drawing, share: Share, tensors: Tensors, collate: Callable[[Batch], Any] | None
) -> Iterator[tuple[list[Any], Cursor]]:
    """Yields (this rank's batches, the cursor after them) for each step."""
    for drawn in drawing.steps(share.global_batch_size, share.seq_len):
        batches = rank_batches(drawn, share, tensors)
        yield (batches if collate is None else [collate(each) for each in batches]), drawn.cursor


class Loader:
    """An iterator of a rank's batches to the end of the data; `SampleStream.batches` makes it.

    A thread reads, tokenizes, packs and collates `prefetch` steps ahead; what it raises, `next` raises.
    `iter()` returns the loader itself, at its position. Not thread-safe, and not for other processes (see
    `dataset`). `close` it, use it in a `with`, or forget it: the thread ends in each case.
    """

    def __init__(
        self,
        drawing: Drawing,
        opened: Opened,
        *,
        share: Share,
        tensors: Tensors,
        collate: Callable[[Batch], Any] | None,
        prefetch: int,
        reopen: Open,
    ) -> None:
        self._share, self._tensors, self._collate, self._prefetch = share, tensors, collate, prefetch
        self._reopen = reopen
        self._begin(drawing, opened)

    def _begin(self, drawing: Drawing, opened: Opened) -> None:
        self._opened, self._cursor, self._after = opened, opened.cursor, opened.cursor
        self._rest: deque[Any] = deque()  # of the current step
        self._given = 0  # of the current step
        made = _made(drawing, self._share, self._tensors, self._collate)
        self._ahead = Ahead(made, self._prefetch, "batches")
        self._end = weakref.finalize(self, self._ahead.close)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if not self._rest:
            batches, self._after = self._ahead.take()
            self._rest, self._given = deque(batches), 0
        batch = self._rest.popleft()
        self._given += 1
        if not self._rest:
            self._cursor = self._after
        return batch

    @property
    def cursor(self) -> Cursor:
        """The place after the last step of which all batches were given."""
        return self._cursor

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain JSON values: the same on every rank. What waits in the thread is not
        counted as read.

        Raises `RefusedError` inside a step, when some of its micro-batches were given and some not: their
        gradient is in nobody's checkpoint.
        """
        if self._rest:
            raise RefusedError(
                f"the loader has returned {self._given} of the {self._given + len(self._rest)} micro-batches "
                "of a step; take the state after the last one, when the optimizer has stepped",
                code="command.inside_step",
            )
        return state_of(self._opened.spec, self._cursor, self._opened.restart)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at exactly the next unread token of `state`, whatever the world size, the batch size and
        the seq_len were when it was taken.

        Raises `DataIdentityError` with both values, and stands where it stood, if it is a state of other
        files, another tokenizer or other settings that make the stream.
        """
        opened = self._reopen(state)
        drawing = Drawing(opened.spec, opened.cursor)
        self.close()
        self._begin(drawing, opened)

    def dataset(self) -> IterableDataset[Any]:
        """The same batches as a torch `IterableDataset`, for `DataLoader(loader.dataset(), batch_size=None)`:
        with `num_workers=0`, for worker processes would each read the whole stream (its iterator raises
        `RefusedError` there).
        """
        from orchestrator.data.loading.torch_dataset import LoaderDataset

        return LoaderDataset(self)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
