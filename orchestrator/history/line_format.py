"""The number of the form of a journal's lines. Each line has it, and so has whatever part of a journal
somebody holds: a segment, a piece of one, its last lines.

It knows no kind and no file. Whoever reads a line asks here first, before it looks at any other field.
"""

from __future__ import annotations

from typing import Any

import orjson

from orchestrator.errors import OrchestratorError, StorageError

FORMAT = 2  # of lines; older ones have no number
FORMATS = (1, FORMAT)


class LaterLineError(StorageError):
    """A later version wrote the line: nothing is torn or damaged, and nothing was decided from it."""


def require_known(line: dict[str, Any], where: str = "") -> None:
    """Raise `LaterLineError` with both numbers for a line of a later format, which `where` names,
    `OrchestratorError` if what it has there is no number of a format.
    """
    found = line.get("format", 1)
    if type(found) is not int or found < 1:
        raise OrchestratorError(f"its format is {found!r}")
    if found not in FORMATS:
        raise LaterLineError(
            f"{where}{' ' if where else ''}has format {found}, this version reads "
            f"{', '.join(map(str, FORMATS))}; use the version that wrote it, or a later one"
        )


def require_known_begin(path: str, data: bytes) -> None:
    """Raise `LaterLineError` if the first line of a segment, or of a piece, is of a later format. One that is
    not whole, or no line of a journal, says nothing: reading it tells what is wrong.
    """
    first, end, _ = data.partition(b"\n")
    try:
        line = orjson.loads(first) if end else {}
        require_known(line if isinstance(line, dict) else {}, f"{path} line 1")
    except (orjson.JSONDecodeError, OrchestratorError) as error:
        if isinstance(error, LaterLineError):
            raise
