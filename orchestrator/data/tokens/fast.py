"""gigatoken's tokenizers of this process. Building one of a large vocabulary takes a second, so those that
are idle are kept for whoever opens a stream with the same tokenizer next.

It knows no document and compares nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
import orjson
from blake3 import blake3

from orchestrator.records import Int32Array

# gigatoken's cache of words grows without bound: the object is made anew after so much text (UTF-8 bytes).
RENEW_BYTES = 256 << 20
# gigatoken takes 0.5 ms for a batch at least: less text is encoded one by one, to the same ids.
_FEW_CHARACTERS = 1 << 15
# Tokenizers of which idle objects are kept.
_KEPT = 2
_idle: OrderedDict[str, list[_Built]] = OrderedDict()
_lock = Lock()


class _Built:
    """One of gigatoken's objects, and the text that it has encoded so far. For one thread at a time."""

    def __init__(self, model_json: str, parse: bool) -> None:
        import gigatoken

        content = orjson.loads(model_json)
        if not parse:  # it has no switch for this: a token that is not listed is text
            content["added_tokens"] = [t for t in content.get("added_tokens") or () if not t.get("special")]
        self.backend: Any = gigatoken.Tokenizer.from_json(orjson.dumps(content).decode()).backend
        self.encoded_bytes = 0


class FastTokenizer:
    """A tokenizer by gigatoken. Any number of them may be alive; each call takes an idle object, or makes
    one.
    """

    def __init__(self, model_json: str, parse: bool) -> None:
        """`parse`: special tokens written out are special."""
        self._json, self._parse = model_json, parse
        self._key = f"{blake3(model_json.encode()).hexdigest()} {parse}"

    def encode(self, texts: Sequence[str]) -> tuple[Int32Array, Int32Array]:
        """(ids of all texts one after the other, number of ids of each)."""
        size = sum(map(len, texts))
        with self._built(size) as backend:
            if size < _FEW_CHARACTERS:
                each = [backend.encode(text) for text in texts]
                return np.concatenate(each).view(np.int32), np.fromiter(map(len, each), np.int32, len(each))
            # one thread: a tokenizer process has one CPU
            layout = backend.encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(layout.offsets.data)
            ids = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
            return ids.view(np.int32), np.diff(offsets).astype(np.int32)

    @contextmanager
    def _built(self, size: int) -> Iterator[Any]:
        with _lock:
            idle = _idle.get(self._key)
            built = idle.pop() if idle else None
        if built is None:
            built = _Built(self._json, self._parse)
        yield built.backend  # one that failed is not kept
        built.encoded_bytes += size
        if built.encoded_bytes <= RENEW_BYTES:
            with _lock:
                _idle.setdefault(self._key, []).append(built)
                _idle.move_to_end(self._key)
                while len(_idle) > _KEPT:
                    _idle.popitem(last=False)
