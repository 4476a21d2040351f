"""A function of a user's own module by `package.module:name`, and what its code is known by.

It is looked for as Ray's workers look for it: on `sys.path`, and in the current directory. It knows nothing
of what the function is for. A process that only reads runs (the page's server, `status`, `audit`) is
`reading_only`: a name that a run's folder holds is never imported there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from blake3 import blake3

from orchestrator.errors import ConfigError, RefusedError

# Of a traceback, and of a digest, so much is shown.
_SHOWN, _DIGITS = 2000, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCode:
    """A function, the blake3 of the file of its module, and that module's `VERSION` (None: it has none)."""

    name: str
    function: Callable[..., Any]
    source: str
    version: str | None

    @property
    def identity(self) -> str:
        """What the code is known by, for people and for comparing."""
        version = "" if self.version is None else f", VERSION {self.version}"
        return f"module source {self.source}{version}"


def load(name: str, where: str) -> UserCode:
    """The function called `name`, of its module as the file is now: what is known is what is executed. A
    module that somebody imported earlier stays theirs, it may have been edited since, as in a notebook; the
    modules that it imports are not looked at.

    Raises `ConfigError`, which begins with `where`, if there is no such module or function, if the import
    fails, or if the module has no file to know it by; `RefusedError` where this process is `reading_only`.
    """
    if _reading:
        raise RefusedError(
            f"{where}: this process only reads runs and imports no code that a run names; `orchestrator plan "
            "CONFIG` and `orchestrator train CONFIG` run it",
            code="user_code.reading_only",
        )
    module_name, _, function_name = name.partition(":")
    with _lock:
        module, source = _import(module_name, where)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"{where}: module {module_name} ({module.__file__}) has no function `{function_name}`; give "
            "package.module:function"
        )
    version = getattr(module, "VERSION", None)
    return UserCode(
        name=name, function=function, source=source, version=None if version is None else str(version)
    )


# How many `reading_only` contexts are open in this process.
_reading: list[None] = []


@contextmanager
def reading_only() -> Iterator[None]:
    """Inside, `load` refuses in all threads of this process, and no import looks into the current folder."""
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
    """Whether a `reading_only` context is open: names in a run's configuration are not looked up then."""
    return bool(_reading)


_lock = threading.Lock()
# The modules that were executed here, and of which content of their files.
_executed: dict[str, tuple[bytes, ModuleType]] = {}


def _import(name: str, where: str) -> tuple[ModuleType, str]:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # Ray's workers have it, a command has not
    try:
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        if spec.origin is None or not os.path.isfile(spec.origin):
            raise ConfigError(
                f"{where}: module {name} has no file of its own to know its code by; put the function into a "
                "module that every machine of the run can import"
            )
        with open(spec.origin, "rb") as file:
            content = file.read()
        return _module(spec, content), blake3(content).hexdigest()[:_DIGITS]
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: {error}; it was looked for in {here} and on Python's path: start from the folder that "
            "the module lies in, or install it on every machine of the run"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's module does
        raise ConfigError(f"{where}: module {name} cannot be imported:\n{shown(error)}") from error


def _module(spec: ModuleSpec, content: bytes) -> ModuleType:
    """The module as this content of its file makes it."""
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
    """The traceback of an error in user code; of a long one the end."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"
