"""Who holds a resume point: whoever wants to keep it (a pin), or whoever deletes it.

    pins/00000480-a0003-g0007.json   sealed; Hold. Created exclusively, deleted by who gives it back

In a bucket a deletion may be repeated late, and would then take away a hold that was made after it, and a pin
lost is a point lost. So the next hold of a point has the next number there, and what is given back is marked,
not deleted: the newest one counts, unless it is marked. Both kinds are read everywhere, for a run's files may
be copied from a folder to a bucket and back.

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.errors import ConfigError, OrchestratorError, RefusedError, StorageError, WantedPointError
from orchestrator.history.claim_files import now_text
from orchestrator.json_form import decode, encode
from orchestrator.resume.points import COMMIT, parse_point_name
from orchestrator.resume.verify import point_path
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import seal, unseal

FOLDER = "pins"
PIN, DELETION = "pin", "deletion"
_NAME = re.compile(r"(.+?)(?:\.(\d{4,}))?(?:\.released)?\.json")


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

    @property
    def why(self) -> str:
        """Who holds the point, and why, as far as that is known."""
        if not self.by:  # a file that is not as it was written: the reason says that
            return self.reason
        return f"pinned by {self.by}" + (f": {self.reason}" if self.reason else "")

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
        return self._held(point)[1]

    def pins(self) -> dict[str, Hold]:
        """The pins by point."""
        return self.pins_since({})

    def pins_since(self, known: Mapping[str, Hold]) -> dict[str, Hold]:
        """The pins, for who looks often: the files of those in `known` are not read again, so that
        one that was given back and made anew in between stays as it was known.
        """
        return {hold.point: hold for hold in self._holds(known) if hold.what == PIN}

    def deletions(self) -> frozenset[str]:
        """The points that somebody has begun to delete, and those that `points --prune` has deleted by
        retention: nobody misses them.
        """
        return self.held()[1]

    def held(self) -> tuple[dict[str, Hold], frozenset[str]]:
        """`pins` and `deletions`, of one look."""
        holds = self._holds({})
        pins = {hold.point: hold for hold in holds if hold.what == PIN}
        return pins, frozenset(hold.point for hold in holds if hold.what == DELETION)

    def pin(self, point: str, by: str, reason: str, run_id: str) -> Hold:
        """Keep the point until `unpin`; returns the pin, or that which stood there before. Raises
        `RefusedError` if there is no such point, or it is being deleted.
        """
        number, hold = self._take(point, PIN, by, reason, run_id)
        if hold.what != PIN:
            raise RefusedError(
                f"resume point {point} cannot be pinned: {hold.by} has begun to delete it ({hold.reason}); "
                "pin another one"
            )
        if not self.storage.exists(point_path(point, COMMIT)):  # from now on nobody takes it away
            self._give_back(point, number)
            raise RefusedError(
                f"there is no resume point {point} to pin; `orchestrator points` lists those that there are"
            )
        return hold

    def unpin(self, point: str) -> Hold | None:
        """Give the pin back: the point may be deleted from now on. Returns the pin; None: there was none."""
        number, hold = self._held(point)
        if hold is None or hold.what != PIN:
            return None
        self._give_back(point, number)
        return hold

    def may_delete(self, point: str, by: str, reason: str, run_id: str) -> bool:
        """Whether nobody has pinned the point; then nobody can until `deleted`. One whose deletion somebody
        has begun may be deleted by another one, too.
        """
        return self._take(point, DELETION, by, reason, run_id)[1].what == DELETION

    def require_kept(self, point: str) -> None:
        """For who has claimed, before it looks whether the point is whole: raises `WantedPointError` if
        somebody has begun to delete it, who may go on with that at any later time.
        """
        number, hold = self._held(point)
        if hold is not None and hold.what == DELETION:
            raise WantedPointError(
                f"nothing goes back to resume point {point}: {hold.by} has begun to delete it "
                f"({hold.reason}), and may go on with that; nothing is changed. Name another point or, once "
                f"no process of {hold.by} is left, delete {self.storage.root}/{_path(point, number)} and "
                "give the command again"
            )

    def deleted(self, point: str) -> None:
        """Who has begun to delete the point holds it no more: it is gone, or stays after all."""
        number, hold = self._held(point)
        if hold is not None and hold.what == DELETION:
            self._give_back(point, number)
        if self._is_numbered and not self.storage.exists(point_path(point, COMMIT)):
            self._forget_holds(point)

    @property
    def _is_numbered(self) -> bool:
        return not self.storage.traits.frees_names

    def _take(self, point: str, what: str, by: str, reason: str, run_id: str) -> tuple[int, Hold]:
        """The hold on the point, and its number: that which stands there, or this one."""
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
            # a mark that stands there already may be about to be forgotten, with a point that is gone
            if not self.storage.create(mark, b"") and not self.storage.exists(point_path(point, COMMIT)):
                self.storage.delete(_path(point, number))
            return
        self.storage.delete(_path(point, number))
        self.storage.sync(FOLDER)

    def _forget_holds(self, point: str) -> None:
        """All that there is of the holds of a point that is gone, and never comes again: a late repeat of
        these deletions harms nothing. The holds go before the marks, so that none counts again in between.
        """
        numbers = sorted(_numbers(self.storage.list(FOLDER)).get(point, ()))
        for released in (False, True):
            for number in numbers:
                self.storage.delete(_path(point, number, released=released))

    def _held(self, point: str) -> tuple[int, Hold | None]:
        """The number of the point's newest hold, -1 if there was none, and that hold unless it was given
        back. What is absent is asked for by its name.
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
        """Of all points, with one list. Those in `known` are not read again."""
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
    """By point the numbers of its holds, those that were given back too."""
    found: dict[str, set[int]] = {}
    for match in map(_NAME.fullmatch, names):
        if match and parse_point_name(match[1]):
            found.setdefault(match[1], set()).add(int(match[2] or 0))
    return found


def _path(point: str, number: int, *, released: bool = False) -> str:
    if parse_point_name(point) is None:
        raise RefusedError(f"{point!r} is no name of a resume point; `orchestrator points` lists them")
    numbered = f".{number:04d}" if number else ""
    return f"{FOLDER}/{point}{numbered}{'.released' if released else ''}.json"
