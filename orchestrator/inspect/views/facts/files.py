"""The small files of a run for its views: claims, ends, points with file sizes, pins, and marks on damaged
points.

Unchangeable files are read once. Sizes are compared again in turn, so a look costs no more for a run with
many points. It reads no file of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.checkpoint.points import verify
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.points import COMMIT, Commit
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import Mark
from orchestrator.errors import (
    LaterFormatError,
    OrchestratorError,
    OtherFormatError,
    ResumePointError,
    StorageError,
)
from orchestrator.history import numbered_files
from orchestrator.history.claims.claim_files import UNREADABLE, AttemptEnd, UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent
from orchestrator.history.numbered_files import Finding, FindingFiles
from orchestrator.storage.parallel import at_once

_NEWEST, _BY_TURNS = 2, 16  # points whose sizes are compared at each look


class UnreadableError(OrchestratorError):
    """A file differs from what was written, and without it nothing of the run can be shown.

    `advice` is what to do, a sentence without its end.
    """

    advice = "Restore the file from a copy of the storage"

    def __init__(self, file: str, reason: str, *, code: str) -> None:
        super().__init__(reason, code=code)
        self.file, self.reason = file, reason

    def __str__(self) -> str:
        return f"{self.file} is damaged: {self.reason}; restore the file"


class LaterError(UnreadableError):
    """Another version wrote the file. Nothing is damaged, and restoring it does not help."""

    code = LaterFormatError.code
    advice = "Use the version of orchestrator that wrote it"

    def __str__(self) -> str:
        return f"{self.file} {self.reason}"


@dataclass(kw_only=True, slots=True)
class PointFacts:
    """A committed point as its files are. `commit` is None if it cannot be read. `wrong` lists faults by
    file: sizes and presence only. `away` names the nodes whose disks hold files that cannot be reached from
    here.
    """

    name: str
    commit: Commit | None
    wrong: dict[str, str] = field(default_factory=dict)
    away: str = ""


class RunFiles:
    """The files of one run except its journal, as they were at the last `refresh`."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.run: RunFile | None = None
        self.claims: dict[int, Claim] = {}
        self.parents: dict[int, ClaimParent] = {}
        self.cut_off: dict[int, UnreadableFile] = {}
        self.ends: dict[int, AttemptEnd] = {}
        self.points: dict[str, PointFacts] = {}
        self.leftovers: frozenset[str] = frozenset()
        self.pins: dict[str, Hold] = {}
        self.deletions: frozenset[str] = frozenset()  # points that are being deleted, or were pruned
        self.marks: dict[str, Mark] = {}
        self.findings: tuple[Finding, ...] = ()
        self._finding_names: list[str] = []
        self.attempts_seen = self.points_seen = 0  # grow with changes
        self._turn = 0

    @property
    def newest(self) -> int | None:
        """The newest attempt, including one that has not begun."""
        return max(self.claims, default=None)

    @property
    def begun(self) -> int | None:
        """The newest attempt with a parent file: the history is followed from it."""
        return max(self.parents, default=None)

    def refresh_attempts(self) -> None:
        """Reads new claims, parent files and ends. Raises `UnreadableError` for a file of another run, and
        `StorageError`.
        """
        store, newest_before = self.store, max(self.claims, default=0)
        if self.run is None:
            self.run = self._run_file()
        for number in store.claim_numbers():
            if number not in self.claims:
                self.claims[number] = self._own(store.read_claim(number))
            if number not in self.parents and number not in self.cut_off:
                parent = store.read_parent(number)
                if isinstance(parent, ClaimParent):
                    self.parents[number] = parent
                elif parent is not None:
                    self.cut_off[number] = parent
        for number in self.claims:
            # an attempt may record its end after the next one has followed; it does so soon, or never
            if number not in self.ends and number >= newest_before - 1:
                end = store.read_end(number)
                if end is not None:
                    self.ends[number] = end
        self.attempts_seen = len(self.claims) + len(self.parents) + len(self.cut_off) + len(self.ends)

    def refresh_points(self) -> None:
        """Reads changes of points, pins and findings, and compares sizes. Raises `StorageError`."""
        store, changed = self.store, False
        while True:
            folders = store.storage.list(verify.POINTS)
            there = store.point_names()
            changed |= set(there) != set(self.points)
            new = [name for name in there if name not in self.points]
            read = dict(zip(new, at_once(store.storage, self._read, new), strict=True))
            self.points = {name: self.points.get(name) or read[name] for name in there}
            self.leftovers = frozenset(folders) - set(there)
            for name in self._due(there):
                changed |= self.compare(name)
            wrong = [name for name, facts in self.points.items() if facts.wrong]
            if not any([self._drop_deleted(name) for name in wrong]):
                break  # else there may be newer ones
        # after the points: one that is not among them is held by then
        (pins, deletions), marks = store.held(), self._marks()
        changed = changed or (pins, deletions, marks) != (self.pins, self.deletions, self.marks)
        self.pins, self.deletions, self.marks = pins, deletions, marks
        self.points_seen += self._refresh_findings() or changed

    def _marks(self) -> dict[str, Mark]:
        found = ((name, self.store.read_mark(name)) for name in sorted(self.store.quarantined()))
        return {name: mark for name, mark in found if mark is not None}

    def _refresh_findings(self) -> bool:
        """Reads new findings of audits and verifications. A finding never changes."""
        names = self.store.storage.list(numbered_files.FINDINGS)
        if names == self._finding_names:
            return False
        run_id = self.run.id if self.run is not None else ""
        self.findings, self._finding_names = FindingFiles(self.store.storage, run_id).all(), names
        return True

    def compare(self, name: str) -> bool:
        """Compares the sizes of one point's files now. Returns whether the result is new."""
        facts = self.points[name]
        before = facts.wrong, facts.away
        facts.wrong, facts.away = self._wrong(name, facts.commit)
        return before != (facts.wrong, facts.away)

    def _due(self, there: list[str]) -> set[str]:
        """Returns which points to compare now: the newest, and some of the others in turn."""
        known = there[:-_NEWEST]
        at = self._turn % max(1, len(known))
        self._turn = at + _BY_TURNS
        return {*known[at : at + _BY_TURNS], *there[-_NEWEST:]}

    def _drop_deleted(self, name: str) -> bool:
        """Drops a point whose COMMIT was removed since. Its faults mean nothing then."""
        if self.store.storage.exists(verify.point_path(name, COMMIT)):
            return False
        del self.points[name]
        return True

    # ---------------------------------------------------------------------- inside
    def _run_file(self) -> RunFile | None:
        try:
            return self.store.read_run()
        except OtherFormatError as error:
            reason = str(error).removeprefix(f"{self.store.storage.root}/{RUN_FILE} ")
            raise LaterError(RUN_FILE, reason, code=error.code) from error
        except ResumePointError as error:
            raise UnreadableError(RUN_FILE, str(error), code=error.code) from error

    def _own(self, claim: Claim) -> Claim:
        run = self.run
        if run is not None and claim.why != UNREADABLE and claim.run_id != run.id:
            raise UnreadableError(
                f"attempts/{claim.number:04d}.json",
                f"it belongs to run {claim.run_id or 'without an id'}, run.json says "
                f"{run.id or 'without an id'}: the folder has files of two runs",
                code="run.mixed_files",
            )
        return claim

    def _read(self, name: str) -> PointFacts:
        commit, wrong = None, {}
        try:
            commit = verify.read_commit(self.store.storage, name)
        except verify.DamageError as error:
            wrong = {error.damage.file: error.damage.reason}
        except StorageError:
            raise
        except OrchestratorError as error:
            wrong = {COMMIT: str(error)}
        facts = PointFacts(name=name, commit=commit, wrong=wrong)
        if commit is not None:
            facts.wrong, facts.away = self._wrong(name, commit)
        return facts

    def _wrong(self, name: str, commit: Commit | None) -> tuple[dict[str, str], str]:
        if commit is None:
            return self._read(name).wrong, ""
        wrong, away = {}, ""
        for entry in commit.files:
            if text := self.store.storage.away(verify.point_path(name, entry.path)):
                away = away or text
                continue  # on the disk of a node that is not this one
            try:
                verify.check_file(self.store.storage, name, entry, with_digest=False)
            except verify.DamageError as error:
                wrong[error.damage.file] = error.damage.reason
        return wrong, away
