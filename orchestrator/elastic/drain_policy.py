"""Membership during a node drain: who is admitted, who may leave, and which save is awaited.

`drain_state.py` decides when a node is left, and whether with a save. `state_selection.py` finds the newest
state.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.elastic.drain_state import Placed
from orchestrator.elastic.formation import Generation
from orchestrator.elastic.held_shards import held_by, holds_any
from orchestrator.elastic.membership_state import MembershipState
from orchestrator.elastic.state_selection import ParentStateSelection
from orchestrator.records.membership import JoinRequest
from orchestrator.records.steps import StateKey


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDrain:
    """The draining nodes and how they are left. No member is admitted from `nodes` any more.

    `leave`: members on them are not kept either. `with_save`: the current step is saved before. `in_time`: a
    save of it will be committed before the nodes go. `decided` is the newest save that was committed or given
    up.

    Guarantee: with `leave`, members go only if the others and the newest point have all of the newest state
    without them.
    """

    nodes: frozenset[str] = frozenset()
    leave: bool = False
    with_save: bool = False
    in_time: bool = True
    decided: StateKey | None = None

    # ---- what happens
    def on_save_decided(self, key: StateKey) -> NodeDrain:
        """The save of `key` was committed or given up."""
        return replace(self, decided=max(self.decided or key, key))

    def on_leave(self, save: bool, in_time: bool) -> NodeDrain:
        """Members on the nodes are to leave. A save that was requested once stays requested."""
        return replace(self, leave=True, with_save=self.with_save or save, in_time=in_time)

    def on_stay(self) -> NodeDrain:
        """Members on the nodes continue with the others."""
        return replace(self, leave=False, with_save=False, in_time=True)

    # ---- who is in
    def elsewhere(self, requests: Iterable[JoinRequest]) -> list[JoinRequest]:
        """Returns the requests of members that are not on the nodes."""
        return [r for r in requests if r.node_id not in self.nodes]

    def candidates(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> list[JoinRequest]:
        """Returns the members that may be in the next generation.

        From a draining node only members that hold a state are admitted. If the node is to be left, they are
        admitted only while the others do not have all of the newest state.
        """
        elsewhere = self.elsewhere(requests)
        if self.leave and _have_newest(elsewhere, requests, states):
            return elsewhere
        return [r for r in requests if r.node_id not in self.nodes or holds_any(r)]

    # ---- who may leave
    def needs_save(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> bool:
        """Whether some of these are to leave and the others lack a part of the newest state."""
        elsewhere = self.elsewhere(requests)
        return self.leave and len(elsewhere) < len(requests) and not _have_newest(elsewhere, requests, states)

    def awaited_save(self, requests: Sequence[JoinRequest], states: ParentStateSelection) -> StateKey | None:
        """Returns the undecided save of the newest state of these, or None."""
        newest = states.newest(requests)[0]
        asked = [r.saving for r in requests if r.saving is not None and r.saving == newest]
        return asked[0] if asked and self._is_undecided(asked[0]) else None

    def may_go(
        self, requests: Sequence[JoinRequest], states: ParentStateSelection, is_running: bool
    ) -> tuple[str, ...]:
        """Returns the waiting members on draining nodes that are not needed.

        A member is not needed if it has no state. If the node is to be left, it is also not needed under two
        conditions. Its states are not newer than what the others have: members that have not arrived yet, or
        that would complete the state with it, may need its part. And it has no unanswered vote (rule 15).
        `is_running`: a generation trains meanwhile.
        """
        going = [r for r in requests if r.node_id in self.nodes]
        if not going:
            return ()
        theirs = states.newest(self.elsewhere(requests))[0]
        return tuple(
            r.member
            for r in going
            if not holds_any(r)
            or (
                self.leave
                and (is_running or not _is_newer(r, theirs, states))
                and not self._is_undecided(r.saving)
            )
        )

    def has_leavers(self, current: Generation, group: MembershipState) -> bool:
        """Whether a live member of the current generation is on a draining node."""
        return any(
            current.requests[m].node_id in self.nodes
            for m in current.members
            if m not in group.gone and m in current.requests
        )

    def placed(self, group: MembershipState) -> Placed:
        """Counts the members of the running generation, and waiting ones with a state, by place.

        Newcomers elsewhere are counted, too.
        """
        current, gone = group.current, group.gone
        inside = current.requests if current is not None else {}
        there = {m: r for m, r in inside.items() if current and m in current.members and m not in gone}
        there |= {m: a.request for m, a in group.waiting.items()}
        leaving = [r for r in there.values() if r.node_id in self.nodes]
        return Placed(
            leaving=tuple(r.node_id for r in leaving if r.member in inside or holds_any(r)),
            num_elsewhere=len(there) - len(leaving),
        )

    def snapshot(self) -> Hashable:
        """What later answers depend on."""
        return self.nodes, self.leave, self.with_save, self.in_time, self.nodes and self.decided

    def _is_undecided(self, key: StateKey | None) -> bool:
        return key is not None and (self.decided is None or self.decided < key)


def _have_newest(
    some: Sequence[JoinRequest], requests: Sequence[JoinRequest], states: ParentStateSelection
) -> bool:
    """Whether `some`, with the newest point, have the whole newest state of all `requests`."""
    newest, theirs = (states.newest(each)[0] for each in (requests, some))
    return states.origin(theirs) == states.origin(newest)


def _is_newer(request: JoinRequest, state: StateKey | None, states: ParentStateSelection) -> bool:
    """Whether a member has a part of a state that is newer than this one."""
    newest = max((held.key for held in held_by(request)), default=None)
    if newest is None or state is None:
        return newest is not None
    return newest > state and states.origin(newest) != states.origin(state)
