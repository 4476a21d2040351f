"""Encodes documents that are partly trained: a conversation, a prompt with its completion, or a preference.

The result is token ids and a mask of targets. A token is a target if any of its characters is to be trained,
as in transformers' assistant masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from orchestrator.data.sources.records.content import Conversation, Document, Preference, Prompted
from orchestrator.data.tokens.chat_template import (
    Rendered,
    Span,
    SpecialToken,
    UnrenderableError,
)
from orchestrator.data.tokens.encoder import Encoder, Pieces, difference_text
from orchestrator.data.tokens.tokenizer_files import TokenizerModel
from orchestrator.errors import ConfigError
from orchestrator.records.tokens import BoolArray, Int32Array, Int64Array

if TYPE_CHECKING:
    from orchestrator.data.tokens.rendering import Renderer


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedPiece:
    """Tokens of a piece of a document, (num_tokens,) each. `loss` False: the token is no target.

    `row`: the row of its sample, 0 unless the document is a preference.
    """

    tokens: Int32Array
    loss: BoolArray
    row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedDocument:
    """A document's pieces, none if it has no target, and the number of special tokens that its texts
    spell.
    """

    pieces: tuple[MaskedPiece, ...]
    special_texts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A special token, or a text with the spans of its characters that are trained.

    `encoder` is a key of `MaskedEncoder._encoders`.
    """

    text: str = ""
    targets: tuple[Span, ...] = ()
    encoder: str = ""
    token: int | None = None
    is_target: bool = False


# The characters that a special token with `lstrip` or `rstrip` absorbs: Unicode's White_Space, which unlike
# Python's white space excludes U+001C to U+001F.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

# How the tokenizer treats the beginning of a text: as that of a document; as text after a special token
# (without a prefix that only a document's beginning gets); or as the middle of a text (without any prefix).
_BEGIN, _AFTER_SPECIAL, _INSIDE = "begin", "after special", "inside"


Masked = Conversation | Prompted | Preference
_How = Callable[[Encoder, Sequence[str]], tuple[Int32Array, Int32Array]]


class MaskedEncoder:
    """Makes ids and masks with one encoder. Not thread-safe. Does not pickle."""

    def __init__(self, model: TokenizerModel, encoder: Encoder, special_tokens_in_text: str) -> None:
        self._model, self._mode = model, special_tokens_in_text
        self._content: dict[str, Any] = orjson.loads(model.model_json)
        self._encoders = {_BEGIN: encoder}
        self._renderer: Renderer | None = None
        self._token_bytes: dict[int, bytes] | None = None

    def encode(
        self,
        document: Masked,
        loss: str,
        ends: tuple[int | None, int | None],
        piece_bytes: int,
    ) -> MaskedDocument:
        """The document's pieces of at most about `piece_bytes` of UTF-8.

        `loss`: `assistant`, `last` or `all`. `ends`: the BOS and EOS around a prompt and its completion (in a
        chat only the template makes special tokens). A prompt and its completion are encoded separately, as
        at inference. The pieces of a preference are those of both answers, each with its prompt, one after
        the other. Raises `UnrenderableError` and `DataError` as `Renderer`, also for an answer of which
        nothing is learnt, and `UnencodableTextError` for a text that the tokenizer has no ids for.
        """
        return self._document(document, loss, ends, piece_bytes, Encoder.encode)

    def difference(
        self,
        document: Masked,
        loss: str,
        ends: tuple[int | None, int | None],
        piece_bytes: int,
    ) -> str | None:
        """How the ids of `tokenizers` differ, with both; None if they do not.

        Also None if neither encodes anything. Raises as `encode`.
        """
        made = self.encode(document, loss, ends, piece_bytes)
        reference = self._document(document, loss, ends, piece_bytes, Encoder.encode_reference)
        ids, expected = _all_ids(made), _all_ids(reference)
        return None if np.array_equal(ids, expected) else difference_text(plain_text(document), ids, expected)

    def _document(
        self,
        document: Masked,
        loss: str,
        ends: tuple[int | None, int | None],
        piece_bytes: int,
        how: _How,
    ) -> MaskedDocument:
        if isinstance(document, Preference):
            return _joined([self._document(row, loss, ends, piece_bytes, how) for row in document.rows])
        if isinstance(document, Conversation):
            if not document.messages:
                return MaskedDocument(pieces=(), special_texts=0)
            rendered = self._rendering().render(document, loss, self._mode == "parse")
            parts, special_texts = _conversation_parts(rendered), rendered.special_texts
        else:
            parts = _prompted_parts(document, loss, ends)
            encoder = self._encoders[_BEGIN]
            special_texts = sum(encoder.count_special(t) for t in (document.prompt, document.completion))
        if not any(part.is_target or part.targets for part in parts):
            return MaskedDocument(pieces=(), special_texts=special_texts)
        pieces = tuple(self._piece(group, how) for group in _grouped(parts, piece_bytes))
        return MaskedDocument(pieces=pieces, special_texts=special_texts)

    def _rendering(self) -> Renderer:
        if self._renderer is None:
            if self._model.chat is None:
                raise no_chat_template()
            from orchestrator.data.tokens.rendering import Renderer

            self._renderer = Renderer(self._model.chat, special_tokens(self._content))
        return self._renderer

    def _encoder(self, key: str) -> Encoder:
        """The encoder for texts at such a place."""
        if key not in self._encoders:
            content = without_prefix(self._content, only_first=key == _AFTER_SPECIAL)
            first = self._encoders[_BEGIN]
            assert self._model.native is None, "a start refuses it: see require_masks"
            if content != self._content:
                model = replace(self._model, model_json=orjson.dumps(content).decode())
                first = Encoder(model, first.choice, self._mode)
            self._encoders[key] = first
        return self._encoders[key]

    def _piece(self, parts: Sequence[_Part], how: _How) -> MaskedPiece:
        tokens: list[Int32Array] = []
        loss: list[BoolArray] = []
        for part, ids in zip(parts, self._encode(parts, how), strict=True):
            if part.token is not None or not part.targets or part.targets == ((0, len(part.text)),):
                tokens.append(ids)
                loss.append(np.full(len(ids), part.is_target or bool(part.targets)))
            else:
                split_ids, split_loss = self._split(part, ids, how)
                tokens.append(split_ids)
                loss.append(split_loss)
        return MaskedPiece(tokens=np.concatenate(tokens), loss=np.concatenate(loss))

    def _encode(self, parts: Sequence[_Part], how: _How) -> list[Int32Array]:
        """The ids of each part. Texts of one encoder are encoded in one call."""
        found: dict[int, Int32Array] = {
            i: np.array([part.token], np.int32) for i, part in enumerate(parts) if part.token is not None
        }
        for key in (_BEGIN, _AFTER_SPECIAL, _INSIDE):
            numbers = [i for i, part in enumerate(parts) if part.token is None and part.encoder == key]
            if numbers:
                ids, lengths = how(self._encoder(key), [parts[i].text for i in numbers])
                found.update(zip(numbers, np.split(ids, np.cumsum(lengths)[:-1]), strict=True))
        return [found[i] for i in range(len(parts))]

    def _split(self, part: _Part, ids: Int32Array, how: _How) -> tuple[Int32Array, BoolArray]:
        """The ids and the mask of a text that is partly trained.

        The tokens' bytes give their places in the text. If the tokens do not spell the text (a normalizer
        changed it), the text is cut at the borders of its targets and encoded again.
        """
        lengths = self._byte_lengths(part.text, ids)
        if lengths is None:
            cut = _cut_at_borders(part)
            each = self._encode(cut, how)
            masks = [np.full(len(ids), bool(p.targets)) for p, ids in zip(cut, each, strict=True)]
            return np.concatenate(each), np.concatenate(masks)
        ends = np.cumsum(lengths)
        loss = np.zeros(len(ids), np.bool_)
        for span in part.targets:
            start, stop = (len(part.text[:border].encode()) for border in span)
            loss |= (ends - lengths < stop) & (ends > start)
        return ids, loss

    def _byte_lengths(self, text: str, ids: Int32Array) -> Int64Array | None:
        """The number of the text's bytes in each token; None if the tokens do not spell the text."""
        if self._token_bytes is None:
            self._token_bytes = token_bytes(self._content)
        spelled = [self._token_bytes.get(token, b"") for token in ids.tolist()]
        data, expected = b"".join(spelled), text.encode()
        lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
        if data == b" " + expected:  # the tokenizer inserted a space before the text
            lengths[np.flatnonzero(lengths)[0]] -= 1
            return lengths
        return lengths if data == expected else None


def no_chat_template() -> ConfigError:
    """The error that conversations cannot be rendered."""
    return ConfigError(
        "data.sources: the documents are conversations, and the tokenizer has no chat_template that can be "
        "used; add one to its tokenizer_config.json, or as chat_template.jinja",
        code="tokenizer.no_chat_template",
    )


def require_masks(name: str, model: TokenizerModel, content: Mapping[str, str]) -> None:
    """Raises `ConfigError` if chats or prompts (`content` of each source) need a tokenizer.json that is not
    exact.

    The trained parts of a text can be located only with a tokenizer.json that encodes. `name` is the
    tokenizer.
    """
    masked = [f"{source} ({kind})" for source, kind in content.items() if kind != "text"]
    if model.native is not None and masked:
        raise ConfigError(
            f"data.sources {', '.join(masked)}: chats and prompts cannot be read with data.tokenizer={name}, "
            f"because {model.native.library} itself encodes it ({model.native.difference}); take a tokenizer "
            "that has a tokenizer.json",
            code="tokenizer.no_exact_json",
        )


def _all_ids(document: MaskedDocument) -> Int32Array:
    return np.concatenate([np.empty(0, np.int32), *(piece.tokens for piece in document.pieces)])


def _joined(rows: Sequence[MaskedDocument]) -> MaskedDocument:
    """A preference from the documents of its rows."""
    for name, row in zip(("chosen", "rejected"), rows, strict=True):
        if not row.pieces:
            raise UnrenderableError(
                f"nothing of the {name} answer is learnt; it needs a message with the role assistant and a "
                "weight other than 0",
                code="chat.nothing_learnt",
            )
    return MaskedDocument(
        pieces=tuple(replace(piece, row=at) for at, row in enumerate(rows) for piece in row.pieces),
        special_texts=sum(row.special_texts for row in rows),
    )


def plain_text(document: Document) -> str:
    """The text of a document, without a template: for display and comparison, not for training."""
    if isinstance(document, str):
        return document
    if isinstance(document, Prompted):
        return document.prompt + document.completion
    if isinstance(document, Preference):
        return "\n".join(plain_text(row) for row in document.rows)
    contents = (message.get("content") for message in document.messages)
    return "\n".join(content for content in contents if isinstance(content, str))


# ------------------------------------------------------------------------------------------- parts
def _conversation_parts(rendered: Rendered) -> list[_Part]:
    """The template's special tokens, and the texts between them."""
    parts: list[_Part] = []
    position = 0
    for start, stop, special in (*rendered.specials, (len(rendered.text), len(rendered.text), None)):
        text = rendered.text[position:start]
        if special is not None and special.lstrip:
            text = text.rstrip(_WHITE_SPACE)
        taken_from = position + len(text)
        if text:
            targets = tuple(
                (max(a, position) - position, min(b, taken_from) - position)
                for a, b in rendered.targets
                if max(a, position) < min(b, taken_from)
            )
            parts.append(_Part(text=text, targets=targets, encoder=_AFTER_SPECIAL if position else _BEGIN))
        if special is None:
            break
        after = rendered.text[stop:]
        position = stop + (len(after) - len(after.lstrip(_WHITE_SPACE)) if special.rstrip else 0)
        learnt = any(a < position and b > taken_from for a, b in rendered.targets)
        parts.append(_Part(token=special.token, is_target=learnt))
    return parts


def _prompted_parts(document: Prompted, loss: str, ends: tuple[int | None, int | None]) -> list[_Part]:
    """BOS, prompt, completion, EOS. Without a completion nothing is trained, not even EOS."""
    prompt, completion = document.prompt, document.completion
    every = loss == "all"
    if not (completion or (every and prompt)):
        return []
    parts = []
    if ends[0] is not None:
        parts.append(_Part(token=ends[0], is_target=every))
    if prompt:
        parts.append(_Part(text=prompt, targets=((0, len(prompt)),) if every else (), encoder=_BEGIN))
    if completion:
        encoder = _INSIDE if prompt else _BEGIN
        parts.append(_Part(text=completion, targets=((0, len(completion)),), encoder=encoder))
    if ends[1] is not None:
        parts.append(_Part(token=ends[1], is_target=True))
    return parts


def _grouped(parts: Sequence[_Part], piece_bytes: int) -> Iterator[list[_Part]]:
    """The parts in pieces. A new piece begins if a text would not fit. A longer text is cut."""
    group: list[_Part] = []
    total = 0
    for whole in parts:
        for part in _cut_part(whole, piece_bytes):
            size = len(part.text.encode())
            if total + size > piece_bytes and total:
                yield group
                group, total = [], 0
            group.append(part)
            total += size
    yield group


def _cut_part(part: _Part, piece_bytes: int) -> Iterator[_Part]:
    """A text as texts of at most `piece_bytes`, cut like a document's text (data rule 7)."""
    pieces = Pieces(part.text, 4 * len(part.text), piece_bytes)
    if len(pieces) == 1:
        yield part
        return
    begin = 0
    for number, text in enumerate(pieces):
        stop = begin + len(text)
        yield _between(part, begin, stop, part.encoder if not number else _INSIDE)
        begin = stop


def _cut_at_borders(part: _Part) -> list[_Part]:
    """The text as texts that are trained completely or not at all."""
    borders = sorted({0, len(part.text), *(border for span in part.targets for border in span)})
    return [
        _between(part, start, stop, _INSIDE if start else part.encoder)
        for start, stop in zip(borders, borders[1:], strict=False)
    ]


def _between(part: _Part, start: int, stop: int, encoder: str) -> _Part:
    targets = tuple(
        (max(a, start) - start, min(b, stop) - start) for a, b in part.targets if max(a, start) < min(b, stop)
    )
    return _Part(text=part.text[start:stop], targets=targets, encoder=encoder)


# ------------------------------------------------------------------------------------ tokenizer.json
def special_tokens(content: dict[str, Any]) -> list[SpecialToken]:
    """The special tokens of a tokenizer.json."""
    return [
        SpecialToken(
            text=token["content"],
            token=token["id"],
            lstrip=bool(token.get("lstrip")),
            rstrip=bool(token.get("rstrip")),
        )
        for token in content.get("added_tokens") or ()
        if token.get("special")
    ]


def without_prefix(content: dict[str, Any], only_first: bool) -> dict[str, Any]:
    """A tokenizer.json that inserts nothing before a text.

    `only_first`: removes only what is inserted at the beginning of a whole document.
    """

    def changed(step: Any) -> Any:
        if not isinstance(step, dict):
            return step
        kind = step.get("type")
        if kind == "Sequence":
            key = "pretokenizers" if "pretokenizers" in step else "normalizers"
            kept = [changed(each) for each in step[key]]
            return {**step, key: [each for each in kept if each is not None]}
        scheme = step.get("prepend_scheme", "always")
        if kind == "Metaspace" and (scheme == "first" or (scheme == "always" and not only_first)):
            return {**step, "prepend_scheme": "never"}
        if kind == "ByteLevel" and step.get("add_prefix_space") and not only_first:
            return {**step, "add_prefix_space": False}
        return None if kind == "Prepend" and not only_first else step

    return {**content, **{key: changed(content.get(key)) for key in ("normalizer", "pre_tokenizer")}}


def token_bytes(content: dict[str, Any]) -> dict[int, bytes]:
    """The bytes of each id of a tokenizer.json in a text, as far as they are known without its decoder."""
    vocab = content["model"].get("vocab") or {}
    named = enumerate(t for t, _ in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
    found: dict[int, bytes] = {}
    if _is_byte_level(content.get("pre_tokenizer")):
        table = _byte_level_alphabet()
        for number, token in named:
            found[number] = token.translate(table).encode("latin-1", "ignore")
    else:
        fallback = content["model"].get("byte_fallback")
        for number, token in named:
            is_byte = fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            found[number] = bytes.fromhex(token[3:5]) if is_byte else token.replace("▁", " ").encode()
    found.update((t["id"], t["content"].encode()) for t in content.get("added_tokens") or ())
    return found


def _is_byte_level(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or any(_is_byte_level(s) for s in step.get("pretokenizers") or ())


def _byte_level_alphabet() -> dict[int, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {**{byte: byte for byte in printable}, **{0x100 + i: byte for i, byte in enumerate(others)}}
