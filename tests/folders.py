"""What a folder holds."""

from __future__ import annotations

from pathlib import Path


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
