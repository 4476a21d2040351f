"""Agreeing on state at the begin of a generation: who keeps its own, who receives a copy, who loads a point
(membership rules 1 to 4, 19).

It moves state between members of one group; who is a member, and which state is the parent, the view says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from orchestrator.errors import TrainingError
from orchestrator.faults import Hook
from orchestrator.records import Cursor, GenerationView, StateKey
from orchestrator.trainer.group import GenerationEnded, Group
from orchestrator.trainer.state import TrainState
from orchestrator.trainer.weights import StateFiles, load


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step whose every collective but the summary succeeded; its whole gradient stands in `.grad`. `key` is
    that of the state it leads to.
    """

    key: StateKey
    cursor: Cursor
    lr: float


def apply_prepared(state: TrainState, prepared: Prepared) -> None:
    """Applies the step: afterwards `state` is the one that `prepared` names."""
    state.apply(prepared.lr)
    state.key, state.cursor = prepared.key, prepared.cursor


def settle(state: TrainState, view: GenerationView, prepared: Prepared | None) -> bool:
    """Whether this member holds the parent's state by itself, if need be by applying its prepared step.

    Needs no collective: that the step belongs to the history was decided before the view was given.
    """
    if prepared is not None and prepared.key == view.parent:
        apply_prepared(state, prepared)
    holds = view.parent is not None and state.key == view.parent
    if holds and view.cursor is not None and state.cursor != view.cursor:
        raise TrainingError(
            f"the state {view.parent} stands at {state.cursor} here and at {view.cursor} in the view of "
            f"generation {view.generation}; start again from the newest resume point"
        )
    return holds


def agree(
    group: Group,
    state: TrainState,
    config_digest: str,
    prepared: Prepared | None,
    files: StateFiles,
    faults: Hook,
    warm: bool,
) -> bool:
    """All members hold the parent's state afterwards, under the key (attempt, generation, label) of this
    generation. `warm`: this member has done a step before; the answer: all have.

    Raises `GenerationEnded` if a collective fails or a copy is not equal to its source; a member keeps the
    key it came with then, or is blank if it was about to receive. Raises `ResumePointError` if the point is
    damaged.
    """
    view = group.view
    holds = settle(state, view, prepared)
    rows = group.compare(config_digest, [int(holds), int(holds and state.committed)])
    state.form(group)
    if view.source_rank is not None:
        lacking = [rank for rank, row in enumerate(rows) if not row[0]]
        if view.source_rank in lacking:
            raise GenerationEnded(f"rank {view.source_rank} should hold {view.parent}, but does not")
        committed = any(row[1] for row in rows)
        _copy(group, state, lacking, faults)
    else:
        committed = view.point is not None
        if not holds:
            _from_storage(state, view, files)
    if view.cursor is not None:
        state.cursor = view.cursor
    # who falls out before this still has its old key, or none, and learns what to do from the next view
    warms = group.gather([int(warm)], "agreeing on the state")
    state.formed()
    state.committed = committed
    state.key = StateKey(attempt=view.attempt, generation=view.generation, step=view.step)
    return all(row[0] for row in warms)


def _from_storage(state: TrainState, view: GenerationView, files: StateFiles) -> None:
    state.key = None
    if view.point is not None:
        load(state.items(), view.point, files)
        state.filled()
    else:
        state.initialise()


def _copy(group: Group, state: TrainState, lacking: list[int], faults: Hook) -> None:
    """The source's state to the ranks that lack it; the others only help to form the subgroup."""
    view = group.view
    source = view.source_rank
    if not lacking or source is None:
        return
    among = group.subgroup(sorted([source, *lacking]))
    if among is None:
        return
    if view.rank in lacking:
        state.key = None  # from before the first byte until the digests have been compared
    items = state.items()
    for number, item in enumerate(items):
        if number == len(items) // 2:
            faults("state_half_sent" if view.rank == source else "state_half_received", view.step, view.rank)
        group.send(item.tensor, source, among)
    if view.rank in lacking:
        state.filled()
    mine = torch.tensor(list(state.digest()), dtype=torch.uint8)
    theirs = mine.clone()
    group.send(theirs, source, among)
    if not torch.equal(mine, theirs):
        raise GenerationEnded(
            f"the state that rank {view.rank} received from rank {source} has another digest than its source"
        )
