"""An iterator that prefetches a bounded number of items in a thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from orchestrator.errors import FeedError

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
