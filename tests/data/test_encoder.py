"""Encoders give the same ids, or the slower one is taken and it is said; pieces; special tokens in texts."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from orchestrator.data.dataset import prepare_data
from orchestrator.data.tokens import encoder as encoder_module
from orchestrator.data.tokens.chunks import tokenize_block
from orchestrator.data.tokens.encoder import (
    Encoder,
    Pieces,
    SpecialTexts,
    choose_encoder,
    find_difference,
    installed_version,
)
from orchestrator.data.tokens.tokenizer_files import (
    TokenizerFacts,
    examine,
    fetch,
    ids_around,
)
from orchestrator.data.tokens.tokenizer_json import ADVERSARIAL_TEXTS
from orchestrator.errors import ConfigError, DataError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records.cursor import Cursor
from tests.data.making import job, samples, some_texts, spec_of, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
FAST = EncoderChoice(name="gigatoken", version=installed_version("gigatoken") or "")
SLOW = EncoderChoice(name="tokenizers", version=installed_version("tokenizers") or "")


@pytest.fixture(scope="module")
def facts(corpus: Path) -> TokenizerFacts:
    return examine("t", fetch(str(corpus / "tokenizer")))


@pytest.fixture(scope="module")
def fast_encoder(facts: TokenizerFacts) -> Encoder:
    return Encoder(facts.model, FAST, "text")


@pytest.mark.parametrize("mode", ["text", "parse"])
def test_both_encoders_agree_on_adversarial_texts(facts: TokenizerFacts, mode: str) -> None:
    texts = [
        *ADVERSARIAL_TEXTS,
        "a<|endoftext|>b<|endoftext|><|endoftext",
        *(chr(i) for i in range(0x20, 0x3000, 7)),
    ]
    assert find_difference(Encoder(facts.model, FAST, mode), texts) is None


@settings(deadline=None)  # a loaded machine is no difference of encoders
@given(text=st.text(max_size=60))
def test_both_encoders_agree_on_any_text(fast_encoder: Encoder, text: str) -> None:
    assert np.array_equal(fast_encoder.encode([text])[0], fast_encoder.encode_reference([text])[0])


@pytest.mark.parametrize("mode", ["text", "parse"])
def test_the_ids_do_not_depend_on_how_much_is_encoded_at_once(facts: TokenizerFacts, mode: str) -> None:
    """A few texts are encoded one by one, many in a batch."""
    encoder = Encoder(facts.model, FAST, mode)
    few = [*ADVERSARIAL_TEXTS, "a<|endoftext|>b<|endoftext|><|endoftext", *some_texts(40)]
    many = few * (1 + (1 << 16) // sum(map(len, few)))
    ids, lengths = encoder.encode(many)
    one_by_one = [encoder.encode([text])[0] for text in many]
    assert lengths.tolist() == list(map(len, one_by_one))
    assert np.array_equal(ids, np.concatenate(one_by_one))


def test_special_tokens_in_a_text_are_text_or_parsed(facts: TokenizerFacts) -> None:
    for choice in (FAST, SLOW):
        text = Encoder(facts.model, choice, "text").encode(["a<|endoftext|>b"])[0].tolist()
        parsed = Encoder(facts.model, choice, "parse").encode(["a<|endoftext|>b"])[0].tolist()
        assert facts.eos_id in parsed
        assert facts.eos_id not in text
        assert len(parsed) == 3


def test_special_tokens_in_a_text_stop_the_run_if_asked_and_are_counted_otherwise(
    tmp_path: Path, tiny_config: Make
) -> None:
    lines = ["one", "two <|endoftext|> and <|endoftext|><|endoftext|>", "three <|endoftext", "four"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    found = {}
    for mode in ("text", "parse"):
        spec = spec_of(job(tiny_config, tmp_path, special_tokens_in_text=mode, num_epochs=2))
        found[mode] = samples(spec, 8)[-1].cursor.sources["made"].special_texts
        eos = [int(t) for chunk in spec.chunks(Cursor()) for t in chunk.tokens].count(
            spec.settings.eos_id or 0
        )
        assert eos == (8 if mode == "text" else 14)
    assert found == {"text": 6, "parse": 6}
    values = ("line 2: ", " 3 special tokens", "data.special_tokens_in_text=text", "run.name")
    with raises(DataError, "data.special_tokens", *values):
        samples(spec_of(job(tiny_config, tmp_path, special_tokens_in_text="stop")), 8)


def test_special_texts_are_counted_longest_first_without_overlaps() -> None:
    count = SpecialTexts(["<s>", "<s><s>", "</s>", "<|im_start|>", "[CLS]", ""]).count
    assert count("") == 0
    assert count("<s><s><s>") == 2
    assert count("x</s>[CLS]<|im_start|>[cls]") == 3
    assert SpecialTexts([]).count("<s>") == 0


def test_auto_takes_gigatoken_where_it_agrees(facts: TokenizerFacts) -> None:
    assert choose_encoder(facts.model, "auto", "text", ["some text"]) == (FAST, ())
    assert choose_encoder(facts.model, "tokenizers", "text", []) == (SLOW, ())


def test_a_difference_means_tokenizers_said_aloud_or_a_refusal(
    facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Encoder.encode

    def wrong(self: Encoder, texts: list[str]) -> Any:
        ids, lengths = right(self, texts)
        return np.where(ids == ids[-1], ids + 1, ids), lengths

    monkeypatch.setattr(Encoder, "encode", wrong)
    choice, notes = choose_encoder(facts.model, "auto", "text", ["some text"])
    assert choice == SLOW
    assert "its ids from 1 on are [" in notes[0]
    assert "those of tokenizers [" in notes[0]
    with raises(ConfigError, "tokenizer.encoder_unusable", "data.encoder=gigatoken", "its ids"):
        choose_encoder(facts.model, "gigatoken", "text", ["some text"])


def test_a_tokenizer_that_gigatoken_does_not_take_means_tokenizers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        ["a b c hello world"], trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"])
    )
    found = examine("t", saved(tmp_path, tokenizer, eos_token="[SEP]"))
    choice, notes = choose_encoder(found.model, "auto", "text", ["hello world"])
    assert choice == SLOW
    assert "it does not take this tokenizer" in notes[0]


def word_level(folder: Path, *words: str) -> dict[str, bytes]:
    """A tokenizer that knows these words and has no token for others."""
    tokenizer = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return saved(folder, tokenizer)


def test_a_tokenizer_without_a_token_for_unknown_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    unencodable = "tokenizer.unencodable_text"
    with raises(ConfigError, unencodable, "data.tokenizer=t", "'a'", "unk_token"):
        examine("t", word_level(tmp_path / "t", "b", "c"))
    found = examine("t", word_level(tmp_path / "u", "a", "b"))
    with raises(ConfigError, unencodable, "data.tokenizer", "unk_token", "data.encoder=tokenizers"):
        choose_encoder(found.model, "auto", "text", ["a b"])


def test_a_document_that_the_tokenizer_has_no_ids_for_is_named(tmp_path: Path, tiny_config: Make) -> None:
    word_level(tmp_path / "t", "a", "b")
    (tmp_path / "d.jsonl").write_text('{"text": "a b"}\n{"text": "b"}\n{"text": "b c"}\n{"text": "a"}\n')
    asked = {"tokenizer": str(tmp_path / "t"), "encoder": "tokenizers", "eos": False, "shuffle": "none"}
    values = ("d.jsonl: byte 30: ", "'b c'", "unk_token")
    with raises(DataError, "tokenizer.unencodable_text", *values):
        samples(spec_of(job(tiny_config, tmp_path / "d.jsonl", **asked)), 2)


def test_another_version_of_the_frozen_encoder_is_refused_with_both(facts: TokenizerFacts) -> None:
    values = ("gigatoken 0.0.1", f"gigatoken {FAST.version}")
    with raises(DataIdentityError, "machine.packages", *values):
        Encoder(facts.model, EncoderChoice(name="gigatoken", version="0.0.1"), "text")


def test_the_encoder_is_renewed_and_gives_the_same_ids(
    facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_module, "_idle", OrderedDict())
    encoder = Encoder(facts.model, FAST, "text")
    first = [encoder.encode([text * 3])[0].tolist() for text in ADVERSARIAL_TEXTS]
    ((kept,),) = encoder_module._idle.values()  # one object for all of them
    assert kept.encoded_bytes > 100
    monkeypatch.setattr(encoder_module._Built, "is_worn", lambda self: self.encoded_bytes > 100)
    assert [encoder.encode([text * 3])[0].tolist() for text in ADVERSARIAL_TEXTS] == first
    assert kept not in [built for idle in encoder_module._idle.values() for built in idle]


def test_streams_of_one_tokenizer_share_what_is_built_and_never_at_a_time(
    facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_module, "_idle", OrderedDict())
    encoders = [Encoder(facts.model, FAST, "text") for _ in range(4)]
    expected = encoders[0].encode_reference(ADVERSARIAL_TEXTS)[0].tolist()
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda e: [e.encode(ADVERSARIAL_TEXTS)[0].tolist() for _ in range(9)], encoders)
        )
    assert found == [[expected] * 9] * 4
    ((*kept,),) = encoder_module._idle.values()
    assert 1 <= len(kept) <= 4
    assert sum(built.encoded_bytes for built in kept) == 36 * sum(map(len, ADVERSARIAL_TEXTS))


def test_a_difference_found_while_running_is_reported_and_changes_nothing(
    corpus: Path, tiny_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(5)))
    spec = spec_of(job(tiny_config, tmp_path))
    before = [t for chunk in spec.chunks(Cursor()) for t in chunk.tokens.tolist()]
    monkeypatch.setattr(Encoder, "encode_reference", lambda self, texts: (np.array([1], np.int32), [1]))
    chunks = list(spec.chunks(Cursor()))
    assert [t for chunk in chunks for t in chunk.tokens.tolist()] == before
    (difference,) = [d for chunk in chunks for d in chunk.encoder_differences]
    assert difference.startswith(f"{tmp_path / 'a.jsonl'}: byte 0, line 1: gigatoken")
    assert difference.endswith("those of tokenizers [1]")


# ---------------------------------------------------------------------------------------- tokenizer files
def saved(folder: Path, tokenizer: Tokenizer, **settings: Any) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return fetch(str(folder))


def bpe(**options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["the quick brown fox"] * 5, trainer)
    return tokenizer


def test_what_cuts_fills_or_randomizes_is_switched_off_and_said(tmp_path: Path) -> None:
    tokenizer = bpe(dropout=0.9)
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=15)
    files = saved(tmp_path, tokenizer, eos_token="</s>")
    found = examine("t", files)
    assert [n.split(" is switched")[0] for n in found.notes] == [
        "the tokenizer's truncation",
        "the tokenizer's padding",
        "the tokenizer's dropout of 0.9",
    ]
    texts = ["the quick brown fox jumps over the lazy dog", "x"]
    for choice in (FAST, SLOW):
        encoder = Encoder(found.model, choice, "text")
        ids, lengths = encoder.encode(texts)
        assert lengths[0] > 15
        assert lengths[1] == 1
        assert ids.tolist() == encoder.encode(texts)[0].tolist()
    assert find_difference(Encoder(found.model, FAST, "text"), texts) is None


END = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "special": True}


def test_bos_stands_where_the_tokenizers_own_post_processor_puts_one(tmp_path: Path) -> None:
    plain = examine("t", saved(tmp_path / "a", bpe(), bos_token="<s>", eos_token=END))
    tokenizer = bpe()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    adding = examine("t", saved(tmp_path / "b", tokenizer, bos_token="<s>", eos_token="</s>"))
    assert (plain.adds_bos, adding.adds_bos) == (False, True)
    assert ids_around("t", plain, "auto", True) == (None, 1)
    assert ids_around("t", adding, "auto", True) == (0, 1)
    assert ids_around("t", plain, True, False) == (0, None)
    assert ids_around("t", adding, False, False) == (None, None)
    assert plain.digest != adding.digest
    assert Encoder(adding.model, FAST, "text").encode(["a"])[0].tolist() == plain_ids(plain, "a")


def plain_ids(facts: TokenizerFacts, text: str) -> list[int]:
    return Encoder(facts.model, SLOW, "text").encode([text])[0].tolist()


def test_a_tokenizer_without_the_needed_token_is_refused(tmp_path: Path) -> None:
    found = examine("t", saved(tmp_path, bpe()))
    no_token = "tokenizer.no_such_token"
    with raises(ConfigError, no_token, "data.eos=true", "tokenizer t ", "eos_token"):
        ids_around("t", found, "auto", True)
    with raises(ConfigError, no_token, "data.bos=true", "tokenizer t ", "bos_token"):
        ids_around("t", found, True, False)


def test_eos_and_bos_may_be_named_where_a_bare_tokenizer_declares_none(
    tmp_path: Path, tiny_config: Make
) -> None:
    bare = bpe()
    bare.add_special_tokens(["<|endoftext|>"])
    found = examine("t", saved(tmp_path / "t", bare))
    end = bare.token_to_id("<|endoftext|>")
    assert ids_around("t", found, "<|endoftext|>", "<|endoftext|>") == (end, end)
    assert ids_around("t", found, "auto", "</s>") == (None, bare.token_to_id("</s>"))
    values = ("data.eos='<eod>'", "tokenizer t ", "endoftext")
    with raises(ConfigError, "tokenizer.no_such_token", *values):
        ids_around("t", found, "auto", "<eod>")
    (tmp_path / "t").mkdir(exist_ok=True)
    bare.save(str(tmp_path / "t" / "tokenizer.json"))
    write_corpus(tmp_path / "data", ["one", "two"], "lines", num_files=1)
    asked = {"tokenizer": str(tmp_path / "t"), "shuffle": "none", "encoder": "tokenizers"}
    config = job(tiny_config, tmp_path / "data", "lines", **asked, eos="<|endoftext|>")
    tokens = [int(i) for chunk in prepare_data(config).chunks(Cursor()) for i in chunk.tokens]
    assert [i for i, token in enumerate(tokens) if token == end] == [tokens.index(end), len(tokens) - 1]


def test_the_digest_is_that_of_what_makes_ids(tmp_path: Path) -> None:
    first = examine("t", saved(tmp_path / "a", bpe(), eos_token="</s>"))
    same = examine("t", saved(tmp_path / "b", bpe(), eos_token="</s>", chat_template="x", model_max_length=5))
    other_eos = examine("t", saved(tmp_path / "c", bpe(), eos_token="<s>"))
    normalizing = bpe()
    normalizing.normalizer = normalizers.Lowercase()
    assert first.digest == same.digest
    assert len({first.digest, other_eos.digest, examine("t", saved(tmp_path / "d", normalizing)).digest}) == 3


def test_the_vocabulary_counts_added_tokens_and_gaps(tmp_path: Path) -> None:
    tokenizer = bpe()
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("extra")])
    assert examine("t", saved(tmp_path, tokenizer)).vocab_size == size + 1


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_missing_tokenizer_folder_is_named(name: str) -> None:
    with raises(ConfigError, "tokenizer.not_found", f"data.tokenizer={name}: ", "(looked in /"):
        fetch(name)


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, "tokenizer.no_files", tmp_path, "tokenizer.json"):
        fetch(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises(ConfigError, "tokenizer.invalid", "data.tokenizer=t"):
        examine("t", fetch(str(tmp_path)))


# ---------------------------------------------------------------------------------------- pieces
def pieces_of(text: str, size: int, piece_bytes: int) -> list[str]:
    return list(Pieces(text, size, piece_bytes))


@given(text=st.text(st.sampled_from("ab é日🏳️\n "), max_size=400), size=st.integers(16, 80))
def test_pieces_join_to_the_text_and_none_is_too_long(text: str, size: int) -> None:
    pieces = pieces_of(text, len(text.encode()), size)
    assert "".join(pieces) == text
    assert all(0 < len(p.encode()) <= size for p in pieces) or not text


def test_pieces_end_behind_a_newline_else_a_space_else_a_character() -> None:
    size = 160
    head = "x" * 152
    assert pieces_of(head + "a\nb c d" + "y" * 300, 500, size)[0] == head + "a\n"
    assert pieces_of(head + "a b c d" + "y" * 300, 500, size)[0] == head + "a b c "
    assert pieces_of("\n" + "é" * 300, 601, size)[0] == "\n" + "é" * 79
    assert pieces_of("x" * size, size, size) == ["x" * size]


def test_the_tokens_of_a_piece_do_not_depend_on_the_pieces_before_it(
    tmp_path: Path, tiny_config: Make
) -> None:
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    spec = spec_of(job(tiny_config, tmp_path, fragment_bytes=10_000, window_bytes=10_000), piece_bytes=100)
    (task,) = spec.tasks_from(Cursor())

    def tokens_from(piece: int) -> list[int]:
        chunks = tokenize_block(
            replace(task, piece=piece), spec.plans[0], spec.build_encoders(), spec.settings
        )
        return [t for chunk in chunks for t in chunk.tokens.tolist()]

    whole = tokens_from(0)
    for piece in range(1, 10):
        rest = tokens_from(piece)
        assert whole[-len(rest) :] == rest
    with raises(DataIdentityError, "resume.cursor_mismatch", "piece 99") as caught:
        tokens_from(99)
    assert re.search(r" 1[0-9] pieces", str(caught.value))
