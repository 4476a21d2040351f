"""The formats by name: a file each, named after it, which gives it as `FORMAT`.

A format is added by its file, and by its name in `config.data_sections.FormatName`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from orchestrator.data.sources.file_parts import Cut
from orchestrator.data.sources.formats.base import Format

__all__ = ["Cut", "Format", "format_of"]


@cache
def format_of(name: str) -> Format:
    """The format of that name. Only then is its file loaded, and what that needs."""
    found: Format = import_module(f"{__name__}.{name}").FORMAT
    return found
