"""The user's own functions between a record and its tokens (data rule 25): found, identified, called.

It knows no file, no window and no tokens; who has the record says where it lies.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.data.sources.documents import (
    BadRecordError,
    Content,
    Conversation,
    Document,
    Prompted,
    document_of,
)
from orchestrator.errors import BadDocument, ConfigError, DataError, DataIdentityError
from orchestrator.planning.record_keys import document_seed

# A record that gives more documents than this is one of a function that does not end.
MAX_OUTPUTS = 1_000_000
# Of a document in a message so many characters are shown.
_SHOWN = 120
# What comes out: a document, None where a function dropped one, the reason where one was bad.
Output = Document | BadRecordError | None
_Fields = Mapping[str, Any]
_Function = Callable[[dict[str, Any], int], Any]
_HOW = "a transform takes (document, seed) and returns a document, several in a list or iterator, or None"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformRef:
    """A transform and what it is: `name` as in the configuration; `source` is the blake3 of its module's
    source, and what that module says in `VERSION`. Of what the module imports only `VERSION` can tell.
    """

    name: str
    source: str


def find_transform(name: str) -> TransformRef:
    """The transform `pkg.module:function` as it is now, imported as any module is: from `sys.path`, last of
    all from the current folder.

    Raises `ConfigError` if it cannot be imported, or is no function of two arguments.
    """
    return _imported(name)[0]


@cache
def _function(ref: TransformRef) -> _Function:
    """The transform that a run was started with. Raises `DataIdentityError` if it is another one here."""
    found, function = _imported(ref.name)
    if found != ref:
        raise DataIdentityError(
            f"data.transforms {ref.name} had source {ref.source} when the run was started, and has "
            f"{found.source} on this machine ({_file(ref.name.partition(':')[0])}); put the module back as "
            "it was: a run's transforms never change"
        )
    return function


def _imported(name: str) -> tuple[TransformRef, _Function]:
    """What the name is now, and its function, both of the same source."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # Ray's workers have it, a command has not
    try:
        source = Path(_file(module_name)).read_bytes()
        module = _executed(module_name, source)
        function = getattr(module, attribute)
        with suppress(ValueError):  # some that are written in C do not say their arguments
            inspect.signature(function).bind({}, 0)
    except Exception as error:
        raise ConfigError(
            f"data.transforms {name} cannot be used ({type(error).__name__}: {error}); {_HOW}. Give "
            "pkg.module:function, of a module that every machine of the run can import"
        ) from error
    version = getattr(module, "VERSION", None)
    said = "" if version is None else f" VERSION {version}"
    return TransformRef(name=name, source=blake3(source).hexdigest() + said), function


def _file(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module!r}")
    if spec.origin is None or not os.path.isfile(spec.origin):
        raise ImportError(f"module {module} has no file, so nobody could say whether it is the same later")
    return spec.origin


# The modules that were executed here, and of which source.
_EXECUTED: dict[str, tuple[bytes, ModuleType]] = {}


def _executed(name: str, source: bytes) -> ModuleType:
    """The module as this source makes it. One that somebody imported earlier may be an older one, which was
    edited since, as in a notebook: that stays theirs.
    """
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} has a file"
    if not str(spec.origin).endswith(".py"):
        return importlib.import_module(name)
    last_source, module = _EXECUTED.get(name, (None, None))
    if module is not None and last_source == source:
        return module
    new = importlib.util.module_from_spec(spec)
    if sys.modules.setdefault(name, new) is module:
        sys.modules[name] = new
    exec(compile(source, str(spec.origin), "exec", dont_inherit=True), new.__dict__)  # noqa: S102  an import
    around, _, last = name.rpartition(".")
    if around and sys.modules[name] is new:
        setattr(sys.modules[around], last, new)
    _EXECUTED[name] = source, new
    return new


class Transforms:
    """A source's transforms, one after the other. Not for several threads."""

    def __init__(self, refs: Sequence[TransformRef]) -> None:
        """Raises `DataIdentityError` or `ConfigError` where one is not as it was, or not here."""
        self._functions = [(ref.name, _function(ref)) for ref in refs]

    def outputs(self, document: Document, seed: int) -> list[Output]:
        """What becomes of a document, in order; `seed` is its record's. Each function gets a `dict` of the
        document's fields (`fields_of`) and a seed, and what it returns goes to the next.

        Raises `DataError` for any exception of theirs but `BadDocument`, with their traceback, and for what
        is no document.
        """
        kind = _kind(document)
        found: list[_Fields | BadRecordError | None] = [fields_of(document)]
        for number, (name, function) in enumerate(self._functions):
            after: list[_Fields | BadRecordError | None] = []
            at = 0
            for each in found:
                if isinstance(each, Mapping):
                    after += _called(name, function, each, document_seed(seed, number, at))
                    at += 1
                else:
                    after.append(each)
            found = after
            if len(found) > MAX_OUTPUTS:
                raise _too_many(name)
        name = self._functions[-1][0]
        return [_document(name, each, kind) if isinstance(each, Mapping) else each for each in found]


def fields_of(document: Document) -> dict[str, Any]:
    """A document as transforms get it, whatever its source calls these fields: `text`; `prompt` and
    `completion`; `messages`, and `tools` if there are any.
    """
    if isinstance(document, str):
        return {"text": document}
    if isinstance(document, Prompted):
        return {"prompt": document.prompt, "completion": document.completion}
    tools = {} if document.tools is None else {"tools": document.tools}
    return {"messages": list(document.messages), **tools}


def utf8_size(document: Document) -> int:
    """The UTF-8 bytes of a text; 0 for any other document."""
    if not isinstance(document, str):
        return 0
    return len(document) if document.isascii() else len(document.encode())


def first_difference(one: Sequence[Output], other: Sequence[Output]) -> str | None:
    """What two results of one record have not in common, for people; None if they are the same."""
    if len(one) != len(other):
        return f"{len(one)} documents, and {len(other)}"
    for number, pair in enumerate(zip(one, other, strict=True)):
        a, b = (str(each) if isinstance(each, BadRecordError) else each for each in pair)
        if a != b:
            return f"document {number} is {_short(a)}, and {_short(b)}"
    return None


def _short(value: object) -> str:
    text = "dropped" if value is None else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _kind(document: Document) -> str:
    return "text" if isinstance(document, str) else "prompt" if isinstance(document, Prompted) else "chat"


def _called(
    name: str, function: _Function, fields: _Fields, seed: int
) -> list[_Fields | BadRecordError | None]:
    """What one call makes of one document. One that yields nothing has dropped it; one that finds it bad
    while it yields has made nothing of it.
    """
    try:
        made = function(dict(fields), seed)
        if made is None or isinstance(made, Mapping):
            return [made]
        several = list(islice(made, MAX_OUTPUTS + 1)) if _is_several(made) else [made]
    except BadDocument as error:
        return [BadRecordError(f"{name} says: {error}")]
    except Exception as error:
        raise DataError(_failed(name, error)) from error
    if len(several) > MAX_OUTPUTS:
        raise _too_many(name)
    for each in several:
        if not isinstance(each, Mapping):
            raise DataError(
                f"data.transforms {name} returned a {type(each).__name__} where a document is expected, "
                f"which is a dict of its fields; {_HOW}"
            )
    return several or [None]


def _is_several(made: object) -> bool:
    return isinstance(made, Iterable) and not isinstance(made, str | bytes)


def _document(name: str, fields: _Fields, kind: str) -> Document:
    """The document of what the last function returned."""
    try:
        document = document_of(fields, Content(kind=kind))
        _require_unicode(document)
    except (BadRecordError, ValueError, TypeError) as error:
        raise DataError(
            f"data.transforms {name} returned no document of content {kind}: {error}; {_HOW}"
        ) from error
    return document


def _require_unicode(document: Document) -> None:
    """Raises what Python raises for texts without a UTF-8 form, and for messages that are no JSON."""
    for text in _texts(document):
        if not text.isascii():
            text.encode()
    if isinstance(document, Conversation):
        orjson.dumps([document.messages, document.tools])


def _texts(document: Document) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, Prompted):
        yield from (document.prompt, document.completion)


def _too_many(name: str) -> DataError:
    return DataError(
        f"data.transforms {name} gave more than {MAX_OUTPUTS:,} documents of a record; does it end?"
    )


def _failed(name: str, error: Exception) -> str:
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, own))
    return (
        f"data.transforms {name} raised {type(error).__name__}: {error}. Repair it in a new run (another "
        "run.name; a run's transforms never change), or let it raise orchestrator.BadDocument for documents "
        f"that are to be skipped\n{trace.rstrip()}"
    )
