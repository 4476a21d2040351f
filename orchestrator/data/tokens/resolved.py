"""Resolves a tokenizer's folder with transformers, if it means more than its tokenizer.json.

Examples are tokens in tokenizer_config.json or added_tokens.json, a class that builds its own pipeline, and
named templates. The result is frozen with the run's tokenizer (`transformers.json`), so that no later version
of transformers changes a run. A folder that cannot be reproduced is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from logging import ERROR
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.data.tokens.chat_template import DEFAULT, WITH_TOOLS, read_chat_template
from orchestrator.data.tokens.tokenizer_json import (
    ADVERSARIAL_TEXTS,
    ADVERSARIAL_VERSION,
    added_token_texts,
    parse,
)
from orchestrator.errors import ConfigError
from orchestrator.json_form import decode, encode
from orchestrator.storage.home import remembered

RESOLVED = "transformers.json"
VERSION = 1
CODE = "data.tokenizer_meaning"
# The folder of additional templates, and the names of their files in a run.
TEMPLATE_FOLDER = "additional_chat_templates"
_TEMPLATE_BEGIN, TEMPLATE_END = "additional_chat_template-", ".jinja"
# Files by which a folder may differ from its tokenizer.json.
_OTHER_MEANING = ("config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE_FOLDER)
_PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
_PLAIN_SETTINGS = ("tokenizer_class", "chat_template", "model_max_length", "clean_up_tokenization_spaces")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The tokenizer as transformers builds it.

    `tokenizer` is its tokenizer.json, None if it equals the folder's. `special_tokens` are the named ones
    (`bos_token`, …). `templates` are jinja texts by name. `no_chats` is the reason why chats cannot be read
    with it, empty if they can.
    """

    version: int = VERSION
    transformers: str
    tokenizer: str | None
    special_tokens: dict[str, str]
    templates: dict[str, str]
    no_chats: str = ""


def read_resolved(files: Mapping[str, bytes]) -> Resolved | None:
    """The result among a tokenizer's files; None if the files are read as they are."""
    if RESOLVED not in files:
        return None
    content = orjson.loads(files[RESOLVED])
    if content.get("version") != VERSION:
        raise ValueError(f"{RESOLVED} has version {content.get('version')}, this version reads {VERSION}")
    return decode(Resolved, content)


def template_file(name: str) -> str:
    """The name of the file of the additional template `name` among a run's files."""
    return f"{_TEMPLATE_BEGIN}{name}"


def is_template_file(name: str) -> bool:
    """Whether a file of a run's tokenizer is an additional template."""
    return name.startswith(_TEMPLATE_BEGIN) and name.endswith(TEMPLATE_END)


def as_given(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A run's tokenizer files as in their original folder, by their paths in it."""
    return {
        f"{TEMPLATE_FOLDER}/{name.removeprefix(_TEMPLATE_BEGIN)}" if is_template_file(name) else name: data
        for name, data in files.items()
        if name != RESOLVED
    }


def resolve(name: str, folder: Path, files: Mapping[str, bytes]) -> bytes | None:
    """The content of `transformers.json` for the tokenizer `name` in `folder`.

    None if its `files` describe it completely. Raises `ConfigError` if transformers cannot read the folder,
    or encodes by more than its tokenizer.json.
    """
    try:
        whole = parse(files["tokenizer.json"])
        if _is_plain(whole, folder, files):
            return None
    except Exception:  # noqa: BLE001  the examination of the files reports it
        return None
    model = folder / "config.json"
    given = {**files, "config.json": model.read_bytes() if model.is_file() else b""}
    digests = sorted((path, blake3(data).hexdigest()) for path, data in given.items())
    key = [digests, _version(), version("tokenizers"), VERSION, ADVERSARIAL_VERSION]
    found = remembered(_Answer, key, lambda: _Answer(text=_asked(name, folder, files, whole)))
    return found.text.encode() if found.text else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """The content of `transformers.json`, empty if the files describe it completely. Takes seconds to
    compute.
    """

    text: str


def _asked(name: str, folder: Path, files: Mapping[str, bytes], whole: dict[str, Any]) -> str:
    tokenizer = load(name, folder)
    _require_plain_borders(name, tokenizer.added_tokens_decoder.values())
    made = parse(_without_settings(tokenizer.backend_tokenizer).to_str())
    _require_same_ids(name, tokenizer, made)
    found = Resolved(
        transformers=_version(),
        tokenizer=None if _is_same(whole, files, made) else orjson.dumps(made).decode(),
        special_tokens={key: str(text) for key, text in tokenizer.special_tokens_map.items()},
        templates=_templates(tokenizer.chat_template),
        no_chats=inexact_in_parts(made) or _own_chats(tokenizer),
    )
    own = read_chat_template(files)
    if (
        found.tokenizer is None
        and not found.no_chats
        and (own.sources if own else {}) == used_templates(found.templates)
        and _named(files) == found.special_tokens
    ):
        return ""
    return orjson.dumps(encode(found), option=orjson.OPT_SORT_KEYS).decode()


def load(name: str, folder: Path) -> Any:
    """The folder's tokenizer as transformers loads it, without running the folder's code. Raises
    `ConfigError`.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizer cannot be used, whatever the error
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"data.tokenizer={name}: transformers {_version()} cannot load this folder: {first}; repair its "
            "files, or save it as a fast tokenizer (tokenizer.save_pretrained)",
            code=CODE,
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    if not hasattr(found, "backend_tokenizer"):
        raise ConfigError(
            f"data.tokenizer={name}: transformers encodes it by Python code ({type(found).__name__}) and has "
            "no tokenizer.json for it; take a fast tokenizer",
            code=CODE,
        )
    if found.split_special_tokens:
        raise ConfigError(
            f"data.tokenizer={name}: with split_special_tokens it encodes special tokens as text, also those "
            "of a template; set it to false in tokenizer_config.json",
            code=CODE,
        )
    return found


def _version() -> str:
    return version("transformers")


def _is_plain(whole: dict[str, Any], folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether transformers loads the tokenizer.json unchanged.

    The folder has no file and no setting that changes it, and its named tokens are special tokens of the
    tokenizer.json.
    """
    if any((folder / name).exists() for name in _OTHER_MEANING):
        return False
    if b"\r" in files.get("chat_template.jinja", b""):  # read as "\n"
        return False
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    named = {key: config[key] for key in _NAMED if config.get(key) is not None}
    if config.keys() - {*_PLAIN_SETTINGS, *_NAMED} or config.get("tokenizer_class") not in _PLAIN_CLASSES:
        return False
    added = whole.get("added_tokens") or []
    special = {token["content"] for token in added if token.get("special")}
    return (
        all(isinstance(text, str) and text in special for text in named.values())
        and _are_without_gap(whole["model"], added)
        and not inexact_in_parts(whole)
        and not any(token["content"] != token["content"].strip() for token in added)
    )


def _are_without_gap(model: dict[str, Any], added: list[dict[str, Any]]) -> bool:
    """Whether the library gives the added tokens the ids of the file: those of the vocabulary, or the next
    ones.
    """
    vocab = model.get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {text: number for number, (text, _) in enumerate(vocab)}
    if max(vocab.values(), default=-1) + 1 != len(vocab):
        return False
    new = [token["id"] for token in added if token["content"] not in vocab]
    known = [token for token in added if token["content"] in vocab]
    return new == list(range(len(vocab), len(vocab) + len(new))) and all(
        token["id"] == vocab[token["content"]] for token in known
    )


def _without_settings(backend: Any) -> Any:
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _is_same(whole: dict[str, Any], files: Mapping[str, bytes], made: dict[str, Any]) -> bool:
    """Whether the folder's tokenizer.json, as written, gives the same ids."""
    from tokenizers import Tokenizer

    own = _without_settings(Tokenizer.from_str(files["tokenizer.json"].decode()))
    read = parse(own.to_str())
    other = Tokenizer.from_str(json.dumps(made))
    same_bos = own.encode("a").ids == other.encode("a").ids
    written = [(token["id"], token["content"]) for token in whole.get("added_tokens") or ()]
    loaded = [(token["id"], token["content"]) for token in read["added_tokens"]]
    rest = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    return same_bos and sorted(written) == loaded and all(read.get(key) == made.get(key) for key in rest)


def _require_plain_borders(name: str, tokens: Iterable[Any]) -> None:
    """Raises `ConfigError` for added tokens with which the library fails while encoding.

    Some of them absorb the white space beside them, and others begin or end with white space.
    """
    taking = [token.content for token in tokens if token.lstrip or token.rstrip]
    blank = [token.content for token in tokens if token.content != token.content.strip()]
    if taking and blank:
        raise ConfigError(
            f"data.tokenizer={name}: its token {taking[0]!r} takes the white space beside it (lstrip, "
            f"rstrip), and its token {blank[0]!r} begins or ends with white space: tokenizers fails "
            "on texts that have both; change one of them",
            code=CODE,
        )


def _require_same_ids(name: str, tokenizer: Any, made: dict[str, Any]) -> None:
    """Raises `ConfigError` if transformers' tokenizer gives other ids than its own tokenizer.json."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(json.dumps({**made, "post_processor": None}))
    for text in (*ADVERSARIAL_TEXTS, *added_token_texts(made["added_tokens"])):
        expected = _ids(partial(_by_transformers, tokenizer, text))
        found = _ids(partial(_by_library, plain, text))
        if found != expected:
            raise ConfigError(
                f"data.tokenizer={name}: transformers makes {_first(expected)} of {text[:40]!r}, and its own "
                f"tokenizer.json {_first(found)}: {type(tokenizer).__name__} encodes by more than that file; "
                "take another tokenizer",
                code=CODE,
            )


def _by_transformers(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _by_library(plain: Any, text: str) -> list[int]:
    found: list[int] = plain.encode(text, add_special_tokens=False).ids
    return found


def _ids(encode: Callable[[], list[int]]) -> list[int] | None:
    """The ids; None for a text that the tokenizer cannot encode."""
    try:
        return encode()
    except Exception:  # noqa: BLE001  the library raises plain Exception
        return None


def _first(ids: list[int] | None) -> str:
    return "nothing" if ids is None else str(ids[:20])


def _templates(found: Any) -> dict[str, str]:
    if isinstance(found, list):
        found = {each["name"]: each["template"] for each in found}
    return dict(found) if isinstance(found, dict) else {} if found is None else {DEFAULT: found}


def used_templates(templates: Mapping[str, str]) -> dict[str, str]:
    """The templates that chats are rendered with; none without a template for chats without tools."""
    names = (DEFAULT, WITH_TOOLS) if DEFAULT in templates else ()
    return {name: templates[name] for name in names if name in templates}


def _named(files: Mapping[str, bytes]) -> dict[str, str]:
    """The named special tokens in tokenizer_config.json and special_tokens_map.json."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (json.loads(files[name]) if name in files else {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def _own_chats(tokenizer: Any) -> str:
    """How transformers renders chats with it other than by its templates; empty if it does not."""
    from transformers import PreTrainedTokenizerBase

    for method in ("apply_chat_template", "get_chat_template"):
        if getattr(type(tokenizer), method) is not getattr(PreTrainedTokenizerBase, method):
            return f"{type(tokenizer).__name__} has a {method} of its own"
    return ""


def inexact_in_parts(content: dict[str, Any]) -> str:
    """Why a rendered chat would get other ids in parts than as a whole; empty if they are the same.

    A chat is encoded in the parts between its special tokens.
    """
    added = content.get("added_tokens") or []
    special = [token for token in added if token.get("special")]
    others = [token for token in added if not token.get("special")]
    for token in special:
        if token.get("single_word"):
            return f"its special token {token['content']!r} is one only as a single word (single_word)"
        if token.get("normalized") and _normalizes(content.get("normalizer")):
            return f"its special token {token['content']!r} is looked for in normalized text (normalized)"
        if token["content"] != token["content"].strip() or not token["content"]:
            return f"its special token {token['content']!r} begins or ends with white space"
    edges = [token["content"] for token in special if _is_word(token["content"][0] + token["content"][-1])]
    for token in others:
        if token.get("single_word") and edges:
            return (
                f"its token {token['content']!r} is one only as a single word, which {edges[0]!r} may border"
            )
        for one in special:
            if _overlap(token["content"], one["content"]):
                return f"its token {token['content']!r} may overlap with the special token {one['content']!r}"
    return ""


def _normalizes(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    return step.get("type") != "Sequence" or any(map(_normalizes, step.get("normalizers") or ()))


def _is_word(ends: str) -> bool:
    return any(character.isalnum() or character == "_" for character in ends)


def _overlap(other: str, special: str) -> bool:
    """Whether a token may begin before a special one, or begin with it and be longer, and absorb a part of
    it.
    """
    ends = range(1, min(len(other), len(special) + 1))
    return special in other or any(other.endswith(special[:size]) for size in ends)
