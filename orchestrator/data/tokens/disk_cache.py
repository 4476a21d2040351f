"""A cache of facts about tokenizers that take seconds to compute and never change, keyed by content.

It is optional: an entry that is missing, damaged or cannot be written is computed again. A run does not
depend on it, because it freezes its choices in its own folder.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TypeVar

import orjson
from blake3 import blake3

from orchestrator.errors import OrchestratorError
from orchestrator.json_form import decode, encode
from orchestrator.storage.home import cache_folder

Record = TypeVar("Record")
FOLDER = "ORCHESTRATOR_CACHE_DIR"
"""Environment variable: a folder instead of the user's default; empty: no cache."""


def remembered(kind: type[Record], content: list[object], find: Callable[[], Record]) -> Record:
    """The result of `find` (a flat dataclass), from the cache if an earlier process stored it completely.

    `content` holds everything that the result depends on, as JSON values.
    """
    folder = _folder()
    if folder is None:
        return find()
    key = blake3(orjson.dumps([kind.__name__, content], option=orjson.OPT_SORT_KEYS)).hexdigest()
    path = folder / f"{kind.__name__}-{key}.json"
    if path not in _held:
        while len(_held) >= _NUM_HELD:
            _held.pop(next(iter(_held)), None)
        _held[path] = _from_file(kind, path, find)
    return typing.cast(Record, _held[path])


# This process's most recent results, also if nothing can be written.
_held: dict[Path, object] = {}
_NUM_HELD = 16


def _from_file(kind: type[Record], path: Path, find: Callable[[], Record]) -> Record:
    try:
        kept = orjson.loads(path.read_bytes())
        if kept["check"] == _check(kept["value"]):
            return decode(kind, kept["value"])
    except (OSError, ValueError, KeyError, TypeError, OrchestratorError):
        pass  # missing or damaged: computed and written below
    found = find()
    value = encode(found)
    _write(path, orjson.dumps({"check": _check(value), "value": value}))
    return found


def _check(value: object) -> str:
    return blake3(orjson.dumps(value)).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Writes the file completely or not at all. A folder that is not writable is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
    except OSError:
        return


def _folder() -> Path | None:
    asked = os.environ.get(FOLDER)
    if asked is not None:
        return Path(asked) if asked else None
    return cache_folder()
