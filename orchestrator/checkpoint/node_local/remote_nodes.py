"""Reaches the disks of a cluster's nodes (`resume.node_folder`): finds places, and has copies kept.

`Servers` transports the calls, and each node's `NodeServer` answers them: it reads, lists and deletes the
parts on its disk for other nodes, and copies other nodes' parts. It runs as an actor, or as an object in a
test. It serves no path outside a run's folder in a node folder.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from typing_extensions import override

from orchestrator.checkpoint.files.part_writer import PartCancelled
from orchestrator.checkpoint.node_local.node_folder import (
    Nodes,
    NodesHere,
    NodeStore,
    copy_part,
    expanded,
    make_node,
    place_in,
    root_here,
)
from orchestrator.errors import OrchestratorError, ResourceError, StorageError, UnreachableNodeError, text_of
from orchestrator.planning.state.copy_placement import keeper
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
        """Returns size and tag of a file, as `Store.facts`."""
        return self._at(place).facts(path)

    def list(self, place: NodePlace, folder: str) -> Sequence[Listed]:
        """Lists a folder, as `Store.list`."""
        return self._at(place).list(folder)

    def delete_folder(self, place: NodePlace, folder: str) -> None:
        """Deletes a folder, as `Store.delete_folder`."""
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


HOLDS_S = 30.0  # how long the nodes' answers about themselves are used
_MISSED_S = 5.0  # and the answer that no node has a place


class FutureAnswer(Protocol):
    """The future answer of a call."""

    def get(self, check: Callable[[], None] | None = None) -> Any:
        """Returns the answer, or raises what the call raised.

        Raises `UnreachableNodeError` if the node does not answer in time; with `check`, if the node is no
        longer alive. `check` is called regularly, and its exceptions are raised.
        """
        ...


class Servers(Protocol):
    """Transports calls to the nodes' servers. Can be pickled; safe to use from threads."""

    def own(self) -> str:
        """Returns the node of this process."""
        ...

    def all(self) -> Sequence[str]:
        """Returns the nodes that are alive."""
        ...

    def call(self, node: str, method: str, *arguments: Any) -> FutureAnswer:
        """Calls the `NodeServer` of a node. Does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteStore(NodeStore):
    """A place on another node. Can be pickled if `servers` can."""

    servers: Servers
    node: str
    place: NodePlace

    @override
    def read(self, path: str, start: int, into: memoryview) -> int:
        found: bytes = self._ask("read", path, start, len(into))
        into[: len(found)] = found
        return len(found)

    @override
    def facts(self, path: str) -> ObjectFacts:
        found: ObjectFacts = self._ask("facts", path)
        return found

    @override
    def list(self, folder: str) -> Sequence[Listed]:
        found: Sequence[Listed] = self._ask("list", folder)
        return found

    @override
    def delete_folder(self, folder: str) -> None:
        self._ask("delete_folder", folder)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return self.servers.call(self.node, method, self.place, *arguments).get()


class ReachedNodes(Nodes):
    """Reaches the nodes of the cluster. Can be pickled if `servers` can, without its cached answers."""

    def __init__(
        self, servers: Servers, folder: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`folder` as configured."""
        self._servers, self._folder, self._clock = servers, folder, clock
        self._here = NodesHere(folder)
        self._lock = threading.Lock()  # over the cached answers; held while nodes are asked
        self._homes: dict[str, Home] = {}  # by node
        self._homes_at = -HOLDS_S
        self._stores: dict[NodePlace, tuple[RemoteStore | None, float]] = {}  # with the time of the answer

    def __reduce__(self) -> tuple[type[ReachedNodes], tuple[Servers, str | None]]:
        return ReachedNodes, (self._servers, self._folder)

    # ---------------------------------------------------------------------- as `Nodes`
    @property
    @override
    def advice(self) -> str:
        return (
            "bring the node back and give the command again, or go back to an older point with resume.from "
            "(`orchestrator points` lists them)"
        )

    @override
    def store(self, place: NodePlace) -> NodeStore | None:
        if (here := self._here.store(place)) is not None:
            return here
        with self._lock:
            found, since = self._stores.get(place, (None, -_MISSED_S))
            now, holds_s = self._clock(), _MISSED_S if found is None else HOLDS_S
            if now - since > holds_s:
                found = self._asked(place)
                self._stores[place] = (found, self._clock())
        return found

    @override
    def everywhere(self, run: str) -> Sequence[NodeStore]:
        if self._folder is None:
            return ()
        # several nodes of Ray may be one machine, including this one
        found: dict[str, NodeStore] = {}
        for node, home in self.homes(anew=True).items():
            place = home.place_of(run)
            found[place.id] = self._here.store(place) or RemoteStore(self._servers, node, place)
        return tuple(found.values())

    # ---------------------------------------------------------------------- homes
    def homes(self, *, anew: bool = False) -> Mapping[str, Home]:
        """Returns the folder of each node that answers and has one, by node."""
        return {n: home for n, home in self._asked_homes(anew).items() if isinstance(home, Home)}

    def home(self, node: str) -> Home:
        """Returns the folder of one node, and makes it if it is missing.

        Raises `UnreachableNodeError` if the node does not answer, `ResourceError` or `StorageError` if the
        folder cannot be made.
        """
        found: Home = self._servers.call(node, "home").get()
        return found

    def require_folders(self) -> Mapping[str, Home]:
        """Like `homes`, but requires that the folder can be made on every node.

        Raises `ResourceError` with all nodes on which it cannot, and if no node answers. A single node that
        does not answer is just starting or ending.
        """
        asked = self._asked_homes(anew=True)
        away = [each for each in asked.values() if isinstance(each, UnreachableNodeError)]
        wrong = [
            f"  node {node}: {text_of(why)}"
            for node, why in asked.items()
            if isinstance(why, Exception) and (why not in away or len(away) == len(asked))
        ]
        if wrong:
            raise ResourceError(
                f"resume.node_folder={self._folder} cannot be used on every node; nothing is started: "
                "correct these, or give a folder that all of them can make\n" + "\n".join(wrong),
                code="storage.node_folder_unusable",
            )
        return self.homes()

    def workers_came(self) -> None:
        """Records that workers write to the folder of this process's node. Raises `UnreachableNodeError`."""
        self._servers.call(self._servers.own(), "workers_came").get()

    # ---------------------------------------------------------------------- as `CopyTransport`
    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        """Has another node copy a part, as `node_folder.CopyTransport`.

        The other node is the next one on which workers write (`copy_placement.keeper`).
        """
        by_id = self._with_workers(anew=False)
        if set(by_id) <= {own.id}:
            by_id = self._with_workers(anew=True)
        if (chosen := keeper(own.id, by_id)) is None:
            return None
        source = RemoteStore(self._servers, self._servers.own(), own)
        token, run = secrets.token_hex(8), own.folder.rpartition("/")[2]
        answer = self._servers.call(by_id[chosen], "keep", source, run, path, entry, token)
        try:
            kept: NodePlace = answer.get(check)
        except UnreachableNodeError:
            self._homes_at = -HOLDS_S  # the next part goes elsewhere
            raise
        except PartCancelled:
            with suppress(OrchestratorError):  # it ends soon, or is lost
                self._servers.call(by_id[chosen], "stop_keeping", token).get()
                answer.get()
            raise
        return kept

    def _with_workers(self, *, anew: bool) -> dict[str, str]:
        """Maps the id of each folder that workers write to, to a node that has it."""
        return {home.place.id: node for node, home in self.homes(anew=anew).items() if home.has_workers}

    # ---------------------------------------------------------------------- asking
    def _asked_homes(self, anew: bool) -> dict[str, Home | Exception]:
        with self._lock:
            if anew or self._clock() - self._homes_at > HOLDS_S:
                asked = self._of_all("home")
                self._homes = {n: home for n, home in asked.items() if isinstance(home, Home)}
                self._homes_at = self._clock()
                return asked
            return dict(self._homes)

    def _asked(self, place: NodePlace) -> RemoteStore | None:
        for node, has in self._of_all("has", (place,)).items():
            if has == [True]:
                return RemoteStore(self._servers, node, place)
        return None

    def _of_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Returns the answer, or the error, of each node that is alive."""
        answers = {node: self._servers.call(node, method, *arguments) for node in self._servers.all()}
        found = dict[str, Any]()
        for node, answer in answers.items():
            try:
                found[node] = answer.get()
            except (UnreachableNodeError, ResourceError, StorageError) as error:
                found[node] = error
        return found
