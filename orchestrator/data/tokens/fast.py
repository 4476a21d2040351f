"""A pool of gigatoken's tokenizers in this process.

Building one with a large vocabulary takes a second, so idle ones are kept for the next stream with the same
tokenizer.
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

# gigatoken caches every word that it has seen, about 100 bytes for each. The object is replaced when the
# process has grown by `MAX_GROWTH_BYTES` since it was made, or after `RENEW_BYTES` of text (UTF-8) if the
# growth is not known.
MAX_GROWTH_BYTES, RENEW_BYTES = 256 << 20, 256 << 20
# The growth is checked after this much text.
_LOOK_EVERY_BYTES = 1 << 20
# gigatoken takes at least 0.5 ms for a batch. Less text than `_FEW_CHARACTERS` is encoded one by one, to the
# same ids. So are texts with a mean length of `_LONG_CHARACTERS`, which is as fast.
_FEW_CHARACTERS, _LONG_CHARACTERS = 1 << 15, 1 << 12
# The first batch of a process imports awkward, which takes 0.5 CPU seconds. It waits until this many
# characters of short texts were encoded one by one.
_BEFORE_BATCHES = 16 << 20
# The number of tokenizers whose idle objects are kept.
_KEPT = 2
_idle: OrderedDict[str, list[_Built]] = OrderedDict()
_lock = Lock()


class _Built:
    """One of gigatoken's objects, and the amount of text that it has encoded. For one thread at a time."""

    def __init__(self, model_json: str, parse: bool) -> None:
        import gigatoken

        # gigatoken has no option for this: a token that is not listed is text
        content = model_json if parse else without_special_tokens(model_json)
        self.backend: Any = gigatoken.Tokenizer.from_json(content).backend
        self.encoded_bytes = self._looked_at = 0
        self._resident_bytes = _resident_bytes()

    def is_worn(self) -> bool:
        """Whether it holds too much memory. If something else made the process grow, a second is lost."""
        if self.encoded_bytes - self._looked_at < _LOOK_EVERY_BYTES:
            return False
        self._looked_at, now = self.encoded_bytes, _resident_bytes()
        if now is None or self._resident_bytes is None:
            return self.encoded_bytes > RENEW_BYTES
        # memory that was used when this was made, for example for a long document, hides the growth
        self._resident_bytes = min(self._resident_bytes, now)
        return now - self._resident_bytes > min(MAX_GROWTH_BYTES, process_limits().words_bytes)


class FastTokenizer:
    """A tokenizer that uses gigatoken. Any number may exist. Each call uses an idle object, or makes one."""

    def __init__(self, model_json: str, parse: bool) -> None:
        """`parse`: spelled special tokens are encoded as special tokens."""
        self._json, self._parse = model_json, parse
        self._key = f"{blake3(model_json.encode()).hexdigest()} {parse}"

    def encode(self, texts: Sequence[str]) -> tuple[Int32Array, Int32Array]:
        """(ids of all texts in order, number of ids of each)."""
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
        yield built.backend  # an object that failed is not kept
        built.encoded_bytes += size
        if not built.is_worn():
            with _lock:
                _idle.setdefault(self._key, []).append(built)
                _idle.move_to_end(self._key)
                while len(_idle) > _KEPT:
                    _idle.popitem(last=False)


def _resident_bytes() -> int | None:
    """The resident memory of this process; None if /proc does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


_short_characters = 0  # encoded one by one in this process


def _before_batches(size: int) -> bool:
    """Whether `size` more characters are encoded one by one before batches begin."""
    global _short_characters  # noqa: PLW0603  a process imports once
    _short_characters += size
    return _short_characters <= _BEFORE_BATCHES
