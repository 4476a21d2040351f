"""An audit says the same whatever parts it is divided into and however many processes carry them out, of
whole runs and of damaged ones; and a process that ends early is never read as a result.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orchestrator
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.data.sources import windows as sources
from orchestrator.inspect.audit import audit_run
from orchestrator.inspect.audit.audit import audit_history
from orchestrator.inspect.audit.audit_processes import (
    AuditProcessError,
    AuditProcesses,
    Found,
    Task,
)
from orchestrator.inspect.audit.audit_run import AuditRun, HowToAudit
from orchestrator.inspect.audit.history_parts import history_of
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StepRecord
from tests.data.making import some_texts, write_corpus
from tests.inspect.audits_in_parts import HereButPickled, in_parts, num_parts
from tests.inspect.trained_run import (
    TrainedRun,
    a_block_twice,
    made_in,
    one_lost_one_repeated,
    one_token_later,
)
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_config: Make) -> TrainedRun:
    """A run that has trained nothing, only to be copied; with empty, blank and bad records, which at epochs'
    borders belong to one side only.
    """
    folder = tmp_path_factory.mktemp("made")
    mapping = made_in(folder, tiny_config)
    mapping["data"] |= {"num_epochs": 3, "on_bad_document": "skip", "max_bad_share": 0.9}
    for path in sorted((folder / "data").iterdir()):
        lines = path.read_bytes().splitlines(keepends=True)
        odd = [b'{"text": ""}\n', b"no json\n", b"\n", b'{"text": ""}\n']
        path.write_bytes(b"".join(line for pair in zip(lines, odd * 40, strict=False) for line in pair))
    return TrainedRun(mapping)


@pytest.fixture
def run(prepared: TrainedRun, tmp_path: Path) -> TrainedRun:
    return prepared.copied(tmp_path / "runs")


def packed(folder: Path, make: Make, mode: str) -> TrainedRun:
    listed = []
    for i, name in enumerate("ab"):
        write_corpus(folder / name, [f"{name} {text}" for text in some_texts(60 + 20 * i, 30)], "jsonl")
        listed.append({"name": name, "path": str(folder / name), "format": "jsonl", "weight": 1 + i})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.num_epochs": 2}
    pack = {"pack.mode": mode, "pack.seq_len": 64, "pack.long_document": "skip", "data.on_end": "drop"}
    pack |= {"pack.max_long_share": 1.0}
    return TrainedRun(make({"data.sources": listed, **small, **pack}))


# ---------------------------------------------------------------------------------------- whole runs
@pytest.mark.quick("1")
@pytest.mark.parametrize("least_tokens", [1, 5000])
def test_the_report_is_the_same_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, least_tokens: int
) -> None:
    run.attempt(30, batch=3)
    run.attempt(17, batch=5, seq_len=47)
    run.attempt(1000, batch=2, seq_len=64)
    whole = run.audit()
    assert whole["exactly_once"], whole["first_difference"]
    assert (whole["not_shown"], whole["skipped_documents"]["made"] > 20) == ([], True)
    assert num_parts(run) > 30
    assert in_parts(run, monkeypatch, least_tokens) == whole
    for steps in ("5:", "9:40", ":13", "12:13"):
        assert in_parts(run, monkeypatch, least_tokens, steps=steps) == run.audit(steps)


@pytest.mark.quick("33")
@pytest.mark.parametrize("stop", range(33, 61, 3))
def test_wherever_the_history_ends_the_report_is_the_same_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    run.attempt(stop, batch=1, seq_len=509)
    assert in_parts(run, monkeypatch, 1) == run.audit()


@pytest.mark.chaos
def test_documents_of_many_pieces_are_counted_once_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(run.spec.settings, piece_bytes=64, chunk_tokens=20, num_epochs=None)
    run.spec = replace(run.spec, settings=small)
    run.attempt(900, batch=1, seq_len=47)
    whole = audit_history(run.spec, survey(run.store))
    assert whole["exactly_once"], whole["first_difference"]
    monkeypatch.setattr(audit_run, "PART_TOKENS", 1)
    monkeypatch.setattr(audit_run, "_PARTS_OF_A_PROCESS", 1 << 30)
    monkeypatch.setattr(audit_run, "AuditProcesses", HereButPickled)
    assert num_parts(run) > 100
    assert audit_history(run.spec, survey(run.store), how=HowToAudit(processes=2)) == whole


@pytest.mark.quick("bestfit")
@pytest.mark.parametrize("mode", ["concat", "bestfit", "pad"])
def test_a_mixture_is_the_same_in_any_parts(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    run = packed(tmp_path, tiny_config, mode)
    run.attempt(13, batch=3)
    run.attempt(1000, batch=7)
    whole = run.audit()
    assert whole["exactly_once"], whole["first_difference"]
    assert num_parts(run) > 4
    assert in_parts(run, monkeypatch, 1) == whole
    assert in_parts(run, monkeypatch, 1, steps="7:19") == run.audit("7:19")


# ---------------------------------------------------------------------------------------- damaged runs
@pytest.mark.parametrize("wrong", [1, 4, 5, 17])
def test_a_wrong_step_is_named_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    run.attempt(24, wrong=wrong)
    run.attempt(6, wrong=27)
    whole = run.audit()
    assert whole["first_difference"]["step"] == str(wrong)
    assert in_parts(run, monkeypatch, 1) == whole


def test_a_cursor_that_is_not_the_streams_is_found_by_the_part_before_it(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(16, noted=one_token_later)
    whole = run.audit()
    assert "the journal's cursor after it" in whole["first_difference"]["reason"]
    assert in_parts(run, monkeypatch, 1) == whole


def a_block_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "block_at", a_block_twice)


def both_packers_lose_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    right, reference = StepSamples.rows, ReferencePacker.samples

    def rows(self: StepSamples, start: int, stop: int) -> Any:
        numbers, *tables = (array.copy() for array in right(self, start, stop))
        one_lost_one_repeated(*tables)
        return numbers, *tables

    def samples(self: ReferencePacker, num_tokens: int, seq_len: int) -> Samples:
        found = reference(self, num_tokens, seq_len)
        one_lost_one_repeated(found.input_ids, found.labels, found.document_ids)
        return found

    monkeypatch.setattr(StepSamples, "rows", rows)
    monkeypatch.setattr(ReferencePacker, "samples", samples)


def a_step_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal says so of step 9, and of all that follows."""
    right = StepSamples.rows

    def wrong(self: StepSamples, start: int, stop: int) -> Any:
        numbers, inputs, *others = right(self, start, stop)
        if self.step.first_sample >= 64:
            inputs = np.roll(inputs, 1, axis=0)
        return numbers, inputs, *others

    monkeypatch.setattr(StepSamples, "rows", wrong)


@pytest.mark.parametrize(
    ("plant", "text"),
    [
        (a_block_comes_twice, "epoch 0 held the record at"),
        (both_packers_lose_a_token, "one after the other"),
        (a_step_is_repeated, "trained samples have digest"),
    ],
)
def test_planted_faults_are_found_alike_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch, plant: Any, text: str
) -> None:
    plant(monkeypatch)
    run.attempt(60)
    whole = run.audit()
    assert text in whole["first_difference"]["reason"]
    assert in_parts(run, monkeypatch, 1) == whole


def test_files_that_lost_a_document_are_found_alike_in_any_parts(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(1000)
    path = next(Path(row) for row in [run.spec.plans[0].manifest.path(1)])
    whole, times = path.read_bytes(), path.stat()
    at = len(whole) // 2
    path.write_bytes(whole[:at].replace(b'{"text": "', b'{"text": "', 1) + whole[at:].replace(b"e", b"o", 3))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    found = run.audit()
    assert found["exactly_once"] is False
    assert in_parts(run, monkeypatch, 1) == found


# ---------------------------------------------------------------------------------------- processes
def test_several_processes_say_what_one_says(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(24)
    run.attempt(1000, batch=5)
    monkeypatch.setattr(audit_run, "PART_TOKENS", 2000)
    monkeypatch.setattr(audit_run, "PART_BYTES", 1)
    opened = orchestrator.open(run.folder)
    assert opened.audit(processes=3) == opened.audit(processes=1)


def test_a_process_that_is_killed_is_an_error_and_no_proof(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(24)
    right = AuditProcesses.run

    def killed(self: AuditProcesses, tasks: Sequence[Task], advanced: Any) -> list[Found]:
        def then_they_die(*_: int) -> None:
            for number in self.process_ids:
                os.kill(number, signal.SIGKILL)

        return right(self, tasks, then_they_die)

    monkeypatch.setattr(AuditProcesses, "run", killed)
    monkeypatch.setattr(audit_run, "PART_TOKENS", 1)
    with raises(AuditProcessError, "audit.process_died", "SIGKILL", "compared"):
        orchestrator.open(run.folder).audit(processes=2)


def test_an_error_of_a_part_is_that_of_the_whole(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.attempt(24)
    path = Path(run.spec.plans[0].manifest.path(0))
    held = path.read_bytes()
    opened = orchestrator.open(run.folder)
    seen, spec = survey(run.store), run.spec
    path.unlink()
    try:
        texts = []
        for processes in (1, 2):
            monkeypatch.setattr(audit_run, "PART_TOKENS", 1)
            with pytest.raises(orchestrator.errors.DataIdentityError) as caught:
                audit_history(spec, seen, how=HowToAudit(processes=processes))
            texts.append(str(caught.value))
    finally:
        path.write_bytes(held)
    assert texts[0] == texts[1]
    assert opened


def test_an_interrupted_audit_says_how_far_it_came_and_claims_nothing_more(
    run: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.attempt(24)

    class Impatient:
        steps = 0

        def begin(self, what: str, unit: str, total: int) -> None:
            pass

        def advance(self, num: int) -> None:
            self.steps += 1
            if self.steps == 7:
                raise KeyboardInterrupt

    for processes in (1, 2):
        monkeypatch.setattr(audit_run, "AuditProcesses", HereButPickled)
        monkeypatch.setattr(audit_run, "PART_TOKENS", 1)
        with pytest.raises(KeyboardInterrupt) as caught:
            audit_history(
                run.spec,
                survey(run.store),
                how=HowToAudit(processes=processes, progress=Impatient()),
            )
        assert str(caught.value) == (
            "interrupted: 7 of 24 steps, up to step 7, are those of the stream; nothing is claimed of the "
            "others, nor of epochs; --steps 8: continues"
        )


def test_the_parts_follow_one_another_and_begin_at_cursors(run: TrainedRun) -> None:
    run.attempt(30)
    history = history_of(run.spec, survey(run.store))
    parts = history.parts(range(2, 30), 1500)
    assert [index for part in parts for index in part.wanted] == list(range(2, 30))
    assert len(parts) > 4
    for part in parts[1:]:
        assert part.first == part.wanted.start
        assert part.begin == history.known[part.first]
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert AuditRun(run.spec, history, range(30), HowToAudit()) is not None
    assert isinstance(parts[0].records[0], StepRecord)
    assert parts[0].begin == Cursor()
