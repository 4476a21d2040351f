"""The files of points that ranks write and read. Only files that COMMIT lists are read."""

from __future__ import annotations

from orchestrator.checkpoint.files.manifest import Manifest
from orchestrator.checkpoint.node_local.parts_on_node import PartsOnNode
from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.writer.part_writer import Placed
from orchestrator.storage.files import Storage


class CommittedFiles:
    """`trainer.loading.state_tensors.StateFiles` of a run. Safe to use from threads."""

    def __init__(self, storage: Storage, on_node: PartsOnNode | None = None) -> None:
        """`on_node`: this rank's parts are written there, not to `storage`."""
        self.storage, self._points = storage, PointFiles(storage)
        self.parts = on_node.storage if on_node is not None else storage
        self.placed: Placed | None = on_node.placed if on_node is not None else None

    def manifest(self, point: str) -> Manifest:
        """Returns the tensors of a point and the digests of their files, as listed in COMMIT.

        Thus nothing of another step, or of another save of the same step, is loaded. Raises
        `ResumePointError` for a document that is not as it was committed.
        """
        return self._points.read_manifest(point)
