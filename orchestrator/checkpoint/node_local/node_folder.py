"""Folders on the nodes' own disks that hold parts of points (`resume.node_folder`), and their identity.

    <node_folder>/node.json     sealed: id (32 hex digits), host, address, created, format
    <node_folder>/<run>-<run_id>/points/<point>/state/…     parts, named as in the run's storage

The id is random and created exclusively. It outlives Ray's nodes, which get a new id at each start, and stays
with the disk.

`FolderChecks` tracks which nodes may get workers: only nodes where that folder exists or could be made. A
node that joins later may lack the variable or the disk, and must not end a run that trains well without it.
It is pure: the caller asks the nodes. `PartsOnNode` writes a rank's parts there, and has another node keep
copies.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from blake3 import blake3
from typing_extensions import override

from orchestrator.checkpoint.files.part_file import goes_on, parse_header, piece_digest, read_header
from orchestrator.checkpoint.files.part_writer import PartCancelled
from orchestrator.errors import OrchestratorError, ResourceError, StorageError, text_of
from orchestrator.json_form import decode, encode, seal, unseal
from orchestrator.records.points import FileEntry, NodePlace
from orchestrator.storage.files import Storage
from orchestrator.storage.home import expanded as expanded_home
from orchestrator.storage.local_store import LocalStore
from orchestrator.storage.store import Listed, Readable

NODE = "node.json"
FORMAT = 1  # of node.json; files without a number have the first
_ID_BYTES = 16
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """The content of node.json. host, address and created (ISO 8601) are for people."""

    id: str
    host: str
    address: str
    created: str
    format: int = FORMAT


class NodeStore(Readable, Protocol):
    """The operations on a run's folder on a node, for example a `LocalStore`. Paths are as in the run's
    storage.

    Each call raises `UnreachableNodeError` if the node does not answer.
    """

    def list(self, folder: str) -> Sequence[Listed]:
        """Lists a folder, as `Store.list`."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Deletes a folder, as `Store.delete_folder`."""
        ...


class Nodes(Protocol):
    """The nodes that a process can reach, including its own. Safe to use from threads."""

    @property
    def advice(self) -> str:
        """What to do about a part that no reachable node has; a sentence without its end."""
        ...

    def store(self, place: NodePlace) -> NodeStore | None:
        """Returns the store at this place; None if it cannot be reached now."""
        ...

    def everywhere(self, run: str) -> Sequence[NodeStore]:
        """Returns the folders of this name (see `run_folder`) in the node folders of all nodes reachable now.

        The folders need not exist.
        """
        ...


def run_folder(name: str, run_id: str) -> str:
    """Returns the name of a run's folder in node folders."""
    return f"{name}-{run_id}"


def expanded(folder: str) -> str:
    """Expands `~` and `$NAME` in a configured node folder on this machine.

    Raises `ResourceError` if the result is not an absolute path.
    """
    found = os.path.expandvars(expanded_home(folder, "resume.node_folder"))
    if not os.path.isabs(found) or "$" in found:
        raise ResourceError(
            f"resume.node_folder={folder} is {found!r} on {socket.gethostname()}, which is not an absolute "
            "path; set the variable on every node before Ray starts there, or give an absolute path",
            code="config.node_folder_not_absolute",
        )
    return os.path.normpath(found)


def read_node(folder: str) -> Node | None:
    """Returns the identity of a node folder of this machine.

    None if there is none, or its node.json cannot be read: its disk is not here.
    """
    try:
        return _read(Storage(folder))
    except (FileNotFoundError, OrchestratorError):
        return None


def _read(storage: Storage) -> Node:
    node = decode(Node, unseal(storage.read(NODE)), NODE)
    if node.format != FORMAT:
        raise OrchestratorError(
            f"its format is {node.format}, this version reads {FORMAT}", code="storage.node_identity"
        )
    return node


def make_node(folder: str, address: str) -> Node:
    """Like `read_node`, but makes the folder and node.json if they are missing.

    Raises `StorageError` if it can be neither made nor read.
    """
    storage = Storage(folder)
    node = Node(
        id=secrets.token_hex(_ID_BYTES),
        host=socket.gethostname(),
        address=address,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if not storage.exists(NODE) and storage.create(NODE, seal(encode(node))):
        return node
    try:
        return _read(storage)
    except (FileNotFoundError, OrchestratorError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(
            f"{folder}/{NODE} on {socket.gethostname()} cannot be read ({error}), so the node that owns the "
            "parts in this folder is unknown; restore the file, or move the folder away",
            code="storage.node_identity",
        ) from error


def place_in(folder: str, node: Node, run: str) -> NodePlace:
    """Returns the place of a run's parts in a node folder."""
    return NodePlace(id=node.id, host=node.host, address=node.address, folder=f"{folder}/{run}")


def root_here(place: NodePlace, own: str = "") -> str | None:
    """Returns the folder of this machine at this place; None if its disk is not here.

    It is in the node folder `own` ("" for none), or where COMMIT recorded it.
    """
    above, run = os.path.split(place.folder)
    for folder in dict.fromkeys((own, above)):
        if folder and (node := read_node(folder)) is not None and node.id == place.id:
            return f"{folder}/{run}"
    return None


class NodesHere(Nodes):
    """Reaches this machine only. Can be pickled."""

    def __init__(self, folder: str | None = None) -> None:
        """`folder`: the configured node folder."""
        self._folder = folder

    @property
    def own(self) -> str:
        """The node folder of this machine, or "".

        It is "" without one, or if its path cannot be expanded: a driver need not have the variables of its
        nodes.
        """
        try:
            return expanded(self._folder) if self._folder else ""
        except ResourceError:
            return ""

    @property
    @override
    def advice(self) -> str:
        return (
            "what runs without the cluster reads the disks of this machine only. Give the command on such a "
            "node; `orchestrator train` on the run's cluster reaches all nodes that live"
        )

    @override
    def store(self, place: NodePlace) -> NodeStore | None:
        root = root_here(place, self.own)
        return LocalStore(root) if root is not None else None

    @override
    def everywhere(self, run: str) -> Sequence[NodeStore]:
        return (LocalStore(f"{self.own}/{run}"),) if self.own else ()


def copy_part(
    source: Readable, to: Storage, path: str, entry: FileEntry, check: Callable[[], None] = goes_on
) -> None:
    """Copies a part to this node, whole and durable, and verifies the copy.

    `check` is called between pieces; an exception of it ends the copying. Raises `StorageError`, and as
    `source`. Then no part of the file is left, unless even its removal failed.
    """

    def pieces() -> Iterator[memoryview]:
        memory = memoryview(bytearray(min(_PIECE_BYTES, max(1, entry.bytes))))
        for start in range(0, entry.bytes, len(memory)):
            check()
            piece = memory[: entry.bytes - start]
            yield piece[: source.read(path, start, piece)]

    to.put(path, pieces, entry.bytes)
    if problem := _wrong_with(to, path, entry):
        to.delete(path)
        raise StorageError(
            f"the copy {to.root}/{path} of another node's part differs from that part: {problem}",
            code="storage.copy_differs",
        )
    to.sync(path.rpartition("/")[0])


def _wrong_with(storage: Storage, path: str, entry: FileEntry) -> str:
    """Returns how a part differs from what was written; empty if it does not.

    The digests in its header decide.
    """
    try:
        header = read_header(storage, path, entry.bytes)
        if (found := blake3(header).hexdigest()) != entry.digest:
            return f"its header has digest {found}, written was {entry.digest}"
        extents = parse_header(header, entry.bytes).extents
    except ValueError as error:
        return str(error)
    memory = memoryview(bytearray(max((e.piece_bytes for e in extents.values()), default=0)))
    for (group, name), extent in extents.items():
        for number, digest in enumerate(extent.digests):
            first = number * extent.piece_bytes
            piece = memory[: min(extent.piece_bytes, extent.num_bytes - first)]
            found_bytes = storage.read_into(path, extent.start + first, piece)
            if found_bytes != len(piece) or piece_digest(piece) != digest:
                return f"its bytes of {group}/{name} differ"
    return ""


# -------------------------------------------------------------------------------- which nodes may get workers
ASK_AGAIN_S = 30.0  # a node whose folder was wrong: its disk may be mounted meanwhile


class FolderChecks:
    """The answers of the nodes of one launch.

    A node that was right once stays right. A later failure there fails a save, which is retried.
    """

    def __init__(self, right: Iterable[str] = ()) -> None:
        """`right`: the nodes whose folders the start has made."""
        self._right = set(right)
        # when a node is asked again; inf: it was asked and has not answered
        self._not_before: dict[str, float] = {}
        self._told: dict[str, str] = {}

    def to_ask(self, nodes: Iterable[str], now: float) -> list[str]:
        """Returns which of these nodes are to be asked now. They count as asked."""
        due = [n for n in nodes if n not in self._right and self._not_before.get(n, -math.inf) <= now]
        self._not_before.update(dict.fromkeys(due, math.inf))
        return due

    def is_right(self, node: str) -> None:
        """The node has answered: workers can write there."""
        self._right.add(node)
        self._not_before.pop(node, None)

    def is_wrong(self, node: str, reason: str, now: float) -> bool:
        """The node has answered: workers cannot write there. Returns whether to report it, once for each
        reason.
        """
        self._not_before[node] = now + ASK_AGAIN_S
        new = self._told.get(node) != reason
        self._told[node] = reason
        return new

    def is_silent(self, node: str) -> None:
        """The node has not answered, because it is just starting or ending. It is asked again at once."""
        self._not_before.pop(node, None)

    def held_back(self, nodes: Collection[str]) -> frozenset[str]:
        """Returns those of these nodes that get no workers now."""
        return frozenset(nodes) - self._right


# ---------------------------------------------------------------------------------------- the parts of a rank
class CopyTransport(Protocol):
    """Transports copies to another node's disk."""

    def keep(
        self, own: NodePlace, path: str, entry: FileEntry, check: Callable[[], None]
    ) -> NodePlace | None:
        """Has another node copy a part of this one onto its disk; returns the copy's place.

        `path` is in the run's folder. The copy is whole, durable and verified (`copy_part`).
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
        """`folder` is as configured, `run` as from `run_folder`.

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
