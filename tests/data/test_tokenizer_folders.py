"""A tokenizer's folder means what transformers makes of it: ids of texts and of rendered chats are its own,
token by token, or the folder is refused by name at the start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers

from orchestrator.data.dataset import prepare_data
from orchestrator.data.frozen import copy_frozen, read_frozen
from orchestrator.data.sources.records.content import Conversation
from orchestrator.data.tokens.encoder import Encoder, choose_encoder, installed_version
from orchestrator.data.tokens.loss_mask import MaskedEncoder
from orchestrator.data.tokens.resolved import RESOLVED, as_given, resolve
from orchestrator.data.tokens.tokenizer_files import TokenizerFacts, examine, fetch
from orchestrator.data.tokens.tokenizer_json import ADVERSARIAL_TEXTS, added_token_texts
from orchestrator.errors import ConfigError
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.planning.resume.identity import compare
from orchestrator.storage.files import Storage
from tests.data.chats import CHATML, LLAMA_3, byte_level, metaspace, with_legacy_prefix
from tests.num_examples import examples

Files = dict[str, Any]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
CODE = "data.tokenizer_meaning"


def token(text: str, **flags: bool) -> dict[str, Any]:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": text, **usual, **flags}


def added(tokenizer: Callable[[], Tokenizer], *tokens: tuple[int, dict[str, Any]]) -> Files:
    """A tokenizer.json with further added tokens at these ids."""
    content = json.loads(tokenizer().to_str())
    content["added_tokens"] += [{"id": number, **each} for number, each in tokens]
    return {"tokenizer.json": content}


def flagged(tokenizer: Callable[[], Tokenizer], **flags: bool) -> Files:
    """A tokenizer.json of which all added tokens have these flags."""
    content = json.loads(tokenizer().to_str())
    content["added_tokens"] = [{**each, **flags} for each in content["added_tokens"]]
    return {"tokenizer.json": content}


def lowercase() -> Tokenizer:
    return byte_level(normalizers.Lowercase())


def with_holes() -> Files:
    """A vocabulary in which ids are missing."""
    content = json.loads(byte_level().to_str())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {text: i if i < 300 else i + 50 for text, i in vocab.items()}
    return {"tokenizer.json": content}


def decoder(*tokens: dict[str, Any], first: int = 391) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(first + i): each for i, each in enumerate(tokens)}}


X, Y = token("<x>"), token("<y>", special=False, normalized=True, lstrip=True)
USES_X = CHATML.replace("<|im_start|>", "<x>")
CONFIG = "tokenizer_config.json"
# Each folder by what is special in it.
FOLDERS: dict[str, Files] = {
    "tokenizer.json alone": {CONFIG: None, "chat_template.jinja": CHATML},
    "usual": {},
    "named tokens as added tokens": {
        CONFIG: {**FAST, "eos_token": {"__type": "AddedToken", **token("</s>")}, "bos_token": "<s>"}
    },
    "named tokens as objects": {CONFIG: {**FAST, "eos_token": token("</s>"), "bos_token": token("<s>")}},
    "named tokens that are new": {
        CONFIG: {**FAST, "eos_token": "<x>", "bos_token": "<|new|>", "chat_template": USES_X}
    },
    "named tokens of the vocabulary": {CONFIG: {**FAST, "eos_token": "Z", "bos_token": "Q"}},
    "named tokens null": {CONFIG: {**FAST, "eos_token": None, "bos_token": None}},
    "further special tokens": {
        CONFIG: {**FAST, "additional_special_tokens": ["<x>", "<y>"], "chat_template": USES_X}
    },
    "extra special tokens": {CONFIG: {**FAST, "extra_special_tokens": ["<x>"], "chat_template": USES_X}},
    "named extra tokens": {
        CONFIG: {
            **FAST,
            "extra_special_tokens": {"image_token": "<x>"},
            "chat_template": "{{ image_token }}" + CHATML,
        }
    },
    "added_tokens_decoder": {CONFIG: {**FAST, **decoder(X, Y), "chat_template": USES_X}},
    "added_tokens_decoder with holes": {
        CONFIG: {**FAST, **decoder(X, Y, first=900), "chat_template": USES_X}
    },
    "added_tokens_decoder with other flags": {
        CONFIG: {**FAST, **decoder(token("</s>", lstrip=True), first=2)}
    },
    "added_tokens.json": {
        "added_tokens.json": {"<x>": 391, "<y>": 392},
        CONFIG: {**FAST, "chat_template": USES_X},
    },
    "added_tokens.json with holes": {"added_tokens.json": {"<x>": 777}, CONFIG: {**FAST, "eos_token": "<x>"}},
    "special_tokens_map.json": {
        "special_tokens_map.json": {"bos_token": token("<|map|>", lstrip=True), "eos_token": "</s>"},
        CONFIG: {**FAST, "bos_token": "<s>"},
    },
    "special_tokens_map.json beside a decoder": {
        "special_tokens_map.json": {"eos_token": "<unk>"},
        CONFIG: {**FAST, **NAMED, **decoder(X)},
    },
    "added tokens with holes": added(byte_level, (1000, X), (1002, Y)),
    "a special token with a hole": {
        **added(byte_level, (1000, X)),
        CONFIG: {**FAST, "chat_template": USES_X},
    },
    "a vocabulary with holes": with_holes(),
    "a vocabulary with holes and more tokens": {
        **with_holes(),
        CONFIG: {**FAST, **decoder(X, Y), "chat_template": USES_X},
    },
    "lstrip": flagged(byte_level, lstrip=True),
    "rstrip": flagged(byte_level, rstrip=True),
    "both strip": flagged(lambda: metaspace("always"), lstrip=True, rstrip=True),
    "single words": added(
        byte_level, (391, token("fox", special=False, single_word=True)), (392, token("Hello", special=False))
    ),
    "special single words": flagged(byte_level, single_word=True),
    "normalized, nothing normalizes": flagged(byte_level, normalized=True),
    "normalized": flagged(lowercase, normalized=True),
    "normalized with a prefix": flagged(with_legacy_prefix, normalized=True),
    "tokens that overlap": added(
        byte_level, (391, token("x<|im_", special=False)), (392, token("\n<|im_start|>", special=False))
    ),
    "tokens inside of others": added(
        byte_level, (391, token("<|im_start|>user")), (392, token("<|im", special=False))
    ),
    "lower case": {"tokenizer.json": json.loads(lowercase().to_str())},
    "a prefix of each text": {"tokenizer.json": json.loads(metaspace("always").to_str())},
    "a prefix of the first text": {"tokenizer.json": json.loads(metaspace("first").to_str())},
    "a legacy prefix": {"tokenizer.json": json.loads(with_legacy_prefix().to_str())},
    "flags for BOS and EOS": {CONFIG: {**FAST, **NAMED, "add_bos_token": True, "add_eos_token": True}},
    "class of Llama, spaces": {
        "tokenizer.json": json.loads(metaspace("always").to_str()),
        CONFIG: {**FAST, **NAMED, "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"},
    },
    "class of Llama, bytes": {
        CONFIG: {**FAST, **NAMED, "tokenizer_class": "LlamaTokenizer", "chat_template": LLAMA_3}
    },
    "class of Llama, flags": {
        "tokenizer.json": json.loads(metaspace("first").to_str()),
        CONFIG: {
            **FAST,
            **NAMED,
            "tokenizer_class": "LlamaTokenizerFast",
            "add_bos_token": True,
            "legacy": False,
        },
    },
    "class of Qwen": {CONFIG: {**FAST, "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}},
    "class of GPT-2": {
        CONFIG: {**FAST, **NAMED, "tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}
    },
    "class of Gemma": {
        "tokenizer.json": json.loads(metaspace("always").to_str()),
        CONFIG: {**FAST, **NAMED, "tokenizer_class": "GemmaTokenizer"},
    },
    "class of Cohere": {CONFIG: {**FAST, "tokenizer_class": "CohereTokenizer"}},
    "class that nobody knows": {CONFIG: {**FAST, "tokenizer_class": "MyTokenizer"}},
    "class by the model": {CONFIG: {"chat_template": CHATML}, "config.json": {"model_type": "qwen2"}},
    "class by another model": {CONFIG: {**FAST, **NAMED}, "config.json": {"model_type": "gemma2"}},
    "code beside a known class": {CONFIG: {**FAST, "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}},
    "code of its own": {
        CONFIG: {**FAST, "tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    },
    "special tokens split": {CONFIG: {**FAST, "split_special_tokens": True}},
    "templates in a list": {
        CONFIG: {
            **FAST,
            "chat_template": [
                {"name": "default", "template": CHATML},
                {"name": "tool_use", "template": "T" + CHATML},
            ],
        }
    },
    "templates in a list without default": {
        CONFIG: {**FAST, "chat_template": [{"name": "tool_use", "template": CHATML}]}
    },
    "template in a file": {CONFIG: {**FAST, "chat_template": "X"}, "chat_template.jinja": CHATML},
    "templates in files": {
        CONFIG: {**FAST, "chat_template": "X"},
        "chat_template.jinja": CHATML,
        "additional_chat_templates/tool_use.jinja": "T" + CHATML,
        "additional_chat_templates/rag.jinja": "R",
    },
    "a file of another template alone": {"additional_chat_templates/tool_use.jinja": "T" + CHATML},
    "an empty template": {CONFIG: FAST, "chat_template.jinja": ""},
    "no template": {CONFIG: {"tokenizer_class": "PreTrainedTokenizerFast"}},
    "a file with CRLF": {"chat_template.jinja": CHATML.replace("{% endfor %}", "\r\n{% endfor %}")},
}


def saved(folder: Path, files: Files) -> str:
    whole = {"tokenizer.json": json.loads(byte_level().to_str()), CONFIG: {**FAST, **NAMED}, **files}
    for name, content in whole.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_bytes(data.encode())
    return str(folder)


def reference(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def encoders(facts: TokenizerFacts, mode: str) -> list[Encoder]:
    """`tokenizers`, and gigatoken where a run would encode with it."""
    chosen, _ = choose_encoder(facts.model, "auto", mode, [])
    plain = EncoderChoice(name="tokenizers", version=installed_version("tokenizers") or "")
    return [Encoder(facts.model, choice, mode) for choice in dict.fromkeys((plain, chosen))]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHATS = [
    ([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The fox"}], None),
    ([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " x \n"}], [TOOL]),
    (
        [
            {"role": "user", "content": "foxy fox <y> <x"},
            {"role": "assistant", "content": "\n\nHello y> HELLO\x1c "},
            {"role": "user", "content": " x\u00a0"},
            {"role": "assistant", "content": "fox"},
        ],
        None,
    ),
]


def require_texts(name: str, theirs: Any, facts: TokenizerFacts, texts: list[str]) -> None:
    for encoder in encoders(facts, "parse"):
        for text in texts:
            expected = theirs(text, add_special_tokens=False)["input_ids"]
            assert encoder.encode([text])[0].tolist() == expected, (encoder.choice.name, text)


@pytest.mark.quick(
    "named tokens as added tokens",
    "named tokens as objects",
    "named tokens that are new",
    "named tokens of the vocabulary",
    "named tokens null",
    "extra special tokens",
    "added_tokens_decoder",
    "added_tokens_decoder with other flags",
    "added_tokens.json",
    "added_tokens.json with holes",
    "special_tokens_map.json",
    "special_tokens_map.json beside a decoder",
    "added tokens with holes",
    "a special token with a hole",
    "a vocabulary with holes",
    "lstrip",
    "rstrip",
    "single words",
    "normalized, nothing normalizes",
    "normalized",
    "lower case",
    "a prefix of each text",
    "a legacy prefix",
    "class of Llama, spaces",
    "class of Llama, flags",
    "class of Qwen",
    "class of GPT-2",
    "class that nobody knows",
    "class by another model",
    "code beside a known class",
    "code of its own",
    "special tokens split",
    "a file of another template alone",
    "no template",
    "usual",
    "class of Gemma",
    "a vocabulary with holes and more tokens",
)
# In `make test` each folder is tried here or with chats below.
@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_ids_are_transformers_or_the_folder_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name = saved(tmp_path / "t", FOLDERS[kind])
    facts = examined(name, chat=False)
    if isinstance(facts, ConfigError):
        assert kind in REFUSED, facts
        assert (facts.code, facts.exit_code) == (CODE, 2)
        assert name in str(facts)
        return
    assert kind not in REFUSED
    theirs = reference(name)
    require_texts(name, theirs, facts, [*ADVERSARIAL_TEXTS, *added_token_texts(all_added(theirs))])
    assert (facts.bos_id, facts.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert facts.vocab_size == max(theirs.get_vocab().values()) + 1
    begin = theirs("a")["input_ids"][:1] if facts.adds_bos else []
    assert begin == ([theirs.bos_token_id] if facts.adds_bos else [])


def examined(name: str, chat: bool) -> TokenizerFacts | ConfigError:
    try:
        return examine(name, fetch(name), chat=chat)
    except ConfigError as error:
        return error


def all_added(tokenizer: Any) -> list[dict[str, str]]:
    return [{"content": str(each)} for each in tokenizer.added_tokens_decoder.values()]


REFUSED = {"code of its own", "special tokens split", "named tokens as objects"}
REFUSED_FOR_CHATS = {
    *("special single words", "normalized", "normalized with a prefix", "tokens that overlap"),
    *("templates in a list without default", "a file of another template alone", "no template"),
    *REFUSED,
}


@pytest.mark.quick(
    "tokenizer.json alone",
    "usual",
    "further special tokens",
    "named extra tokens",
    "added_tokens_decoder with holes",
    "a vocabulary with holes and more tokens",
    "both strip",
    "special single words",
    "normalized with a prefix",
    "tokens that overlap",
    "tokens inside of others",
    "a prefix of the first text",
    "flags for BOS and EOS",
    "class of Llama, bytes",
    "class of Gemma",
    "class of Cohere",
    "class by the model",
    "code of its own",
    "special tokens split",
    "templates in a list",
    "templates in a list without default",
    "template in a file",
    "templates in files",
    "an empty template",
    "a file with CRLF",
)
@pytest.mark.parametrize("kind", sorted(FOLDERS))
def test_chats_are_transformers_or_the_folder_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name = saved(tmp_path / "t", FOLDERS[kind])
    facts = examined(name, chat=True)
    if isinstance(facts, ConfigError):
        assert kind in REFUSED_FOR_CHATS, facts
        assert name in str(facts)
        return
    assert kind not in REFUSED_FOR_CHATS
    theirs, tried = reference(name), 0
    for encoder in encoders(facts, "text"):
        masked = MaskedEncoder(facts.model, encoder, "text")
        for messages, tools in CHATS:
            document = Conversation(messages=tuple(messages), tools=tools)
            made = masked.encode(document, "all", (None, None), 1 << 20)
            if made.special_texts:  # a text of a message: transformers would make a special token of it
                continue
            tried += 1
            ids = [i for piece in made.pieces for i in piece.tokens.tolist()]
            assert ids == theirs.apply_chat_template(messages, tools=tools)["input_ids"], encoder.choice.name
    assert tried >= 2, kind


# ---------------------------------------------------------------------------------------- any flags
FLAG = st.booleans()
TEXTS = ["<|im_start|>", "<a>", "fox", "x<|im", "Hello", " b ", "é", "\n"]
TOKEN = st.builds(
    lambda text, special, single_word, lstrip, rstrip, normalized: token(
        text, special=special, single_word=single_word, lstrip=lstrip, rstrip=rstrip, normalized=normalized
    ),
    st.sampled_from(TEXTS), FLAG, FLAG, FLAG, FLAG, FLAG,
)  # fmt: skip
PARTS = ["Hello", "fox", " ", "\n", "<a>", "<A>", "é", "x", " b ", "\u00a0", "\x1c", "The quick"]
BASES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "lower case": lowercase,
    "spaces": lambda: metaspace("first"),
    "legacy": with_legacy_prefix,
}


@settings(max_examples=examples(15, chaos=60), deadline=None)
@given(
    base=st.sampled_from(sorted(BASES)),
    tokens=st.lists(TOKEN, max_size=4, unique_by=lambda each: each["content"]),
    in_config=FLAG,
    first=st.sampled_from([391, 700]),
    contents=st.lists(st.lists(st.sampled_from(PARTS), max_size=6).map("".join), min_size=2, max_size=4),
)
def test_any_added_tokens_give_transformers_ids_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory,
    base: str,
    tokens: list[dict[str, Any]],
    in_config: bool,
    first: int,
    contents: list[str],
) -> None:
    numbered = [(first + i, each) for i, each in enumerate(tokens)]
    own = {"<|im_start|>"} if not in_config else set()
    numbered = [(i, each) for i, each in numbered if each["content"] not in own]
    files = added(BASES[base], *([] if in_config else numbered))
    config = {**FAST, **NAMED}
    if in_config and numbered:
        config["added_tokens_decoder"] = {str(i): each for i, each in numbered}
    name = saved(tmp_path_factory.mktemp("t"), {**files, CONFIG: config})
    try:
        facts = examine(name, fetch(name), chat=True)
    except ConfigError:
        return
    theirs = reference(name)
    plain = EncoderChoice(name="tokenizers", version=installed_version("tokenizers") or "")
    masked = MaskedEncoder(facts.model, Encoder(facts.model, plain, "text"), "text")
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    made = masked.encode(Conversation(messages=tuple(messages)), "all", (None, None), 1 << 20)
    if not made.special_texts:
        ids = [i for piece in made.pieces for i in piece.tokens.tolist()]
        assert ids == theirs.apply_chat_template(messages)["input_ids"]
    require_texts(name, theirs, facts, contents)


# ---------------------------------------------------------------------------------------- in a run
def test_a_folder_that_transformers_reads_as_it_is_written_is_frozen_as_it_is(tmp_path: Path) -> None:
    for kind in (
        "tokenizer.json alone",
        "usual",
        "named tokens null",
        "template in a file",
        "templates in a list",
    ):
        files = fetch(saved(tmp_path / kind, FOLDERS[kind]))
        assert RESOLVED not in files, kind


@pytest.mark.quick("4")
@pytest.mark.parametrize("every", [1, 4])
def test_the_short_way_says_what_transformers_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Of the folders that are not loaded by transformers, for nothing in them can change what they mean."""
    import orchestrator.data.tokens.resolved as module

    found = {kind: _fetched(tmp_path / kind, FOLDERS[kind]) for kind in sorted(FOLDERS)[::every]}
    short = {kind: files for kind, files in found.items() if RESOLVED not in files}
    monkeypatch.setattr(module, "_is_plain", lambda *_: False)
    assert len(short) >= 5
    for kind, files in short.items():
        assert resolve(kind, tmp_path / kind, files) is None, kind


def _fetched(folder: Path, files: Files) -> dict[str, bytes]:
    try:
        return fetch(saved(folder, files))
    except ConfigError:
        return {RESOLVED: b""}


def test_what_transformers_made_of_it_is_the_runs_for_good(
    tmp_path: Path, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.config.loading import parse_config

    name = saved(tmp_path / "t", FOLDERS["added tokens with holes"] | FOLDERS["templates in files"])
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHATS[0][0], "tools": [TOOL]}))
    source = {"name": "s", "path": str(tmp_path / "chat.jsonl"), "format": "jsonl", "content": "chat"}
    config = parse_config(tiny_config({"data.sources": [source], "data.tokenizer": name, "data.eos": False}))
    began = prepare_data(config, Storage(str(tmp_path / "run")))
    monkeypatch.setitem(sys.modules, "transformers", None)  # asking it again would be an ImportError
    again = prepare_data(config, Storage(str(tmp_path / "run")))
    assert again.identity() == began.identity()
    assert again.tokenizer == began.tokenizer
    frozen = read_frozen(Storage(str(tmp_path / "run")))
    assert frozen is not None
    given = as_given(frozen.tokenizer_files)
    for path, content in given.items():
        assert (tmp_path / "t" / path).read_bytes() == content
    assert "additional_chat_templates/rag.jinja" in given
    copy_frozen(Storage(str(tmp_path / "run")), Storage(str(tmp_path / "copy")))
    assert read_frozen(Storage(str(tmp_path / "copy"))) == frozen
    assert (
        examine("copy", fetch(str(tmp_path / "copy" / "tokenizer")), chat=True).digest
        == frozen.record.tokenizer_digest
    )


def test_a_run_of_an_earlier_version_keeps_its_tokenizer(
    tmp_path: Path, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It froze the folder's files alone, and read tokenizer.json."""
    from orchestrator.config.loading import parse_config

    name = saved(tmp_path / "t", FOLDERS["added_tokens_decoder"])
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Hello <x> fox"}))
    source = {"name": "s", "path": str(tmp_path / "a.jsonl"), "format": "jsonl"}
    config = parse_config(tiny_config({"data.sources": [source], "data.tokenizer": name, "data.eos": False}))
    with monkeypatch.context() as earlier:
        earlier.setattr("orchestrator.data.tokens.tokenizer_files.resolve", lambda *_: None)
        began = prepare_data(config, Storage(str(tmp_path / "run")))
    record = tmp_path / "run" / "manifest" / "data.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_bytes()).items() if k != "rules"}))
    again = prepare_data(config, Storage(str(tmp_path / "run")))
    assert (again.identity(), again.tokenizer) == (began.identity(), began.tokenizer)
    assert prepare_data(config).tokenizer != began.tokenizer
    # another file that says the same
    (tmp_path / "t" / CONFIG).write_text(json.dumps({**FOLDERS["added_tokens_decoder"][CONFIG], "note": 1}))
    assert prepare_data(config, Storage(str(tmp_path / "run"))).identity() == began.identity()


def test_a_folder_that_means_something_else_now_is_refused(tmp_path: Path, tiny_config: Any) -> None:
    from orchestrator.config.loading import parse_config

    name = saved(tmp_path / "t", {})
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Hello <x> fox"}))
    source = {"name": "s", "path": str(tmp_path / "a.jsonl"), "format": "jsonl"}
    config = parse_config(tiny_config({"data.sources": [source], "data.tokenizer": name}))
    began = prepare_data(config, Storage(str(tmp_path / "run")))
    (tmp_path / "t" / "added_tokens.json").write_text(json.dumps({"<x>": 391}))
    again = prepare_data(config, Storage(str(tmp_path / "run")))
    assert again.tokenizer == began.tokenizer
    assert compare(began.identity(), again.identity()) != ()
