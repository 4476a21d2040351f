"""The server of one node for the parts on its disk (`resume.node_folder`).

It reads, lists and deletes them for other nodes, and copies other nodes' parts. It runs as an actor, or as an
object in a test. It serves no path outside a run's folder in a node folder.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.checkpoint.node_local.node_folder import (
    NodesHere,
    NodeStore,
    copy_part,
    expanded,
    make_node,
    place_in,
    root_here,
)
from orchestrator.checkpoint.writer.part_job import PartCancelled
from orchestrator.errors import UnreachableNodeError
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import Listed, ObjectFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """A node folder: its place without a run, whether workers write there, and the free bytes on its disk."""

    place: NodePlace
    has_workers: bool
    free_bytes: int

    def place_of(self, run: str) -> NodePlace:
        """Returns the place of a run's parts in it."""
        return replace(self.place, folder=f"{self.place.folder}/{run}")


class NodeServer:
    """The server of one node. Safe to use from threads."""

    def __init__(self, folder: str | None, address: str) -> None:
        """`folder` as configured. None: this launch writes to none, and only places that a COMMIT names are
        served.

        `address` is for people.
        """
        self._folder, self._address, self._here = folder, address, NodesHere(folder)
        self._has_workers = False
        self._unwanted = set[str]()

    def home(self) -> Home:
        """Returns this node's folder, and makes it if it is missing.

        Raises `ResourceError` or `StorageError` if that fails.
        """
        assert self._folder is not None, "a launch without a node folder asks for none"
        folder = expanded(self._folder)
        node = make_node(folder, self._address)
        place = replace(place_in(folder, node, ""), folder=folder)
        free = shutil.disk_usage(folder).free
        return Home(place=place, has_workers=self._has_workers, free_bytes=free)

    def workers_came(self) -> None:
        """Records that workers write to this node's folder from now on."""
        self._has_workers = True

    def has(self, places: Sequence[NodePlace]) -> list[bool]:
        """Returns which of these are on this node's disks."""
        return [root_here(place, self._here.own) is not None for place in places]

    def read(self, place: NodePlace, path: str, start: int, num_bytes: int) -> bytes:
        """Returns bytes of a file, fewer if it ends before. Raises as `Storage.read`."""
        memory = bytearray(num_bytes)
        found = self._at(place).read(path, start, memoryview(memory))
        return bytes(memoryview(memory)[:found])

    def facts(self, place: NodePlace, path: str) -> ObjectFacts:
        """See `Store`."""
        return self._at(place).facts(path)

    def list(self, place: NodePlace, folder: str) -> Sequence[Listed]:
        """See `Store`."""
        return self._at(place).list(folder)

    def delete_folder(self, place: NodePlace, folder: str) -> None:
        """See `Store`."""
        self._at(place).delete_folder(folder)

    def keep(self, source: NodeStore, run: str, path: str, entry: FileEntry, token: str) -> NodePlace:
        """Copies another node's part into this node's folder, durably and verified; returns its place.

        Raises `StorageError`, and `PartCancelled` after `stop_keeping` of its token.
        """

        def check() -> None:
            if token in self._unwanted:
                raise PartCancelled("the copy is no longer needed")

        place = self.home().place_of(run)
        copy_part(source, Storage(place.folder), path, entry, check)
        return place

    def stop_keeping(self, token: str) -> None:
        """The copy that was requested with this token is not needed any more."""
        self._unwanted.add(token)

    def _at(self, place: NodePlace) -> LocalStore:
        root = root_here(place, self._here.own)
        if root is None:
            raise UnreachableNodeError(f"{place.folder} is not on {socket.gethostname()} any more")
        return LocalStore(root)
