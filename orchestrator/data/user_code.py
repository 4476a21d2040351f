"""A function of a user's own module by `package.module:name`, and what its code is known by.

It is looked for as Ray's workers look for it: on `sys.path`, and in the current directory. It knows nothing
of what the function is for.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from blake3 import blake3

from orchestrator.errors import ConfigError

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
    """The function called `name`. Its module is imported once per process, and anew where its file has
    changed since (a notebook's user may have fixed it); the modules that it imports are not.

    Raises `ConfigError`, which begins with `where`, if there is no such module or function, if the import
    fails, or if the module has no file to know it by.
    """
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


_lock = threading.Lock()
# Of each module that was loaded here, the digest of the file that its code came from.
_loaded: dict[str, str] = {}


def _import(name: str, where: str) -> tuple[ModuleType, str]:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        source = _digest(module, where)
        if _loaded.get(name, source) != source:
            module = importlib.reload(module)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{where}: {error}; it was looked for in {here} and on Python's path: start from the folder that "
            "the module lies in, or install it on every machine of the run"
        ) from error
    except Exception as error:  # whatever a user's module does
        raise ConfigError(f"{where}: module {name} cannot be imported:\n{shown(error)}") from error
    _loaded[name] = source
    return module, source


def _digest(module: ModuleType, where: str) -> str:
    origin = module.__spec__.origin if module.__spec__ is not None else None
    if origin is None or not os.path.isfile(origin):
        raise ConfigError(
            f"{where}: module {module.__name__} has no file of its own to know its code by; put the function "
            "into a module that every machine of the run can import"
        )
    with open(origin, "rb") as file:
        return blake3(file.read()).hexdigest()[:_DIGITS]


def shown(error: BaseException) -> str:
    """The traceback of an error in user code; of a long one the end."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"
