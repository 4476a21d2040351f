"""What takes seconds to find out of a tokenizer and never changes, remembered between processes, by content.

It is never needed: what is missing, damaged or cannot be written is found out anew. Nothing in it is a run's:
that freezes its choices in its own folder.
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
"""Environment variable: another folder than the user's usual one; empty: nothing is remembered."""


def remembered(kind: type[Record], content: list[object], find: Callable[[], Record]) -> Record:
    """What `find` says (a flat dataclass), from the file that an earlier process left for the same `content`
    (JSON values: all that it depends on), if that is whole.
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


# What this process has asked for last, also where nothing can be written.
_held: dict[Path, object] = {}
_NUM_HELD = 16


def _from_file(kind: type[Record], path: Path, find: Callable[[], Record]) -> Record:
    try:
        kept = orjson.loads(path.read_bytes())
        if kept["check"] == _check(kept["value"]):
            return decode(kind, kept["value"])
    except (OSError, ValueError, KeyError, TypeError, OrchestratorError):
        pass  # not there, or damaged: found out below, and written anew
    found = find()
    value = encode(found)
    _write(path, orjson.dumps({"check": _check(value), "value": value}))
    return found


def _check(value: object) -> str:
    return blake3(orjson.dumps(value)).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all; a folder that cannot be written to is no fault."""
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
