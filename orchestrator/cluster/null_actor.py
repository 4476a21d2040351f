"""A stand-in for handles of Ray actors that we do without.

Ray's libraries start some for every run, each a process of 100 to 200 MB and 1 to 2 CPU seconds, and call
them for features that we do not use. They get this in place of the actor's handle. Ray is imported only on
use.
"""

from __future__ import annotations

from typing import Any


class NullActor:
    """An actor whose methods all return `answer`. It pickles."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> NullActor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def remote(self, *_: Any, **__: Any) -> Any:
        """Answers as an actor's method does."""
        import ray

        return ray.put(self._answer)
