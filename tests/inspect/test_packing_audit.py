"""The audit of runs that pack whole documents: what it shows, what it leaves open, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.common.settings import SPLIT_WHOLE
from orchestrator.data.packing import packed_window, window_packer
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.errors import DataIdentityError
from orchestrator.inspect.audit.reference.reference_packing import Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.source_walk import TrainedDocuments
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import TokenChunk
from tests.data.making import some_texts, write_corpus
from tests.data.packed import WINDOWS, chunks_of, documents, draw_all, settings_of
from tests.inspect.trained_run import TrainedRun
from tests.num_examples import examples
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def packed_run(folder: Path, make: Make, mode: str, long_document: str, sources: int = 1) -> TrainedRun:
    listed = []
    for i in range(sources):
        name = "abc"[i]
        write_corpus(folder / name, [f"{name} {text}" for text in some_texts(60 + 20 * i, 30)], "jsonl")
        listed.append({"name": name, "path": str(folder / name), "format": "jsonl", "weight": 1 + i})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    pack = {"pack.mode": mode, "pack.seq_len": 64, "pack.long_document": long_document}
    pack |= {"pack.max_long_share": 1.0}
    on_end = {"data.on_end": "drop"} if sources > 1 else {}
    return TrainedRun(make({"data.sources": listed, **small, **pack, **on_end}))


@pytest.mark.quick("bestfit-split", "bestfit-skip")
@pytest.mark.parametrize(
    ("mode", "long_document"), [("bestfit", "split"), ("pad", "split"), ("bestfit", "skip")]
)
def test_a_run_of_packs_is_shown_whole_and_from_any_step_on(
    tmp_path: Path, tiny_config: Make, mode: str, long_document: str
) -> None:
    run = packed_run(tmp_path, tiny_config, mode, long_document)
    run.attempt(6, batch=3)
    run.attempt(1000, batch=7)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    long = run.cursor.sources["a"].long_documents
    skipped = [f"documents of epoch {e} in no sample: {long // 2} with more tokens" for e in (0, 1)]
    assert [text.split(" than a sample")[0] for text in report["not_shown"]] == (skipped if long else [])
    assert bool(long) == (long_document == "skip")
    assert report["tokens"] == 64 * run.cursor.consumed_samples
    for first in ("6", "8", "9"):
        later = run.audit(f"{first}:")
        assert later["exactly_once"], later["first_difference"]
        assert any("completeness of epoch" in text for text in later["not_shown"])


def test_a_mixture_of_packed_sources_is_shown_whole(tmp_path: Path, tiny_config: Make) -> None:
    run = packed_run(tmp_path, tiny_config, "bestfit", "split", sources=2)
    run.attempt(5, batch=4)
    run.attempt(1000, batch=7)
    report = run.audit()
    assert report["exactly_once"], report["first_difference"]
    assert report["not_shown"] == []


# ---------------------------------------------------------------------------------------- planted faults
def a_document_is_split(inputs: Any, labels: Any, documents: Any) -> None:
    first = documents[0]
    at = max(1, int((first == 0).sum()) // 2)
    first[at:][first[at:] >= 0] += 1


def a_pack_comes_twice(inputs: Any, labels: Any, documents: Any) -> None:
    for table in (inputs, labels, documents):
        table[1] = table[0]


def the_mask_is_off_by_one(inputs: Any, labels: Any, documents: Any) -> None:
    for row in documents:
        num = int((row >= 0).sum())
        row[1:num] = row[: num - 1].copy()


def padding_is_trained(inputs: Any, labels: Any, documents: Any) -> None:
    row, at = np.argwhere(documents < 0)[0]
    labels[row, at] = 7


def two_documents_are_one(inputs: Any, labels: Any, documents: Any) -> None:
    documents[documents > 0] -= 1


PLANTED = [
    (a_document_is_split, "are no document"),
    (a_pack_comes_twice, "that was trained already"),
    (the_mask_is_off_by_one, "labels are not its inputs|are no document"),
    (padding_is_trained, "padding is not all"),
    (two_documents_are_one, "labels are not its inputs"),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> TrainedRun:
    return packed_run(tmp_path_factory.mktemp("made"), tiny_config, "bestfit", "split")


@pytest.mark.parametrize(("wrong", "text"), PLANTED)
def test_what_the_packer_does_wrong_is_found_in_its_step_and_what_both_do_in_the_documents(
    prepared: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any, text: str
) -> None:
    right, reference = StepSamples.rows, ReferenceWindows.samples

    def rows(self: StepSamples, start: int, stop: int) -> Any:
        numbers, *tables = (array.copy() for array in right(self, start, stop))
        wrong(*tables)
        return numbers, *tables

    def samples(self: ReferenceWindows, num_tokens: int, seq_len: int) -> Samples:
        found = reference(self, num_tokens, seq_len)
        wrong(found.input_ids, found.labels, found.document_ids)
        return found

    run = prepared.copied(tmp_path / "runs")
    monkeypatch.setattr(StepSamples, "rows", rows)
    run.attempt(3, batch=6)
    found = run.audit()["first_difference"]
    assert found is not None
    assert (found["step"], "trained samples have digest" in found["reason"]) == ("1", True)
    monkeypatch.setattr(ReferenceWindows, "samples", samples)
    found = run.audit()["first_difference"]
    assert found is not None
    assert any(part in found["reason"] for part in text.split("|")), found


def documents_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_window.stretches
    monkeypatch.setattr(packed_window, "stretches", lambda lengths, seq_len: right(lengths, seq_len - 1))


def packs_are_in_the_order_of_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_window, "pack_order", lambda num, *_: np.arange(num))


def a_resume_takes_a_pack_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = window_packer.WindowPacker._verify_start

    def wrong(self: Any, window: Any) -> None:
        right(self, window)
        self._place.taken = max(0, self._place.taken - 1)

    monkeypatch.setattr(window_packer.WindowPacker, "_verify_start", wrong)


@pytest.mark.parametrize(
    "plant", [documents_are_cut, packs_are_in_the_order_of_filling, a_resume_takes_a_pack_again]
)
def test_a_packer_with_a_fault_of_its_own_is_found(
    prepared: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    run = prepared.copied(tmp_path / "runs")
    with monkeypatch.context() as planted:
        plant(planted)
        run.attempt(2, batch=5)
        run.attempt(6, batch=5)
    found = run.audit()["first_difference"]
    assert found is not None
    assert "trained samples have digest" in found["reason"]


# ---------------------------------------------------------------------------------------- made by hand
def endless(windows: Any, cuts: int, at: SourceCursor) -> Iterator[TokenChunk]:
    first = at.block
    for epoch in range(at.epoch, at.epoch + 9):
        yield from (replace(c, epoch=epoch) for c in chunks_of(windows, cuts) if c.block >= first)
        first = 0


@settings(max_examples=examples(25, chaos=80), deadline=None)
@given(
    windows=WINDOWS,
    mode=st.sampled_from(["bestfit", "pad"]),
    seq_len=st.integers(1, 12),
    rule=st.sampled_from(["split", SPLIT_WHOLE, "skip"]),
    cuts=st.integers(1, 9),
    data=st.data(),
)
def test_both_packers_agree_on_any_windows_at_every_cursor(
    windows: Any, mode: str, seq_len: int, rule: str, cuts: int, data: st.DataObject
) -> None:
    made, how = documents(windows), settings_of(mode, seq_len, rule)
    if not any(1 < len(t) <= seq_len + 1 and any(loss[1:]) for window in made for t, loss in window):
        return
    found = draw_all(made, how, [1], cuts)
    after = data.draw(st.integers(0, len(found.rows) - 1))
    begin = SourceCursor() if after == 0 else found.inside[after - 1].sources["made"]
    watch = TrainedDocuments(begin.packs, rule)
    packer = ReferenceWindows(watch.watch(endless(made, cuts, begin)), begin, how)
    for number in range(after, len(found.rows)):
        assert packer.left(99 * seq_len, 1, seq_len) == seq_len * min(99, len(found.rows) - number)
        samples = packer.samples(seq_len, seq_len)
        tables = samples.input_ids[0], samples.labels_of_loss[0], samples.document_ids[0]
        assert tuple(table.tolist() for table in tables) == found.rows[number]
        assert packer.cursor() == found.inside[number].sources["made"]
        assert watch.add(samples, seq_len) is None
    assert packer.cursor().epoch == 1 or packer.ends_epoch(99)
    # a mask that is off by one, made by both packers
    if samples.masked.any():
        rolled = replace(samples, masked=np.roll(samples.masked, 1))
        again = TrainedDocuments(begin.packs, rule)
        second = ReferenceWindows(again.watch(endless(made, cuts, begin)), begin, how)
        for _ in range(after, len(found.rows) - 1):
            assert again.add(second.samples(seq_len, seq_len), seq_len) is None
        second.samples(seq_len, seq_len)
        real = samples.document_ids >= 0
        if (rolled.masked[real] != samples.masked[real]).any():
            assert again.add(rolled, seq_len) is not None


def test_a_cursor_whose_packs_are_not_reproduced_is_refused_by_the_audit(
    prepared: TrainedRun, tmp_path: Path
) -> None:
    run = prepared.copied(tmp_path / "runs")
    run.attempt(1, batch=2)
    at = run.cursor.sources["a"]
    assert at.packs
    wrong = replace(at, prefix_digest="0" * 16)
    chunks = run.spec.endless().chunks(Cursor(sources={"a": at}))
    with raises(DataIdentityError, "resume.cursor_mismatch", "0" * 16, at.prefix_digest):
        ReferenceWindows(chunks, wrong, run.spec.settings).samples(64, 64)
