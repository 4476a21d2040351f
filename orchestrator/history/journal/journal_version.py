"""The version number of the format of a journal's lines.

Each line has it, and so does every part of a journal: a segment, a piece of one, its last lines. A reader
checks it first, before any other field.
"""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.errors import LaterFormatError, OrchestratorError, StorageError

FORMAT = 2  # of lines; older ones have no number
FORMATS = (1, FORMAT)
DAMAGED = "journal.damaged"  # the code of the error for a line that the journal did not write so


class LaterLineError(StorageError):
    """A later version wrote the line: nothing is torn or damaged, and nothing was decided from it."""

    code = LaterFormatError.code


def require_known(line: dict[str, Any], where: str = "") -> None:
    """Raises `LaterLineError` with both numbers for a line of a later format, which `where` names.

    Raises `OrchestratorError` if its format is no number of a format.
    """
    found = line.get("format", 1)
    if type(found) is not int or found < 1:
        raise OrchestratorError(f"its format is {found!r}", code=DAMAGED)
    if found not in FORMATS:
        raise LaterLineError(
            f"{where}{' ' if where else ''}has format {found}, this version reads "
            f"{', '.join(map(str, FORMATS))}; use the version that wrote it, or a later one"
        )


def require_known_begin(path: str, data: bytes) -> None:
    """Raises `LaterLineError` if the first line of a segment, or of a piece, is of a later format.

    Ignores a line that is incomplete, or no line of a journal: reading it reports the error.
    """
    first, end, _ = data.partition(b"\n")
    try:
        line = orjson.loads(first) if end else {}
        require_known(line if isinstance(line, dict) else {}, f"{path} line 1")
    except (orjson.JSONDecodeError, OrchestratorError) as error:
        if isinstance(error, LaterLineError):
            raise
