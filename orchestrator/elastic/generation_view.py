"""A formed generation as its members see it.

Pure; it knows neither why these are its members nor what is asked of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.elastic.formation import Generation
from orchestrator.records.membership import GenerationView


def view_of_first(current: Generation, launch: str) -> GenerationView | None:
    """The generation as its first member sees it; None for one of an older attempt, of which no formation is
    known.
    """
    if current.formation is None:
        return None
    formation, first = current.formation, current.requests[current.members[0]]
    return GenerationView(
        attempt=current.attempt,
        generation=current.number,
        rank=0,
        world_size=len(current.members),
        members=current.members,
        host=first.host,
        port=first.port,
        parent=formation.parent,
        source_rank=None if formation.source is None else 0,
        sources=formation.sources,
        keep=formation.keep,
        nodes=_numbered([current.requests[m].node_id for m in current.members]),
        own_host=first.host,
        point=formation.point,
        cursor=formation.cursor,
        step=formation.step,
        launch=launch,
        probe=tuple((r.host, r.port) for r in (current.requests[m] for m in current.members))
        if formation.probe_ports
        else (),
    )


def view_of(member: str, current: Generation, first: GenerationView) -> GenerationView:
    """As `member` sees it, by the view of its `first` member: of 10,000 members all but two fields are alike,
    and take as long to make as there are members.
    """
    return replace(first, rank=current.ranks[member], own_host=current.requests[member].host)


def _numbered(nodes: Iterable[str]) -> tuple[int, ...]:
    """A number for each name, as they come."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
