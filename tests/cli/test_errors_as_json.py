"""With `--json` an error that ends a command is a document, too; its exit code is the error's."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.commands import main
from orchestrator.config.loading import parse_config
from orchestrator.errors import RefusedError, error_document
from orchestrator.launch import api
from orchestrator.records.cursor import Cursor
from orchestrator.records.run_status import RunStatus

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2"


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return int(exit_.value.code or 0)


def test_a_plan_for_a_damaged_run_is_a_document_with_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    (tmp_path / "copy" / "example" / "run.json").write_text("{")
    assert ended("plan", "job.yaml", "train.max_steps=20", "--json") == 1
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert list(document) == ["error"]
    assert document["error"]["class"] == "ResumePointError"
    assert document["error"]["code"] == "run.damaged_run_file"
    assert "run.json" in document["error"]["text"]
    assert f"error: {document['error']['text']}" in said.err


def test_a_refused_command_line_is_one_too_and_without_json_nothing_is_printed_but_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "points", "audit"):
        assert ended(command, str(tmp_path), "--json") == 2
        assert json.loads(capsys.readouterr().out)["error"]["class"] == "RefusedError"
        assert ended(command, str(tmp_path)) == 2
        assert capsys.readouterr().out == ""


def test_the_document_names_the_code_of_an_error_and_other_processes_keep_it() -> None:
    error = RefusedError("the bucket has no conditional create", code="storage.no_conditional_create")
    assert error_document(error) == {
        "class": "RefusedError",
        "code": "storage.no_conditional_create",
        "text": "the bucket has no conditional create",
    }
    assert pickle.loads(pickle.dumps(error)).code == error.code  # noqa: S301


def test_the_document_of_a_failed_run_has_the_code_of_the_error_that_ended_it(
    tiny_config: Callable[..., dict[str, Any]],
) -> None:
    status = RunStatus(
        version=1,
        attempt=2,
        generation=1,
        world_size=0,
        last_step=None,
        newest_point=None,
        committed=Cursor(),
        waiting_since=None,
        ended="failed",
        reason="a document is bad",
        code="data.bad_document",
        left_out=(),
        members=(),
        failures=(),
    )
    document = api._result(parse_config(tiny_config()), status, 1.0).to_json()
    assert (document["outcome"], document["code"]) == ("failed", "data.bad_document")
