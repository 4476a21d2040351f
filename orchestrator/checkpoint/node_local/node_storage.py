"""A run's storage that also finds parts on the disks of nodes (`resume.node_folder`).

Code that reads, deletes or forks a point gets each part from the place that COMMIT records, transparently.
Everything else is in the shared storage.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from typing_extensions import override

from orchestrator.checkpoint.node_local.node_folder import Nodes, NodesHere, NodeStore, run_folder
from orchestrator.errors import OrchestratorError, StorageError, UnreachableNodeError
from orchestrator.json_form import SealError, decode, unseal
from orchestrator.planning.state.copy_placement import missing, missing_text, places_of
from orchestrator.records.points import NodeParts, NodePlace
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.open import open_storage
from orchestrator.storage.store import ObjectFacts, Readable, Store

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
_POINT = re.compile(r"points/([^/]+)")
_COMMIT = re.compile(r"points/([^/]+)/COMMIT")
_PART = re.compile(r"points/([^/]+)/state/(\d+)-of-\d+\.safetensors")


def run_storage(location: str, nodes: Nodes | None = None) -> NodeStorage:
    """Opens the storage of the run at a folder's path or a bucket's URI, as `open_storage` takes it.

    `nodes`: those that can be reached; by default this machine.
    """
    return with_nodes(open_storage(location), nodes)


def with_nodes(storage: Storage, nodes: Nodes | None = None) -> NodeStorage:
    """Adds node folders to `storage`, which is the one that all nodes see. `nodes` as in `run_storage`."""
    return NodeStorage(storage._store, nodes or NodesHere())


class NodeStorage(Storage):
    """A `Storage` with parts on nodes. If a point's COMMIT names nodes, its parts are read there.

    This node is tried first, then the others in the order of COMMIT. If a place has lost a file, or has other
    bytes, this is logged, and the next place is tried. If no node that has a file can be reached, reading it
    raises `UnreachableNodeError` with everything that is missing of the point. A file counts as gone only if
    all its places have surely lost it.
    """

    def __init__(self, shared: Store, nodes: Nodes) -> None:
        """`shared` is the storage that all nodes see."""
        self._store = shared
        self._nodes = nodes
        self._known: dict[str, tuple[NodeParts, ...]] = {}  # point -> nodes; a COMMIT never changes
        self._wrong: set[tuple[str, str]] = set()  # (path, node) of files that are not as they were written
        self._used = _Used()

    def reach(self, nodes: Nodes) -> None:
        """Sets the reachable nodes, when a driver has connected to its cluster."""
        self._nodes = nodes

    # ---------------------------------------------------------------------- what is where
    @property
    def reached(self) -> Nodes:
        """The reachable nodes."""
        return self._nodes

    def used(self, path: str, place: NodePlace) -> None:
        """Records that a file was read there."""
        self._used.put(path, place)

    def is_wrong(self, path: str, place: NodePlace) -> bool:
        """Whether a file is no longer read there; see `elsewhere`."""
        return (path, place.id) in self._wrong

    def nodes_of(self, point: str) -> tuple[NodeParts, ...]:
        """Returns which nodes have which parts of a committed point.

        Empty if all are in this storage, and for names without a point. Raises `StorageError`.
        """
        if point not in self._known:
            with suppress(FileNotFoundError):
                self.read(f"points/{point}/COMMIT")
        return self._known.get(point, ())

    @override
    def away(self, path: str) -> str:
        if (match := _PART.fullmatch(path)) is None or not (parts := self.nodes_of(match[1])):
            return ""
        if any(self._nodes.store(place) is not None for place in places_of(parts, int(match[2]))):
            return ""
        return self._missing_text(match[1])

    @override
    def on_nodes(self, path: str) -> bool:
        return (match := _PART.fullmatch(path)) is not None and bool(self.nodes_of(match[1]))

    @override
    def elsewhere(self, path: str) -> bool:
        if (match := _PART.fullmatch(path)) is None:
            return False
        places = places_of(self.nodes_of(match[1]), int(match[2]))
        used = self._used.pop(path)
        if used is not None:
            self._wrong.add((path, used.id))
            if any((path, place.id) not in self._wrong for place in places):
                _log.warning(
                    "%s/%s on %s is not as it was written; its copy is read", used.folder, path, used
                )
                return True
        # the next reader tries all of them again
        self._wrong.difference_update([(path, place.id) for place in places])
        return False

    def left_on_nodes(self) -> list[str]:
        """Returns the folders of points on the reachable nodes."""
        found = set[str]()
        for store in self._everywhere():
            with suppress(UnreachableNodeError):
                found.update(each.name for each in store.list("points"))
        return sorted(found)

    # ---------------------------------------------------------------------- as `Storage`
    @override
    def beside(self, root: str) -> Storage:
        """The same nodes are reached."""
        return with_nodes(super().beside(root), self._nodes)

    @override
    def within(self, limit_s: float) -> Storage:
        return NodeStorage(self._store.within(limit_s), self._nodes)

    @override
    def read(self, path: str, start: int = 0) -> bytes:
        data = super().read(path, start)
        if not start and (match := _COMMIT.fullmatch(path)):
            self._learn(match[1], data)
        return data

    @override
    def create(self, path: str, data: bytes) -> bool:
        created = super().create(path, data)
        if created and (match := _COMMIT.fullmatch(path)):
            self._learn(match[1], data)
        return created

    @override
    def delete(self, path: str) -> None:
        if match := _COMMIT.fullmatch(path):
            self.nodes_of(match[1])  # afterwards it is unknown where the parts are
        super().delete(path)

    @override
    def delete_folder(self, folder: str) -> None:
        """A point's folder is also deleted on the reachable nodes.

        A later start removes the rest on the others.
        """
        super().delete_folder(folder)
        if (match := _POINT.fullmatch(folder)) is None:
            return
        places = [self._nodes.store(each.node) for each in self._known.get(match[1], ())]
        for store in (*filter(None, places), *self._everywhere()):
            with suppress(UnreachableNodeError):
                store.delete_folder(folder)
        self._known.pop(match[1], None)

    # ---------------------------------------------------------------------- inside
    def _holding(self, path: str) -> Readable:
        if (match := _PART.fullmatch(path)) is None or not (parts := self.nodes_of(match[1])):
            return self._store
        return _Placed(self, match[1], places_of(parts, int(match[2])))

    def _everywhere(self) -> Sequence[NodeStore]:
        try:
            run: dict[str, Any] = unseal(self.read("run.json"))
        except (FileNotFoundError, SealError):
            return ()
        return self._nodes.everywhere(run_folder(run["name"], run["id"])) if run.get("id") else ()

    def _learn(self, point: str, commit: bytes) -> None:
        parts: tuple[NodeParts, ...] = ()
        if b'"nodes"' in commit:  # most have none, and are not read twice
            try:
                parts = tuple(decode(NodeParts, each) for each in unseal(commit).get("nodes", ()))
            except (OrchestratorError, AttributeError, TypeError):
                return  # damaged; its reader reports that
        self._known[point] = parts

    def unreachable(self, point: str, path: str, away: Sequence[NodePlace]) -> UnreachableNodeError:
        """Builds the error for a part whose only good places are `away`."""
        if not (text := self._missing_text(point)):  # the other places of this part are no good
            rank = int(path.rpartition("/")[2].partition("-")[0])
            where = " and ".join(f"{place} in {place.folder}" for place in away)
            text = f"resume point {point} needs file {rank} on {where}: it is damaged or gone elsewhere"
        return UnreachableNodeError(f"{text}. That is out of reach, not damaged: {self._nodes.advice}")

    def _missing_text(self, point: str) -> str:
        parts = self.nodes_of(point)
        reached = {each.node.id for each in parts if self._nodes.store(each.node) is not None}
        found = missing(parts, reached)
        return missing_text(point, found) if found else ""


class _Used(threading.local):
    """The places where a thread last read files, by path. Pickles as an empty one."""

    def __init__(self) -> None:
        self._places: dict[str, NodePlace] = {}

    def __reduce__(self) -> tuple[type[_Used], tuple[()]]:
        return _Used, ()

    def put(self, path: str, place: NodePlace) -> None:
        """Records that a file was read there."""
        self._places[path] = place

    def pop(self, path: str) -> NodePlace | None:
        """Returns where it was read last, and forgets it."""
        return self._places.pop(path, None)


class _Placed(Readable):
    """A part with several places."""

    def __init__(self, storage: NodeStorage, point: str, places: Sequence[NodePlace]) -> None:
        self._storage, self._point, self._places = storage, point, places

    @override
    def read(self, path: str, start: int, into: memoryview) -> int:
        return self._first(path, lambda store: store.read(path, start, into))

    @override
    def facts(self, path: str) -> ObjectFacts:
        return self._first(path, lambda store: store.facts(path))

    def _first(self, path: str, act: Callable[[NodeStore], Result]) -> Result:
        """Returns the result of the first place that has one."""
        storage, trouble = self._storage, None
        away = list[NodePlace]()
        for place, store in self._in_order(path):
            try:
                if store is None:
                    raise UnreachableNodeError(str(place))
                found = act(store)
            except FileNotFoundError:
                if storage.reached.store(place) is None:  # a disk that is unavailable has not lost the file
                    away.append(place)
                else:
                    _log.warning("%s/%s on %s is missing", place.folder, path, place)
            except UnreachableNodeError:
                away.append(place)
            except StorageError as error:
                trouble = error
            else:
                storage.used(path, place)
                return found
        if trouble is not None:
            raise trouble
        if away:
            raise storage.unreachable(self._point, path, away)
        raise FileNotFoundError(f"{path} is in none of its places: {', '.join(map(str, self._places))}")

    def _in_order(self, path: str) -> list[tuple[NodePlace, NodeStore | None]]:
        """Orders the places, this machine's first because it is the fastest."""
        good = [place for place in self._places if not self._storage.is_wrong(path, place)]
        found = [(place, self._storage.reached.store(place)) for place in good]
        return sorted(found, key=lambda each: not isinstance(each[1], LocalStore))
