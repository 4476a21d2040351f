"""What ranks write and read of points: as storage has it, but nothing is read that COMMIT does not list.

It knows files and their digests; what the tensors in them mean is for the loader.
"""

from __future__ import annotations

from orchestrator.parts.manifest import Manifest
from orchestrator.resume.point_files import PointFiles
from orchestrator.storage.files import Storage


class CommittedFiles:
    """`trainer.loading.StateFiles` of a run. Safe to use from threads."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self._points = storage, PointFiles(storage)

    def manifest(self, point: str) -> Manifest:
        """The tensors of a point and the digests of the files they lie in, as COMMIT has them, so that
        nothing of another step, or of another save of the same one, is loaded. Raises `ResumePointError` for
        a document that is not as it was committed.
        """
        return self._points.read_manifest(point)
