"""Sealed JSON: a small document that carries the digest of its own content, so that no changed byte of it
goes unnoticed.

It knows bytes and JSON values; not which files use it.
"""

from __future__ import annotations

from typing import Any

import orjson
from blake3 import blake3

from orchestrator.errors import OrchestratorError


class SealError(OrchestratorError):
    """The bytes are not what was written; the text says how that shows."""


def canonical(value: Any) -> bytes:
    """`value` (plain JSON types) as bytes that depend on nothing but the value: sorted names, no spaces."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def seal(content: Any) -> bytes:
    """The document `{"content": …, "digest": blake3 of the canonical content}`, indented, with a last
    newline.
    """
    digest = blake3(canonical(content)).hexdigest()
    options = orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps({"content": content, "digest": digest}, option=options)


def unseal(data: bytes) -> Any:
    """The content of a sealed document. Raises `SealError` unless the bytes are exactly those that `seal`
    makes of it.
    """
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise SealError(f"is not JSON ({error}); {len(data)} bytes") from error
    if not isinstance(document, dict) or set(document) != {"content", "digest"}:
        raise SealError("is JSON, but not a sealed document")
    found = blake3(canonical(document["content"])).hexdigest()
    if found != document["digest"]:
        raise SealError(f"has content of digest {found}, the seal says {document['digest']}")
    # Spaces and the spelling of numbers are not content: only this catches a change there.
    if seal(document["content"]) != data:
        raise SealError("has the content that was sealed, but not the bytes that were written")
    return document["content"]
