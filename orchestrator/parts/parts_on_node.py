"""Where the parts of a rank go with `resume.node_folder`: to the disk of its own node, and a copy to that of
another one, so that a lost node costs no point.

How a copy travels is the business of `Copies`; which points are committed, that of others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.errors import text_of
from orchestrator.parts.node_folder import expanded, make_node, place_in
from orchestrator.parts.part_job import PartCancelled
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage


class Copies(Protocol):
    """The way to another node's disk."""

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        """Has another node copy a part of this one, `path` in the run's folder, onto its disk, whole, durable
        and read back (`node_folder.copy_part`); where that lies. None: there is no other node.

        Raises `StorageError` if the copy failed, and what `check` raises, which is called every so often:
        then nobody writes it any more, or its node is lost.
        """
        ...


class NoCopies:
    """See `Copies`: there is one node."""

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        """See `Copies`."""


class PartsOnNode:
    """One rank's. Safe to use from threads."""

    def __init__(
        self, folder: str, run: str, address: str, copies: Copies, say: Callable[[str], None]
    ) -> None:
        """`folder` as configured, `run` as `node_folder.run_folder` names it, `address` of this node, for
        people. `say` hears of copies that fail. Raises `ResourceError` for a folder that has no name here.
        """
        self._folder, self._run, self._address = expanded(folder), run, address
        self._copies, self._say = copies, say
        self.storage = Storage(f"{self._folder}/{run}")

    def placed(self, point: str, entry: FileEntry, check: Callable[[], None]) -> tuple[NodePlace, ...]:
        """See `part_writer.Placed`.

        The vote waits for the copy: so a point whose COMMIT there is outlives the loss of any one node from
        then on, and no later record has to be joined to COMMIT. A copy that fails costs the point that, not
        its being: the save goes on with one place.
        """
        own = place_in(self._folder, make_node(self._folder, self._address), self._run)
        path = f"points/{point}/{entry.path}"
        try:
            kept = self._copies.keep(own, path, entry, check)
        except PartCancelled:
            return (own,)
        except Exception as error:  # noqa: BLE001  whatever it is, the save continues with one place
            self._say(
                f"{path} of {own} has no copy on another node: {text_of(error)}; if {own} is lost, so is "
                "this point"
            )
            return (own,)
        return (own,) if kept is None else (own, kept)
