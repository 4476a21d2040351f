"""How a private part of Ray is reached: it is looked up when it is used, and where a new Ray has renamed,
removed or changed it, its user goes the plain way, and one sentence says so.

Which parts there are stands in `ray_inventory`. Ray is imported only when something is looked up.
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
    """Private names of Ray's which are of use together only, and what a run loses without them.

    `names`: "module:attribute.attribute", each with the function of Ray's that has to use it ("": any), for
    replacing what nobody uses changes nothing. `texts`: what a file of Ray's has to contain: the name of a
    variable that it reads. `shape`: whether the named objects are still what we take them for.
    """

    names: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    shape: Callable[..., bool] = lambda *_: True
    lost: str

    def found(self) -> tuple[Any, ...] | None:
        """The named objects; None where this Ray lacks the part, which this process's log says once."""
        gone = self.gone()
        if gone:
            self.tell(_log.warning)
            return None
        return tuple(_named(name) for name in self.names)

    def gone(self) -> str:
        """What this Ray lacks of it; "" if nothing."""
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
        """What is gone, and what it means for the run; "" where nothing is."""
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
        """Raises `ResourceError` where this Ray lacks the part: for what has no plain way."""
        sentence = self.sentence()
        if sentence:
            raise ResourceError(f'{sentence}; install "ray[train,data]=={TESTED}.*" on all nodes')


_told: set[PrivatePart] = set()


def replace(part: PrivatePart, values: Sequence[Any]) -> Callable[[], None]:
    """Puts `values` in the places of the part's first names, where it is found; the function that is returned
    puts Ray's own back.
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
    """The global names and attributes that a function uses, those of functions inside it, too."""
    inner = (_words(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _contains(file: str, text: str) -> bool:
    import ray

    path = Path(ray.__file__).parent / file
    return path.is_file() and text.encode() in path.read_bytes()
