"""Chooses where copies of the state are kept: memory points on other ranks, parts on nodes' disks.

For a point whose parts are on nodes (`resume.node_folder`), it determines which parts are missing, and which
node keeps the copy of whose parts. Nodes are identified by their folders' ids, parts by ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.records.points import NodeParts, NodePlace

_NAMED = 8  # a message names at most this many nodes or files


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """The parts of `ranks` are only on `nodes`, none of which can be reached. Any one of them is
    sufficient.
    """

    nodes: tuple[NodePlace, ...]
    ranks: tuple[int, ...]


def gathered(places: Mapping[int, Sequence[NodePlace]]) -> tuple[NodeParts, ...]:
    """Returns the list of nodes for COMMIT, ordered by id.

    `places` are those of each rank's part, its own node first.
    """
    nodes: dict[str, NodePlace] = {}
    wrote: dict[str, list[int]] = {}
    copies: dict[str, list[int]] = {}
    for rank in sorted(places):
        for number, place in enumerate(places[rank]):
            nodes.setdefault(place.id, place)
            (copies if number else wrote).setdefault(place.id, []).append(rank)
    return tuple(
        NodeParts(node=nodes[each], wrote=tuple(wrote.get(each, ())), copies=tuple(copies.get(each, ())))
        for each in sorted(nodes)
    )


def places_of(parts: Iterable[NodeParts], rank: int) -> tuple[NodePlace, ...]:
    """Returns the places of a rank's part, the node that it was written on first."""
    own, copies = list[NodePlace](), list[NodePlace]()
    for each in parts:
        if rank in each.wrote:
            own.append(each.node)
        elif rank in each.copies:
            copies.append(each.node)
    return (*own, *copies)


def missing(parts: Iterable[NodeParts], reached: Collection[str]) -> tuple[Missing, ...]:
    """Returns the parts that no node of `reached` (ids) has, grouped by the nodes that have them.

    Empty: all parts can be reached, and the point can be read.
    """
    places: dict[int, list[NodePlace]] = {}
    for each in parts:
        for rank in (*each.wrote, *each.copies):
            places.setdefault(rank, []).append(each.node)
    found: dict[tuple[NodePlace, ...], list[int]] = {}
    for rank in sorted(places):
        if not any(place.id in reached for place in places[rank]):
            found.setdefault(tuple(places[rank]), []).append(rank)
    return tuple(Missing(nodes=nodes, ranks=tuple(ranks)) for nodes, ranks in found.items())


def keeper(own: str, nodes: Iterable[str]) -> str | None:
    """Returns the node that keeps the copy of what `own` writes.

    It is the next of `nodes` in the order of their ids; after the last one the first. If all see the same
    nodes, each thus keeps the parts of one other node, and never its own. None if there is no other.
    """
    others = sorted({*nodes} - {own})
    return next((each for each in others if each > own), others[0] if others else None)


def missing_text(point: str, found: Sequence[Missing]) -> str:
    """Describes what is missing of a point, as one sentence without its end."""
    nodes = list(dict.fromkeys(str(node) for each in found for node in each.nodes))
    several = "node" if len(nodes) == 1 else "nodes"
    lies = "; ".join(_lies(each) for each in found[:_NAMED])
    more = f"; and more on {len(found) - _NAMED} others" if len(found) > _NAMED else ""
    return f"resume point {point} needs {several} {_listed(nodes)}: {lies}{more}"


def _lies(each: Missing) -> str:
    files = _listed([str(rank) for rank in each.ranks])
    one = len(each.ranks) == 1
    where = " and ".join(f"{node} in {node.folder}" for node in each.nodes)
    enough = " (either is enough)" if len(each.nodes) > 1 else ""
    return f"{'file' if one else 'files'} {files} {'lies' if one else 'lie'} only on {where}{enough}"


def _listed(texts: Sequence[str]) -> str:
    if len(texts) > _NAMED:
        return f"{', '.join(texts[:_NAMED])} and {len(texts) - _NAMED} more"
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def neighbours(nodes: Sequence[str]) -> tuple[int, ...]:
    """Returns the rank that keeps the copy of each rank's shard. `nodes[rank]` is the node of a rank.

    Empty for a world of one, which has no rank to give a copy to. Every rank keeps exactly one copy and never
    its own. No copy is on the giver's own node if no node has more than half of the ranks. Otherwise 2·k - W
    copies are, where k is the number of ranks of that node: they survive a lost process, but not a lost node.
    The algorithm shifts the ranks in the order of their nodes by k.
    """
    if len(nodes) < 2:
        return ()
    by_node = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    largest = max(Counter(nodes).values())
    shift = largest if largest < len(nodes) else 1  # on a single node the next rank
    keeper = {rank: by_node[(at + shift) % len(nodes)] for at, rank in enumerate(by_node)}
    return tuple(keeper[rank] for rank in range(len(nodes)))
