"""Reads folders of exported weights. Each has the file EXPORT, written last, which describes it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.points.points import newest_first
from orchestrator.errors import LaterFormatError
from orchestrator.json_form import decode
from orchestrator.records.points import FileEntry
from orchestrator.storage.at_once import at_once
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import unseal

MARKER = "EXPORT"
EXPORTS = "exports"  # the folder of a run for its automatic exports
FORMAT = 1  # of EXPORT
WHOLE, INCOMPLETE = "whole", "incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of EXPORT: the origin of the weights, and every other file with its size and digest.

    `dtype` is empty if numbers are as trained. `weights_digest` is the point's, of the weights before any
    `dtype`.
    """

    format: int
    run: str
    run_id: str
    point: str
    weights_digest: str
    dtype: str
    created: str
    files: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all its files except EXPORT."""
        return sum(entry.bytes for entry in self.files)


def read_marker(storage: Storage, folder: str) -> Exported | None:
    """Returns the EXPORT of `folder` in `storage`; None if there is none.

    Raises `SealError` or `OrchestratorError` if it is not as it was written, `LaterSealError` or
    `LaterFormatError` if a later version wrote it.
    """
    try:
        content = unseal(storage.read(f"{folder}/{MARKER}" if folder else MARKER))
    except FileNotFoundError:
        return None
    found = content.get("format") if isinstance(content, dict) else None
    if isinstance(found, int) and found > FORMAT:
        raise LaterFormatError(
            f"has format {found}, this version reads {FORMAT}; use the version that wrote it, or a later one"
        )
    return decode(Exported, content, MARKER)


def find_exports(storage: Storage) -> tuple[list[str], list[str]]:
    """Returns the points whose weights a run has copied to `exports/`, oldest first.

    The first list has the exports that are whole, the second those that are in progress or were cut off.
    """
    names = newest_first(storage.list(EXPORTS))[::-1]
    found = at_once(storage, lambda name: storage.exists(f"{EXPORTS}/{name}/{MARKER}"), names)
    whole = [name for name, is_whole in zip(names, found, strict=True) if is_whole]
    return whole, [name for name in names if name not in whole]


def export_states(storage: Storage) -> dict[str, str]:
    """Maps each point with a folder in `exports/` to whether that is whole or incomplete."""
    whole, incomplete = find_exports(storage)
    return dict.fromkeys(whole, WHOLE) | dict.fromkeys(incomplete, INCOMPLETE)
