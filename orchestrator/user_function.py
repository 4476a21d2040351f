"""Imports functions that a configuration names as `package.module:function`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import ConfigError

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def find_function(
    field: str, path: str, code: str, num_positional: int = 0, arguments: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Imports the function at `path`, which the configuration's `field` names.

    Raises `ConfigError` with `code` if it does not exist, or if it does not take `num_positional` arguments
    and `arguments` by name.
    """
    module, _, name = path.partition(":")
    search_current_folder()
    try:
        function = getattr(importlib.import_module(module), name)
        with suppress(ValueError):  # some functions written in C have no signature
            inspect.signature(function).bind(*[None] * num_positional, **(arguments or {}))
    except Exception as error:  # a user's module may raise anything
        raise not_callable(field, path, code, error, has_arguments=arguments is not None) from error
    return function  # type: ignore[no-any-return]


def search_current_folder() -> None:
    """Lets imports find modules of the current folder. Ray's workers do this, a command does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def described(error: BaseException) -> str:
    """Returns class and text of an error of a user's function, and the innermost line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    own = [frame for frame in own if not frame.filename.startswith(_PACKAGE)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def not_callable(
    field: str, path: str, code: str, error: Exception, has_arguments: bool = True
) -> ConfigError:
    """Builds the error for a function that cannot be called. `has_arguments`: there is a field for them."""
    is_missing = isinstance(error, ImportError | AttributeError)
    arguments = f", and in {field}_args the arguments that it takes" if has_arguments else ""
    return ConfigError(
        f"{field}={path} cannot be {'imported' if is_missing else 'called'} ({error}); give "
        f"pkg.module:function of the current folder or PYTHONPATH{'' if is_missing else arguments}",
        code=code,
    )
