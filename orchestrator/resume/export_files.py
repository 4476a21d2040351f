"""Folders of exported weights, as they lie in storage: EXPORT, which is written last and says what they are.

It writes nothing and loads no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import LaterFormatError
from orchestrator.json_form import decode
from orchestrator.records.points import FileEntry
from orchestrator.resume.points import newest_first
from orchestrator.storage.at_once import at_once
from orchestrator.storage.files import Storage
from orchestrator.storage.sealed import unseal

MARKER = "EXPORT"
EXPORTS = "exports"  # the folder of a run in which those lie that it makes by itself
FORMAT = 1  # of EXPORT
WHOLE, INCOMPLETE = "whole", "incomplete"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The content of EXPORT: which weights these are, and every other file with its size and digest. `dtype`
    is empty where numbers are as they were trained; `weights_digest` is the point's, of the weights before
    any `dtype`.
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
        """Size of all its files but EXPORT."""
        return sum(entry.bytes for entry in self.files)


def read_marker(storage: Storage, folder: str) -> Exported | None:
    """What `folder` of `storage` says to be; None without EXPORT. Raises `SealError` or `OrchestratorError`
    if that is not as it was written, `LaterSealError` or `LaterFormatError` if a later version wrote it.
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
    """The points whose weights a run has copied to `exports/`, oldest first: those that are whole, and those
    that are under way or were cut off.
    """
    names = newest_first(storage.list(EXPORTS))[::-1]
    found = at_once(storage, lambda name: storage.exists(f"{EXPORTS}/{name}/{MARKER}"), names)
    whole = [name for name, is_whole in zip(names, found, strict=True) if is_whole]
    return whole, [name for name in names if name not in whole]


def export_states(storage: Storage) -> dict[str, str]:
    """Of each point that has a folder in `exports/` whether that is whole or incomplete."""
    whole, incomplete = find_exports(storage)
    return dict.fromkeys(whole, WHOLE) | dict.fromkeys(incomplete, INCOMPLETE)
