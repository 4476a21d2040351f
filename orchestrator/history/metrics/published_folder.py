"""Publishes files that grow on this machine to a run's bucket, whole and repeatedly.

They are files that people and other programs read. The run does not depend on them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from orchestrator.errors import StorageError
from orchestrator.storage.files import Storage

EVERY_S = 60.0
_PIECE_BYTES = 1 << 20
_State = tuple[int, int]  # of a file: bytes, modification time


class PublishedFolder:
    """Publishes the files below a folder under the same paths in a storage, from a thread.

    Files that changed are published every 60 s and at the end. An error of the storage is reported once and
    retried the next time. If a file changes meanwhile, its first part is published. A request that is
    repeated late may replace the newest content with an older one, until the file changes again.
    """

    def __init__(
        self, storage: Storage, folder: Path, trouble: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        """`trouble` receives errors; it must not wait or raise."""
        self._storage, self._folder, self._trouble, self._every_s = storage, folder, trouble, every_s
        self._published: dict[str, _State] = {}
        self._failed = self._is_whole = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="published files", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> bool:
        """Publishes the current files. Returns False if storage takes longer than `limit_s`, or fails."""
        self._over.set()
        self._thread.join(limit_s)
        return self._is_whole

    def _keep(self) -> None:
        while not self._over.wait(self._every_s):
            self._publish()
        self._is_whole = self._publish()

    def _publish(self) -> bool:
        try:
            for path in self._files():
                self._publish_file(path)
        except (StorageError, OSError) as error:
            if not self._failed:
                self._failed = True
                self._trouble(
                    f"the files in {self._folder} cannot be published in {self._storage.root} "
                    f"({error}); the run continues, and this is tried every {self._every_s:.0f} s"
                )
            return False
        return True

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())

    def _publish_file(self, path: Path) -> None:
        name = path.relative_to(self._folder).as_posix()
        try:
            found = path.stat()
        except FileNotFoundError:  # a program's own file, deleted meanwhile
            return
        state = found.st_size, found.st_mtime_ns
        if self._published.get(name) != state:
            self._storage.put(name, partial(_first, path, found.st_size), found.st_size)
            self._published[name] = state


def _first(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, in pieces."""
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, _PIECE_BYTES))):
            size -= len(piece)
            yield piece
