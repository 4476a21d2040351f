"""Builds the members' views of a formed generation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from orchestrator.elastic.formation import Generation
from orchestrator.records.membership import GenerationView


def view_of_first(current: Generation, launch: str) -> GenerationView | None:
    """Returns the generation as its first member sees it.

    None for a generation of an older attempt, whose formation is unknown.
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
    """Returns the view of `member`, derived from that of the first member.

    Views differ in two fields only, and building one from scratch takes time proportional to the number of
    members. This matters with 10,000 members.
    """
    return replace(first, rank=current.ranks[member], own_host=current.requests[member].host)


def _numbered(nodes: Iterable[str]) -> tuple[int, ...]:
    """Numbers distinct names in the order of their appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(node, len(numbers)) for node in nodes)
