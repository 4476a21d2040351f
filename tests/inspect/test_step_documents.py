"""`samples` names the documents that a step was trained on, of every step of runs through changes of shape;
compared with files that are read here, record by record.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.cli.tables import samples_lines
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.inspect.audit.trained_data import trained_data
from orchestrator.inspect.step_documents import TracingPacker, step_documents
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import DocumentLoss
from tests.data.making import job, some_texts, spec_of, write_corpus
from tests.inspect.trained_run import TrainedRun, changed
from tests.launch.skipping_run import SkippingRun
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def test_a_number_that_counting_anew_left_out_is_said_to_be_and_one_before_it_belongs_to_another_counting(
    tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "d", some_texts(60), "jsonl")
    source = {"name": "d", "path": str(tmp_path / "d"), "format": "jsonl"}
    run = SkippingRun(tiny_config({"data.sources": [source], "run.storage": str(tmp_path)}))
    for num_steps, batch in ((4, 4), (3, 2), (2, 4)):  # 16 samples; 8 steps of 2; 22, which are 6 steps of 4
        run.launch(num_steps, f"train.global_batch_size={batch}")
    opened = orchestrator.open(run.folder)
    assert [record.step for record in opened.records()] == [1, 2, 3, 4, 9, 10, 11, 7, 8]
    values = "number 6", "step 4 (attempt 1)", "step 9 (attempt 2)", "name 4, 9"
    with raises(RefusedError, "command.unknown_step", *values):
        opened.list_samples(6)
    found = opened.list_samples(10)
    assert found["note"] == (
        "step 10 is counted as attempt 2 did; after its step 11 steps are counted anew, because batch size "
        "or seq_len changed: the next one is 7, of attempt 3"
    )
    assert samples_lines(found)[-1] == f"note: {found['note']}"
    newest = opened.list_samples(8)
    assert newest["note"] is None
    assert not any("note" in line for line in samples_lines(newest))


@pytest.fixture
def run(tmp_path: Path, tiny_config: Make) -> TrainedRun:
    """Two sources, documents of several pieces, three shapes, weights that change, to the end of the data."""
    sources = []
    long = "".join(f"line {i} of a long document, {i * i}\\n" for i in range(90))
    for name, kind, weight in (("web", "jsonl", 0.6), ("books", "parquet", 0.4)):
        texts = [f"{name} {text}" for text in some_texts(25, 25)]
        write_corpus(tmp_path / name, [*texts, f"{name} {long}"], kind)
        sources.append({"name": name, "path": str(tmp_path / name), "format": kind, "weight": weight})
    mapping = tiny_config(
        {
            "data.sources": sources,
            "data.fragment_bytes": 900,
            "data.window_bytes": 5000,
            "data.on_end": "drop",
            "data.num_epochs": 2,
        }
    )
    run = TrainedRun(mapping)
    run.attempt(6, batch=3)
    changed(run, (0.2, 0.8))
    run.attempt(5, batch=5, seq_len=100)
    run.attempt(1000, batch=9)
    return run


def record_text(document: dict[str, Any]) -> str:
    """The text of the record that a document names, read from its file."""
    path = Path(document["file"])
    if document["unit"] == "row":
        text = pq.read_table(path)["text"][document["place"]].as_py()
    else:
        data = path.read_bytes()
        line = data[document["place"] :].partition(b"\n")[0]
        assert data.splitlines()[document["line"] - 1] == line
        text = json.loads(line)["text"]
    return str(text)


def test_every_steps_documents_are_the_files_records_token_by_token(run: TrainedRun) -> None:
    opened = orchestrator.open(run.folder)
    records = opened.records()
    tokenizer = Tokenizer.from_file(f"{run.job.data.tokenizer}/tokenizer.json")
    tokenizer.encode_special_tokens = True
    trained = 0
    seen: dict[tuple[Any, ...], int] = {}  # tokens of each document of each epoch that were shown so far
    ended = set()
    for number, record in enumerate(records):
        name = f"a{record.attempt}:{record.step}"
        found = opened.list_samples(name, text=number % 7 == 0)
        before = records[number - 1] if number else None
        assert (found["matches"], found["digest"]) == (True, record.digest)
        first = before.consumed_samples if before else 0
        assert [s["index"] for s in found["samples"]] == list(range(first, record.consumed_samples))
        tokens = sum(s["tokens"] for s in found["samples"])
        assert tokens == record.consumed_tokens - (before.consumed_tokens if before else 0)
        trained += tokens
        for sample in found["samples"]:
            assert sum(d["tokens"] for d in sample["documents"]) == sample["tokens"]
            for document in sample["documents"]:
                key = (sample["source"], document["epoch"], document["file"], document["place"])
                assert document["first_token"] == seen.get(key, 0), "it goes on where it was left"
                assert document["begins"] == (key not in seen)
                assert document["end_token"] == document["first_token"] + document["tokens"]
                seen[key] = document["end_token"]
                if document["ends"]:
                    ended.add(key)
                    num = len(tokenizer.encode(record_text(document), add_special_tokens=False).ids)
                    assert document["end_token"] == num + 1, "and its EOS"
                if "text" in document and document["begins"] and document["ends"]:
                    assert document["text"].startswith(record_text(document))
    assert trained == run.cursor.consumed_tokens
    # all documents were shown; one of each source ends with the token that is only a label
    assert set(seen) - ended <= {key for key in seen if key[1] == 1}
    assert len(set(seen) - ended) <= 2
    assert len({key[1] for key in seen}) == 2


def test_documents_over_several_steps_are_counted_from_a_cursor_inside_them(run: TrainedRun) -> None:
    opened = orchestrator.open(run.folder)
    inside = [
        document
        for record in opened.records()
        for sample in opened.list_samples(f"a{record.attempt}:{record.step}")["samples"]
        for document in sample["documents"][:1]
        if not document["begins"]
    ]
    assert any(document["first_token"] > 300 for document in inside), "pieces of the long documents"


def test_a_cursor_that_does_not_count_earlier_pieces_says_so(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", ["word " * 400, "short one"], "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", shuffle="none"))
    start = SourceCursor(piece=2)
    packer = TracingPacker(spec.endless().chunks(Cursor(sources={"made": start})), start)
    packer.samples(40, 40)
    (inside,) = packer.stretches(0, 40)
    assert (inside.first_token, inside.begins, inside.num_tokens) == (None, False, 40)
    left = packer.left(10_000, 1, 40)
    packer.samples(left, left)
    first, second = packer.stretches(0, left)
    assert (first.first_token, first.ends) == (None, True)
    assert (second.first_token, second.begins, second.place > 0) == (0, True, True)


def test_samples_that_are_not_those_of_the_journal_are_said_to_be_others(
    run: TrainedRun, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = TrainedRun({**run.job.to_json(), "run": {"name": "wrong", "storage": str(tmp_path / "wrong")}})
    broken.attempt(5, wrong=3)
    opened = orchestrator.open(broken.folder)
    assert opened.list_samples(2)["matches"]
    found = opened.list_samples("3")
    assert not found["matches"]
    assert "have digest" in found["difference"]
    assert len(found["samples"]) == 8, "what the files hold there"
    with raises(DataIdentityError, "audit.other_samples", "step 3", "digest"):
        opened.samples(3)
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(broken.folder), "--step", "3"])
    assert ended.value.code == 1
    assert "NOT what the journal says was trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "code", "value"),
    [
        ("999", "command.unknown_step", "step 999"),
        ("1:2", "command.several_steps", "2 steps"),
        ("x", "command.step_form", "'x'"),
    ],
)
def test_what_names_no_single_step_is_refused(run: TrainedRun, step: str, code: str, value: str) -> None:
    with raises(RefusedError, code, value):
        orchestrator.open(run.folder).list_samples(step)


def test_the_command_and_the_table_say_the_same(run: TrainedRun, capsys: pytest.CaptureFixture[str]) -> None:
    opened = orchestrator.open(run.folder)
    table = opened.samples("a2:7", text=True)
    with pytest.raises(SystemExit) as ended:
        main(["samples", str(run.folder), "--step", "a2:7", "--text", "--json"])
    assert ended.value.code == 0
    found = orjson.loads(capsys.readouterr().out)
    rows = [d for sample in found["samples"] for d in sample["documents"]]
    assert table["text"].tolist() == [row["text"] for row in rows]
    assert table["first_token"].tolist() == [row["first_token"] for row in rows]
    assert table.groupby("index")["tokens"].sum().tolist() == [100] * 5
    with pytest.raises(SystemExit):
        main(["samples", str(run.folder), "--step", "a2:7", "--text"])
    shown = capsys.readouterr().out
    assert f"step {found['step']}: these 5 samples have the digest" in shown
    for row in rows:
        assert f"{row['file']}: {row['unit']} {row['place']:,}" in shown


def test_documents_by_loss_are_those_of_the_step_in_the_order_of_the_journal(run: TrainedRun) -> None:
    seen, opened = survey(run.store), orchestrator.open(run.folder)
    plain = opened.list_samples("a2:7", text=True)
    assert plain["by_loss"] is None
    first, last = plain["samples"][0], plain["samples"][-1]
    worst = [
        DocumentLoss(sample=last["index"], document=len(last["documents"]) - 1, loss=None, targets=3),
        DocumentLoss(sample=first["index"], document=0, loss=2.5, targets=7),
    ]
    spec = trained_data(run.store, str(run.folder), seen)
    found = step_documents(spec, seen, "a2:7", True, worst)
    assert found["samples"] == plain["samples"]
    rows = found["by_loss"]
    assert [(row["loss"], row["targets"], row["index"]) for row in rows] == [
        (None, 3, last["index"]),
        (2.5, 7, first["index"]),
    ]
    assert [row["text"] for row in rows] == [last["documents"][-1]["text"], first["documents"][0]["text"]]
    lines = samples_lines(found)
    assert lines[0].startswith("loss not finite")
    assert sum(line.startswith("loss ") for line in lines) == 2
    assert not any(line.startswith("sample ") for line in lines)


def test_a_step_whose_documents_losses_were_not_recorded_is_refused(run: TrainedRun) -> None:
    with raises(RefusedError, "samples.no_losses", "a2:7", "monitor.document_losses"):
        orchestrator.open(run.folder).list_samples("a2:7", by_loss=True)
