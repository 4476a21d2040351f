"""Numbered files that others than a run's coordinator add to the run: requests and findings.

Only a run's coordinator writes its journal. A request to a running launch, and the result of an audit, are
sealed files instead. They need no network: any machine that can access the storage can write one. Each file
is created exclusively, numbered without gaps, and never changed.

    requests/<launch>/000001.json   Request, to a running launch
    findings/000001.json            Finding, the result of an audit or of verified points

A launch reads the requests under its own id in order, and answers each in its journal. Requests to a launch
that has ended are never read: a new launch has another id, so that an old "stop" never stops it.

A finding was true of the data read at that time. No decision uses it: a start, a deletion and another audit
read the data themselves. It may be deleted by hand, the newest ones first.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import SealError, decode, encode, seal, unseal
from orchestrator.storage.files import Storage

SAVE, STOP, STOP_NOW = "save", "stop", "stop now"
AUDIT, VERIFY = "audit", "verify"
FINDINGS = "findings"
_REQUESTS = "requests"
_NAME = re.compile(r"(\d{6,})\.json")

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """`what` is save, stop or stop now. `by` (user@host) and `created` (ISO 8601) are for display.

    `unreadable` is the reason why the file of this number cannot be read; it then requests nothing.
    """

    number: int
    launch: str
    what: str
    by: str
    created: str
    run_id: str = ""
    unreadable: str = ""


def asker() -> str:
    """The user and host of this process, for display: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


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


class _NumberedFiles(Generic[Content]):
    """The numbered files of one folder."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder

    def _numbers(self) -> list[int]:
        names = self._storage.list(self._folder)
        return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:06d}.json"

    def _add(self, made: Callable[[int], Content]) -> Content:
        """Writes the next file, whose content is `made(number)`. It is durable when this returns."""
        number = max(self._numbers(), default=0)
        while True:
            number += 1
            content = made(number)
            if self._storage.create(self._path(number), seal(encode(content))):
                return content

    def _read(
        self,
        kind: type[Content],
        number: int,
        check: Callable[[Content], None],
        unreadable: Callable[[str], Content],
    ) -> Content:
        """Returns the file's content, or `unreadable(reason)` if it cannot be read.

        `check` raises `SealError` for a content that is not this file's. Raises `FileNotFoundError` and
        `StorageError`.
        """
        path = self._path(number)
        try:
            found = decode(kind, unseal(self._storage.read(path)), path)
            check(found)
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            return unreadable(f"{path} cannot be read: {error}")
        return found


class RequestFiles(_NumberedFiles[Request]):
    """The requests to one launch."""

    def __init__(self, storage: Storage, launch: str, run_id: str) -> None:
        """`run_id`: that of run.json."""
        super().__init__(storage, f"{_REQUESTS}/{launch}")
        self._launch, self._run_id = launch, run_id

    def ask(self, what: str) -> Request:
        """Writes the next request, which is durable when it returns. Raises `StorageError`."""
        return self._add(
            lambda number: Request(
                number=number,
                launch=self._launch,
                what=what,
                by=asker(),
                created=now_text(),
                run_id=self._run_id,
            )
        )

    def read(self, number: int) -> Request | None:
        """The request of this number, None while there is none. Raises `StorageError`."""

        def check(found: Request) -> None:
            if (found.number, found.launch, found.run_id) != (number, self._launch, self._run_id):
                raise SealError(f"it is request {found.number} to launch {found.launch}")

        def unreadable(why: str) -> Request:
            return Request(number=number, launch=self._launch, what="", by="", created="", unreadable=why)

        try:
            return self._read(Request, number, check, unreadable)
        except FileNotFoundError:
            return None


class FindingFiles(_NumberedFiles[Finding]):
    """The findings of one run. `run_id` is that of run.json. Every method may raise `StorageError`."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        super().__init__(storage, FINDINGS)
        self._run_id = run_id

    def add(self, what: str, attempt: int, seconds: float, result: dict[str, Any]) -> Finding:
        """Stores a finding, which is durable when it returns."""
        return self._add(
            lambda number: Finding(
                number=number,
                what=what,
                attempt=attempt,
                seconds=seconds,
                result=result,
                by=asker(),
                created=now_text(),
                run_id=self._run_id,
            )
        )

    def all(self) -> tuple[Finding, ...]:
        """All findings, oldest first. One that cannot be read has its reason."""
        return tuple(self._found(number) for number in self._numbers())

    def _found(self, number: int) -> Finding:
        def check(found: Finding) -> None:
            if (found.number, found.run_id) != (number, self._run_id):
                raise SealError(f"it is finding {found.number} of run {found.run_id or 'without an id'}")

        def unreadable(why: str) -> Finding:
            return Finding(number=number, what="", attempt=0, seconds=0.0, unreadable=why)

        try:
            return self._read(Finding, number, check, unreadable)
        except FileNotFoundError as error:
            return unreadable(f"{self._path(number)} cannot be read: {error}")


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
