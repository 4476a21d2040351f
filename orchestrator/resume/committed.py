"""What ranks read and write of points: as storage has it, but no document is read that COMMIT does not list.

It knows files and their digests; what the tensors in them mean, and whether each has the digest that
parts.json says, is for the loader.
"""

from __future__ import annotations

from orchestrator.records import FileEntry
from orchestrator.resume.point_files import PointFiles
from orchestrator.resume.points import DOCUMENTS
from orchestrator.resume.verify import POINTS
from orchestrator.storage.files import Storage


class CommittedFiles:
    """`trainer.weights.StateFiles` of a run. Safe to use from threads.

    A document (parts.json) is read only with the bytes that the point's COMMIT lists; it holds the digest of
    every tensor, so that nothing of another step, or of another save of the same one, is loaded. Files of
    tensors are not hashed once more here.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage, self._points = storage, PointFiles(storage)

    def write(self, path: str, data: bytes | memoryview) -> FileEntry:
        """See `Storage.write`."""
        return self._storage.write(path, data)

    def sync(self, folder: str) -> None:
        """See `Storage.sync`."""
        self._storage.sync(folder)

    def read(self, path: str) -> bytes:
        """A file's bytes. Raises `ResumePointError` for a document that is not as it was committed, else as
        `Storage.read` does.
        """
        folder, name, file = (*path.split("/", 2), "", "")[:3]
        if folder == POINTS and file in DOCUMENTS:
            return self._points.read_listed(name, file)
        return self._storage.read(path)
