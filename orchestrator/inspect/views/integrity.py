"""The missing parts of a run's folder, as `status` shows them (`monitor.missing`), from the views' data.

The views know the whole journal, so they find at least as much as `status`.
"""

from __future__ import annotations

from orchestrator.history.journal.event_kinds import EventKind
from orchestrator.inspect.status.missing import (
    lost_points,
    missing_pieces,
    newest_there,
    newest_unwritten,
    on_history,
    read_names,
)
from orchestrator.inspect.status.tail import Tail
from orchestrator.inspect.views.facts.facts import Facts

_FATES = (EventKind.POINT_COMMITTED, EventKind.DELETING_POINTS, EventKind.POINTS_DELETED)


def missing_now(facts: Facts, lost: frozenset[str]) -> tuple[str, ...]:
    """The paths that are missing or differ from what was written, a few words each.

    It lists all of the run's folders. `lost` are the points that lost their COMMIT although nobody meant to
    delete them. Raises `StorageError`.
    """
    store, begun = facts.files.store, facts.files.begun or 0
    names, there, tail = read_names(store), [*facts.files.points], _as_tail(facts)
    lost &= lost_points(tail, names, facts.parent(begun), there)
    if lost:
        lost -= store.deletions()
    torn = {number for number in facts.files.cut_off if number > begun}
    mine = on_history(facts.parent(begun), [name for name in there if name not in facts.files.marks])
    _, wrong = newest_there(mine, lambda name: facts.files.points[name].wrong)
    return missing_pieces(names, lost, torn, newest_unwritten(tail, there), len(facts.columns) > 0, wrong)


def _as_tail(facts: Facts) -> Tail:
    """A tail that reaches back to the beginning of the journal."""
    newest = max((attempt for attempt, _ in facts.columns.index), default=0)
    return Tail(
        generation={"attempt": newest} if newest else None,
        fates=[(event.kind, event.fields) for event in facts.events(*_FATES)],
    )
