"""Stores the results of audits and of verified points in the run's storage, for other readers.

Only a run's coordinator writes its journal, and an audit runs outside of it. So each result is a file:

    findings/000001.json   sealed; Finding. Created exclusively, numbered without gaps, never changed

A finding was true of the data read at that time. No decision uses it: a start, a deletion and another audit
read the data themselves. It may be deleted by hand, the newest ones first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.history.request_files import asker
from orchestrator.json_form import decode, encode
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import SealError, seal, unseal

FOLDER = "findings"
AUDIT, VERIFY = "audit", "verify"
_NAME = re.compile(r"(\d{6,})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of an audit or a verification.

    `what` is audit or verify. `attempt` was the run's newest at that time. `seconds` is the duration. `by`
    (user@host) and `created` (ISO 8601) are for display.

    `result` of an audit: `exactly_once`, `first_step`, `last_step`, `final_up_to_step`, `samples`, `tokens`,
    `not_shown`, as in `audit --json`. Of verify: `checked` (digests), `all` (whether the run's points are all
    among them) and `points`, each with `point`, `healthy`. `unreadable` is the reason why a file cannot be
    read; it then has no other content.
    """

    number: int
    what: str
    attempt: int
    seconds: float
    result: dict[str, Any] = field(default_factory=dict)
    by: str = ""
    created: str = ""
    run_id: str = ""
    unreadable: str = ""


class FindingFiles:
    """The findings of one run. `run_id` is that of run.json. Every method may raise `StorageError`."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self._storage, self._run_id = storage, run_id

    def add(self, what: str, attempt: int, seconds: float, result: dict[str, Any]) -> Finding:
        """Stores a finding, which is durable when it returns."""
        number = max(self._numbers(), default=0)
        while True:
            number += 1
            found = Finding(
                number=number,
                what=what,
                attempt=attempt,
                seconds=seconds,
                result=result,
                by=asker(),
                created=now_text(),
                run_id=self._run_id,
            )
            if self._storage.create(_path(number), seal(encode(found))):
                return found

    def all(self) -> tuple[Finding, ...]:
        """All findings, oldest first. One that cannot be read has its reason."""
        return tuple(self._read(number) for number in self._numbers())

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, self._storage.list(FOLDER)) if match)

    def _read(self, number: int) -> Finding:
        path = _path(number)
        try:
            found = decode(Finding, unseal(self._storage.read(path)), path)
            if (found.number, found.run_id) != (number, self._run_id):
                raise SealError(f"it is finding {found.number} of run {found.run_id or 'without an id'}")
        except (FileNotFoundError, OrchestratorError) as error:
            if isinstance(error, StorageError):
                raise
            reason = f"{path} cannot be read: {error}"
            return Finding(number=number, what="", attempt=0, seconds=0.0, unreadable=reason)
        return found


def audit_result(report: dict[str, Any]) -> dict[str, Any]:
    """The part of an audit's document that is stored."""
    kept = ("exactly_once", "first_step", "last_step", "final_up_to_step", "samples", "tokens", "not_shown")
    return {name: report[name] for name in kept}


def verify_result(rows: list[dict[str, Any]], every: bool) -> dict[str, Any]:
    """The part of a `verify` document that is stored.

    `every`: these are all points that the run had. Points that could not be read from this machine are left
    out, and then they are not all.
    """
    read = [row for row in rows if row["healthy"] is not None]
    points = [{"point": row["name"], "healthy": row["healthy"]} for row in read]
    return {"checked": "digests", "all": every and len(read) == len(rows), "points": points}


def newest_audit(findings: tuple[Finding, ...]) -> Finding | None:
    """The newest audit."""
    return next((found for found in reversed(findings) if found.what == AUDIT), None)


def verified_points(findings: tuple[Finding, ...]) -> dict[str, tuple[Finding, bool]]:
    """For each verified point: the newest finding about it, and whether it was healthy."""
    return {
        each["point"]: (found, each["healthy"])
        for found in findings
        if found.what == VERIFY
        for each in found.result["points"]
    }


def _path(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"
