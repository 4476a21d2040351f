"""Tokenizers of tiktoken and sentencepiece give their own library's ids, by a tokenizer.json or by that
library.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.tokens.encoder import Encoder, choose_encoder
from orchestrator.data.tokens.tiktoken_sentencepiece import NATIVE, from_sentencepiece, from_tiktoken_file
from orchestrator.data.tokens.tokenizer_files import examine, fetch, ids_around
from orchestrator.data.tokens.tokenizer_json import ADVERSARIAL_TEXTS
from orchestrator.errors import ConfigError
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data.chats import CHATML_TAGGED
from tests.data.making import job, some_texts, write_corpus
from tests.data.tiktoken_ranks import CL100K, ranks
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
SENTENCES = [*some_texts(60), "the quick brown fox", "日本語とカタカナ", "it's 1234567 naïve", "a" * 40] * 3
AS_LLAMA = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}


def tiktoken_folder(folder: Path, **settings: Any) -> str:
    folder.mkdir()
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks().items()]
    (folder / "some.tiktoken").write_bytes(b"".join(lines))
    content = {"pattern": CL100K, "special_tokens": {"<|endoftext|>": 300, "<|fim|>": 302}, **settings}
    (folder / "tiktoken.json").write_text(json.dumps(content))
    return str(folder)


def spm(kind: str, vocab_size: int, **how: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=out,
        vocab_size=vocab_size,
        model_type=kind,
        minloglevel=2,
        **how,
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def spm_models() -> dict[str, bytes]:
    return {"bpe": spm("bpe", 420, **AS_LLAMA), "unigram": spm("unigram", 70)}


def test_a_tiktoken_encoding_gives_its_own_ids(tmp_path: Path) -> None:
    name = tiktoken_folder(tmp_path / "t")
    own = tiktoken.Encoding(
        name="own",
        pat_str=CL100K,
        mergeable_ranks=ranks(),
        special_tokens={"<|endoftext|>": 300, "<|fim|>": 302},
    )
    facts = examine(name, fetch(name))
    assert facts.model.native is None  # its tokenizer.json is exact
    assert ids_around(name, facts, "auto", True) == (None, 300)
    assert facts.vocab_size == 303
    choice, _ = choose_encoder(facts.model, "auto", "text", SENTENCES[:50])
    encoder = Encoder(facts.model, choice, "text")
    texts = [*ADVERSARIAL_TEXTS, *SENTENCES, "a<|endoftext|>b", "aaaaaaa the in thing 12345"]
    ids, lengths = encoder.encode(texts)
    assert ids.tolist() == [i for text in texts for i in own.encode_ordinary(text)]
    assert int(lengths.sum()) == len(ids)
    assert fetch(str(tmp_path / "t" / "some.tiktoken")) == fetch(name)


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_any_text_gets_tiktokens_ids(text: str) -> None:
    encoder, own = _tiktoken_encoders()
    assert encoder.encode_reference([text])[0].tolist() == own.encode_ordinary(text)


def _tiktoken_encoders(made: list[Any] = []) -> tuple[Encoder, Any]:  # noqa: B006  made once
    if not made:
        own = tiktoken.Encoding(
            name="own", pat_str=CL100K, mergeable_ranks=ranks(), special_tokens={"<|endoftext|>": 300}
        )
        data = b"".join(base64.b64encode(t) + f" {rank}\n".encode() for t, rank in ranks().items())
        content = json.dumps({"pattern": CL100K, "special_tokens": {"<|endoftext|>": 300}}).encode()
        model = examine("t", from_tiktoken_file("t", data, content)).model
        made += [Encoder(model, choose_encoder(model, "tokenizers", "text", [])[0], "text"), own]
    return made[0], made[1]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_gives_its_own_ids(
    kind: str, spm_models: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "tokenizer.model").write_bytes(spm_models[kind])
    own = sentencepiece.SentencePieceProcessor(model_proto=spm_models[kind])
    files = fetch(str(tmp_path / "t"))
    assert (NATIVE in files) == (kind == "unigram")  # a tokenizer.json with its normalizer is not exact
    facts = examine("t", files)
    assert ids_around("t", facts, "auto", True) == (None, own.eos_id())
    assert ids_around("t", facts, True, False) == (own.bos_id(), None)
    choice, notes = choose_encoder(facts.model, "auto", "text", SENTENCES[:50])
    assert (choice.name == "sentencepiece") == (kind == "unigram")
    assert ("which is slower" in str(notes)) == (kind == "unigram")
    texts = [*ADVERSARIAL_TEXTS, *SENTENCES, "</s><s>", "▁x ▁▁́"]
    ids, lengths = Encoder(facts.model, choice, "text").encode(texts)
    assert ids.tolist() == [i for each in own.encode(texts) for i in each]
    assert len(lengths) == len(texts)
    assert fetch(str(tmp_path / "t" / "tokenizer.model")) == files


def test_another_encoder_than_its_own_is_refused_where_it_differs(spm_models: dict[str, bytes]) -> None:
    facts = examine("t", from_sentencepiece("t", spm_models["unigram"]))
    with raises(ConfigError, "tokenizer.encoder_unusable", "data.encoder=gigatoken", "sentencepiece ["):
        choose_encoder(facts.model, "gigatoken", "text", [])
    with raises(ConfigError, "tokenizer.cannot_parse", "special_tokens_in_text=parse", "sentencepiece"):
        choose_encoder(facts.model, "auto", "parse", [])


@pytest.mark.parametrize(
    ("content", "record"),
    [
        ("chat", {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]}),
        ("prompt", {"prompt": "Hi", "completion": "x"}),
    ],
)
def test_chats_and_prompts_need_a_tokenizer_json_that_encodes_and_a_start_says_so(
    content: str,
    record: dict[str, Any],
    spm_models: dict[str, bytes],
    tmp_path: Path,
    tiny_config: Make,
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps(record) + "\n")
    source = {"name": "made", "path": str(tmp_path / "data"), "format": "jsonl", "content": content}
    for kind, exact in (("unigram", False), ("bpe", True)):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(spm_models[kind])
        (folder / "chat_template.jinja").write_text(CHATML_TAGGED)
        config = parse_config(tiny_config({"data.sources": [source], "data.tokenizer": str(folder)}))
        if exact:
            assert len(next(prepare_data(config).chunks(Cursor())).tokens)
            continue
        values = (f"data.sources made ({content})", f"data.tokenizer={folder}", "sentencepiece")
        with raises(ConfigError, "tokenizer.no_exact_json", *values):
            prepare_data(config, Storage(str(tmp_path / "run")))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_run_goes_on_with_its_own_copy_without_converting_again(
    kind: str,
    spm_models: dict[str, bytes],
    tmp_path: Path,
    tiny_config: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "tokenizer.model"
    model.write_bytes(spm_models[kind])
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    config = job(tiny_config, tmp_path / "data", tokenizer=str(model))
    first = prepare_data(config, Storage(str(tmp_path / "run")))
    tokens = [chunk.tokens.tolist() for chunk in first.chunks(Cursor())]
    if kind == "bpe":
        monkeypatch.setitem(sys.modules, "sentencepiece", None)
    again = prepare_data(config, Storage(str(tmp_path / "run")))
    assert again.identity() == first.identity()
    assert [chunk.tokens.tolist() for chunk in again.chunks(Cursor())] == tokens


def test_a_missing_library_is_named_with_how_to_install_it(
    spm_models: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = tiktoken_folder(tmp_path / "t")
    (tmp_path / "x.model").write_bytes(spm_models["bpe"])
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    missing = "machine.missing_package"
    with raises(ConfigError, missing, "pip install -e '.[tiktoken]'"):
        fetch(name)
    with raises(ConfigError, missing, "pip install -e '.[sentencepiece]'"):
        fetch(str(tmp_path / "x.model"))


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_bytes(b"\xff\xfe no model")
    with raises(ConfigError, "tokenizer.invalid", "sentencepiece"):
        fetch(str(tmp_path / "x.model"))
    name = tiktoken_folder(tmp_path / "t", special_tokens=["<|endoftext|>"])
    with raises(ConfigError, "tokenizer.invalid", "tiktoken encoding"):
        fetch(name)
    (tmp_path / "t" / "tiktoken.json").unlink()
    with raises(ConfigError, "tokenizer.no_pattern", "tiktoken.json"):
        fetch(name)
    with raises(ConfigError, "tokenizer.not_found", "data.tokenizer=tiktoken:", "cl100k_base"):
        fetch("tiktoken:no_such_encoding")
