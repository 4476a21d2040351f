"""Requests to a running launch, as files in its storage.

They need no network: any machine that can access the storage can make a request.

    requests/<launch>/000001.json   sealed; Request. Created exclusively, numbered without gaps, never changed

A launch reads the requests under its own id in order, and answers each in its journal. Requests to a launch
that has ended are never read: a new launch has another id, so that an old "stop" never stops it.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from dataclasses import dataclass

from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.history.claims.claim_files import now_text
from orchestrator.json_form import decode, encode
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import SealError, seal, unseal

FOLDER = "requests"
SAVE, STOP, STOP_NOW = "save", "stop", "stop now"
_NAME = re.compile(r"(\d{6,})\.json")


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


class RequestFiles:
    """The requests to one launch."""

    def __init__(self, storage: Storage, launch: str, run_id: str) -> None:
        """`run_id`: that of run.json."""
        self._storage, self._launch, self._run_id = storage, launch, run_id

    def ask(self, what: str) -> Request:
        """Writes the next request, which is durable when it returns. Raises `StorageError`."""
        matches = map(_NAME.fullmatch, self._storage.list(f"{FOLDER}/{self._launch}"))
        number = max((int(match[1]) for match in matches if match), default=0)
        while True:
            number += 1
            request = Request(
                number=number,
                launch=self._launch,
                what=what,
                by=asker(),
                created=now_text(),
                run_id=self._run_id,
            )
            if self._storage.create(self._path(number), seal(encode(request))):
                return request

    def read(self, number: int) -> Request | None:
        """The request of this number, None while there is none. Raises `StorageError`."""
        path = self._path(number)
        try:
            found = decode(Request, unseal(self._storage.read(path)), path)
            if (found.number, found.launch, found.run_id) != (number, self._launch, self._run_id):
                raise SealError(f"it is request {found.number} to launch {found.launch}")
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            reason = f"{path} cannot be read: {error}"
            return Request(number=number, launch=self._launch, what="", by="", created="", unreadable=reason)
        return found

    def _path(self, number: int) -> str:
        return f"{FOLDER}/{self._launch}/{number:06d}.json"
