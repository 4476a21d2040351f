"""The audit of runs with transforms and a hold-out: what it shows, and planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.packing.packer import Packer
from orchestrator.data.sources.records.content import Described
from orchestrator.data.sources.windows import OrderedWindow
from orchestrator.data.tokens import chunks, transforms
from orchestrator.data.tokens.transforms import Output
from orchestrator.errors import DataIdentityError
from orchestrator.inspect.audit.audit import audit_history
from orchestrator.records.cursor import Cursor
from orchestrator.records.tokens import TokenChunk
from tests.data.format_writers import write_files
from tests.data.made_transforms import HERE, some_records, told_texts
from tests.data.making import write_corpus
from tests.inspect.audits_in_parts import in_parts, num_parts
from tests.inspect.trained_run import TrainedRun
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def transformed_run(folder: Path, make: Make, mode: str = "concat", **data: Any) -> TrainedRun:
    write_corpus(folder / "data", told_texts(110, 25), "jsonl")
    source = {"name": "made", "path": str(folder / "data"), "format": "jsonl"}
    small: dict[str, Any] = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    small |= {"data.on_bad_document": "skip", "data.max_bad_share": 1.0}
    pack: dict[str, Any] = {"pack.mode": mode, "pack.seq_len": 64, "pack.long_document": "split"}
    told: dict[str, Any] = {"transforms": [f"{HERE}:as_told", f"{HERE}:half"], "holdout": 0.1, **data}
    return TrainedRun(
        make({"data.sources": [source], **small, **pack, **{f"data.{k}": v for k, v in told.items()}})
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> TrainedRun:
    return transformed_run(tmp_path_factory.mktemp("made"), tiny_config)


@pytest.fixture
def run(prepared: TrainedRun, tmp_path: Path) -> TrainedRun:
    return prepared.copied(tmp_path / "runs")


@pytest.mark.quick("bestfit")
@pytest.mark.parametrize("mode", ["concat", "bestfit", "pad"])
def test_a_run_of_transformed_documents_is_shown_whole_and_from_any_step_on(
    mode: str, tmp_path: Path, tiny_config: Make
) -> None:
    run = transformed_run(tmp_path, tiny_config, mode)
    run.attempt(6, batch=3)
    run.attempt(1000, batch=7)
    report = audit(run)
    assert report["exactly_once"], report["first_difference"]
    assert report["not_shown"] == []
    last = run.cursor.sources["made"]
    assert min(last.filtered_documents, last.held_out_documents, last.bad_documents) > 5
    assert report["left_out_documents"] == {
        "made": {"filtered": last.filtered_documents, "held_out": last.held_out_documents}
    }
    for first in ("5", "6", "9"):
        later = audit(run, f"{first}:")
        assert later["exactly_once"], later["first_difference"]


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["concat", "bestfit", "pad"])
def test_transformed_documents_are_counted_once_in_any_parts(
    mode: str, tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = transformed_run(tmp_path, tiny_config, mode)
    run.attempt(1000, batch=1, seq_len=64 if mode != "concat" else 23)
    whole = audit(run)
    assert (whole["exactly_once"], whole["not_shown"]) == (True, [])
    assert num_parts(run) > 20
    assert without_attempts(in_parts(run, monkeypatch, 1)) == whole
    assert without_attempts(in_parts(run, monkeypatch, 1, steps="9:30")) == audit(run, "9:30")


# ---------------------------------------------------------------------------------------- planted faults
def the_number_is_lost_at_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record's documents come from its first on, whichever the cursor names, and nobody looks."""
    right_add, right_verify = chunks._Records._add_outputs, Packer._verify_start

    def add(self: Any, position: int, outputs: Sequence[Output]) -> Iterator[TokenChunk]:
        self._task = replace(self._task, output=0)
        return right_add(self, position, outputs)

    def verify(self: Any, chunk: TokenChunk) -> int:
        try:
            return right_verify(self, chunk)
        except DataIdentityError:
            return 0

    monkeypatch.setattr(chunks._Records, "_add_outputs", add)
    monkeypatch.setattr(Packer, "_verify_start", verify)


def what_is_held_out_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OrderedWindow, "is_held_out", lambda *_: False)


def the_last_document_of_a_record_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = chunks._Records._add_outputs

    def add(self: Any, position: int, outputs: Sequence[Output]) -> Iterator[TokenChunk]:
        return right(self, position, outputs[:-1] if len(outputs) > 2 else outputs)

    monkeypatch.setattr(chunks._Records, "_add_outputs", add)


def records_have_the_seeds_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OrderedWindow.seed
    monkeypatch.setattr(OrderedWindow, "seed", lambda self, position: right(self, 0) + position)


def audit(run: TrainedRun, steps: str | None = None) -> dict[str, Any]:
    """In this process, in which the faults are planted; the command runs the transforms in another."""
    return audit_history(run.spec.made_by(run.encoders), survey(run.store), steps)


def without_attempts(report: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != "attempts"}


def first_inside_a_record(run: TrainedRun) -> None:
    """Trains up to a place between two documents of one record."""
    for _ in range(60):
        run.attempt(1, batch=1, seq_len=23)
        if run.cursor.sources["made"].output:
            return
    raise AssertionError("no record gave several documents")


PLANTED = [
    the_number_is_lost_at_a_resume,
    what_is_held_out_is_trained,
    the_last_document_of_a_record_is_lost,
    records_have_the_seeds_of_others,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_stream_with_a_fault_of_its_own_is_found(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    if plant is the_number_is_lost_at_a_resume:
        first_inside_a_record(run)
    with monkeypatch.context() as planted:
        plant(planted)
        run.attempt(12, batch=5)
    found = audit(run)["first_difference"]
    assert found is not None
    assert "trained samples have digest" in found["reason"]


@pytest.mark.parametrize("plant", PLANTED[1:])
def test_a_fault_that_the_recomputed_stream_has_too_is_found_in_the_files(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    plant(monkeypatch)
    run.attempt(1000, batch=9)
    found = audit(run)["first_difference"]
    assert found is not None
    assert (found["step"], "the files hold" in found["reason"]) == (None, True)
    assert "held out" in found["reason"]


def test_a_lost_number_is_refused_by_the_stream_itself(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_inside_a_record(run)
    right = chunks._Records._add_outputs

    def add(self: Any, position: int, outputs: Sequence[Output]) -> Iterator[TokenChunk]:
        self._task = replace(self._task, output=0)
        return right(self, position, outputs)

    monkeypatch.setattr(chunks._Records, "_add_outputs", add)
    with raises(DataIdentityError, "resume.cursor_mismatch", "of record", "piece 0 ", "tokens for record"):
        run.attempt(1)


def test_a_transform_that_makes_another_thing_later_is_found(tmp_path: Path, tiny_config: Make) -> None:
    run = transformed_run(tmp_path, tiny_config, transforms=[f"{HERE}:moody"])
    run.attempt(9)
    assert audit(run)["exactly_once"]
    (ref,) = run.spec.settings.transforms["made"]
    mood = transforms._function(ref).__globals__["MOOD"]
    mood["now"] = 1
    try:
        found = audit(run)["first_difference"]
    finally:
        mood["now"] = 0
    assert found is not None
    assert "trained samples have digest" in found["reason"]


def run_with_columns(folder: Path, make: Make, form: str) -> TrainedRun:
    """Documents that say what their record holds beside them."""
    records = some_records(90)
    write_files(folder / "data", form, [records[:40], records[40:]])
    source = {"name": "made", "path": str(folder / "data"), "format": form}
    source |= {"transform_fields": ["meta.url", "score"], "transforms": [f"{HERE}:says_its_fields"]}
    small: dict[str, Any] = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    return TrainedRun(make({"data.sources": [source], **small, "pack.seq_len": 64}))


def columns_are_those_of_another_record(monkeypatch: pytest.MonkeyPatch) -> None:
    right = OrderedWindow.described

    def described(self: OrderedWindow, position: int) -> Any:
        found, other = right(self, position), right(self, 0)
        assert isinstance(found, Described), "the source has such fields"
        assert isinstance(other, Described), "the source has such fields"
        return Described(document=found.document, fields=other.fields)

    monkeypatch.setattr(OrderedWindow, "described", described)


@pytest.mark.chaos
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_run_whose_transforms_see_columns_is_shown_and_told_from_one_with_columns_of_others(
    form: str, tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_columns(tmp_path, tiny_config, form)
    run.attempt(6, batch=3)
    run.attempt(6, batch=7)
    report = audit(run)
    assert report["exactly_once"], report["first_difference"]
    other = run_with_columns(tmp_path / "other", tiny_config, form)
    with monkeypatch.context() as planted:
        columns_are_those_of_another_record(planted)
        other.attempt(3)
    found = audit(other)["first_difference"]
    assert found is not None
    assert "trained samples have digest" in found["reason"]


def test_a_cursor_at_the_second_document_of_an_epochs_first_record_is_no_epochs_begin(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = transformed_run(tmp_path, tiny_config, transforms=[f"{HERE}:twice"], holdout=0.0)
    first = next(chunk for chunk in run.spec.chunks(Cursor()))
    assert (first.record[:2].tolist(), first.outputs[:2].tolist()) == ([0, 0], [0, 1])
    run.attempt(1, batch=1, seq_len=int(first.num_tokens[0]))
    at = run.cursor.sources["made"]
    assert (at.block, at.window, at.record, at.output, at.piece, at.token) == (0, 0, 0, 1, 0, 0)
    (text,) = audit(run)["not_shown"]
    assert text == "completeness of epoch 0 (the audited steps end inside it); no duplicates found"
    for _ in range(3):
        run.attempt(1, batch=1, seq_len=7)
    whole = audit(run)
    assert whole["exactly_once"], whole["first_difference"]
    assert without_attempts(in_parts(run, monkeypatch, 1)) == whole
