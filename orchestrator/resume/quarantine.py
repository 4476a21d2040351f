"""Marks on damaged points: whoever otherwise trusts sizes reads all bytes of such a point, or does not count
on it.

    quarantine/00000480-a0003-g0007.json   sealed; Mark. Created exclusively, deleted by who lifts it

Nothing of the point is deleted or moved. A mark is what the newest reading of all bytes found: `verify`,
`points`, a start and the run's own reading back make it, and lift it where they find every byte right. It
decides nothing that bytes can decide: whoever chooses a point (a start, `plan`, `rewind`, `fork`, `export`)
reads all of a marked one, so that all of them say the same, also when its files were restored. Who only shows
(`status`, the page) and retention go by the mark. So a mark that came too late or is lost costs a look, and
never a point.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claim_files import now_text
from orchestrator.json_form import decode, encode
from orchestrator.records.points import Damage
from orchestrator.resume.points import COMMIT, parse_point_name
from orchestrator.resume.verify import point_path
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import SealError, seal, unseal

FOLDER = "quarantine"
_NAME = re.compile(r"(.+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What was found wrong with a point, by whom and when (ISO 8601), these two for people."""

    point: str
    damages: tuple[Damage, ...]
    by: str
    created: str


class QuarantineFiles:
    """The marks of one run. Every method may raise `StorageError`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def quarantined(self) -> frozenset[str]:
        """The points with a mark; also such as are gone."""
        matches = (match for match in map(_NAME.fullmatch, self.storage.list(FOLDER)) if match)
        return frozenset(match[1] for match in matches if parse_point_name(match[1]))

    def is_quarantined(self, point: str) -> bool:
        """Whether a point has a mark."""
        return self.storage.exists(_path(point))

    def read_mark(self, point: str) -> Mark | None:
        """The mark on a point; None: it has none. One that is not as it was written is a mark."""
        path = _path(point)
        try:
            found = decode(Mark, unseal(self.storage.read(path)), path)
            if found.point != point or not found.damages:
                raise SealError(f"it is that of {found.point}, with {len(found.damages)} damages")
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            unreadable = Damage(point=point, file=path, reason=f"is not as it was written: {error}")
            return Mark(point=point, damages=(unreadable,), by="", created="")
        return found

    def note_reading(self, point: str, damages: Sequence[Damage], by: str) -> bool:
        """All bytes of a point were read, and this is what is wrong with them. Makes or lifts the mark;
        whether that changed anything. One that stands stays as it is: it says since when. A point without
        COMMIT is none, so that it needs no mark.
        """
        if damages:
            if not self.storage.exists(point_path(point, COMMIT)):
                return False
            mark = Mark(point=point, damages=tuple(damages), by=by, created=now_text())
            return self.storage.create(_path(point), seal(encode(mark)))
        if not self.storage.exists(_path(point)):
            return False
        self.lift_mark(point)
        return True

    def lift_mark(self, point: str) -> None:
        """Take a mark away, if there is one."""
        self.storage.delete(_path(point))
        if self.storage.list(FOLDER):
            self.storage.sync(FOLDER)


def _path(point: str) -> str:
    return f"{FOLDER}/{point}.json"
