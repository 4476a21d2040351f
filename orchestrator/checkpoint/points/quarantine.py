"""Marks on damaged points. A marked point is read completely, or not relied on.

    quarantine/00000480-a0003-g0007.json   sealed; Mark. Created exclusively, deleted when it is lifted

Nothing of the point is deleted or moved. A mark records the result of the newest reading of all bytes.
`verify`, `points`, a start and the run's own verification make it, and lift it if they find every byte right.
Wherever bytes can decide, the mark does not: every command that chooses a point (a start, `plan`, `rewind`,
`fork`, `export`) reads all bytes of a marked one. All of them thus agree, also after its files were restored.
Commands that only display points (`status`, the page) and retention use the mark. A mark that is late or lost
thus costs a check, and never a point.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.checkpoint.points.points import COMMIT, parse_point_name
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import SealError, decode, encode, seal, unseal
from orchestrator.records.points import Damage
from orchestrator.storage.files import Storage

FOLDER = "quarantine"
_NAME = re.compile(r"(.+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What was found wrong with a point, by whom and when (ISO 8601). The latter two are for people."""

    point: str
    damages: tuple[Damage, ...]
    by: str
    created: str


class QuarantineFiles:
    """The marks of one run. Every method may raise `StorageError`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def quarantined(self) -> frozenset[str]:
        """Returns the points with a mark, including deleted ones."""
        matches = (match for match in map(_NAME.fullmatch, self.storage.list(FOLDER)) if match)
        return frozenset(match[1] for match in matches if parse_point_name(match[1]))

    def is_quarantined(self, point: str) -> bool:
        """Whether a point has a mark."""
        return self.storage.exists(_path(point))

    def read_mark(self, point: str) -> Mark | None:
        """Returns the mark on a point, or None. A file that is not as it was written counts as a mark."""
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
        """Makes or lifts the mark after all bytes of a point were read.

        Returns whether that changed anything. `damages` are the result of reading. An existing mark is not
        changed, because it records since when there is damage. A point without COMMIT does not exist, and
        gets no mark.
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
        """Removes a mark, if there is one."""
        self.storage.delete(_path(point))
        if self.storage.list(FOLDER):
            self.storage.sync(FOLDER)


def _path(point: str) -> str:
    return f"{FOLDER}/{point}.json"
