"""The log files of a run, as a launch writes them into its folder: reads and follows the newest one.

They are for people: no decision uses their content.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Iterator

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError
from orchestrator.storage.files import Storage

FOLDER = "logs"
LOOK_EVERY_S = 0.5
LAST_LOOKS = 4  # without a new line, after the end was written: the driver writes its last lines after it
_LOG = re.compile(r"(\d{4,})-.+\.log")


class LogFollower:
    """Reads the newest log file of a run, then its new text. When that file has ended, a newer one, of a
    later start, follows. Not for several threads.
    """

    def __init__(self, storage: Storage) -> None:
        """Raises `RefusedError` if the run has no log file: it began under `torchrun`, or was never begun."""
        self._storage = storage
        names = self._names()
        if not names:
            raise RefusedError(
                f"{storage.root} has no log file (logs/): a launch writes one when it begins, `torchrun` "
                "does not; `orchestrator status` shows the state of the run",
                code="run.no_log",
            )
        self.name, self._offset, self._text = names[-1], 0, codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """The text since the last call: of the newest file at first, of later ones after it. Raises
        `StorageError`.
        """
        found = self._rest()
        for name in self._names():
            if _order(name) > _order(self.name):
                found += self._rest()  # what was written to the older one before the newer one began
                self.name, self._offset = name, 0
                found += self._rest()
        return found

    def _rest(self) -> str:
        try:
            data = self._storage.read(f"{FOLDER}/{self.name}", self._offset)
        except FileNotFoundError:
            return ""
        self._offset += len(data)
        return self._text.decode(data)

    def _names(self) -> list[str]:
        return sorted(filter(_LOG.fullmatch, self._storage.list(FOLDER)), key=_order)


def _order(name: str) -> tuple[int, str]:
    return int(name.partition("-")[0]), name


def follow(store: RunStore, wait: Callable[[float], None] = time.sleep) -> Iterator[str]:
    """The newest log file, then new text, until the newest attempt has written its end and no text follows. A
    run whose processes died without an end is followed until the reader stops.
    """
    follower, quiet = LogFollower(store.storage), 0
    while quiet < LAST_LOOKS:
        over = _is_over(store)
        if text := follower.read():
            yield text
        quiet = quiet + 1 if over and not text else 0
        wait(LOOK_EVERY_S if quiet < LAST_LOOKS else 0.0)


def _is_over(store: RunStore) -> bool:
    claim = store.newest_claim()
    return claim is None or store.read_end(claim.number) is not None
