"""Encodes text to token ids, with gigatoken where its ids equal those of `tokenizers`, else `tokenizers`.

It also cuts documents into pieces. The chunks add BOS and EOS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any

import numpy as np

from orchestrator.data.common.settings import CUT_SHARE
from orchestrator.data.tokens.adversarial import ADVERSARIAL_TEXTS, added_token_texts
from orchestrator.data.tokens.fast import FastTokenizer
from orchestrator.data.tokens.large_json import added_tokens
from orchestrator.data.tokens.tiktoken_sentencepiece import SENTENCEPIECE, TIKTOKEN, load_native
from orchestrator.data.tokens.tokenizer_files import UNKNOWN_TEXT, NativeModel, TokenizerModel
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records.arrays import Int32Array, Int64Array

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
