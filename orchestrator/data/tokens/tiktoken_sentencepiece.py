"""Tokenizers of tiktoken and sentencepiece, converted to a tokenizer.json.

Their own library is the reference. If the tokenizer.json agrees with it on adversarial texts, the library is
needed only at a run's first start. Otherwise the library encodes, and its file is kept.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from orchestrator.data.tokens.tokenizer_json import ADVERSARIAL_TEXTS
from orchestrator.errors import ConfigError

TIKTOKEN, SENTENCEPIECE = "tiktoken", "sentencepiece"
# The content of the file beside a .tiktoken file: {"pattern": …, "special_tokens": {text: id}}.
TIKTOKEN_SETTINGS = "tiktoken.json"
RANKS, PROTO = "tokenizer.tiktoken", "tokenizer.model"
# Names the library that encodes, and a text for which the tokenizer.json beside it gives other ids.
NATIVE = "native.json"
INVALID, _NOT_CONVERTIBLE = "tokenizer.invalid", "tokenizer.not_convertible"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\s")
_MADE_UP = "".join(map(chr, (0x2581, 0x20, 0x61, 0xA0, 0x3042, 0x1F600, 0x0301, 0x09)))
_Ids = Callable[[str], Sequence[int]]


def is_tiktoken(data: bytes) -> bool:
    """Whether the file holds ranks in tiktoken's format (Llama 3 calls such a file tokenizer.model)."""
    return _RANK_LINE.match(data) is not None


def from_tiktoken_name(encoding: str) -> dict[str, bytes]:
    """The files for one of tiktoken's own encodings, such as `cl100k_base`.

    tiktoken downloads it unless it is cached. Raises `ConfigError`.
    """
    name = f"tiktoken:{encoding}"
    tiktoken = _installed(name, TIKTOKEN)
    try:
        found = tiktoken.get_encoding(encoding)
    except Exception as error:  # an unknown name, or an error of the download
        raise ConfigError(
            f"data.tokenizer={name}: tiktoken cannot load it: {error}; name one of "
            f"{', '.join(tiktoken.list_encoding_names())}, where it can be downloaded or is cached",
            code="tokenizer.not_found",
        ) from error
    return _from_encoding(name, found)


def from_tiktoken_file(name: str, data: bytes, settings: bytes | None) -> dict[str, bytes]:
    """The files for a file of ranks and the `tiktoken.json` beside it. Raises `ConfigError`."""
    tiktoken = _installed(name, TIKTOKEN)
    if settings is None:
        raise ConfigError(
            f"data.tokenizer={name}: a .tiktoken file has no pattern and no special tokens; put them "
            f'beside it as {TIKTOKEN_SETTINGS}: {{"pattern": "…", "special_tokens": {{"<|eot|>": 100257}}}}',
            code="tokenizer.no_pattern",
        )
    try:
        found = _encoding(tiktoken, data, settings)
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise ConfigError(
            f"data.tokenizer={name}: it is not a tiktoken encoding: {type(error).__name__}: {error}; repair "
            f"the file, or {TIKTOKEN_SETTINGS} beside it",
            code=INVALID,
        ) from error
    return _from_encoding(name, found)


def _from_encoding(name: str, encoding: Any) -> dict[str, bytes]:
    """A tokenizer.json of the encoding's ranks: a merge for each way to split a token in two, by its rank."""
    ranks: dict[bytes, int] = encoding._mergeable_ranks
    special: dict[str, int] = encoding._special_tokens
    alphabet = byte_level_characters()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(spelled[left], spelled[right]) for left, right in known]
    content = _tokenizer_json(
        {
            "type": "BPE",
            "vocab": {spelled[token]: rank for token, rank in ranks.items()},
            "merges": merges,
            "ignore_merges": True,
        },
        {**_fillers(ranks.values(), special.values()), **special},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": encoding._pat_str},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    )
    named = {"eos_token": "<|endoftext|>"} if "<|endoftext|>" in special else {}
    difference = _difference(name, TIKTOKEN, content, encoding.encode_ordinary, [])
    lines = [
        base64.b64encode(t) + f" {rank}\n".encode() for t, rank in sorted(ranks.items(), key=lambda i: i[1])
    ]
    settings = json.dumps({"pattern": encoding._pat_str, "special_tokens": special}).encode()
    own = {RANKS: b"".join(lines), TIKTOKEN_SETTINGS: settings}
    return _files(content, named, TIKTOKEN, own, difference)


def _fillers(ranks: Iterable[int], special: Iterable[int]) -> dict[str, int]:
    """Tokens for unused ids: in a tokenizer.json special tokens must follow without a gap."""
    taken = {*ranks, *special}
    return {f"<|unused id {i}|>": i for i in range(max(taken, default=-1) + 1) if i not in taken}


def from_sentencepiece(name: str, data: bytes) -> dict[str, bytes]:
    """The files for a sentencepiece model (unigram or BPE). Raises `ConfigError`."""
    sentencepiece = _installed(name, SENTENCEPIECE)
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = vars(sentencepiece_model_pb2)["ModelProto"]()
    try:
        proto.ParseFromString(data)
        processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    except Exception as error:  # the libraries raise their own classes
        raise ConfigError(
            f"data.tokenizer={name}: it is not a sentencepiece model: {error}; replace it", code=INVALID
        ) from error
    trainer = proto.trainer_spec
    kinds = {1: "Unigram", 2: "BPE"}
    if trainer.model_type not in kinds or trainer.treat_whitespace_as_suffix:
        raise ConfigError(
            f"data.tokenizer={name}: its model (model_type {trainer.model_type}, white space as suffix "
            f"{trainer.treat_whitespace_as_suffix}) cannot be converted; take a unigram or BPE model, or one "
            "that has a tokenizer.json",
            code=_NOT_CONVERTIBLE,
        )
    pieces = [(piece.piece, float(piece.score), piece.type) for piece in proto.pieces]
    content = _tokenizer_json(
        _unigram(pieces, trainer) if trainer.model_type == 1 else _spm_bpe(pieces, trainer),
        {text: number for number, (text, _, kind) in enumerate(pieces) if kind == _CONTROL},
        plain={text: number for number, (text, _, kind) in enumerate(pieces) if kind == _USER_DEFINED},
        normalizer={"type": "Sequence", "normalizers": _spm_normalizers(proto.normalizer_spec)},
        pre_tokenizer=_spm_words(text for text, _, kind in pieces if kind == _NORMAL),
        decoder={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    )
    texts = [text for text, _, _ in pieces]
    difference = _difference(name, SENTENCEPIECE, content, processor.encode, texts)
    named = {
        key: pieces[number][0]
        for key, number in (("bos_token", trainer.bos_id), ("eos_token", trainer.eos_id))
        if 0 <= number < len(pieces)
    }
    return _files(content, named, SENTENCEPIECE, {PROTO: data}, difference)


# sentencepiece's types of pieces
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def _unigram(pieces: list[tuple[str, float, int]], trainer: Any) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": trainer.unk_id,
        "vocab": [[text, score] for text, score, _ in pieces],
        "byte_fallback": trainer.byte_fallback,
    }


def _spm_bpe(pieces: list[tuple[str, float, int]], trainer: Any) -> dict[str, Any]:
    """A merge for each way to split a piece in two. sentencepiece merges the highest score first."""
    normal = {text: number for number, (text, _, kind) in enumerate(pieces) if kind == _NORMAL}
    merges = []
    for text in sorted(normal, key=lambda text: (-pieces[normal[text]][1], normal[text])):
        halves = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [(left, right) for left, right in halves if left in normal and right in normal]
        known.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += known
    return {
        "type": "BPE",
        "vocab": {text: number for number, (text, _, _) in enumerate(pieces)},
        "merges": merges,
        "unk_token": pieces[trainer.unk_id][0],
        "fuse_unk": True,
        "byte_fallback": trainer.byte_fallback,
    }


def _spm_normalizers(spec: Any) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps += [_replaced("^ +| +$", ""), _replaced(" {2,}", " ")]
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": "▁" if spec.escape_whitespaces else " "})
    if spec.escape_whitespaces:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return steps


def _replaced(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _spm_words(pieces: Iterable[str]) -> dict[str, Any] | None:
    """A split before each run of spaces, if no piece crosses one: the same ids, much faster."""
    if any("▁" in text.lstrip("▁") for text in pieces):
        return None
    pattern = {"Regex": "▁*[^▁]+|▁+"}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


# -------------------------------------------------------------------------------------------- both
def _installed(name: str, library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"data.tokenizer={name}: it needs {library}, which is not installed; pip install "
            f"-e '.[{library}]' in the checkout, or give a folder with a tokenizer.json",
            code="machine.missing_package",
        ) from error


def _tokenizer_json(
    model: dict[str, Any],
    special: Mapping[str, int],
    plain: Mapping[str, int] | None = None,
    **steps: Any,
) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": number, "content": text, **flags, "special": text in special}
        for text, number in sorted({**special, **(plain or {})}.items(), key=lambda item: item[1])
    ]
    empty = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
    return {"version": "1.0", **empty, "added_tokens": added, **steps, "model": model}


def _files(
    content: dict[str, Any],
    named: Mapping[str, str],
    library: str,
    own: Mapping[str, bytes],
    difference: str | None,
) -> dict[str, bytes]:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    files = {
        "tokenizer.json": json.dumps(content, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if difference is not None:
        native = {"library": library, "difference": difference}
        files |= {NATIVE: json.dumps(native, ensure_ascii=False).encode(), **own}
    return files


def _difference(
    name: str, library: str, content: dict[str, Any], reference: _Ids, tokens: list[str]
) -> str | None:
    """The first text for which the conversion and the library give different ids, with both; None if there is
    none.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"data.tokenizer={name}: it cannot be converted to a tokenizer.json: {error}; take one that "
            "has a tokenizer.json",
            code=_NOT_CONVERTIBLE,
        ) from error
    for token in content["added_tokens"]:
        if (found := tokenizer.token_to_id(token["content"])) != token["id"]:
            raise ConfigError(
                f"data.tokenizer={name}: it cannot be converted to a tokenizer.json: {token['content']} "
                f"would have id {found}, not {token['id']}; take one that has a tokenizer.json",
                code=_NOT_CONVERTIBLE,
            )
    tokenizer.encode_special_tokens = True
    vocabulary = [text.replace("▁", " ") for text in tokens[:: max(1, len(tokens) // 2000)]]
    made_up = [a + b + c for a in _MADE_UP for b in _MADE_UP for c in _MADE_UP]
    for text in (*ADVERSARIAL_TEXTS, *made_up, *vocabulary, "".join(vocabulary), " ".join(vocabulary)):
        ids, expected = tokenizer.encode(text, add_special_tokens=False).ids, list(reference(text))
        if ids != expected:
            shown = repr(text if len(text) <= 80 else text[:80] + "…")
            return f"for {shown} its tokenizer.json gives {ids[:20]}, {library} {expected[:20]}"
    return None


def load_native(library: str, files: Mapping[str, bytes]) -> Callable[[Sequence[str]], list[list[int]]]:
    """The function that encodes texts with the library itself, like `encode_ordinary`. Raises
    `ConfigError`.
    """
    if library == SENTENCEPIECE:
        processor = _installed(PROTO, library).SentencePieceProcessor(model_proto=files[PROTO])
        return lambda texts: list(processor.encode(list(texts)))
    encoding = _encoding(_installed(RANKS, library), files[RANKS], files[TIKTOKEN_SETTINGS])
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]


def _encoding(tiktoken: Any, data: bytes, settings: bytes) -> Any:
    content = json.loads(settings)
    lines = [line.split() for line in data.splitlines() if line.strip()]
    return tiktoken.Encoding(
        name="given",
        pat_str=content["pattern"],
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
        special_tokens={str(k): int(v) for k, v in content.get("special_tokens", {}).items()},
    )


def byte_level_characters() -> list[str]:
    """The character of each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    places = {**{byte: byte for byte in printable}, **{byte: 0x100 + i for i, byte in enumerate(others)}}
    return [chr(places[byte]) for byte in range(0x100)]
