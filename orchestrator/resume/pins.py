"""Who holds a resume point: whoever wants to keep it (a pin), or whoever deletes it.

    pins/00000480-a0003-g0007.json   sealed; Hold. Created exclusively, deleted by who gives it back

In a bucket a deletion may be repeated late, and would then take away a hold that was made after it. So the
next hold of a point has the next number there, and what is given back is marked, not deleted: the newest
one counts.

    pins/00000480-a0003-g0007.json  ….0001.json  ….0002.json        Hold, each created exclusively
    pins/00000480-a0003-g0007.released.json  ….0001.released.json   empty: this hold was given back

Both take the same name, so that of a pin and a deletion at the same moment one comes first, and the other
hears of it: a point that was pinned is deleted by nobody, and one that is being deleted cannot be pinned.
That holds on dead runs, too, for no process of the run is needed. It knows no lineage and no retention.

A claim that goes back to a point needs no pin. Who deletes takes hold of the point first and asks for a newer
claim then; who goes back claims first and asks for that hold then (`require_kept`), and only then whether the
point is whole. Whichever comes first, one of the two sees the other, also if it stands still in between.

A point has one pin, whoever asks for another, and nothing counts them: no program gives a pin back, only a
person does (`unpin`), who hears which forks still need the point. A fork needs it until it has its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError, RefusedError, StorageError, WantedPointError
from orchestrator.history.claim_files import now_text
from orchestrator.json_form import decode, encode
from orchestrator.resume.points import COMMIT, parse_point_name
from orchestrator.resume.verify import point_path
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import seal, unseal

FOLDER = "pins"
PIN, DELETION = "pin", "deletion"
_NAME = re.compile(r"(?P<point>[^.]+)(?:\.(?P<number>\d{4,}))?(?P<released>\.released)?\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """`what` is pin or deletion; `by` is who holds the point, `reason` why, `created` since when (ISO 8601),
    all for people.
    """

    point: str
    what: str
    by: str
    reason: str
    created: str
    run_id: str = ""

    def answer(self, by: str, reason: str) -> str:
        """What `by` hears who asked for a pin with `reason`, and found this one or made it."""
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
        """Who holds the point; None: nobody. A file that is not as it was written counts as a pin."""
        number = self._held().get(point, 0) if self._is_numbered else 0
        return None if number is None else self._read_numbered(point, number)

    @property
    def _is_numbered(self) -> bool:
        return not self.storage.traits.frees_names

    def _held(self) -> dict[str, int | None]:
        """The number of the newest hold of each point that ever had one; None: it was given back."""
        numbers, released = dict[str, int](), set[tuple[str, int]]()
        for match in filter(None, map(_NAME.fullmatch, self.storage.list(FOLDER))):
            point, number = match["point"], int(match["number"] or 0)
            if parse_point_name(point) is None:
                continue
            numbers[point] = max(number, numbers.get(point, 0))
            if match["released"]:
                released.add((point, number))
        return {point: None if (point, n) in released else n for point, n in numbers.items()}

    def _read_numbered(self, point: str, number: int) -> Hold | None:
        path = _path(point, number)
        try:
            found = decode(Hold, unseal(self.storage.read(path)), path)
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            reason = f"{path} is not as it was written: {error}"
            return Hold(point=point, what=PIN, by="", reason=reason, created="")
        return found

    def pins(self) -> dict[str, Hold]:
        """The pins by point."""
        return self.pins_since({})

    def pins_since(self, known: Mapping[str, Hold]) -> dict[str, Hold]:
        """The pins, for who looks often: the files of those in `known` are not read again, so that
        one that was given back and made anew in between stays as it was known.
        """
        held = {point: number for point, number in self._held().items() if number is not None}
        holds = [known.get(point) or self._read_numbered(point, number) for point, number in held.items()]
        return {hold.point: hold for hold in holds if hold is not None and hold.what == PIN}

    def deletions(self) -> frozenset[str]:
        """The points that somebody has begun to delete, and those that `points --prune` has deleted by
        retention: nobody misses them.
        """
        held = self._held().items()
        holds = [self._read_numbered(point, number) for point, number in held if number is not None]
        return frozenset(hold.point for hold in holds if hold is not None and hold.what == DELETION)

    def pin(self, point: str, by: str, reason: str, run_id: str) -> Hold:
        """Keep the point until `unpin`; returns the pin, or that which stood there before. Raises
        `RefusedError` if there is no such point, or it is being deleted.
        """
        hold = self._take(point, PIN, by, reason, run_id)
        if hold.what != PIN:
            raise RefusedError(
                f"resume point {point} cannot be pinned: {hold.by} has begun to delete it ({hold.reason}); "
                "pin another one"
            )
        if not self.storage.exists(point_path(point, COMMIT)):  # from now on nobody takes it away
            self.unpin(point)
            raise RefusedError(
                f"there is no resume point {point} to pin; `orchestrator points` lists those that there are"
            )
        return hold

    def unpin(self, point: str) -> Hold | None:
        """Give the pin back: the point may be deleted from now on. Returns the pin; None: there was none."""
        number = self._held().get(point, 0) if self._is_numbered else 0
        hold = None if number is None else self._read_numbered(point, number)
        if number is None or hold is None or hold.what != PIN:
            return None
        self._give_back(point, number)
        return hold

    def may_delete(self, point: str, by: str, reason: str, run_id: str) -> bool:
        """Whether nobody has pinned the point; then nobody can until `deleted`. One whose deletion somebody
        has begun may be deleted by another one, too.
        """
        return self._take(point, DELETION, by, reason, run_id).what == DELETION

    def require_kept(self, point: str) -> None:
        """For who has claimed, before it looks whether the point is whole: raises `WantedPointError` if
        somebody has begun to delete it, who may go on with that at any later time.
        """
        hold = self.read_hold(point)
        if hold is not None and hold.what == DELETION:
            path = f"{self.storage.root}/{self._newest_hold_path(point)}"
            raise WantedPointError(
                f"nothing goes back to resume point {point}: {hold.by} has begun to delete it "
                f"({hold.reason}), and may go on with that; nothing is changed. Name another point or, once "
                f"no process of {hold.by} is left, delete {path} and give the command again"
            )

    def deleted(self, point: str) -> None:
        """Who has begun to delete the point holds it no more: it is gone, or stays after all."""
        if not self._is_numbered:
            return self._give_back(point, 0)
        number = self._held().get(point)
        if number is not None and (hold := self._read_numbered(point, number)) and hold.what == DELETION:
            self._give_back(point, number)
        if not self.storage.exists(point_path(point, COMMIT)):
            self._forget_holds(point)
        return None

    def _take(self, point: str, what: str, by: str, reason: str, run_id: str) -> Hold:
        """The hold on the point: that which stands there, or this one."""
        while True:
            if (there := self.read_hold(point)) is not None:
                return there
            path = self._next_hold_path(point)
            hold = Hold(point=point, what=what, by=by, reason=reason, created=now_text(), run_id=run_id)
            if self.storage.create(path, seal(encode(hold))):
                return hold

    def _hold_numbers(self, point: str) -> list[int]:
        """Of the point's holds, given back or not, ascending."""
        matches = filter(None, map(_NAME.fullmatch, self.storage.list(FOLDER)))
        return sorted({int(match["number"] or 0) for match in matches if match["point"] == point})

    def _next_hold_path(self, point: str) -> str:
        """Where the next hold goes, if the newest one was given back; else it is taken already."""
        if not self._is_numbered:
            return _path(point)
        numbers, held = self._hold_numbers(point), self._held().get(point)
        return _path(point, held if held is not None else numbers[-1] + 1 if numbers else 0)

    def _newest_hold_path(self, point: str) -> str:
        numbers = self._hold_numbers(point) if self._is_numbered else []
        return _path(point, numbers[-1] if numbers else 0)

    def _give_back(self, point: str, number: int) -> None:
        if self._is_numbered:
            self.storage.create(_path(point, number, released=True), b"")
            return
        self.storage.delete(_path(point))
        self.storage.sync(FOLDER)

    def _forget_holds(self, point: str) -> None:
        """All that there is of the holds of a point that is gone, and never comes again: a late repeat of
        these deletions harms nothing. The holds go before the marks, so that none counts again in between.
        """
        numbers = self._hold_numbers(point)
        for released in (False, True):
            for number in numbers:
                self.storage.delete(_path(point, number, released=released))


def _path(point: str, number: int = 0, *, released: bool = False) -> str:
    if parse_point_name(point) is None:
        raise RefusedError(f"{point!r} is no name of a resume point; `orchestrator points` lists them")
    return f"{FOLDER}/{point}{f'.{number:04d}' if number else ''}{'.released' if released else ''}.json"
