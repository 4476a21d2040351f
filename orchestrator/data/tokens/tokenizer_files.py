"""Finds a tokenizer's files, reduces them to what determines ids, and identifies them by that content.

It runs an encoder only to test whether the tokenizer itself inserts a BOS.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
from blake3 import blake3

from orchestrator.data.tokens.chat_template import ChatTemplate, read_chat_template
from orchestrator.data.tokens.resolved import (
    CODE,
    RESOLVED,
    TEMPLATE_END,
    TEMPLATE_FOLDER,
    Resolved,
    is_template_file,
    load,
    read_resolved,
    resolve,
    template_file,
    used_templates,
)
from orchestrator.data.tokens.tiktoken_sentencepiece import (
    INVALID,
    NATIVE,
    PROTO,
    RANKS,
    TIKTOKEN_SETTINGS,
    from_sentencepiece,
    from_tiktoken_file,
    from_tiktoken_name,
    is_tiktoken,
)
from orchestrator.data.tokens.tokenizer_json import added_tokens, laid_out, parse
from orchestrator.errors import ConfigError, DataError, StorageError
from orchestrator.storage.buckets import is_uri
from orchestrator.storage.home import expanded, remembered
from orchestrator.storage.open import open_storage, small_files, split

# The files that are copied into a run: everything that transformers reads to build the tokenizer, no weights.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    RANKS,
    TIKTOKEN_SETTINGS,
    NATIVE,
    RESOLVED,
)
_NOT_FOUND, _NO_TOKEN = "tokenizer.not_found", "tokenizer.no_such_token"
# Files that may hold a sentencepiece model, or tiktoken's ranks.
_SPM_NAMES = (PROTO, "spiece.model", "sentencepiece.bpe.model")
_RANKS_END = ".tiktoken"
_FILE_ENDS = (".model", _RANKS_END)
_HUB_TIMEOUT_S = 10.0
# Holds the model's type, by which transformers chooses a tokenizer class.
_MODEL = "config.json"
# The number of a tokenizer's special tokens that a message names.
_FEW_TOKENS = 12
UNKNOWN_TEXT = (
    "it has no token for unknown text: add an unk_token to the model in its tokenizer.json, or take a "
    "tokenizer that encodes any text"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeModel:
    """A tokenizer whose tokenizer.json is not exact: its own `library` encodes, with `files`.

    `difference` is a text with both results.
    """

    library: str
    difference: str
    files: dict[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerModel:
    """The input of an encoder.

    `model_json` is the tokenizer.json without truncation, padding, dropout and post-processor (data rule 6).
    `special_tokens` are the texts of its special tokens. `chat` is its chat template, if conversations are
    read. `native` is the tokenizer itself, if the tokenizer.json is not exact.
    """

    model_json: str
    special_tokens: tuple[str, ...]
    chat: ChatTemplate | None = None
    native: NativeModel | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """The facts about a tokenizer that the stream needs. `notes` report what was switched off.

    `digest` (blake3) covers the content that determines ids. `vocab_size` is the highest id plus one.
    """

    model: TokenizerModel
    digest: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    adds_bos: bool
    notes: tuple[str, ...]


def fetch(name: str, known: Mapping[str, bytes] | None = None) -> dict[str, bytes]:
    """The files of the tokenizer `name`, always with a tokenizer.json.

    `name` is a folder, or a file of sentencepiece or tiktoken, both also in a bucket, `tiktoken:ENCODING`, or
    else a hub name. A tokenizer that was converted to the files `known` is not converted again. Raises
    `ConfigError` if there is none (for a hub name within seconds if the hub cannot be reached), and
    `StorageError` for a bucket that cannot be read.
    """
    if name.startswith("tiktoken:"):
        return from_tiktoken_name(name.removeprefix("tiktoken:"))
    folder = _of_bucket(name) if is_uri(name) else Path(expanded(name, "data.tokenizer"))
    if folder.is_dir():
        return _with_json(name, folder, known or {})
    if folder.suffix in _FILE_ENDS and folder.is_file():
        return _from_file(name, folder, known or {})
    if folder.is_file():
        raise ConfigError(
            f"data.tokenizer={name}: it is a file; give its folder, "
            f"data.tokenizer={os.path.dirname(name) or '.'}",
            code="tokenizer.not_a_folder",
        )
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigError(
            f"data.tokenizer={name}: there is no such folder (looked in "
            f"{name if is_uri(name) else os.path.abspath(folder)}); "
            "give a folder with a tokenizer.json, or a hub name",
            code=_NOT_FOUND,
        )
    return _from_hub(name)


def is_there(name: str) -> bool:
    """Whether the tokenizer `name` is in a folder or in a bucket. Raises as `fetch`."""
    if is_uri(name):
        folder = _of_bucket(name)
        return folder.is_file() or any(folder.iterdir())
    return Path(expanded(name, "data.tokenizer")).is_dir()


def _of_bucket(uri: str) -> Path:
    """A local folder with the files of a bucket's folder. For the URI of a sentencepiece model or of ranks,
    the local file.
    """
    try:
        where, name = split(uri)
        if name.endswith(_FILE_ENDS):
            return small_files(where, (name, TIKTOKEN_SETTINGS).__contains__) / name
        storage = open_storage(uri)
        if storage.folder is None and storage.list(TEMPLATE_FOLDER):
            raise ConfigError(
                f"{uri} has a folder {TEMPLATE_FOLDER}, which is not read from a bucket; write its templates "
                "into tokenizer_config.json (chat_template: a list of {name, template}), or copy the "
                "tokenizer to a local folder",
                code="tokenizer.templates_in_bucket",
            )
        return small_files(uri, lambda each: each in (*FILES, _MODEL) or each.endswith(_RANKS_END))
    except (ConfigError, StorageError) as error:
        raise type(error)(f"data.tokenizer: {error}", code=error.code) from error


def _with_json(name: str, folder: Path, known: Mapping[str, bytes]) -> dict[str, bytes]:
    try:
        files = {n: (folder / n).read_bytes() for n in FILES if (folder / n).is_file()}
        further = (folder / TEMPLATE_FOLDER).glob(f"*{TEMPLATE_END}")
        files |= {template_file(p.name): p.read_bytes() for p in further}
        files |= {p.name: p.read_bytes() for p in folder.iterdir() if is_template_file(p.name)}
    except OSError as error:
        raise _unreadable(name, error) from error
    if _are_those_of(files, known):
        return dict(known)
    if "tokenizer.json" not in files:
        ranks = sorted(folder.glob(f"*{_RANKS_END}"))
        own = [folder / n for n in _SPM_NAMES if n in files and "tokenizer_config.json" not in files]
        if len(ranks) == 1 or own:
            made = _from_file(name, (ranks or own)[0], known)
            return {**made, **{n: files[n] for n in files if n == "chat_template.jinja"}}
        if not files:
            raise ConfigError(
                f"data.tokenizer={name}: there is no tokenizer.json in it; name a tokenizer's folder",
                code="tokenizer.no_files",
            )
        files["tokenizer.json"] = load(name, folder).backend_tokenizer.to_str().encode()
    if not {RESOLVED, NATIVE} & files.keys() and (resolved := resolve(name, folder, files)) is not None:
        files[RESOLVED] = resolved
    return files


def _are_those_of(files: Mapping[str, bytes], known: Mapping[str, bytes]) -> bool:
    """Whether a folder's files are those that a run has frozen, before their conversion.

    Runs of earlier versions have no additional templates.
    """
    given = {n: data for n, data in known.items() if n != RESOLVED}
    if "tokenizer.json" not in files:
        given.pop("tokenizer.json", None)
    if RESOLVED not in known and not any(map(is_template_file, given)):
        files = {n: data for n, data in files.items() if not is_template_file(n)}
    return bool(given) and given == {n: data for n, data in files.items() if n != RESOLVED}


def _from_file(name: str, file: Path, known: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files for a sentencepiece model or tiktoken's ranks, with the original files."""
    settings = file.with_name(TIKTOKEN_SETTINGS)
    try:
        data = file.read_bytes()
        beside = settings.read_bytes() if settings.is_file() else None
    except OSError as error:
        raise _unreadable(name, error) from error
    if is_tiktoken(data):
        own = {RANKS: data} if beside is None else {RANKS: data, TIKTOKEN_SETTINGS: beside}
    else:
        own = {PROTO: data}
    if all(known.get(n) == content for n, content in own.items()):
        return dict(known)
    made = from_tiktoken_file(name, data, beside) if RANKS in own else from_sentencepiece(name, data)
    return {**made, **own}


def _from_hub(name: str) -> dict[str, bytes]:
    try:
        from huggingface_hub import snapshot_download

        wanted = [*FILES, _MODEL, f"{TEMPLATE_FOLDER}/*.jinja"]
        folder = snapshot_download(name, allow_patterns=wanted, etag_timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # a dozen classes of the client; its text has the reason
        raise ConfigError(
            f"data.tokenizer={name}: there is no such folder in {os.getcwd()}, and it cannot be fetched from "
            f"the hub: {str(error).strip().splitlines()[0]}; name an existing folder or hub repository",
            code=_NOT_FOUND,
        ) from error
    return _with_json(name, Path(folder), {})


def examine(name: str, files: dict[str, bytes], chat: bool | None = False) -> TokenizerFacts:
    """The facts from the files. `chat`: with the chat template, which is then a part of the digest; None: if
    it has one that renders as transformers does.

    Raises `ConfigError` if they are no tokenizer, if they lack a template that is needed, or if it has a
    syntax error.
    """
    content = {name: blake3(data).hexdigest() for name, data in files.items()}
    key = repr((sorted(content.items()), chat))
    if key not in _examined:
        while len(_examined) >= _KEPT:
            _examined.pop(next(iter(_examined)), None)
        _examined[key] = _examine(name, files, content, chat)
    return _examined[key]


# This process's most recent results: each opening of a stream needs them again.
_examined: dict[str, TokenizerFacts] = {}
_KEPT = 4


def _examine(
    name: str, files: dict[str, bytes], content: dict[str, str], chat: bool | None
) -> TokenizerFacts:
    try:
        resolved = read_resolved(files)
        whole = parse(
            files["tokenizer.json"] if resolved is None else resolved.tokenizer or files["tokenizer.json"]
        )
        template = None if chat is False else _chat_template(files, resolved)
        reduced, notes = _reduce(whole)
    except Exception as error:  # it is no tokenizer, whatever the error
        raise _no_tokenizer(name, error) from error
    if chat is None:
        chat = template is not None and not (resolved is not None and resolved.no_chats)
        template = template if chat else None
    if chat and resolved is not None and resolved.no_chats:
        raise ConfigError(
            f"data.tokenizer={name}: chats cannot be read with it, because their ids would differ from those "
            f"of transformers: {resolved.no_chats}; change the token in the folder, or take another "
            "tokenizer",
            code=CODE,
        )
    if chat and template is None:
        raise ConfigError(
            f"data.tokenizer={name}: it has no chat_template, and data.sources have content: chat; add "
            "one to its tokenizer_config.json, or as chat_template.jinja",
            code="tokenizer.no_chat_template",
        )
    native = _native(files)
    found = remembered(
        _Found,
        [content, chat, version("tokenizers"), _EXAMINED_VERSION],
        lambda: _find(name, files, whole, reduced, template, native),
    )
    return TokenizerFacts(
        model=TokenizerModel(
            model_json=laid_out(reduced),
            special_tokens=tuple(t["content"] for t in reduced.get("added_tokens") or () if t.get("special")),
            chat=template,
            native=native,
        ),
        digest=found.digest,
        vocab_size=found.vocab_size,
        eos_id=found.eos_id,
        bos_id=found.bos_id,
        adds_bos=found.adds_bos,
        notes=(*notes, *found.notes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Facts that require building the tokenizer, or hashing its whole content."""

    digest: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    adds_bos: bool
    notes: tuple[str, ...]


# Increased when `_find` returns other values for the same files.
_EXAMINED_VERSION = 2


def _chat_template(files: Mapping[str, bytes], resolved: Resolved | None) -> ChatTemplate | None:
    if resolved is None:
        return read_chat_template(files)
    sources = used_templates(resolved.templates)
    return ChatTemplate(sources=sources, variables=resolved.special_tokens) if sources else None


def _no_tokenizer(name: str, error: Exception) -> ConfigError:
    text = f"data.tokenizer={name}: its files are not a tokenizer: {error}; replace them"
    return ConfigError(text, code=INVALID)


def _unreadable(name: str, error: OSError) -> ConfigError:
    text = f"data.tokenizer={name}: cannot be read: {error}; fix its permissions"
    return ConfigError(text, code="tokenizer.unreadable")


def _require_syntax(name: str, template: ChatTemplate) -> None:
    """Raises `ConfigError` with the line if a template has a syntax error."""
    from orchestrator.data.tokens.rendering import Renderer

    try:
        Renderer(template, ())
    except DataError as error:
        raise ConfigError(f"data.tokenizer={name}: {error}", code=error.code) from error


def _find(
    name: str,
    files: dict[str, bytes],
    whole: dict[str, Any],
    reduced: dict[str, Any],
    template: ChatTemplate | None,
    native: NativeModel | None,
) -> _Found:
    from tokenizers import Tokenizer

    notes: tuple[str, ...] = ()
    try:
        resolved = read_resolved(files)
        declared = _declared(files) if resolved is None else resolved.special_tokens
        tokenizer = Tokenizer.from_str(orjson.dumps({**whole, "truncation": None, "padding": None}).decode())
        plain = Tokenizer.from_str(orjson.dumps(reduced).decode())
    except Exception as error:  # the library raises plain Exception
        raise _no_tokenizer(name, error) from error
    eos, bos = declared.get("eos_token"), declared.get("bos_token")
    eos_id = None if eos is None else plain.token_to_id(eos)
    bos_id = None if bos is None else plain.token_to_id(bos)
    try:
        ids, bare = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"data.tokenizer={name}: it cannot encode 'a': {error}; {UNKNOWN_TEXT}",
            code="tokenizer.unencodable_text",
        ) from error
    adds_bos = bos_id is not None and ids[:1] == [bos_id] and bare[:1] != [bos_id]
    if ids not in (bare, [bos_id, *bare]):
        notes = (
            f"the tokenizer puts {ids} for 'a' where {bare} is the text: only BOS and EOS are taken over",
        )
    makes_ids: list[Any] = [reduced, eos_id, bos_id, adds_bos]
    if native is not None:
        own = {name: blake3(data).hexdigest() for name, data in native.files.items()}
        makes_ids.append([native.library, own])
    if template is not None:
        _require_syntax(name, template)
        makes_ids.append([template.sources, template.variables])
    return _Found(
        digest=blake3(orjson.dumps(makes_ids, option=orjson.OPT_SORT_KEYS)).hexdigest(),
        vocab_size=max(plain.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_id=eos_id,
        bos_id=bos_id,
        adds_bos=adds_bos,
        notes=notes,
    )


def _native(files: dict[str, bytes]) -> NativeModel | None:
    if NATIVE not in files:
        return None
    said = orjson.loads(files[NATIVE])
    own = {name: files[name] for name in (RANKS, TIKTOKEN_SETTINGS, PROTO) if name in files}
    return NativeModel(library=said["library"], difference=said["difference"], files=own)


def _reduce(whole: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tokenizer.json without truncation, padding, dropout and post-processor, and a note for each that
    was set.
    """
    reduced = {**whole, "truncation": None, "padding": None, "post_processor": None}
    notes = [
        f"the tokenizer's {n} is switched off" for n in ("truncation", "padding") if whole.get(n) is not None
    ]
    model = whole["model"]
    if model.get("dropout"):
        notes.append(f"the tokenizer's dropout of {model['dropout']} is switched off")
        reduced["model"] = {**model, "dropout": None}
    return reduced, tuple(notes)


def _declared(files: dict[str, bytes]) -> dict[str, str]:
    """The texts of the special tokens (`eos_token`, `bos_token`) that the configuration declares."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = json.loads(files[name]) if name in files else {}
        for key in ("eos_token", "bos_token"):
            value = content.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[key] = text
    return found


def ids_around(
    name: str, facts: TokenizerFacts, bos: str | bool, eos: str | bool
) -> tuple[int | None, int | None]:
    """(BOS, EOS) as requested by `data.bos` and `data.eos`, None for neither.

    Raises `ConfigError` if the tokenizer lacks one that is requested.
    """
    wanted_bos = facts.adds_bos if bos == "auto" else bos
    return _id_around("bos", name, wanted_bos, facts.bos_id, facts), _id_around(
        "eos", name, eos, facts.eos_id, facts
    )


def _id_around(
    field: str, name: str, wanted: str | bool, declared: int | None, facts: TokenizerFacts
) -> int | None:
    if isinstance(wanted, str):
        found, few = id_of(wanted, facts.model), ", ".join(facts.model.special_tokens[:_FEW_TOKENS])
        if found is None:
            raise ConfigError(
                f"data.{field}={wanted!r}, but the tokenizer {name} has no such token; its special tokens "
                f"are {few or 'none'}; name one that it has, or set data.{field}=false",
                code=_NO_TOKEN,
            )
        return found
    if wanted and declared is None:
        raise ConfigError(
            f"data.{field}=true, but the tokenizer {name} declares no {field}_token that has an id; name "
            f"one, as in data.{field}='<|endoftext|>', add it to its tokenizer_config.json, or set "
            f"data.{field}=false",
            code=_NO_TOKEN,
        )
    return declared if wanted else None


def id_of(token: str, model: TokenizerModel) -> int | None:
    """The id of a token, by its text."""
    added = {each["content"]: int(each["id"]) for each in added_tokens(model.model_json)}
    if token in added:
        return added[token]
    vocab = parse(model.model_json)["model"].get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {text: number for number, (text, _) in enumerate(vocab)}
    found = vocab.get(token)
    return None if found is None else int(found)
