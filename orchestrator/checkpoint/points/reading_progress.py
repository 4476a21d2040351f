"""Reports the progress of a long reading of points: bytes done and total, at most every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from orchestrator.checkpoint.points.verify import Stretch
from orchestrator.records.points import Damage
from orchestrator.storage.at_once import at_once, hashed_at_once
from orchestrator.storage.files import Storage

SAY_EVERY_S = 5.0
THREADS_FROM_BYTES = 16 << 20  # hashing fewer bytes takes less time than starting threads
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"))


class ReadingProgress:
    """Calls `say` with a line when a reading has taken `SAY_EVERY_S`, and then at most that often.

    Safe to use from threads.
    """

    def __init__(
        self, say: Callable[[str], None], what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what` names what is read, for the line."""
        self._say, self._what, self._clock = say, what, clock
        self._lock = threading.Lock()
        self._done, self._total = 0, 0
        self._said_at = clock()

    def expect(self, num_bytes: int) -> None:
        """Adds bytes that are to be read."""
        with self._lock:
            self._total += num_bytes

    def read(self, num_bytes: int) -> None:
        """Adds bytes that were read and compared."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._said_at < SAY_EVERY_S or self._done >= self._total:
                return
            self._said_at = now
            line = f"{self._what}: {read_of(self._done, self._total)} read"
        self._say(line)


def read_of(done: int, total: int) -> str:
    """Formats the bytes that were read and the total, for people."""
    size, unit = next((each for each in _UNITS if total >= each[0]), (1 << 10, "KiB"))
    return f"{done / size:,.1f} of {total / size:,.1f} {unit}"


class ReadAtOnce:
    """`each` of `PointFiles.verify_point`: reads stretches in threads and reports the progress."""

    def __init__(self, storage: Storage, say: Callable[[str], None], what: str) -> None:
        self._storage, self._progress = storage, ReadingProgress(say, what)

    def __call__(
        self, look: Callable[[Stretch], Damage | None], stretches: Sequence[Stretch], /
    ) -> Iterable[Damage | None]:
        """See `Each`."""

        def read(stretch: Stretch) -> Damage | None:
            found = look(stretch)
            self._progress.read(stretch.bytes)
            return found

        num_bytes = sum(stretch.bytes for stretch in stretches)
        self._progress.expect(num_bytes)
        in_threads = hashed_at_once if num_bytes >= THREADS_FROM_BYTES else at_once
        return in_threads(self._storage, read, stretches)
