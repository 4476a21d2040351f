"""An iterator that runs ahead in a thread, by a bounded number of items.

It knows nothing of what the items are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from orchestrator.errors import FeedError

Item = TypeVar("Item")


class Ahead(Generic[Item]):
    """Takes the items of `items` in a thread of its own; at most `depth` of them wait to be taken, and one is
    being made. For one consumer.

    What the iterator raises, `take` raises when its turn has come, then and ever after.
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
        """The next item, waited for. Raises `StopIteration` after the last one, `FeedError` once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._closed)
            if self._closed:
                raise FeedError("the stream is closed; open it again at the cursor or state that you have")
            if self._waiting:
                item = self._waiting.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Ends the thread after the item at hand, and waits for that. Idempotent, from any thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:  # garbage is collected in any thread
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
            del self._items  # with all that it holds
            with self._changed:
                self._ended = True
                self._changed.notify_all()
