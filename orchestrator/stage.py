"""Two names of the public API, `train` and `plan`, are also the names of stages: this lets a stage's package
be called as the function.

Python sets a package's attribute to the submodule when that is imported, so `orchestrator.train` would
otherwise be a function or a module depending on what was imported before.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class CallableStage(ModuleType):
    """A package that can be called as the function of `orchestrator.run` that bears its last name."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the function."""
        from orchestrator import run

        return getattr(run, self.__name__.rpartition(".")[2])(*arguments, **keywords)


def make_callable(module: str) -> None:
    """Makes the package `module` callable; it calls this when it is imported."""
    sys.modules[module].__class__ = CallableStage
