"""Another encoder takes over at the next whole document, wherever the run stood, and every opening agrees.

The tokenizer is one on which the two libraries really differ: gigatoken does not heed `use_regex: false`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.dataset import prepare_data
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.encoder import Encoder
from orchestrator.errors import ConfigError
from orchestrator.planning.encoders import EncoderSpan, encoder_of_epoch, with_encoder
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data.encoders import FAST, SLOW, save_tokenizer
from tests.data.making import job, samples, some_texts, spec_of, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def spec(tmp_path: Path, tiny_config: Make) -> DataSpec:
    """Two epochs, in windows and pieces that are much smaller than the corpus, encoded by gigatoken."""
    texts = some_texts(32, longest=200)
    write_corpus(tmp_path / "data", texts, "jsonl")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", texts)
    config = job(tiny_config, tmp_path / "data", tokenizer=tokenizer, encoder="tokenizers", num_epochs=2)
    return spec_of(config).made_by((EncoderSpan(encoder=FAST),))


def documents(spec: DataSpec, cursor: Cursor) -> list[list[int]]:
    """The tokens of each document from a cursor's document (or piece of it) on."""
    found: list[list[int]] = [[]]
    for chunk in spec.chunks(cursor):
        ends = np.cumsum(chunk.num_tokens)
        for i, end in enumerate(ends.tolist()):
            found[-1] += chunk.tokens[end - int(chunk.num_tokens[i]) : end].tolist()
            if chunk.last_piece[i] and found[-1]:
                found.append([])
    return found[:-1]


def test_the_two_libraries_differ_on_this_tokenizer(
    spec: DataSpec, tmp_path: Path, tiny_config: Make
) -> None:
    fast, slow = (Encoder(spec.tokenizer, choice, "text") for choice in (FAST, SLOW))
    texts = some_texts(60, longest=200)[20:23]
    assert fast.encode(texts)[0].tolist() != slow.encode(texts)[0].tolist()
    config = job(tiny_config, tmp_path / "data", tokenizer=str(tmp_path / "tokenizer"))
    run = tmp_path / "run"
    assert prepare_data(config, Storage(str(run))).encoders[0].encoder == SLOW, "auto has compared them"
    asked = config.model_copy(update={"data": config.data.model_copy(update={"encoder": "gigatoken"})})
    for folder in (None, run):  # at the first start, and at a later one
        with raises(ConfigError, "tokenizer.encoder_unusable", "data.encoder=gigatoken", "its ids"):
            prepare_data(asked, Storage(str(folder)))


@pytest.mark.chaos
def test_from_every_place_the_document_at_hand_is_finished_and_the_next_is_the_others(spec: DataSpec) -> None:
    before = spec.made_by((EncoderSpan(encoder=SLOW),))
    old, new = documents(spec, Cursor()), documents(before, Cursor())
    assert sum(a != b for a, b in zip(old, new, strict=True)) > len(old) // 2
    chunks = list(spec.chunks(Cursor()))
    many = {(chunk.epoch, chunk.block) for chunk in chunks}, {(c.block, c.window) for c in chunks}
    assert min(map(len, many)) > 4, "the changes lie in several blocks and windows of both epochs"
    assert max(int(number) for chunk in chunks for number in chunk.piece) > 2
    ends = np.cumsum([len(document) for document in old])
    cursors = [sample.cursor for sample in samples(spec, 700)]
    assert len(cursors) > 20
    epoch = int(ends[len(old) // 2 - 1])
    (border, *_) = (sample.cursor for sample in samples(spec, epoch))
    assert (border.sources["made"].epoch, border.sources["made"].record) == (1, 0)
    for cursor in (*cursors[:-1], border):
        changed = spec.made_by(with_encoder(spec.encoders, SLOW, spec.next_documents(cursor)))
        at_hand = int(np.searchsorted(ends, cursor.consumed_tokens, side="right"))
        expected = [*old[: at_hand + 1], *new[at_hand + 1 :]]
        assert documents(changed, Cursor()) == expected, cursor
        whole = [token for document in expected for token in document]
        rest = [sample.input_ids.tolist() for sample in samples(changed, 50, cursor)]
        flat = [token for ids in rest for token in ids]
        there = whole[cursor.consumed_tokens : -1]  # the last token is a target only
        assert flat[: len(there)] == there, cursor


def test_an_epoch_that_begins_with_empty_documents_changes_behind_its_first_real_one(
    tmp_path: Path, tiny_config: Make
) -> None:
    """The cursor at its border names record 0, but the token that was a target already is of a later one."""
    real = some_texts(60, longest=200)
    write_corpus(tmp_path / "data", ["", "", *real[20:22]], "jsonl", num_files=1)
    tokenizer = save_tokenizer(tmp_path / "tokenizer", real)
    options = {"tokenizer": tokenizer, "encoder": "tokenizers", "num_epochs": 2, "shuffle": "none"}
    made_slow = spec_of(job(tiny_config, tmp_path / "data", **options))
    made_fast = made_slow.made_by((EncoderSpan(encoder=FAST),))
    old, new = documents(made_fast, Cursor()), documents(made_slow, Cursor())
    (border, *_) = (sample.cursor for sample in samples(made_fast, sum(map(len, old[:2]))))
    assert (border.sources["made"].epoch, border.sources["made"].record) == (1, 0)
    begins = made_fast.next_documents(border)
    assert (1, 0, 0, 3) < begins["made"] < (2, 0, 0, 0), (
        "two empty documents and the first real one lie before"
    )
    changed = made_fast.made_by(with_encoder(made_fast.encoders, SLOW, begins))
    assert documents(changed, Cursor()) == [*old[:3], new[3]]
    assert old[3] != new[3]
    # in the last document of an epoch: the next whole one is the next epoch's, and no epoch has two encoders
    (last, *_) = (sample.cursor for sample in samples(made_fast, sum(map(len, old[:2])) - 3))
    begins = made_fast.next_documents(last)
    assert begins["made"][0] == 1
    spans = with_encoder(made_fast.encoders, SLOW, begins)
    assert encoder_of_epoch(spans, "made", 0) == FAST
