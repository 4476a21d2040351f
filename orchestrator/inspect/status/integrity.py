"""Whether a run is whole: a quick look at the names in its folder, and a reading of every byte of its points.

The quick look (`missing_pieces`) lists folders, and uses only the points in the newest part of the journal
and in the newest claim; of the newest point it also checks the sizes of its files. So it finds missing parts,
not altered ones, and not all of them: `plan`, `verify` and `audit` read everything.

`Verifying` reads every byte of the points, several files in parallel, with progress reports. An interrupted
verification can be continued.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from typing_extensions import override

from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.points import COMMIT, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore, point_fates
from orchestrator.checkpoint.points.verify import (
    POINTS,
    DamageError,
    FileRange,
    check_sizes,
    point_path,
    read_commit,
)
from orchestrator.errors import ResumePointError, StorageError, UnreachableNodeError
from orchestrator.history.claims.claim_files import ATTEMPTS, JOURNAL, RESTARTED
from orchestrator.history.claims.claims import ORIGIN, ClaimParent
from orchestrator.history.claims.segments import journal_folder, journals, segment_path, segments
from orchestrator.history.numbered_files import VERIFY, Finding, asker, verify_result
from orchestrator.inspect.status.tail import Tail
from orchestrator.records.points import Damage
from orchestrator.storage.parallel import answers_at_once, asked_at_a_time, at_once

SHOWN = 3  # this many of one kind are named
_ATTEMPT_FILE = re.compile(r"(\d{4,})\.(json|parent\.json|end\.json|heartbeat|start-heartbeat)(-\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderNames:
    """The names in a run's folder: what each attempt has (`json`, `parent.json`, …), the folders below
    points/, the numbers of each attempt's journal segments and the pieces that these lack, and the files
    below manifest/ and tokenizer/. `unwritten` are the attempts without a journal that must have had one.
    """

    attempts: Mapping[int, Collection[str]]
    points: Sequence[str]
    segments: Mapping[int, Sequence[int]]
    pieces_gone: Sequence[str]
    manifest: Sequence[str]
    tokenizer: Sequence[str]
    unwritten: frozenset[int]


def read_names(store: RunStore) -> FolderNames:
    """Lists a run's folder: attempts and points before the journals, because these are begun before. It opens
    files only of attempts that have no journal. Raises `StorageError`.
    """
    storage = store.storage
    attempts: dict[int, set[str]] = {}
    for match in map(_ATTEMPT_FILE.fullmatch, storage.list(ATTEMPTS)):
        if match is not None:
            attempts.setdefault(int(match[1]), set()).add(match[2])
    points = newest_first(storage.list(POINTS))
    found = {number: segments(storage, number) for number in journals(storage)}
    written = {number for number, refs in found.items() if refs}
    must = {_attempt_of(name) for name in points}
    if {*attempts} - written:
        parents, _ = store.parents()
        inherited = {_attempt_of(name) for parent in parents for name in parent.inherited}
        must |= inherited | {parent.parent.attempt for parent in parents if parent.parent is not None}
        must |= {number for number in {*attempts} - written - must if _wrote(store, number)}
    must.discard(ORIGIN)  # a fork's origin has neither claim nor journal here
    return FolderNames(
        attempts=attempts,
        points=points,
        segments={number: [ref.number for ref in refs] for number, refs in found.items()},
        pieces_gone=tuple(path for refs in found.values() for ref in refs for path in ref.gone),
        manifest=storage.list("manifest"),
        tokenizer=storage.list("tokenizer"),
        # once more: one of them may have begun since, and ended
        unwritten=frozenset(n for n in must - written if not segments(storage, n)),
    )


def _wrote(store: RunStore, number: int) -> bool:
    """Whether an attempt must have begun its journal: its end says so (one that fails may not have begun), or
    its coordinator was restarted, which only happens to one that has.
    """
    end = store.read_end(number)
    if end is not None and end.outcome != "failed":
        return True
    claim, after = store.read_claim(number), store.read_claim(number + 1)
    return after.why == RESTARTED and after.launch == claim.launch and claim.why != RESTARTED


def lost_points(
    tail: Tail, names: FolderNames, parent: ClaimParent | None, there: Collection[str]
) -> frozenset[str]:
    """The points of the newest attempt that began (`parent` is its claim's) which were committed, nobody
    meant to delete, and are not among the committed ones, `there`, listed after the tail was read.

    As far as the tail knows: where it does not reach back to the attempt's beginning, of the inherited points
    only the newest counts, for that stands until there is a newer one.
    """
    if parent is None:
        return frozenset()
    fates = point_fates(tail.fates, ())
    own = {name for name in fates.kept if _attempt_of(name) == parent.attempt}
    inherited = {*parent.inherited}
    if tail.whole_from > parent.attempt or not _journal_is_whole(names, parent.attempt):
        none_since = not own and not any(_attempt_of(name) == parent.attempt for name in there)
        newest = parent.parent.point_name if parent.parent is not None and none_since else ""
        inherited &= {newest}
    return frozenset(own | inherited) - fates.deleted - {*there}


def on_history(parent: ClaimParent | None, names: Iterable[str]) -> list[str]:
    """Those of these points that are on the history of the newest begun attempt, newest first."""
    if parent is None:
        return []
    mine = [name for name in names if _attempt_of(name) == parent.attempt]
    older = {*parent.inherited} | ({parent.parent.point_name} if parent.parent is not None else set())
    return newest_first([*mine, *older.intersection(names)])


def newest_there(
    names: Iterable[str], wrong_of: Callable[[str], Iterable[str]]
) -> tuple[str | None, tuple[str, ...]]:
    """The first of these points, newest first, that shows no fault, and the faulty paths of those before it.

    A start continues from no faulty point. `wrong_of` returns a point's faulty files by name.
    """
    wrong = list[str]()
    for name in names:
        found = [point_path(name, file) for file in wrong_of(name)]
        if not found:
            return name, tuple(wrong)
        wrong += found
    return None, tuple(wrong)


def wrong_sizes(store: RunStore, name: str) -> list[str]:
    """The files of a point that are missing or have another size than was committed.

    None for a point that was deleted meanwhile, and for files on nodes that cannot be reached from here.
    Raises `StorageError`.
    """
    try:
        commit = read_commit(store.storage, name)
        seen = [each for each in commit.files if not store.storage.away(point_path(name, each.path))]
        damages = check_sizes(store.storage, name, seen)
    except DamageError as error:
        damages = [error.damage]
    except ResumePointError:
        return []  # of another format, as `plan` says
    there = not damages or store.storage.exists(point_path(name, COMMIT))
    return [damage.file for damage in damages if there]


def newest_unwritten(tail: Tail, there: Iterable[str]) -> frozenset[int]:
    """The attempt of the newest of the committed points, `there`, if the tail reaches back to its beginning
    and no generation is in its journal: one is, before its first point is saved.
    """
    attempt = max(map(_attempt_of, there), default=0)
    known = int(tail.generation["attempt"]) if tail.generation is not None else 0
    return frozenset({attempt} if attempt > known and tail.whole_from <= attempt else ())


def missing_pieces(
    names: FolderNames,
    lost: Iterable[str],
    torn: Collection[int],
    empty: Collection[int],
    is_trained: bool,
    wrong: Sequence[str] = (),
    damaged: Sequence[str] = (),
) -> tuple[str, ...]:
    """The paths that are gone or not as written, a few words each; empty if none is seen to be. `lost`:
    points without COMMIT (`lost_points`); `torn`: attempts whose parent file cannot be read; `empty`: whose
    journal lacks what was in it; `is_trained`: whether there is a step, so that the data were frozen;
    `wrong`: files of the newest points that are missing or have another size (`newest_there`); `damaged`:
    places of the journal that are not as they were written.
    """
    of_points = {_attempt_of(name) for name in (*names.points, *lost)} - {ORIGIN}
    written = {number for number, found in names.segments.items() if found and number not in empty}
    unwritten = names.unwritten | (of_points - written)
    last = max(unwritten | {*names.attempts} | {*names.segments}, default=0)
    claims = {number for number, files in names.attempts.items() if "json" in files}
    unclaimed = [f"{ATTEMPTS}/{number:04d}.json" for number in range(1, last + 1) if number not in claims]
    orphaned = [
        f"{ATTEMPTS}/{number:04d}.parent.json"
        for number in sorted((unwritten | written) & claims)
        if "parent.json" not in names.attempts[number] or number in torn
    ]
    unbegun = [journal_folder(number) for number in sorted(unwritten)]
    gaps = [
        segment_path(number, segment)
        for number, found in sorted(names.segments.items())
        for segment in range(1, max(found, default=0))
        if segment not in found
    ]
    points = [
        f"{POINTS}/{name}/{COMMIT}" if name in names.points else f"{POINTS}/{name}"
        for name in newest_first(lost)
    ]
    frozen = _frozen(names, is_trained or bool(of_points))
    return tuple(
        text
        for text in (
            f"{ATTEMPTS}/" if unclaimed and not names.attempts else _few(unclaimed),
            _few(orphaned),
            f"{JOURNAL}/" if unbegun and not names.segments else _few(unbegun),
            _few([*gaps, *names.pieces_gone, *damaged]),
            _few(points),
            _few(wrong),
            _few(frozen),
        )
        if text
    )


def _attempt_of(point: str) -> int:
    key = parse_point_name(point)
    return key.attempt if key is not None else 0


def _journal_is_whole(names: FolderNames, attempt: int) -> bool:
    """Whether the attempt's journal has no visible gap; also true for one that was not begun."""
    found = names.segments.get(attempt, ())
    return [*found] == [*range(1, len(found) + 1)] and attempt not in names.unwritten


def _frozen(names: FolderNames, is_trained: bool) -> list[str]:
    """The missing files of the frozen data. They are frozen before the first step, their record last."""
    if "data.json" not in names.manifest:
        return ["manifest/data.json"] if is_trained else []
    lists = [] if any(name.endswith(".parquet") for name in names.manifest) else ["manifest/*.parquet"]
    return lists + ([] if "tokenizer.json" in names.tokenizer else ["tokenizer/tokenizer.json"])


def _few(paths: Sequence[str]) -> str:
    rest = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {rest} more like it" if rest > 0 else "")


# ------------------------------------------------------------------------------------------------- every byte
HEALTH = {True: "healthy", False: "damaged", None: "away"}  # a row's `healthy` in words
NOTE_EVERY_S = 30.0  # interval at which results are noted meanwhile


class VerifyProgress(Protocol):
    """A receiver of progress."""

    def begin(self, num_points: int, num_bytes: int) -> None:
        """Called with the amount to read, at most; it may be called again."""

    def read(self, num_bytes: int) -> None:
        """Called when a file of so many bytes was read, from any thread."""

    def done(self, point: str, healthy: bool | None) -> None:
        """Called when a point was read, or was before (see `done_before`). None: it cannot be read from
        here.
        """


class NoVerifyProgress(VerifyProgress):
    """A receiver that does nothing."""

    @override
    def begin(self, num_points: int, num_bytes: int) -> None:
        ...

    @override
    def read(self, num_bytes: int) -> None:
        ...

    @override
    def done(self, point: str, healthy: bool | None) -> None:
        ...


def done_before(findings: Sequence[Finding]) -> frozenset[str]:
    """The points that an interrupted verification found whole: those read since the newest verification that
    completed all points.
    """
    healthy: set[str] = set()
    for found in findings:
        if found.what != VERIFY or found.unreadable:
            continue
        if found.result.get("all", True):
            healthy.clear()
            continue
        for each in found.result["points"]:
            (healthy.add if each["healthy"] else healthy.discard)(each["point"])
    return frozenset(healthy)


@dataclass(kw_only=True)
class Verifying:
    """Reads points, `num_threads` files at a time; from afar at least `ASKED_AT_A_TIME`, of several points.

    `note` receives the results meanwhile, at least every `NOTE_EVERY_S` and on an interruption, but not the
    last ones, which the caller has. `before`: points that need not be read. A damaged point is marked, a
    whole one's mark is removed (`checkpoint.points.verify`), if this process may write there; `by` is the
    user.
    """

    store: PointFiles
    note: Callable[[dict[str, Any]], None] = lambda result: None
    progress: VerifyProgress = field(default_factory=NoVerifyProgress)
    before: Collection[str] = ()
    by: str = field(default_factory=asker)
    num_threads: int = 2 * (os.cpu_count() or 1)
    clock: Callable[[], float] = time.monotonic

    def rows(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each point: `name`, `healthy`, `damaged`, `quarantined`, `away`.

        Interruptions pass through. `away` names the nodes whose disks hold files that cannot be reached from
        here. `healthy` is None then, because it is unknown.
        """
        storage = self.store.storage
        self.progress.begin(len(names), sum(at_once(storage, self._num_bytes, names)))
        rows: list[dict[str, Any]] = []
        noted, noted_at = 0, self.clock()
        try:
            pool = self._threads()
            # interrupted, the files end first: what has begun to read a point must not wait for all of them
            with closing(answers_at_once(storage, partial(self._row, pool), names)) as found, _ended(pool):
                for name, row in zip(names, found, strict=True):
                    rows.append(row)
                    self.progress.done(name, row["healthy"])
                    if self.clock() - noted_at >= NOTE_EVERY_S and len(rows) < len(names):
                        self.note(verify_result(rows[noted:], every=False))
                        noted, noted_at = len(rows), self.clock()
        except BaseException:
            if rows[noted:]:
                self.note(verify_result(rows[noted:], every=False))
            raise
        return rows

    def _row(self, pool: ThreadPoolExecutor, name: str) -> dict[str, Any]:
        damages: list[Damage] = []
        if name not in self.before:

            def each(look: Callable[[FileRange], Damage | None], stretches: Sequence[FileRange]) -> Any:
                return pool.map(lambda stretch: self._looked(look, stretch), stretches)

            try:
                damages = self.store.verify_point(name, each=each)
            except UnreachableNodeError as error:
                marked = self.store.is_quarantined(name)
                return {
                    "name": name,
                    "healthy": None,
                    "damaged": [],
                    "quarantined": marked,
                    "away": str(error),
                }
            with suppress(StorageError):  # without the right to write, it only reads
                self.store.note_reading(name, damages, self.by)
        damaged = [{"file": damage.file, "reason": damage.reason} for damage in damages]
        marked = self.store.is_quarantined(name)
        row = {"name": name, "healthy": not damages, "damaged": damaged, "quarantined": marked}
        return {**row, "away": ""}

    def _looked(self, look: Callable[[FileRange], Damage | None], stretch: FileRange) -> Damage | None:
        found = look(stretch)
        self.progress.read(stretch.bytes)
        return found

    def _num_bytes(self, name: str) -> int:
        if name in self.before:
            return 0
        try:
            return self.store.read_point(name).num_bytes
        except ResumePointError:
            return 0  # damaged, which is said when it is read

    def _threads(self) -> ThreadPoolExecutor:
        num_threads = max(self.num_threads, asked_at_a_time(self.store.storage))
        return ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="verify")


@contextmanager
def _ended(pool: ThreadPoolExecutor) -> Iterator[None]:
    """On any end, files that are not begun are not read any more."""
    try:
        yield
    finally:
        pool.shutdown(cancel_futures=True)
