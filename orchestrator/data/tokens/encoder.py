"""Encodes text to token ids, with gigatoken where its ids equal those of `tokenizers`, else `tokenizers`.

It also cuts documents into pieces. The chunks add BOS and EOS. Building one of gigatoken's tokenizers with a
large vocabulary takes a second, so idle ones are kept in a pool for the next stream with the same tokenizer.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from threading import Lock
from typing import Any

import numpy as np
from blake3 import blake3

from orchestrator.data.common.process_limits import process_limits
from orchestrator.data.common.settings import CUT_SHARE
from orchestrator.data.tokens.tiktoken_sentencepiece import SENTENCEPIECE, TIKTOKEN, load_native
from orchestrator.data.tokens.tokenizer_files import UNKNOWN_TEXT, NativeModel, TokenizerModel
from orchestrator.data.tokens.tokenizer_json import (
    ADVERSARIAL_TEXTS,
    added_token_texts,
    added_tokens,
    without_special_tokens,
)
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records.tokens import Int32Array, Int64Array

GIGATOKEN, TOKENIZERS = "gigatoken", "tokenizers"
_UNUSABLE = "tokenizer.encoder_unusable"


def installed_version(name: str) -> str | None:
    """The version of the library on this machine, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def installed_encoders() -> dict[str, str | None]:
    """The libraries' versions on this machine, None for one that is not installed."""
    return {name: installed_version(name) for name in (GIGATOKEN, TOKENIZERS, TIKTOKEN, SENTENCEPIECE)}


class UnencodableTextError(Exception):
    """The tokenizer has no ids for a text: its `index` in the call, and the reason."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)
        self.index, self.reason = index, reason


class Encoder:
    """Encodes with one library. Not thread-safe. Does not pickle: build it where it is used."""

    def __init__(self, model: TokenizerModel, choice: EncoderChoice, special_tokens_in_text: str) -> None:
        """`special_tokens_in_text`: `parse` encodes spelled special tokens as such, `text` and `stop` as
        text.

        Raises `DataIdentityError` if this machine has another version of the library.
        """
        found = installed_version(choice.name)
        if found != choice.version:
            raise DataIdentityError(
                f"the run encodes with {choice}, this machine has {choice.name} "
                f"{found or '(not installed)'}; "
                f"install {choice.name}=={choice.version} on every machine, or start a new run",
                code="machine.packages",
            )
        self.choice = choice
        self._parse = special_tokens_in_text == "parse"
        self._model = model
        self._native: Callable[[Sequence[str]], list[list[int]]] | None = None
        self._reference: Any = None
        self._fast: FastTokenizer | None = None
        self._special = SpecialTexts(model.special_tokens)

    def encode(self, texts: Sequence[str]) -> tuple[Int32Array, Int32Array]:
        """(ids of all texts in order, number of ids of each). Adds no special tokens.

        Raises `UnencodableTextError` for a text that the tokenizer has no ids for.
        """
        if not texts:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        if self.choice.name != GIGATOKEN:
            return self.encode_reference(texts)
        if self._fast is None:
            self._fast = FastTokenizer(self._model.model_json, self._parse)
        return self._fast.encode(texts)

    def encode_reference(self, texts: Sequence[str]) -> tuple[Int32Array, Int32Array]:
        """The same with `tokenizers`, or with the tokenizer's native library if their ids differ.

        This does not depend on the chosen encoder. Raises `UnencodableTextError`.
        """
        if self._model.native is not None:
            return _joined(self._encode_native(texts))
        if self._reference is None:
            from tokenizers import Tokenizer

            self._reference = Tokenizer.from_str(self._model.model_json)
            self._reference.encode_special_tokens = not self._parse
        try:
            encoded = self._reference.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise self._unencodable(texts, error) from error
        return _joined([e.ids for e in encoded])

    def _encode_native(self, texts: Sequence[str]) -> list[list[int]]:
        if self._native is None:
            native = self._model.native
            assert native is not None, "the tokenizer has a library of its own"
            self._native = load_native(native.library, native.files)
        return self._native(texts)

    def _unencodable(self, texts: Sequence[str], error: Exception) -> UnencodableTextError:
        """Finds the text that caused the error."""
        for index, text in enumerate(texts):
            try:
                self._reference.encode(text, add_special_tokens=False)
            except Exception as own:  # noqa: BLE001  any error identifies the text
                return UnencodableTextError(index, f"{_shown(text)}: {own}")
        return UnencodableTextError(0, f"{len(texts)} texts together: {error}")

    def count_special(self, text: str) -> int:
        """The number of special tokens spelled out in the text."""
        return self._special.count(text)

    def count_special_each(self, texts: Sequence[str]) -> Int64Array:
        """(num_texts,) the same for each text."""
        return self._special.count_each(texts)


def _joined(ids: list[list[int]]) -> tuple[Int32Array, Int32Array]:
    """(all ids in order, number of ids of each)."""
    lengths = np.fromiter(map(len, ids), np.int32, len(ids))
    total = int(lengths.sum(dtype=np.int64))
    return np.fromiter(chain.from_iterable(ids), np.int32, total), lengths


class SpecialTexts:
    """Counts special tokens spelled out in a text, the longest at each place, without overlaps."""

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(filter(None, tokens), key=lambda token: (-len(token), token))
        self._starts = sorted({token[:2] for token in longest_first})
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def count(self, text: str) -> int:
        """The count. Fast if none of the tokens' first two characters occur."""
        for start in self._starts:
            if start in text:
                return sum(1 for _ in self._pattern.finditer(text))
        return 0

    def count_each(self, texts: Sequence[str]) -> Int64Array:
        """(num_texts,) the same for each text."""
        found = np.zeros(len(texts), np.int64)
        for start in self._starts:
            for at in np.flatnonzero([start in text for text in texts]).tolist():
                found[at] = self.count(texts[at])
        return found


def choose_encoder(
    model: TokenizerModel, wanted: str, special_tokens_in_text: str, documents: Sequence[str]
) -> tuple[EncoderChoice, tuple[str, ...]]:
    """(the encoder for a new run, notes for the user).

    `wanted` is `data.encoder`. `documents` are some of the run's documents. Both encoders are compared on
    them and on adversarial texts. If they differ, `tokenizers` is chosen, or `ConfigError` is raised if the
    configuration names gigatoken.
    """
    if model.native is not None:
        return _native_choice(model.native, wanted, special_tokens_in_text)
    reference = EncoderChoice(name=TOKENIZERS, version=installed_version(TOKENIZERS) or "")
    if wanted == TOKENIZERS:
        return reference, ()
    fast_version = installed_version(GIGATOKEN)
    if fast_version is None:
        problem: str | None = "it is not installed"
        choice = reference
    else:
        choice = EncoderChoice(name=GIGATOKEN, version=fast_version)
        try:
            problem = find_difference(
                Encoder(model, choice, special_tokens_in_text), [*_adversarial_texts(model), *documents]
            )
        except UnencodableTextError as error:
            raise ConfigError(
                f"data.tokenizer: it cannot encode {error.reason}; {UNKNOWN_TEXT}, or set "
                "data.encoder=tokenizers if the documents have no such text",
                code="tokenizer.unencodable_text",
            ) from error
    if problem is None:
        return choice, ()
    if wanted == GIGATOKEN:
        raise ConfigError(
            f"data.encoder=gigatoken cannot be used: {problem}; set data.encoder=auto", code=_UNUSABLE
        )
    return reference, (f"encoding with {reference}, not with gigatoken ({fast_version}): {problem}",)


def _native_choice(
    native: NativeModel, wanted: str, special_tokens_in_text: str
) -> tuple[EncoderChoice, tuple[str, ...]]:
    """Chooses the tokenizer's native library, because its tokenizer.json gives other ids."""
    if wanted in (GIGATOKEN, TOKENIZERS):
        raise ConfigError(
            f"data.encoder={wanted} cannot be used: {native.difference}; set data.encoder=auto",
            code=_UNUSABLE,
        )
    if special_tokens_in_text == "parse":
        raise ConfigError(
            f"data.special_tokens_in_text=parse: {native.library} encodes ({native.difference}), and it "
            "encodes special tokens as text; set data.special_tokens_in_text to text or stop",
            code="tokenizer.cannot_parse",
        )
    choice = EncoderChoice(name=native.library, version=installed_version(native.library) or "")
    return choice, (f"encoding with {choice}, which is slower than gigatoken: {native.difference}",)


def find_difference(encoder: Encoder, texts: Sequence[str]) -> str | None:
    """The first text for which the encoder and `tokenizers` give different ids, with both; None if they
    agree.

    Also returns a text if the encoder does not support this tokenizer at all.
    """
    expected, expected_lengths = encoder.encode_reference(texts)
    try:
        ids, lengths = encoder.encode(texts)
    except Exception as error:  # noqa: BLE001  the other encoder is used then
        return f"it does not take this tokenizer: {type(error).__name__}: {error}"
    if np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected):
        return None
    ends, expected_ends = np.cumsum(lengths), np.cumsum(expected_lengths)
    for i, text in enumerate(texts):
        one = ids[ends[i] - lengths[i] : ends[i]]
        other = expected[expected_ends[i] - expected_lengths[i] : expected_ends[i]]
        if not np.array_equal(one, other):
            return difference_text(text, one, other)
    raise AssertionError("equal texts make equal arrays")


def difference_text(text: str, ids: Int32Array, expected: Int32Array) -> str:
    """A difference between two encodings, as a message: the place, and the ids there by each."""
    common = min(len(ids), len(expected))
    first = next((i for i in range(common) if ids[i] != expected[i]), common)
    here = slice(max(0, first - 2), first + 6)
    return (
        f"for {_shown(text)} ({len(text)} characters) its ids from {here.start} on are {ids[here].tolist()}, "
        f"those of tokenizers {expected[here].tolist()}"
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:80] + "…")


def _adversarial_texts(model: TokenizerModel) -> list[str]:
    special = [f"a{token} {token}b{token}{token}" for token in model.special_tokens[:32]]
    return [*ADVERSARIAL_TEXTS, *special, *added_token_texts(added_tokens(model.model_json))]


# ---------------------------------------------------------------------------------------- pieces
class Pieces:
    """The pieces whose tokens are the document's tokens (data rule 7). `size` bounds its UTF-8 length.

    Each has at most `piece_bytes` of UTF-8. It is cut after the last newline of the last sixteenth, else
    after its last space, else at a character's border. `piece_bytes` is at least 4, so that every character
    fits. A text of several pieces is held as UTF-8, and a piece is decoded on access.
    """

    def __init__(self, text: str, size: int, piece_bytes: int) -> None:
        self._text, self._data, self._cuts = text, b"", [0]
        if size > piece_bytes:
            self._text, self._data = "", text.encode()
            while len(self._data) - self._cuts[-1] > piece_bytes:
                start = self._cuts[-1]
                self._cuts.append(_cut(self._data, start, start + piece_bytes, piece_bytes // CUT_SHARE))

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, number: int) -> str:
        if not self._data:
            return self._text
        stop = self._cuts[number + 1] if number + 1 < len(self._cuts) else len(self._data)
        return self._data[self._cuts[number] : stop].decode()

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


def _cut(data: bytes, start: int, stop: int, back: int) -> int:
    for border in (b"\n", b" "):
        found = data.rfind(border, max(start, stop - back), stop)
        if found >= 0:
            return found + 1
    while data[stop] & 0xC0 == 0x80:  # not inside a character
        stop -= 1
    return stop


# -------------------------------------------------------------------------------------------------- gigatoken
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
_KEPT_IDLE = 2
_idle: OrderedDict[str, list[_Built]] = OrderedDict()
_idle_lock = Lock()


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
        with _idle_lock:
            idle = _idle.get(self._key)
            built = idle.pop() if idle else None
        if built is None:
            built = _Built(self._json, self._parse)
        yield built.backend  # an object that failed is not kept
        built.encoded_bytes += size
        if not built.is_worn():
            with _idle_lock:
                _idle.setdefault(self._key, []).append(built)
                _idle.move_to_end(self._key)
                while len(_idle) > _KEPT_IDLE:
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
