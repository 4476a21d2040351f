"""`audit --reference` encodes with `tokenizers`, too: differences that the run journalled are told from
others, and what it cannot show it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.config.loading import parse_config
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.tokens import chunks
from orchestrator.data.tokens.encoder import Encoder
from orchestrator.errors import RefusedError
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.audit import audit_run
from orchestrator.inspect.audit.audit import audit_history
from orchestrator.inspect.audit.audit_run import HowToAudit
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.records.cursor import Cursor
from tests.data.encoders import FAST, SLOW, save_tokenizer
from tests.data.making import some_texts
from tests.inspect.audits_in_parts import HereButPickled
from tests.inspect.trained_run import TrainedRun, made_in
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    return made_in(tmp_path, tiny_config)


@pytest.fixture
def differing(mapping: dict[str, Any], tmp_path: Path) -> TrainedRun:
    """A run whose encoder gives other ids than `tokenizers` for nearly every document; nothing is trained."""
    mapping["data"]["tokenizer"] = save_tokenizer(tmp_path / "tokenizer", some_texts(60, longest=200))
    mapping["data"]["encoder"] = "tokenizers"
    run = TrainedRun(mapping)
    run.encoders = (EncoderSpan(encoder=FAST),)
    return run


def differences(run: TrainedRun, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run that compares every document notes of the first epoch."""
    with monkeypatch.context() as every:
        every.setattr(chunks, "CHECK_ONE_IN", 1)
        spec = run.spec.made_by(run.encoders)
        return [t for c in spec.chunks(Cursor()) if c.epoch == 0 for t in c.encoder_differences]


def test_where_both_libraries_agree_the_audit_says_so(
    mapping: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainedRun(mapping)
    run.attempt(1000)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--reference"])
    assert ended.value.code in (0, None)
    assert f"{SLOW} gives the same ids for every document of these steps" in capsys.readouterr().out


def test_differences_that_the_journal_names_are_told_from_others(
    differing: TrainedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = differing
    run.attempt(1000)
    told = differences(run, monkeypatch)
    assert len(told) > 30
    seen = survey(run.store)
    noted = [
        replace(seen.journal.events[0], kind=EventKind.ENCODERS_DIFFER, fields={"text": text})
        for text in told
    ]
    seen = replace(seen, journal=replace(seen.journal, events=(*seen.journal.events, *noted[:-3])))
    whole = audit_history(run.spec.made_by(run.encoders), seen, how=HowToAudit(by_reference=True))
    assert whole["exactly_once"], "the stream is what the run's own encoder makes"
    found = whole["reference"]
    # the run's two epochs hold each document twice
    assert (found["encoder"], found["documents_journalled"]) == (str(SLOW), 2 * (len(told) - 3))
    assert found["documents_not_journalled"] == len(found["not_journalled"]) == 6
    for text in told[-3:]:
        ids = text.partition(" its ids from ")[2]
        assert sum(each.endswith(ids) and ".jsonl: by gigatoken" in each for each in found["not_journalled"])
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(run.folder), "--reference"])
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert "not in the journal: epoch 0, the document at" in said
    assert "those of tokenizers" in said


def orchestrator_report(run: TrainedRun, **how: Any) -> dict[str, Any]:
    report: dict[str, Any] = orchestrator.open(run.folder).audit(reference=True, **how)
    return report


def test_only_documents_of_the_audited_steps_are_compared_in_any_parts(
    differing: TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = differing
    run.attempt(24)
    whole = orchestrator_report(run)
    later = orchestrator_report(run, steps="13:")
    assert 0 < later["reference"]["documents_not_journalled"] < whole["reference"]["documents_not_journalled"]
    monkeypatch.setattr(audit_run, "PART_TOKENS", 1)
    monkeypatch.setattr(audit_run, "_PARTS_OF_A_PROCESS", 1 << 30)
    monkeypatch.setattr(audit_run, "AuditProcesses", HereButPickled)
    assert orchestrator_report(run, processes=2) == whole
    assert orchestrator_report(run, steps="13:", processes=2) == later


def test_a_fault_of_the_encoder_that_both_readings_share_is_found_by_the_reference_alone(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, right = TrainedRun(mapping), Encoder.encode

    def swaps(self: Encoder, texts: Any) -> Any:
        ids, lengths = right(self, texts)
        if self.choice == FAST:
            ids = ids.copy()
            ids[5:7] = ids[5:7][::-1]
        return ids, lengths

    monkeypatch.setattr(Encoder, "encode", swaps)
    run.attempt(6)
    assert run.audit()["exactly_once"]
    found = orchestrator_report(run)["reference"]
    assert found["documents_not_journalled"] > 0
    assert "those of tokenizers" in found["not_journalled"][0]


def test_where_the_run_was_encoded_by_tokenizers_it_shows_nothing_and_says_so(
    mapping: dict[str, Any],
) -> None:
    mapping["data"]["encoder"] = "tokenizers"
    run = TrainedRun(mapping)
    run.attempt(3)
    assert parse_config(mapping).data.encoder == "tokenizers"
    with raises(RefusedError, "audit.no_reference", "encoded with tokenizers"):
        orchestrator_report(run)
