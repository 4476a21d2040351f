"""`samples` of runs that pack whole documents, and of chats: every position of every step is the token of the
record that it names, read and encoded here.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import orchestrator
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.packing.samples import open_samples
from orchestrator.inspect import step_documents
from orchestrator.inspect.audit.reference import reference_windows
from orchestrator.inspect.audit.trained_data import trained_data
from orchestrator.inspect.step_documents import TracingWindows
from orchestrator.records.cursor import Cursor
from tests.data.chats import CHATML_TAGGED, byte_level, saved
from tests.data.making import some_texts, write_corpus
from tests.inspect.trained_run import TrainedRun
from tests.launch.skipping_run import SkippingRun, survey_newest

Make = Callable[..., dict[str, Any]]
SEQ_LEN = 64
Ids = Callable[[dict[str, Any]], list[int]]


def packed(folder: Path, make: Make, mode: str, rule: str) -> dict[str, Any]:
    """Two sources of different formats; documents longer than a sample, empty ones, and equal ones."""
    sources = []
    for name, kind, weight in (("web", "jsonl", 0.7), ("books", "parquet", 0.3)):
        texts = [text and f"{name} {text}" for text in some_texts(45, 30)] + ["twice the same", "x"] * 2
        write_corpus(folder / name, texts, kind)
        sources.append({"name": name, "path": str(folder / name), "format": kind, "weight": weight})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    pack = {"pack.mode": mode, "pack.seq_len": SEQ_LEN, "pack.long_document": rule, "data.on_end": "drop"}
    pack |= {"pack.max_long_share": 1.0}
    return make({"data.sources": sources, **small, **pack})


def record_at(document: dict[str, Any]) -> dict[str, Any]:
    """The record that a document names, read from its file."""
    path = Path(document["file"])
    if document["unit"] == "row":
        assert document["line"] is None
        row: dict[str, Any] = pq.read_table(path).slice(document["place"], 1).to_pylist()[0]
        return row
    data = path.read_bytes()
    line = data[document["place"] :].partition(b"\n")[0]
    assert data.splitlines()[document["line"] - 1] == line
    found: dict[str, Any] = json.loads(line)
    return found


def ids_of_texts(tokenizer_folder: str) -> Ids:
    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    declared = json.loads(Path(tokenizer_folder, "tokenizer_config.json").read_text())
    end = int(str(tokenizer.token_to_id(declared["eos_token"])))
    return lambda record: [*tokenizer.encode(record["text"], add_special_tokens=False).ids, end]


def check_every_step(run: TrainedRun | SkippingRun, ids_of: Ids, tokenizer_folder: str) -> dict[Any, Any]:
    """Each step's documents against the arrays of the whole stream; how often each input token was seen."""
    opened = orchestrator.open(run.folder)
    spec = trained_data(run.store, str(run.folder), survey(run.store))
    stream = list(open_samples(spec, Cursor(), SEQ_LEN))
    decoder = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    seen: dict[Any, Any] = defaultdict(lambda: np.zeros(0, np.int64))
    indices = []
    for record in opened.records():
        found = opened.list_samples(f"a{record.attempt}:{record.step}", text=True)
        assert (found["matches"], found["digest"]) == (True, record.digest)
        for sample in found["samples"]:
            drawn, at = stream[sample["index"]], 0
            indices.append(sample["index"])
            for number, document in enumerate(sample["documents"]):
                ids, first, end = ids_of(record_at(document)), document["first_token"], document["end_token"]
                here = slice(at, at + end - first)
                assert drawn.input_ids[here].tolist() == ids[first:end]
                assert (drawn.document_ids[here] == number).all()
                labels = drawn.labels[here]
                assert ((labels == ids[first + 1 : end + 1]) | (labels == -100)).all()
                assert (document["begins"], document["ends"]) == (first == 0, end == len(ids) - 1)
                shown = ids[first : end + document["ends"]]
                assert document["text"] == decoder.decode(shown, skip_special_tokens=False)
                key = (sample["source"], document["epoch"], document["file"], document["place"])
                seen[key] = seen[key] if len(seen[key]) else np.zeros(len(ids) - 1, np.int64)
                seen[key][first:end] += 1
                at = here.stop
            assert at == sample["tokens"]
            assert (drawn.document_ids[at:] == -1).all()
    assert len(indices) == len(set(indices))
    return seen


@pytest.mark.quick("bestfit-split")
@pytest.mark.parametrize(("mode", "rule"), [("bestfit", "split"), ("bestfit", "skip"), ("pad", "split")])
def test_every_position_of_a_packed_run_is_the_token_that_is_named(
    tmp_path: Path, tiny_config: Make, mode: str, rule: str
) -> None:
    run = TrainedRun(packed(tmp_path, tiny_config, mode, rule))
    run.attempt(6, batch=3)
    run.attempt(3, batch=5)
    run.attempt(1000, batch=9)
    ids_of = ids_of_texts(run.job.data.tokenizer)
    seen = check_every_step(run, ids_of, run.job.data.tokenizer)
    for times in seen.values():
        assert (times == 1).all(), "each document's tokens are inputs once"
    documents = sum(
        rule == "split" or len(ids_of({"text": text})) <= SEQ_LEN + 1
        for name in ("web", "books")
        for text in [text and f"{name} {text}" for text in some_texts(45, 30)] + ["twice the same", "x"] * 2
        if text
    )
    assert len(seen) == 2 * documents
    assert any(len(times) > SEQ_LEN for times in seen.values()) == (rule == "split")


@pytest.mark.chaos
def test_a_packed_runs_documents_are_named_after_a_skip(tmp_path: Path, tiny_config: Make) -> None:
    mapping = packed(tmp_path, tiny_config, "bestfit", "split")
    run = SkippingRun({**mapping, "train": {**mapping["train"], "global_batch_size": 4, "max_steps": 1000}})
    run.launch(3)
    run.launch(2, "resume.skip_steps=2")
    killed = run.begin(f"resume.from={survey_newest(run)}", "resume.skip_samples=3")
    run.train(killed, 2, "resume.skip_samples=3", save=False)
    run.launch(1000, "resume.skip_samples=3")
    tokenizer = run.job().data.tokenizer
    seen = check_every_step(run, ids_of_texts(tokenizer), tokenizer)
    assert all((times <= 1).all() for times in seen.values())
    assert any(
        sample["index"] == 20 for sample in orchestrator.open(run.folder).list_samples("4")["samples"]
    ), "the step after the skip begins with the sample after what was skipped"


@pytest.mark.quick("bestfit")
@pytest.mark.parametrize("mode", ["bestfit", "pad"])
def test_packed_chats_and_prompts_are_those_of_their_records(
    tmp_path: Path, tiny_config: Make, mode: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    name = saved(tmp_path / "t", byte_level(), CHATML_TAGGED)
    reference = PreTrainedTokenizerFast.from_pretrained(name)
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Hello {i}, who are you? " + "fox " * (i % 5)},
                {"role": "assistant", "content": f"I am the assistant {i}.\n" * (i % 3 + 1)},
            ]
        }
        for i in range(30)
    ]
    prompts = [{"prompt": f"def f({i}):\n", "completion": f"    return {i}\n"} for i in range(30)]
    sources = []
    for kind, records in (("chat", chats), ("prompt", prompts)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        path = str(tmp_path / kind)
        sources.append({"name": kind, "path": path, "format": "jsonl", "content": kind, "weight": 1})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.on_end": "drop"}
    pack = {"pack.mode": mode, "pack.seq_len": SEQ_LEN, "pack.long_document": "split"}
    run = TrainedRun(tiny_config({"data.sources": sources, "data.tokenizer": name, **small, **pack}))
    run.attempt(3, batch=3)
    run.attempt(1000, batch=5)
    plain = Tokenizer.from_file(f"{name}/tokenizer.json")

    def ids_of(record: dict[str, Any]) -> list[int]:
        if "messages" in record:
            found: list[int] = reference.apply_chat_template(record["messages"])["input_ids"]
            return found
        prompt, completion = plain.encode(record["prompt"]).ids, plain.encode(record["completion"]).ids
        return [*prompt, *completion, int(str(plain.token_to_id("</s>")))]

    seen = check_every_step(run, ids_of, name)
    assert all((times == 1).all() for times in seen.values())
    assert len(seen) == 60


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["bestfit", "concat"])
def test_the_documents_that_transforms_make_of_a_record_are_counted(
    tmp_path: Path, tiny_config: Make, mode: str
) -> None:
    texts = [f"{i}: some words of it" for i in range(20)]
    write_corpus(tmp_path / "data", texts, "jsonl")
    source = {"name": "made", "path": str(tmp_path / "data"), "format": "jsonl"}
    transforms = {"data.transforms": [f"{__name__}:with_its_end"], "pack.mode": mode, "pack.seq_len": SEQ_LEN}
    run = TrainedRun(tiny_config({"data.sources": [source], **transforms}))
    run.attempt(100, batch=2)
    opened = orchestrator.open(run.folder)
    found = [
        document
        for record in opened.records()
        for sample in opened.list_samples(record.step, text=True)["samples"]
        for document in sample["documents"]
    ]
    whole = [each for each in found if each["begins"] and each["ends"]]
    assert {each["output"] for each in whole} == {0, 1}
    for each in whole:
        text = record_at(each)["text"]
        assert each["text"].startswith(text if not each["output"] else f"the end of {text}")


def with_its_end(document: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    del seed
    return [document, {**document, "text": f"the end of {document['text']}"}]


def named_by_their_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    right = step_documents._documents
    monkeypatch.setattr(step_documents, "_documents", lambda chunks: [*right(chunks)[1:], right(chunks)[0]])


def those_before_the_cursor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(self: Any, num_tokens: int, seq_len: int) -> Any:
        self._newest, self._capacity = [], seq_len
        return reference_windows.ReferenceWindows.samples(self, num_tokens, seq_len)

    monkeypatch.setattr(TracingWindows, "samples", samples)


@pytest.mark.parametrize("plant", [named_by_their_neighbour, those_before_the_cursor_count])
def test_documents_that_are_named_wrong_are_found(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    mapping = packed(tmp_path, tiny_config, "bestfit", "split")
    del mapping["data"]["sources"][1:]  # a mixture asks how much is left, and so passes the cursor, before
    run = TrainedRun(mapping)
    run.attempt(9, batch=3)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_every_step(run, ids_of_texts(run.job.data.tokenizer), run.job.data.tokenizer)
