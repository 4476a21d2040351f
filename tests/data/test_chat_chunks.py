"""Conversations and prompts in chunks: masks beside the tokens, documents without a target counted and never
packed, the same from wherever a window is opened.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers, trainers

from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources.records.content import Conversation, Document, Prompted
from orchestrator.data.tokens.tokenizer_files import examine, fetch
from orchestrator.errors import BadDocumentError, DataError
from orchestrator.records.tokens import BAD, EMPTY, PIECE
from tests.data.chat_chunks import Make, chat_spec, chunks, entries
from tests.data.chats import CHATML_TAGGED, LLAMA_2, SPECIALS, byte_level, chat, saved
from tests.data.making import job
from tests.raising import raises

DOCUMENTS: list[Document] = [
    chat("Hello", "Hello, I am the assistant", "who are you?", "The quick brown fox"),
    chat("only a question"),
    "a text among them",
    Prompted(prompt="What is it? ", completion="It is a test."),
    Prompted(prompt="Nothing follows", completion=""),
    chat("again ", "and an answer " * 30),
    "",
    chat("the end?", "Yes."),
]
END = SPECIALS.index("</s>")


@pytest.mark.parametrize("chunk_tokens", [1, 40, 1 << 20])
def test_masks_lie_beside_the_tokens_and_documents_without_a_target_are_counted(
    chunk_tokens: int, tmp_path: Path, tiny_config: Make
) -> None:
    made = chat_spec(tmp_path, tiny_config, DOCUMENTS, shuffle="none")
    made = replace(made, settings=replace(made.settings, chunk_tokens=chunk_tokens))
    rows = entries(chunks(made, DOCUMENTS))
    kinds = {record: kind for record, _, kind, _, _ in rows}
    assert [kinds[i] for i in range(8)] == [PIECE, EMPTY, PIECE, PIECE, EMPTY, PIECE, EMPTY, PIECE]
    assert all(not tokens for _, _, kind, tokens, _ in rows if kind == EMPTY)
    learnt = {record for record, _, _, _, loss in rows if any(loss)}
    assert learnt == {record for record, kind in kinds.items() if kind == PIECE}
    text = next(loss for record, _, _, _, loss in rows if record == 2)
    assert all(text)
    ((tokens, loss),) = [(tokens, loss) for record, _, _, tokens, loss in rows if record == 3]
    assert tokens[-1] == END
    assert loss == sorted(loss)  # the prompt first, then what is learnt
    assert sum(record == 5 for record, *_ in rows) > 1  # more than a piece
    assert not any(END in tokens for record, _, _, tokens, _ in rows if record in (0, 5, 7))


@pytest.mark.parametrize("shuffle", ["none", "block"])
def test_a_window_opened_at_any_piece_goes_on_exactly(
    shuffle: str, tmp_path: Path, tiny_config: Make
) -> None:
    made = chat_spec(tmp_path, tiny_config, DOCUMENTS, shuffle=shuffle)
    rows = entries(chunks(made, DOCUMENTS))
    for number, (record, piece, *_) in enumerate(rows):
        assert entries(chunks(made, DOCUMENTS, record, piece)) == rows[number:]


def test_a_window_of_texts_alone_has_no_mask(tmp_path: Path, tiny_config: Make) -> None:
    texts = ["one", "two", ""]
    assert [chunk.loss for chunk in chunks(chat_spec(tmp_path, tiny_config, texts), texts)] == [None]


def test_what_the_template_refuses_is_a_bad_document_and_a_useless_template_stops(
    tmp_path: Path, tiny_config: Make
) -> None:
    odd = Conversation(messages=({"role": "assistant", "content": "I begin"},))
    documents = [chat("Hi", "x"), odd]
    made = chat_spec(tmp_path, tiny_config, documents, LLAMA_2, shuffle="none", on_bad_document="skip")
    (chunk,) = chunks(made, documents)
    assert chunk.kind.tolist() == [PIECE, BAD]
    assert "line 2: " in chunk.bad_reasons[0]
    assert "Conversation roles" in chunk.bad_reasons[0]
    stopping = replace(made, settings=replace(made.settings, on_bad_document="stop"))
    with raises(BadDocumentError, "data.bad_document", "roles must alternate") as refused:
        chunks(stopping, documents)
    assert refused.value.reason_code == "chat.not_taken"
    forgets = LLAMA_2.replace("content.strip()", "(content.strip() if loop.last else 'cut')")
    more = [chat("Hi", "x", "Hi", "y")]
    with raises(DataError, "data.chat_template_unusable", "line 1: "):
        chunks(chat_spec(tmp_path / "more", tiny_config, more, forgets), more)


def test_special_tokens_that_a_chat_spells_are_counted_or_stop(tmp_path: Path, tiny_config: Make) -> None:
    documents = [chat("say <|im_end|>", "<|im_end|><|im_start|>"), chat("Hi", "x")]
    (chunk,) = chunks(chat_spec(tmp_path, tiny_config, documents, shuffle="none"), documents)
    assert chunk.special_texts.tolist() == [3, 0]
    stop = chat_spec(tmp_path / "s", tiny_config, documents, shuffle="none", special_tokens_in_text="stop")
    with raises(DataError, "data.special_tokens", "line 1: ", " 3 special tokens"):
        chunks(stop, documents)


@pytest.mark.parametrize(
    "document",
    [chat("Hello you", "who  is \n\n it?"), Prompted(prompt="Hello you", completion=" who  is it")],
)
def test_a_difference_between_the_encoders_is_reported_of_chats_and_prompts_too(
    document: Document, tmp_path: Path, tiny_config: Make
) -> None:
    made = chat_spec(tmp_path, tiny_config, [document], shuffle="none")
    assert not any(chunk.encoder_differences for chunk in chunks(made, [document]))
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Hello you, who  is it"] * 3, trainer)
    name = saved(tmp_path / "no regex, which gigatoken does not heed", tokenizer, CHATML_TAGGED)
    other = replace(made, tokenizer=examine(name, fetch(name), chat=True).model)
    found = chunks(other, [document])
    (difference,) = [text for chunk in found for text in chunk.encoder_differences]
    assert "line 1: gigatoken" in difference
    assert "those of tokenizers" in difference


def test_what_is_learnt_is_part_of_the_runs_identity(tmp_path: Path, tiny_config: Make) -> None:
    name = saved(tmp_path / "t", byte_level(), CHATML_TAGGED)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps({"text": "x", "messages": []}) + "\n")
    config = job(tiny_config, tmp_path / "data", tokenizer=name)
    source = config.data.sources[0].model_dump()
    found = []
    for change in ({}, {"content": "chat"}, {"content": "chat", "loss": "last"}):
        asked = tiny_config({"data.sources": [{**source, **change}], "data.tokenizer": name})
        from orchestrator.config.loading import parse_config
        from orchestrator.planning.resume.identity import stream_settings

        found.append(stream_settings(parse_config(asked).flat()))
    assert "data.sources.made.loss" not in found[0]
    assert found[1]["data.sources.made.loss"] == '"assistant"'
    assert found[2]["data.sources.made.loss"] == '"last"'
    assert prepare_data(config).settings.loss == {"made": "assistant"}
