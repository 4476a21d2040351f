"""Imports functions that a configuration names as `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.text import visible

_NAMED, _FRAMES = 3, 5
# The places of code that is not the user's.
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


OPTIMIZER_MISSING = "optimizer.not_callable"
# The code of a field's error, by the beginning of the field. `model.frozen` has factories.
_CODES = {
    "model.": "model.factory_not_callable",
    "train.callbacks": "callback.not_callable",
    "train.objective": "objective.not_callable",
    "train.": OPTIMIZER_MISSING,
}


def require_functions(named: Mapping[str, str]) -> None:
    """Imports functions, by field of the configuration. Raises `ConfigError` for one that does not exist."""
    for field, path in named.items():
        _import(field, path, next(code for begin, code in _CODES.items() if field.startswith(begin)))


def _import(field: str, path: str, code: str, has_arguments: bool = False) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    search_current_folder()
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
    except Exception as error:  # a user's module may raise anything
        raise not_callable(field, path, code, error, has_arguments) from error


def find_function(
    field: str, path: str, code: str, num_positional: int = 0, arguments: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Imports the function at `path`, which the configuration's `field` names.

    Raises `ConfigError` with `code` if it does not exist, or if it does not take `num_positional` arguments
    and `arguments` by name.
    """
    function = _import(field, path, code, arguments is not None)
    try:
        with suppress(ValueError):  # some functions written in C have no signature
            inspect.signature(function).bind(*[None] * num_positional, **(arguments or {}))
    except Exception as error:  # not a function, or one of other arguments
        raise not_callable(field, path, code, error, has_arguments=arguments is not None) from error
    return function


def search_current_folder() -> None:
    """Lets imports find modules of the current folder. Ray's workers do this, a command does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def described(error: BaseException) -> str:
    """Returns class and text of an error of a user's function, and the lines of the user's code.

    The first line is the innermost one, the others are those that called it: of a function in another
    function, at most 5 in all. Lines of libraries are left out, unless all of them are.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE, "<frozen "))
    ]
    own = [frame for frame in frames if not _is_of_library(frame.filename)] or frames[-1:]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(own)][:_FRAMES]
    where = f" ({', called at '.join(places)})" if places else ""
    return visible(f"{type(error).__name__}: {error}{where}")


def _is_of_library(path: str) -> bool:
    return "site-packages" in path or path.startswith(_STANDARD)


def not_callable(
    field: str, path: str, code: str, error: Exception, has_arguments: bool = True
) -> ConfigError:
    """Builds the error for a function that cannot be called. `has_arguments`: there is a field for them."""
    is_missing = isinstance(error, ImportError | AttributeError)
    arguments = f", and in {field}_args the arguments that it takes" if has_arguments else ""
    close = near_paths(path, error) if is_missing else []
    meant = f"did you mean {' or '.join(close)}? Otherwise " if close else ""
    return ConfigError(
        f"{field}={path} cannot be {'imported' if is_missing else 'called'} ({error}); {meant}give "
        f"pkg.module:function of the current folder or PYTHONPATH{'' if is_missing else arguments}",
        code=code,
    )


def near_paths(path: str, error: Exception | None = None) -> list[str]:
    """Returns paths like `path`, `package.module:function`, that exist: the most similar first, at most 3.

    These are functions and classes of its module. If `error` says that the module itself is missing, they are
    modules beside it, which are not imported. Nothing is like a path whose module fails when it is imported.
    """
    module, _, name = path.partition(":")
    found = sys.modules.get(module)
    if found is not None and hasattr(found, name):
        return []
    if found is not None:
        names = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        return [f"{module}:{each}" for each in difflib.get_close_matches(name, names, n=_NAMED)]
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if not missing or not f"{module}.".startswith(f"{missing}."):
        return []
    package, _, last = missing.rpartition(".")
    folders = None if not package else getattr(sys.modules.get(package), "__path__", [])
    names = [each.name for each in pkgutil.iter_modules(folders)]
    rest = path.removeprefix(missing)
    around = f"{package}." if package else ""
    return [f"{around}{each}{rest}" for each in difflib.get_close_matches(last, names, n=_NAMED)]
