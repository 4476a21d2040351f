"""`audit` and `verify` leave what they found in the run's folder, where they may write."""

from __future__ import annotations

from pathlib import Path

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.errors import StorageError
from orchestrator.history.numbered_files import FindingFiles, newest_audit, verified_points

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2"
NEWEST = "00000010-a0003-g0001"


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def looked_at() -> list[object]:
    """What other commands say of the run."""
    plan, run = orchestrator.plan("job.yaml", ["train.max_steps=20"]), orchestrator.open("example")
    return [plan.to_json(), run.list_points(), run.status(0.0).verdict, run.prune(dry_run=True)]


def test_an_audit_and_a_verification_are_seen_by_others_and_change_nothing_of_the_run(example: Path) -> None:
    before = looked_at()
    assert command("audit", "example") == 0
    assert command("verify", "example") == 0
    assert command("verify", "example", NEWEST) == 0
    found = orchestrator.open("example").findings()
    audit = newest_audit(found)
    assert audit is not None
    assert (audit.attempt, audit.result["exactly_once"], audit.result["tokens"]) == (3, True, 960)
    assert {(each.number, healthy) for each, healthy in verified_points(found).values()} == {
        (2, True),
        (3, True),
    }
    assert looked_at() == before
    (example / "points" / NEWEST / "cursor.json").write_text("{}")
    assert command("verify", "example", NEWEST) == 1
    assert not verified_points(orchestrator.open("example").findings())[NEWEST][1]


def test_a_reader_that_may_not_write_says_so_and_prints_its_result(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise StorageError("cannot create findings/000001.json: Permission denied")

    monkeypatch.setattr(FindingFiles, "add", refused)
    assert command("audit", "example", "--json") == 0
    shown = capsys.readouterr()
    assert '"exactly_once": true' in shown.out
    assert "the result is not left in the run's folder" in shown.err
    assert "Permission denied" in shown.err
    assert not (example / "findings").exists()
