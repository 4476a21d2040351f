"""Sealed JSON: a small document that carries the digest of its own content, which reveals any changed
byte.
"""

from __future__ import annotations

from typing import Any

import orjson
from blake3 import blake3

from orchestrator.errors import LaterFormatError, OrchestratorError

FORMAT = 2  # of sealed documents; older ones have no number


class SealError(OrchestratorError):
    """The bytes are not those that were written. The text has the reason."""

    code = "storage.damaged_document"


class LaterSealError(SealError):
    """A later version wrote the document. It is not damaged."""

    code = LaterFormatError.code


def canonical(value: Any) -> bytes:
    """`value` (plain JSON types) as bytes that depend only on the value: sorted names, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def seal(content: Any) -> bytes:
    """The document `{"content": …, "digest": blake3 of the canonical content, "format": 2}`, indented, with a
    final newline.
    """
    return _written({"content": content, "digest": _digest(content), "format": FORMAT})


def unseal(data: bytes) -> Any:
    """The content of a sealed document, of this format or an earlier one.

    Raises `SealError` unless the bytes are exactly those of its sealed form.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SealError(f"is not JSON ({error}); {len(data)} bytes") from error
    if not isinstance(document, dict) or set(document) - {"format"} != {"content", "digest"}:
        raise SealError("is JSON, but not a sealed document")
    found = _digest(document["content"])
    if found != document["digest"]:
        raise SealError(f"has content of digest {found}, the seal says {document['digest']}")
    # Spaces and the spelling of numbers are not content: only this detects a change of them.
    if _written(document) != data:
        raise SealError("has the content that was sealed, but not the bytes that were written")
    if document.get("format", FORMAT) != FORMAT:
        raise LaterSealError(
            f"is a sealed document of format {document['format']}, this version reads 1 and {FORMAT}; use "
            "the version that wrote it, or a later one"
        )
    return document["content"]


def _digest(content: Any) -> str:
    return blake3(canonical(content)).hexdigest()


def _written(document: dict[str, Any]) -> bytes:
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(document, option=options)
