"""Files that people and other programs read and this machine writes bit by bit, where the run lies in a
bucket: they grow in a folder here, and are published whole, again and again.

It knows no file's meaning. Nothing of the run depends on them.
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
_State = tuple[int, int]  # of a file: bytes, time of its last change


class PublishedFolder:
    """Publishes the files below a folder under the same paths in a storage, those that changed, every 60 s
    and at the end, from a thread. What storage refuses is said once and tried again the next time.

    Of a file that changes meanwhile a first part is published. A request that is repeated late may put an
    older content in the place of the newest one, until that changes again.
    """

    def __init__(
        self, storage: Storage, folder: Path, trouble: Callable[[str], None], every_s: float = EVERY_S
    ) -> None:
        """`trouble` hears what goes wrong; it neither waits nor raises."""
        self._storage, self._folder, self._trouble, self._every_s = storage, folder, trouble, every_s
        self._published: dict[str, _State] = {}
        self._failed = self._is_whole = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="published files", daemon=True)
        self._thread.start()

    def close(self, limit_s: float) -> bool:
        """What is there now is published, unless storage takes longer than `limit_s`, or fails: False."""
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
        except FileNotFoundError:  # a program's own, which it has deleted meanwhile
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
