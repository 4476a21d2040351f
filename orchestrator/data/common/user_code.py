"""Loads a function from a user's module, named `package.module:name`, with the identity of its code.

Modules are searched for as Ray's workers do: on `sys.path` and in the current directory. A process that only
reads runs (the dashboard server, `status`, `audit`) is `reading_only`: it never imports a name that a run's
folder holds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from blake3 import blake3

from orchestrator.errors import ConfigError, RefusedError
from orchestrator.user_function import near_paths, search_current_folder

# At most this many characters of a traceback, and digits of a digest, are shown.
_SHOWN, _DIGITS = 2000, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCode:
    """A function, the blake3 of its module's file, and the module's `VERSION` (None: it has none)."""

    name: str
    function: Callable[..., Any]
    source: str
    version: str | None

    @property
    def identity(self) -> str:
        """The code's identity, for messages and comparisons."""
        version = "" if self.version is None else f", VERSION {self.version}"
        return f"module source {self.source}{version}"


def load(name: str, where: str) -> UserCode:
    """Loads the function `name` from its module's current file, so that the executed code is the identified
    code.

    If another module imported the same module earlier, that import stays as it is: the file may have been
    edited since, as in a notebook. The modules that it imports are not checked.

    Raises `ConfigError`, whose message begins with `where`, if there is no such module or function, if the
    import fails, or if the module has no file to identify it by. Raises `RefusedError` if this process is
    `reading_only`.
    """
    if _reading:
        raise RefusedError(
            f"{where}: this process only reads runs and imports no code that a run names; `orchestrator plan "
            "CONFIG` and `orchestrator train CONFIG` run it",
            code="user_code.reading_only",
        )
    module_name, _, function_name = name.partition(":")
    with _lock:
        module, source = _import(module_name, where, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: module {module_name} ({module.__file__}) has no function `{function_name}`; "
            f"{_meant(near_paths(name))}give package.module:function",
            code="user_code.missing_function",
        )
    version = getattr(module, "VERSION", None)
    return UserCode(
        name=name, function=function, source=source, version=None if version is None else str(version)
    )


# One entry for each open `reading_only` context of this process.
_reading: list[None] = []


@contextmanager
def reading_only() -> Iterator[None]:
    """Inside, `load` raises in all threads of this process, and imports do not search the current folder."""
    before, here = sys.path, ""
    with suppress(FileNotFoundError):  # it was deleted
        here = os.getcwd()
    sys.path = [path for path in before if path and os.path.realpath(path) != here]
    _reading.append(None)
    try:
        yield
    finally:
        _reading.pop()
        sys.path = before


def is_reading_only() -> bool:
    """Whether a `reading_only` context is open. Names in a run's configuration are not looked up then."""
    return bool(_reading)


_lock = threading.Lock()
# The modules executed here, each with the content of its file at that time.
_executed: dict[str, tuple[bytes, ModuleType]] = {}


def _meant(close: Sequence[str]) -> str:
    return f"did you mean {' or '.join(close)}? Otherwise " if close else ""


def _import(name: str, where: str, path: str) -> tuple[ModuleType, str]:
    search_current_folder()
    try:
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if spec.origin is None or not os.path.isfile(spec.origin):
            raise ConfigError(
                f"{where}: module {name} has no source file that identifies its code; put the function into "
                "a module that every machine of the run can import",
                code="user_code.module_without_file",
            )
        with open(spec.origin, "rb") as file:
            content = file.read()
        return _module(spec, content), blake3(content).hexdigest()[:_DIGITS]
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: {error}; {_meant(near_paths(path, error))}searched in {os.getcwd()} and on Python's "
            "path: start from the module's folder, or install the module on every machine of the run",
            code="user_code.missing_module",
        ) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(
            f"{where}: module {name} cannot be imported:\n{shown(error)}", code="user_code.import_failed"
        ) from error


def _module(spec: ModuleSpec, content: bytes) -> ModuleType:
    """The module, executed from this content of its file."""
    name = spec.name
    if not str(spec.origin).endswith(".py"):
        return importlib.import_module(name)
    before, module = _executed.get(name, (None, None))
    if module is not None and before == content:
        return module
    new = importlib.util.module_from_spec(spec)
    if sys.modules.setdefault(name, new) is module:
        sys.modules[name] = new
    try:
        exec(compile(content, str(spec.origin), "exec", dont_inherit=True), new.__dict__)  # noqa: S102
    except BaseException:
        if sys.modules.get(name) is new:
            del sys.modules[name]
        raise
    around, _, last = name.rpartition(".")
    if around and sys.modules[name] is new:
        setattr(sys.modules[around], last, new)
    _executed[name] = content, new
    return new


def shown(error: BaseException) -> str:
    """The traceback of an error in user code; only the end of a long one."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"
