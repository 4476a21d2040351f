"""gigatoken's tokenizers of this process. Building one of a large vocabulary takes a second, so those that
are idle are kept for whoever opens a stream with the same tokenizer next.

It knows no document and compares nothing.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from blake3 import blake3

from orchestrator.data.common.process_limits import process_limits
from orchestrator.data.tokens.large_json import without_special_tokens
from orchestrator.records.arrays import Int32Array

# gigatoken remembers every word that it has seen, about 100 bytes for each: the object is made anew when the
# process has grown by so much since it was made, or after so much text (UTF-8 bytes) where that is not known.
MAX_GROWTH_BYTES, RENEW_BYTES = 256 << 20, 256 << 20
# The growth is looked at after so much text.
_LOOK_EVERY_BYTES = 1 << 20
# gigatoken takes 0.5 ms for a batch at least: less text is encoded one by one, to the same ids, and so are
# texts of such a mean length, which is as quick.
_FEW_CHARACTERS, _LONG_CHARACTERS = 1 << 15, 1 << 12
# The first batch of a process imports awkward, which takes 0.5 CPU seconds: not before so many characters of
# short texts were encoded one by one.
_BEFORE_BATCHES = 16 << 20
# Tokenizers of which idle objects are kept.
_KEPT = 2
_idle: OrderedDict[str, list[_Built]] = OrderedDict()
_lock = Lock()


class _Built:
    """One of gigatoken's objects, and the text that it has encoded so far. For one thread at a time."""

    def __init__(self, model_json: str, parse: bool) -> None:
        import gigatoken

        # it has no switch for this: a token that is not listed is text
        content = model_json if parse else without_special_tokens(model_json)
        self.backend: Any = gigatoken.Tokenizer.from_json(content).backend
        self.encoded_bytes = self._looked_at = 0
        self._resident_bytes = _resident_bytes()

    def is_worn(self) -> bool:
        """Whether it holds too much. The process may have grown by something else: then a second is lost."""
        if self.encoded_bytes - self._looked_at < _LOOK_EVERY_BYTES:
            return False
        self._looked_at, now = self.encoded_bytes, _resident_bytes()
        if now is None or self._resident_bytes is None:
            return self.encoded_bytes > RENEW_BYTES
        # a process that was larger when this was made, over a long document say, hides what it remembers
        self._resident_bytes = min(self._resident_bytes, now)
        return now - self._resident_bytes > min(MAX_GROWTH_BYTES, process_limits().words_bytes)


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
            if size < _FEW_CHARACTERS or size >= _LONG_CHARACTERS * len(texts) or _before_batches(size):
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
        if not built.is_worn():
            with _lock:
                _idle.setdefault(self._key, []).append(built)
                _idle.move_to_end(self._key)
                while len(_idle) > _KEPT:
                    _idle.popitem(last=False)


def _resident_bytes() -> int | None:
    """Memory of this process; None where /proc does not say it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


_short_characters = 0  # that were encoded one by one in this process


def _before_batches(size: int) -> bool:
    """Whether so many more characters are encoded one by one before batches begin."""
    global _short_characters  # noqa: PLW0603  a process imports once
    _short_characters += size
    return _short_characters <= _BEFORE_BATCHES
