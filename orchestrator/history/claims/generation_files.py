"""Sealed copies of generations' starts: `generations/a0003-g0007.json` (membership rule 2).

A point is worth what is known of its history, and its generation's start is the link. The journal has every
start, durably, before a member learns of the generation. The copy is written later, before the first COMMIT
that depends on it. So it costs a re-forming nothing, and a damaged journal makes no whole point unusable.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from orchestrator.errors import LaterFormatError, OrchestratorError, StorageError
from orchestrator.history.claims.claims import ORIGIN, GenerationId, GenerationStart
from orchestrator.json_form import decode, encode
from orchestrator.storage.at_once import at_once
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import LaterSealError, seal, unseal

FOLDER = "generations"
_NAME = re.compile(r"a(\d{4,})-g(\d{4,})\.json")


def seal_starts(storage: Storage, starts: Iterable[GenerationStart], run_id: str) -> None:
    """Makes the sealed copies that do not exist yet. A fork's origin needs none: its claim has it.

    Raises `StorageError`.
    """
    wanted = {_path(start.id): start for start in starts if start.attempt != ORIGIN}
    names = {f"{FOLDER}/{name}" for name in storage.list(FOLDER)} if wanted else set()

    def create(path: str) -> None:
        storage.create(path, seal({"run_id": run_id, "start": encode(wanted[path])}))

    at_once(storage, create, sorted(wanted.keys() - names))


def sealed_ids(storage: Storage) -> frozenset[GenerationId]:
    """The generations that have a sealed copy. Listed before the journal is read, all of them are in it."""
    names = (match for match in map(_NAME.fullmatch, storage.list(FOLDER)) if match)
    return frozenset((int(match[1]), int(match[2])) for match in names)


def read_starts(
    storage: Storage, ids: Collection[GenerationId], run_id: str | None
) -> tuple[GenerationStart, ...]:
    """The starts of these generations, from their sealed copies.

    A copy that is damaged, or another run's, is left out. Raises `LaterFormatError` for one that a later
    version wrote, and `StorageError`.
    """
    found = at_once(storage, lambda id_: _read(storage, id_, run_id), sorted(ids))
    return tuple(start for start in found if start is not None)


def _read(storage: Storage, id_: GenerationId, run_id: str | None) -> GenerationStart | None:
    path = _path(id_)
    try:
        content = unseal(storage.read(path))
        start = decode(GenerationStart, content["start"], path)
    except LaterSealError as error:
        raise LaterFormatError(f"{storage.root}/{path} {error}") from error
    except StorageError:
        raise
    except (FileNotFoundError, OrchestratorError, KeyError, TypeError):
        return None
    return start if start.id == id_ and run_id in (None, content.get("run_id")) else None


def _path(id_: GenerationId) -> str:
    return f"{FOLDER}/a{id_[0]:04d}-g{id_[1]:04d}.json"
