"""A stand-in for Ray actors that we do without. Ray's libraries start some for every run, each a process of
100 to 200 MB and 1 to 2 CPU seconds, and call them for things that we never ask for.

It is what those libraries get in place of the actor's handle. Ray is imported when it is used only.
"""

from __future__ import annotations

from typing import Any


class NullActor:
    """Every call of every method is answered with `answer`. It pickles."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> NullActor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    def remote(self, *_: Any, **__: Any) -> Any:
        """As an actor's method answers."""
        import ray

        return ray.put(self._answer)
