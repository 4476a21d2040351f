"""Holds on resume points, for keeping them (pins) or for deleting them.

    pins/00000480-a0003-g0007.json   sealed; Hold. Created exclusively, deleted when it is released

In a bucket a deletion may be repeated late, and would then remove a hold that was made after it. A lost pin
can mean a lost point. In a bucket, therefore, the next hold of a point has the next number, and a released
hold is marked, not deleted. The newest hold counts, unless it is marked. Both kinds are read everywhere,
because a run's files may be copied from a folder to a bucket and back.

    pins/00000480-a0003-g0007.json  ….0001.json  ….0002.json        Hold, each created exclusively
    pins/00000480-a0003-g0007.released.json  ….0001.released.json   empty: this hold was released

A pin and a deletion take the same name. If both are made at the same moment, one is first, and the other
fails: a pinned point is not deleted, and a point that is being deleted cannot be pinned. This also works for
dead runs, because no process of the run is needed.

A claim that goes back to a point needs no pin. A deletion takes hold of the point first and then checks for a
newer claim. A rewind claims first, then checks for that hold (`require_kept`), and only then whether the
point is whole. Whichever is first, one of the two sees the other, even if it pauses in between.

A point has at most one pin, and pins are not counted. No program removes a pin, only a person does (`unpin`),
who is then told which forks still need the point. A fork needs it until it has its own.

`PinWatch` detects changes of pins between two reads, for the journal. Pins can be made and removed at any
time. It protects nothing: before a deletion, a hold on the point is taken in any case (`may_delete`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.checkpoint.points.points import COMMIT, parse_point_name
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.errors import ConfigError, OrchestratorError, RefusedError, StorageError, WantedPointError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import decode, encode, seal, unseal
from orchestrator.storage.files import Storage

FOLDER = "pins"
PIN, DELETION = "pin", "deletion"
_NAME = re.compile(r"(.+?)(?:\.(\d{4,}))?(?:\.released)?\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """A hold on a point. `what` is pin or deletion.

    `by` is the holder, `reason` the reason, `created` the time (ISO 8601), all for people.
    """

    point: str
    what: str
    by: str
    reason: str
    created: str
    run_id: str = ""

    @property
    def why(self) -> str:
        """The holder of the point and the reason, as far as known."""
        if not self.by:  # a file that is not as it was written; the reason says so
            return self.reason
        return f"pinned by {self.by}" + (f": {self.reason}" if self.reason else "")

    def answer(self, by: str, reason: str) -> str:
        """Returns the answer to `by`, who asked for a pin with `reason` and found this one or made it."""
        if (self.by, self.reason) == (by, reason):
            return f"{self.point} is pinned by {self.by}"
        return (
            f"{self.point} was pinned before, by {self.by or 'somebody'} "
            f"({self.reason or 'no reason is given'}): that pin and its reason hold, nothing is changed; "
            "unpin it first to give another reason"
        )


class PinFiles:
    """The holds of one run. Every method may raise `StorageError`; then nothing was decided."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def read_hold(self, point: str) -> Hold | None:
        """Returns the hold on the point, or None. A file that is not as it was written counts as a pin."""
        return self._held(point)[1]

    def pins(self) -> dict[str, Hold]:
        """Returns the pins by point."""
        return self.pins_since({})

    def pins_since(self, known: Mapping[str, Hold]) -> dict[str, Hold]:
        """Returns the pins, for frequent calls: the files of those in `known` are not read again.

        A pin that was released and made again in between therefore appears unchanged.
        """
        return {hold.point: hold for hold in self._holds(known) if hold.what == PIN}

    def deletions(self) -> frozenset[str]:
        """Returns the points that are being deleted, or that `points --prune` has deleted.

        The latter are deleted by retention. Their absence is no damage.
        """
        return self.held()[1]

    def held(self) -> tuple[dict[str, Hold], frozenset[str]]:
        """Returns `pins` and `deletions` of a single read."""
        holds = self._holds({})
        pins = {hold.point: hold for hold in holds if hold.what == PIN}
        return pins, frozenset(hold.point for hold in holds if hold.what == DELETION)

    def pin(self, point: str, by: str, reason: str, run_id: str) -> Hold:
        """Keeps the point until `unpin`. Returns the pin, or the one that was there before.

        Raises `RefusedError` if there is no such point, or if it is being deleted.
        """
        number, hold = self._take(point, PIN, by, reason, run_id)
        if hold.what != PIN:
            raise RefusedError(
                f"resume point {point} cannot be pinned: {hold.by} has begun to delete it ({hold.reason}); "
                "pin another one",
                code="point.being_deleted",
            )
        if not self.storage.exists(point_path(point, COMMIT)):  # from now on it cannot be deleted
            self._give_back(point, number)
            raise RefusedError(
                f"the run has no resume point {point} to pin; `orchestrator points` lists its points",
                code="point.unknown",
            )
        return hold

    def unpin(self, point: str) -> Hold | None:
        """Releases the pin, so that the point may be deleted. Returns the pin, or None if there was none."""
        number, hold = self._held(point)
        if hold is None or hold.what != PIN:
            return None
        self._give_back(point, number)
        return hold

    def may_delete(self, point: str, by: str, reason: str, run_id: str) -> bool:
        """Whether the point is not pinned; if so, it cannot be pinned until `deleted`.

        A deletion that another process has begun may be continued.
        """
        return self._take(point, DELETION, by, reason, run_id)[1].what == DELETION

    def require_kept(self, point: str) -> None:
        """For a process that has claimed, before it checks whether the point is whole.

        Raises `WantedPointError` if the point's deletion has begun, because it may continue at any later
        time.
        """
        number, hold = self._held(point)
        if hold is not None and hold.what == DELETION:
            raise WantedPointError(
                f"resume point {point} cannot be continued: {hold.by} has begun to delete it "
                f"({hold.reason}), and may still do so. Nothing was changed. Name another point. Or, once "
                f"all processes of {hold.by} have ended, delete {self.storage.root}/{_path(point, number)} "
                "and run the command again",
                code="point.being_deleted",
            )

    def deleted(self, point: str) -> None:
        """Releases the hold of a deletion: the point is gone, or stays after all."""
        number, hold = self._held(point)
        if hold is not None and hold.what == DELETION:
            self._give_back(point, number)
        if self._is_numbered and not self.storage.exists(point_path(point, COMMIT)):
            self._forget_holds(point)

    @property
    def _is_numbered(self) -> bool:
        return not self.storage.traits.frees_names

    def _take(self, point: str, what: str, by: str, reason: str, run_id: str) -> tuple[int, Hold]:
        """Returns the number of the hold on the point, and that hold: the existing one, or this one."""
        while True:
            newest, there = self._held(point)
            if there is not None:
                return newest, there
            hold = Hold(point=point, what=what, by=by, reason=reason, created=now_text(), run_id=run_id)
            if self.storage.create(_path(point, newest + 1), seal(encode(hold))):
                return newest + 1, hold

    def _give_back(self, point: str, number: int) -> None:
        if self._is_numbered:
            mark = _path(point, number, released=True)
            # an existing mark may be about to be removed, with a point that is gone
            if not self.storage.create(mark, b"") and not self.storage.exists(point_path(point, COMMIT)):
                self.storage.delete(_path(point, number))
            return
        self.storage.delete(_path(point, number))
        self.storage.sync(FOLDER)

    def _forget_holds(self, point: str) -> None:
        """Deletes all files of the holds of a point that is gone and never returns.

        A late repetition of these deletions is harmless. The holds are deleted before the marks, so that none
        counts again in between.
        """
        numbers = sorted(_numbers(self.storage.list(FOLDER)).get(point, ()))
        for released in (False, True):
            for number in numbers:
                self.storage.delete(_path(point, number, released=released))

    def _held(self, point: str) -> tuple[int, Hold | None]:
        """Returns the number of the point's newest hold, -1 if there was none, and that hold unless released.

        Absent files are requested by name.
        """
        found = None if self._is_numbered else self._read(point, 0)
        if found is not None and not self._is_released(point, 0):
            return 0, found
        number = max(_numbers(self.storage.list(FOLDER)).get(point, ()), default=-1)
        while self._is_numbered and self.storage.exists(_path(point, number + 1)):
            number += 1
        if number < 0 or self._is_released(point, number):
            return number, None
        return number, self._read(point, number)

    def _is_released(self, point: str, number: int) -> bool:
        return self.storage.exists(_path(point, number, released=True))

    def _holds(self, known: Mapping[str, Hold]) -> list[Hold]:
        """Returns the holds of all points, with one list request. Those in `known` are not read again."""
        names = self.storage.list(FOLDER)
        newest = {point: max(numbers) for point, numbers in _numbers(names).items()}
        paths = {f"{FOLDER}/{name}" for name in names}
        holds = [
            known.get(point) or self._read(point, number)
            for point, number in newest.items()
            if _path(point, number, released=True) not in paths
        ]
        return [hold for hold in holds if hold is not None]

    def _read(self, point: str, number: int) -> Hold | None:
        path = _path(point, number)
        try:
            found = decode(Hold, unseal(self.storage.read(path)), path)
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError | ConfigError):
                raise
            reason = f"{path} is not as it was written: {error}"
            return Hold(point=point, what=PIN, by="", reason=reason, created="")
        return found


def _numbers(names: Iterable[str]) -> dict[str, set[int]]:
    """Returns the numbers of each point's holds, including released ones."""
    found: dict[str, set[int]] = {}
    for match in map(_NAME.fullmatch, names):
        if match and parse_point_name(match[1]):
            found.setdefault(match[1], set()).add(int(match[2] or 0))
    return found


def _path(point: str, number: int, *, released: bool = False) -> str:
    if parse_point_name(point) is None:
        raise RefusedError(
            f"{point!r} is no name of a resume point; `orchestrator points` lists them",
            code="command.point_name",
        )
    numbered = f".{number:04d}" if number else ""
    return f"{FOLDER}/{point}{numbered}{'.released' if released else ''}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PinChanges:
    """Pins that are new, and those that are gone."""

    made: tuple[Hold, ...]
    gone: tuple[Hold, ...]


def pin_changes(old: Mapping[str, Hold], new: Mapping[str, Hold]) -> PinChanges:
    """Compares two reads of the pins by point. If a pin was replaced, one is gone and the other new."""
    return PinChanges(
        made=tuple(hold for point, hold in new.items() if old.get(point) != hold),
        gone=tuple(hold for point, hold in old.items() if new.get(point) != hold),
    )


class PinWatch:
    """Reads a run's pins repeatedly. At the first read all pins are new."""

    def __init__(self, pins: PinFiles) -> None:
        self._pins, self._known = pins, dict[str, Hold]()

    def look(self) -> PinChanges:
        """Returns the changes since the last read. Waits for storage.

        Raises `StorageError`; the next read then finds these changes.
        """
        now = self._pins.pins_since(self._known)
        changes, self._known = pin_changes(self._known, now), now
        return changes


def note_pins(journal: JournalWriter, changes: PinChanges) -> None:
    """Journals the changes."""
    for hold in changes.gone:
        journal.event(EventKind.POINT_UNPINNED, point=hold.point, by=hold.by, reason=hold.reason)
    for hold in changes.made:
        journal.event(EventKind.POINT_PINNED, point=hold.point, by=hold.by, reason=hold.reason)
