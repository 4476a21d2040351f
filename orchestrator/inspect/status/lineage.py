"""A run's lineage as text, and the deletion of points that are off it or that retention lets go.

The text says what each attempt continued, its workers, its points, and what left the history. Restarts that
changed nothing are folded, so that it stays readable over hundreds of attempts.

Orphans are on no history any more: the run was rewound to before them, or an interrupted launch committed
them. Nothing else than `prune` deletes orphans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.commit.retention import NEEDED_TO_RELEASE, spared, to_delete
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import Survey, losses_of_points
from orchestrator.history.claims.claim_files import FORK, RESTARTED, RESUME, REWIND, START, AttemptEnd
from orchestrator.history.claims.claims import Claim, ClaimParent, ForkedFrom
from orchestrator.inspect.status.point_rows import names_of

if TYPE_CHECKING:
    from orchestrator.config.schema import ResumeConfig

FOLD_ATTEMPTS = 3  # this many routine attempts in a row, or more, become one line
SHOWN_POINTS = 6  # an attempt with more has only its first and last plain points named
_WHY = {RESTARTED: "coordinator restarted", START: "start", FORK: "fork", RESUME: "resume", REWIND: "rewind"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFacts:
    """One attempt. `worlds` are (first step, workers) of its generations, where the number changed; `first`
    and `last` the steps it trained, None for none; `kept` the last of them that is on the history, None: none
    is. `points` are rows of `points --json`, `before` the world size of the attempt before.
    """

    number: int
    why: str
    parent: str | None
    forked_from: ForkedFrom | None
    outcome: str
    reason: str
    worlds: tuple[tuple[int, int], ...]
    before: int | None
    first: int | None
    last: int | None
    kept: int | None
    points: tuple[Mapping[str, Any], ...]

    @property
    def is_routine(self) -> bool:
        """Whether it is a restart with no other event."""
        plain = all(_is_plain(row) for row in self.points)
        same = all(size == self.before for _, size in self.worlds)
        went_on = self.kept == self.last and self.outcome != "failed"
        return self.why in (RESUME, RESTARTED) and plain and same and went_on


def attempt_facts(
    seen: Survey,
    claims: Iterable[Claim],
    parents: Iterable[ClaimParent],
    ends: Mapping[int, AttemptEnd | None],
    rows: Sequence[Mapping[str, Any]],
) -> list[AttemptFacts]:
    """The attempts by number."""
    by_number = {parent.attempt: parent for parent in parents}
    last_steps = {(record.attempt, record.generation): record.step for record in seen.journal.records}
    kept_to = {
        s.start.id: last_steps.get(s.start.id, s.start.step) if s.open else s.stop_step - 1
        for s in seen.lineage.segments
    }
    found, before = list[AttemptFacts](), None
    for claim in claims:
        begun = [start for start in seen.journal.generations if start.attempt == claim.number]
        trained = [start for start in begun if start.id in last_steps]
        kept = [kept_to[s.id] for s in trained if s.id in kept_to and kept_to[s.id] > s.step]
        parent, end = by_number.get(claim.number), ends.get(claim.number)
        taken = {claim.number} if parent is not None and parent.origin is not None else set()
        worlds = [(start.step + 1, start.world_size) for start in begun]
        found.append(
            AttemptFacts(
                number=claim.number,
                why=claim.why,
                parent=parent.parent.point_name if parent is not None and parent.parent is not None else None,
                forked_from=parent.origin.forked_from if parent is not None and parent.origin else None,
                outcome=end.outcome if end else "",
                reason=end.reason if end else "",
                worlds=tuple(worlds[:1] + [b for a, b in pairwise(worlds) if a[1] != b[1]]),
                before=before,
                first=trained[0].step + 1 if trained else None,
                last=last_steps[trained[-1].id] if trained else None,
                kept=max(kept, default=None),
                points=tuple(
                    row
                    for row in rows
                    if row["attempt"] == claim.number or (not row["attempt"] and row["generation"] in taken)
                ),
            )
        )
        before = begun[-1].world_size if begun else before
    return found


def tree_lines(run: str, attempts: Sequence[AttemptFacts]) -> list[str]:
    """The lines for people."""
    lines, routine = [run], list[AttemptFacts]()
    for attempt in attempts:
        if attempt.is_routine:
            routine.append(attempt)
            continue
        lines += _folded(routine) + _attempt(attempt)
        routine = []
    return lines + _folded(routine)


def _folded(routine: Sequence[AttemptFacts]) -> list[str]:
    if len(routine) < FOLD_ATTEMPTS:
        return [line for attempt in routine for line in _attempt(attempt)]
    trained = [attempt for attempt in routine if attempt.first is not None]
    steps = f", steps {trained[0].first:,} to {trained[-1].last:,}" if trained else ", no step trained"
    points = [row for attempt in routine for row in attempt.points]
    saved = f", {len(points):,} points, {points[0]['name']} to {points[-1]['name']}" if points else ""
    return [f"├─ attempts {routine[0].number} to {routine[-1].number}: {len(routine)} restarts{steps}{saved}"]


def _attempt(attempt: AttemptFacts) -> list[str]:
    fork = attempt.forked_from
    begins = f" from {attempt.parent}" if attempt.parent else ""
    if attempt.why == REWIND:
        begins = f" to {attempt.parent}"
    if fork is not None:
        begins = f" of {fork.run} at {fork.point}"
    ended = f": {attempt.outcome}" if attempt.outcome else ": no end"
    ended += f", {attempt.reason}" if attempt.outcome == "failed" else ""
    why = _WHY.get(attempt.why, attempt.why)
    lines = [f"├─ attempt {attempt.number}  {why}{begins}{ended}{_steps(attempt)}"]
    if [size for _, size in attempt.worlds] != [attempt.before]:
        sizes = [(step, f"{size} worker{'' if size == 1 else 's'}") for step, size in attempt.worlds]
        lines += [f"│    {size} from step {step:,}" for step, size in sizes]
    return lines + _points(attempt.points)


def _steps(attempt: AttemptFacts) -> str:
    if attempt.first is None or attempt.last is None:
        return ""
    text = f", steps {attempt.first:,} to {attempt.last:,}"
    if attempt.kept is None:
        return f"{text}, off the history"
    return text + (f", off the history after {attempt.kept:,}" if attempt.kept != attempt.last else "")


def _points(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each point. Many plain ones in a row are only counted."""
    lines, plain = list[str](), list[Mapping[str, Any]]()
    for row in [*rows, None]:
        if row is not None and _is_plain(row):
            plain.append(row)
            continue
        if len(plain) > SHOWN_POINTS:
            between = f"│    ⋮ {len(plain) - 2:,} more"
            lines += [f"│    ● {plain[0]['name']}", between, f"│    ● {plain[-1]['name']}"]
        else:
            lines += [f"│    ● {each['name']}" for each in plain]
        plain = []
        if row is not None:
            whole = row["on_lineage"] and row["healthy"] is not False
            lines.append(f"│    {'●' if whole else '○'} {row['name']}  {', '.join(_marks(row))}")
    return lines


def _is_plain(row: Mapping[str, Any]) -> bool:
    return not _marks(row)


def _marks(row: Mapping[str, Any]) -> list[str]:
    marks = [] if row["on_lineage"] else ["orphan"]
    marks += [f"not looked at: {row['away']}"] if row["away"] else []
    marks += [f"damaged: {row['reason']}"] if row["healthy"] is False else []
    pin = row["pin"]
    if pin is not None:
        marks.append(f"pinned by {pin['by']}" + (f": {pin['reason']}" if pin["reason"] else ""))
    named = pin["reason"] if pin is not None else ""
    return marks + [f"fork: {folder}" for folder in row["forks"] if folder not in named]


# ------------------------------------------------------------------------------------ points that are deleted
@dataclass(frozen=True, kw_only=True, slots=True)
class Pruned:
    """The result for a point: `deleted`, or why it was `kept` ("": in a dry run, it would be deleted). `why`
    is the reason for its deletion.
    """

    point: str
    deleted: bool = False
    kept: str = ""
    why: str = field(default="", compare=False)


def orphans_of(store: RunStore, seen: Survey) -> dict[str, str]:
    """The committed points that are off the history, each with the reason."""
    keys = {name: parse_point_name(name) for name in names_of(store, seen)}
    why = {name: seen.lineage.why_orphan(key) for name, key in keys.items() if key}
    return {name: f"orphan: {reason}" for name, reason in why.items() if reason}


def prune(store: RunStore, orphans: Mapping[str, str], by: str, run_id: str, dry_run: bool) -> list[Pruned]:
    """Deletes `orphans` (with why each is one), oldest first, each COMMIT first. Pinned ones and another
    run's stay.

    A launch may be active on the run meanwhile: it never continues from an orphan. After a kill, repeating
    the call continues. Raises `StorageError`.
    """
    return [_prune(store, name, why, by, run_id, dry_run) for name, why in orphans.items()]


def _prune(store: RunStore, name: str, why: str, by: str, run_id: str, dry_run: bool) -> Pruned:
    if kept := _why_kept(store, name):
        return Pruned(point=name, kept=kept, why=why)
    if dry_run:
        return Pruned(point=name, why=why)
    if not store.may_delete(name, by, "an orphan is pruned", run_id):
        return Pruned(point=name, kept="somebody has just pinned it", why=why)
    store.delete_point(name)
    store.deleted(name)
    return Pruned(point=name, deleted=True, why=why)


def _why_kept(store: RunStore, name: str) -> str:
    if store.is_foreign(name):
        return "it belongs to another run"
    if (pin := store.pins().get(name)) is not None:
        return pin.why
    return ""


def release(
    store: RunStore, seen: Survey, keep: ResumeConfig, by: str, run_id: str, dry_run: bool
) -> list[Pruned]:
    """Deletes the points of the history that `keep` lets go, oldest first, each COMMIT first.

    That somebody deletes them is durable before, under the name that a pin would take, and stays: so nobody
    misses them. While the newest attempt has not said its end, none goes: a launch that lives does this by
    itself, and one that begins may need any of them. A point counts as kept only if its digests are right;
    damaged ones stay, and count for nothing. Raises `StorageError`.
    """
    newest = store.newest_claim()
    if newest is None:
        return []
    healthy = list[str]()
    damaged = set[str]()
    for name in reversed(seen.points):
        if len(healthy) >= max(keep.keep_latest, NEEDED_TO_RELEASE):
            break
        healthy += [] if store.verify_point(name) else [name]
        damaged |= set() if name in healthy else {name}
    points = [name for name in seen.points if name not in damaged]
    also = spared(
        points,
        keep.keep_every,
        keep.keep_best,
        losses_of_points(seen, keep.keep_best_by),
        keep.keep_best_by,
    )
    claim = store.parents()[0][-1] if store.parents()[0] else None
    parent = claim.parent.point_name if claim is not None and claim.parent is not None else None
    # damaged points may be those that would release an older one: two whole ones stay then, at least
    latest = max(keep.keep_latest, NEEDED_TO_RELEASE) if damaged else keep.keep_latest
    names = to_delete(points, latest, parent, healthy, also)
    why = f"retention: {latest} newer ones are kept (resume.keep_latest)"
    ended = store.read_end(newest.number) is not None
    if ended and not dry_run:
        for name in store.deletions().intersection(store.leftovers()):
            store.discard(name)  # a kill interrupted its deletion
    return [_release(store, name, newest.number if ended else 0, why, by, run_id, dry_run) for name in names]


def _release(
    store: RunStore, name: str, attempt: int, why: str, by: str, run_id: str, dry_run: bool
) -> Pruned:
    """`attempt`: the newest one, which has ended; 0: it has not."""
    if not attempt:
        return Pruned(point=name, kept="the newest attempt has not ended: a launch may need it", why=why)
    if kept := _why_kept(store, name):
        return Pruned(point=name, kept=kept, why=why)
    if dry_run:
        return Pruned(point=name, why=why)
    if not store.may_delete(name, by, "resume.keep_latest", run_id):
        return Pruned(point=name, kept="somebody has just pinned it", why=why)
    if store.next_claim_exists(attempt):
        store.deleted(name)
        return Pruned(point=name, kept="a launch has begun meanwhile, and may need it", why=why)
    store.delete_point(name)
    return Pruned(point=name, deleted=True, why=why)
