"""The formats by name. Each is a module of that name that defines `FORMAT`.

To add a format, add its module, and its name to `config.data_sections.FormatName`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from orchestrator.data.sources.formats.base import Format
from orchestrator.data.sources.lists.file_parts import Cut

__all__ = ["Cut", "Format", "format_of"]


@cache
def format_of(name: str) -> Format:
    """The format of that name. Its module and its dependencies are loaded only now."""
    found: Format = import_module(f"{__name__}.{name}").FORMAT
    return found
