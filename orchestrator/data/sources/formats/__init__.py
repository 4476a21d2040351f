"""The formats by name: those of this package, those of installed packages, and a user's own.

A format of this package is one of the `FORMATS` of the module of its name here, or of the module that
`_MODULES` names. An installed package adds one by an entry point of the group `orchestrator.formats`. Any
other name is `package.module:Format`, a class of a module that every machine of the run can import.
docs/howto/formats.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from orchestrator.data.common.user_code import UserCode, load
from orchestrator.data.sources.formats.base import Format
from orchestrator.data.sources.lists.file_rows import Cut
from orchestrator.errors import ConfigError, DataIdentityError

__all__ = ["Cut", "Format", "UserFormat", "format_of", "is_builtin", "user_format", "user_name"]

GROUP = "orchestrator.formats"
# formats that share the module of another one
_MODULES = {"jsonl": "text", "lines": "text", "csv": "text", "tsv": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class UserFormat:
    """What a list of files records of a format that is not this package's.

    `code` is the identity of its module (`user_code.UserCode.identity`). `cut` and `unit` are those of the
    class. Processes that must not import user code read them here.
    """

    code: str
    cut: str
    unit: str

    def to_json(self) -> dict[str, str]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> UserFormat:
        """The inverse of `to_json`."""
        return cls(code=str(found["code"]), cut=str(found["cut"]), unit=str(found["unit"]))


def is_builtin(name: str) -> bool:
    """Whether the format is one of this package."""
    from orchestrator.config.sections import FORMAT_NAMES

    return name in FORMAT_NAMES


def user_name(name: str) -> str:
    """The `package.module:Format` of a format that is not this package's. Imports nothing.

    Raises `ConfigError` if no installed package adds a format of this name.
    """
    if ":" in name:
        return name
    found = sorted({entry.value for entry in entry_points(group=GROUP) if entry.name == name})
    if len(found) > 1:
        raise ConfigError(
            f"format {name} is added by several installed packages: {', '.join(found)}; uninstall all but "
            "one, or name the class itself",
            code="user_code.several_formats",
        )
    if not found:
        raise ConfigError(
            f"no installed package has the format {name} (an entry point of the group {GROUP}); install it "
            "on every machine of the run",
            code="user_code.missing_format",
        )
    return found[0]


def format_of(name: str) -> Format:
    """The format of that name. Its module and its dependencies are loaded only now.

    Raises `ConfigError` for a user's format that cannot be loaded, and `RefusedError` for one in a process
    that only reads runs.
    """
    return _builtin(name) if is_builtin(name) else _made(_loaded(name), name)


def user_format(name: str) -> UserFormat | None:
    """What a list of files records of the format; None for one of this package. Raises as `format_of`."""
    if is_builtin(name):
        return None
    found = _loaded(name)
    made = _made(found, name)
    return UserFormat(code=found.identity, cut=made.cut.value, unit=made.unit)


@cache
def recorded_format(name: str, recorded: UserFormat | None) -> Format:
    """The format that a list of files was made with.

    Raises as `format_of`, and `DataIdentityError` if the code of a user's format differs here.
    """
    if recorded is None:
        return format_of(name)
    found = _loaded(name)
    if found.identity != recorded.code:
        raise DataIdentityError(
            f"format {name} had {recorded.code} when its files were listed, and has {found.identity} here; "
            "restore the module, or start a new run (another run.name) with the changed one",
            code="resume.changed_format",
        )
    return _made(found, name)


@cache
def _builtin(name: str) -> Format:
    formats: tuple[Format, ...] = import_module(f"{__name__}.{_MODULES.get(name, name)}").FORMATS
    return next(each for each in formats if each.name == name)


def _loaded(name: str) -> UserCode:
    return load(user_name(name), f"format {name}")


_formats: dict[tuple[str, str], Format] = {}  # by name and code


def _made(code: UserCode, name: str) -> Format:
    if (known := _formats.get((name, code.source))) is not None:
        return known
    try:
        made = code.function()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"format {name}: {code.name}() failed: {type(error).__name__}: {error}; it is called without "
            "arguments",
            code="user_code.format_failed",
        ) from error
    if not isinstance(made, Format):
        raise ConfigError(
            f"format {name}: {code.name}() is a {type(made).__name__}, expected a subclass of "
            "orchestrator.RecordFormat",
            code="user_code.no_format",
        )
    if not made.has_files or made.has_index:
        raise ConfigError(
            f"format {name}: has_files is {made.has_files} and has_index is {made.has_index}, expected True "
            "and False; only formats of this package can have others",
            code="user_code.no_format",
        )
    made.name = name
    _formats[name, code.source] = made
    return made
