"""The files of points that a rank writes and reads.

With `resume.node_folder`, a rank's parts are written to the disk of its own node, with a copy on another one.
With the copy, a lost node costs no point. `CopyTransport` transports the copies. Only files that COMMIT
lists are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from orchestrator.checkpoint.files.manifest import PartManifest
from orchestrator.checkpoint.node_local.node_folder import expanded, make_node, place_in
from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.writer.part_writer import Placed
from orchestrator.checkpoint.writer.writer_process import PartCancelled
from orchestrator.errors import text_of
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage


class CopyTransport(Protocol):
    """Transports copies to another node's disk."""

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        """Has another node copy a part of this one onto its disk; returns the copy's place.

        `path` is in the run's folder. The copy is whole, durable and verified (`node_folder.copy_part`).
        Returns None if there is no other node.

        Raises `StorageError` if the copy failed, and what `check` raises, which is called regularly. Then the
        copy is no longer written, or its node is lost.
        """
        ...


class NoCopyTransport(CopyTransport):
    """There is only one node."""

    @override
    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        ...


class PartsOnNode:
    """The parts of one rank. Safe to use from threads."""

    def __init__(
        self, folder: str, run: str, address: str, copies: CopyTransport, say: Callable[[str], None]
    ) -> None:
        """`folder` is as configured, `run` as from `node_folder.run_folder`.

        `address` of this node is for people. `say` is called about copies that fail. Raises `ResourceError`
        if the folder's path cannot be expanded here.
        """
        self._folder, self._run, self._address = expanded(folder), run, address
        self._copies, self._say = copies, say
        self.storage = Storage(f"{self._folder}/{run}")

    def placed(self, point: str, entry: FileEntry, check: Callable[[], None]) -> tuple[NodePlace, ...]:
        """Has another node keep a copy; a `part_writer.Placed`.

        The vote waits for the copy. A committed point thus survives the loss of any one node, and COMMIT
        needs no later additions. If a copy fails, the point loses this protection, but the save continues
        with one place.
        """
        own = place_in(self._folder, make_node(self._folder, self._address), self._run)
        path = f"points/{point}/{entry.path}"
        try:
            kept = self._copies.keep(own, path, entry, check)
        except PartCancelled:
            return (own,)
        except Exception as error:  # noqa: BLE001  after any error the save continues with one place
            self._say(
                f"{path} of {own} has no copy on another node: {text_of(error)}; if {own} is lost, so is "
                "this point"
            )
            return (own,)
        return (own,) if kept is None else (own, kept)


class CommittedFiles:
    """`trainer.loading.loading.StateFiles` of a run. Safe to use from threads."""

    def __init__(self, storage: Storage, on_node: PartsOnNode | None = None) -> None:
        """`on_node`: this rank's parts are written there, not to `storage`."""
        self.storage, self._points = storage, PointFiles(storage)
        self.parts = on_node.storage if on_node is not None else storage
        self.placed: Placed | None = on_node.placed if on_node is not None else None

    def manifest(self, point: str) -> PartManifest:
        """Returns the tensors of a point and the digests of their files, as listed in COMMIT.

        Thus nothing of another step, or of another save of the same step, is loaded. Raises
        `ResumePointError` for a document that is not as it was committed.
        """
        return self._points.read_manifest(point)
