"""Finds, identifies and calls the user's functions between a record and its tokens (data rule 25).

The caller adds the place of the record to errors.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any

import orjson

from orchestrator.data.common.settings import TransformRef
from orchestrator.data.common.user_code import UserCode, load
from orchestrator.data.sources.records.content import (
    KWARGS_FIELD,
    TOOLS_FIELD,
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    Preference,
    Prompted,
    bare,
)
from orchestrator.data.sources.records.documents import document_of
from orchestrator.data.sources.records.plain_values import own_copy
from orchestrator.errors import BadDocument, ConfigError, DataError, DataIdentityError
from orchestrator.planning.order import document_seed
from orchestrator.records.steps import PREFERENCE

# A function that gives more documents than this for a record is assumed not to end.
MAX_OUTPUTS = 1_000_000
# The number of characters of a document shown in a message.
_SHOWN = 120
# A result: a document, None if a function dropped it, the reason if it was bad.
Output = Document | BadRecordError | None
_Fields = Mapping[str, Any]
_Function = Callable[[dict[str, Any], int], Any]
_WRONG_RESULT = "user_code.output"
_HOW = "a transform takes (document, seed) and returns a document, several in a list or iterator, or None"


def find_transform(name: str) -> TransformRef:
    """The transform `pkg.module:function` with its current code (`user_code.load`).

    Raises `ConfigError` if it cannot be imported, or is no function of two arguments.
    """
    return TransformRef(name=name, source=_loaded(name).identity)


@cache
def _function(ref: TransformRef) -> _Function:
    """The transform that a run was started with. Raises `DataIdentityError` if its code differs here."""
    found = _loaded(ref.name)
    if found.identity != ref.source:
        where = inspect.getsourcefile(found.function) or ref.name
        raise DataIdentityError(
            f"data.transforms {ref.name} had {ref.source} when the run was started, and has "
            f"{found.identity} on this machine ({where}); restore the module: the transforms of a run cannot "
            "change",
            code="resume.changed_transform",
        )
    return found.function


def _loaded(name: str) -> UserCode:
    found = load(name, f"data.transforms {name}")
    with suppress(ValueError):  # some functions in C have no signature
        try:
            inspect.signature(found.function).bind({}, 0)
        except TypeError as error:
            text = f"data.transforms {name}: {error}; {_HOW}"
            raise ConfigError(text, code="user_code.signature") from error
    return found


class Transforms:
    """A source's transforms, applied in order. Not thread-safe."""

    def __init__(self, refs: Sequence[TransformRef]) -> None:
        """Raises `DataIdentityError` or `ConfigError` if one has changed, or is missing."""
        self._functions = [(ref.name, _function(ref)) for ref in refs]

    def outputs(self, document: Document | Described, seed: int) -> list[Output]:
        """The results for a document, in order. `seed` is that of its record.

        Each function receives a `dict` of the document's fields (`fields_of`) and a seed, and its results are
        passed to the next. Raises `DataError` for any exception of a function except `BadDocument`, with its
        traceback, and for a result that is no document.
        """
        content = _content(bare(document))
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
        return [_document(name, each, content) if isinstance(each, Mapping) else each for each in found]


def fields_of(document: Document | Described) -> dict[str, Any]:
    """The fields of a document for transforms, whatever the names in its source.

    They are `text`; `prompt` and `completion`; `messages`, and `tools` if there are any; or `prompt`,
    `chosen` and `rejected`, and `tools` if these are messages. Additional fields have the source's names.
    """
    if isinstance(document, Described):
        return {**document.fields, **fields_of(document.document)}
    if isinstance(document, str):
        return {"text": document}
    if isinstance(document, Prompted):
        return {"prompt": document.prompt, "completion": document.completion}
    if isinstance(document, Preference):
        return _fields_of_preference(document)
    return {"messages": list(document.messages), **_beside(document)}


def _fields_of_preference(document: Preference) -> dict[str, Any]:
    chosen, rejected = document.rows
    if isinstance(chosen, Prompted) and isinstance(rejected, Prompted):
        return {"prompt": chosen.prompt, "chosen": chosen.completion, "rejected": rejected.completion}
    assert isinstance(chosen, Conversation), "both are of one kind"
    assert isinstance(rejected, Conversation), "both are of one kind"
    num = chosen.num_given
    return {
        "prompt": list(chosen.messages[:num]),
        "chosen": list(chosen.messages[num:]),
        "rejected": list(rejected.messages[num:]),
        **_beside(chosen),
    }


def _beside(document: Conversation) -> dict[str, Any]:
    tools = {} if document.tools is None else {TOOLS_FIELD: document.tools}
    return tools | ({KWARGS_FIELD: dict(document.template_kwargs)} if document.template_kwargs else {})


def utf8_size(document: Document) -> int:
    """The UTF-8 bytes of a text; 0 for any other document."""
    if not isinstance(document, str):
        return 0
    return len(document) if document.isascii() else len(document.encode())


def first_difference(one: Sequence[Output], other: Sequence[Output]) -> str | None:
    """The first difference between two results of one record, as a message; None if they are the same."""
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


def _content(document: Document | None) -> Content:
    """The content of the documents that a transform returns for this one."""
    if isinstance(document, Conversation):
        return Content(kind="chat", as_stored=document.as_stored)
    if isinstance(document, Preference):
        return Content(kind=PREFERENCE)
    return Content(kind="prompt" if isinstance(document, Prompted) else "text")


def _called(
    name: str, function: _Function, fields: _Fields, seed: int
) -> list[_Fields | BadRecordError | None]:
    """The results of one call for one document.

    A function that yields nothing has dropped it. If it raises `BadDocument` after yielding, its yielded
    documents are discarded.
    """
    try:
        made = function(dict(fields), seed)
        if made is None or isinstance(made, Mapping):
            return [made]
        # A generator may modify what it has yielded, and the next function may modify one of two results that
        # are the same object.
        several = [own_copy(each) for each in islice(made, MAX_OUTPUTS + 1)] if _is_several(made) else [made]
    except BadDocument as error:
        return [BadRecordError(f"{name} says: {error}", code="record.user_refused")]
    except (Exception, SystemExit) as error:  # SystemExit would end the process without a message
        raise DataError(_failed(name, error), code="user_code.raised") from error
    if len(several) > MAX_OUTPUTS:
        raise _too_many(name)
    for each in several:
        if not isinstance(each, Mapping):
            raise DataError(
                f"data.transforms {name} returned a {type(each).__name__}, expected is a document, a dict of "
                f"its fields; {_HOW}",
                code=_WRONG_RESULT,
            )
    return several or [None]


def _is_several(made: object) -> bool:
    return isinstance(made, Iterable) and not isinstance(made, str | bytes)


def _document(name: str, fields: _Fields, content: Content) -> Document:
    """The document in the result of the last function."""
    try:
        document = document_of(fields, content)
        _require_unicode(document)
    except (BadRecordError, ValueError, TypeError) as error:
        raise DataError(
            f"data.transforms {name} returned no document of content {content.kind}: {error}; {_HOW}",
            code=getattr(error, "error_code", None) or _WRONG_RESULT,
        ) from error
    return document


def _require_unicode(document: Document) -> None:
    """Raises Python's error for texts without a UTF-8 form, and for messages that are no JSON."""
    for text in _texts(document):
        if not text.isascii():
            text.encode()
    for row in document.rows if isinstance(document, Preference) else (document,):
        if isinstance(row, Conversation):
            orjson.dumps([row.messages, row.tools, row.template_kwargs])


def _texts(document: Document) -> Iterator[str]:
    if isinstance(document, str):
        yield document
    elif isinstance(document, Prompted):
        yield from (document.prompt, document.completion)
    elif isinstance(document, Preference):
        for row in document.rows:
            yield from _texts(row)


def _too_many(name: str) -> DataError:
    return DataError(
        f"data.transforms {name} returned more than {MAX_OUTPUTS:,} documents for one record; let it end",
        code="user_code.endless",
    )


def _failed(name: str, error: BaseException) -> str:
    own = error.__traceback__.tb_next if error.__traceback__ is not None else None
    trace = "".join(traceback.format_exception(type(error), error, own))
    return (
        f"data.transforms {name} raised {type(error).__name__}: {error}. Repair it in a new run (another "
        "run.name; a run's transforms never change), or let it raise orchestrator.BadDocument for documents "
        f"that are to be skipped\n{trace.rstrip()}"
    )
