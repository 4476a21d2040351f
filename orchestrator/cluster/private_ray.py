"""Access to private parts of Ray, with a fallback, and a stand-in for handles of actors that we do without.

A part is looked up when it is used. If a new Ray has renamed, removed or changed it, its user takes the plain
way, and one sentence reports that. `ray_inventory` lists the parts. Ray is imported only when something is
looked up.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from orchestrator.errors import ResourceError

TESTED = "2.60"  # the Ray whose parts these are; pyproject.toml holds Ray there

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrivatePart:
    """Private names of Ray's which are useful only together, and what a run loses without them.

    `names`: "module:attribute.attribute", each with the function of Ray's that has to use it ("": any),
    because replacing an unused name changes nothing. `texts`: what a file of Ray's has to contain: the name
    of a variable that it reads. `shape`: whether the named objects still have the form that we expect.
    """

    names: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    shape: Callable[..., bool] = lambda *_: True
    lost: str

    def found(self) -> tuple[Any, ...] | None:
        """The named objects; None if this Ray lacks the part. This process's log reports that once."""
        gone = self.gone()
        if gone:
            self.tell(_log.warning)
            return None
        return tuple(_named(name) for name in self.names)

    def gone(self) -> str:
        """What this Ray lacks of the part; "" if nothing."""
        for name, user in self.names.items():
            try:
                _named(name)
                unused = user and _owner(name)[1] not in _words(inspect.unwrap(_named(user)).__code__)
            except (ImportError, AttributeError):
                return name
            if unused:
                return f"a use of {name} in {user}"
        if not self.shape(*map(_named, self.names)):
            return f"the former shape of {', '.join(self.names)}"
        for text, file in self.texts.items():
            if not _contains(file, text):
                return f"{text} in {file}"
        return ""

    def sentence(self) -> str:
        """A sentence on what is missing and what that means for the run; "" if nothing is."""
        import ray

        gone = self.gone()
        return gone and f"this Ray ({ray.__version__}) lacks {gone}, which Ray {TESTED} has: {self.lost}"

    def tell(self, say: Callable[[str], None]) -> None:
        """Says the sentence, once in this process."""
        sentence = self.sentence()
        if sentence and self not in _told:
            _told.add(self)
            say(sentence)

    def require(self) -> None:
        """Raises `ResourceError` if this Ray lacks the part. For parts without a plain way."""
        sentence = self.sentence()
        if sentence:
            raise ResourceError(
                f'{sentence}; install "ray[train,data]=={TESTED}.*" on all nodes', code="cluster.ray_version"
            )


_told: set[PrivatePart] = set()


def replace(part: PrivatePart, values: Sequence[Any]) -> Callable[[], None]:
    """Puts `values` in the places of the part's first names, if it is found. Returns a function that restores
    Ray's own.
    """
    places: list[tuple[Any, str, Any]] = []
    if part.found() is not None:
        for name, value in zip(part.names, values, strict=False):
            owner, last = _owner(name)
            places.append((owner, last, getattr(owner, last)))
            setattr(owner, last, value)

    def undo() -> None:
        for place in places:
            setattr(*place)

    return undo


def _owner(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, last = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return owner, last


def _named(name: str) -> Any:
    return getattr(*_owner(name))


def _words(code: CodeType) -> set[str]:
    """The global names and attributes that a function uses, including those of functions inside it."""
    inner = (_words(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _contains(file: str, text: str) -> bool:
    import ray

    path = Path(ray.__file__).parent / file
    return path.is_file() and text.encode() in path.read_bytes()


class NullActor:
    """An actor whose methods all return `answer`. It pickles.

    Ray's libraries start some actors for every run, each a process of 100 to 200 MB and 1 to 2 CPU seconds,
    and call them for features that we do not use. They get this in place of the actor's handle.
    """

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
