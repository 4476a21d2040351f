"""Every error has a code, codes have one form, and docs/errors.md and docs/notices.md list all sentences."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from orchestrator.data.sources.records.content import MissingFieldError
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.errors import (
    BadDocumentError,
    ConfigError,
    Format1Error,
    OrchestratorError,
    error_document,
)
from tests.messages import FORM, PASSED_ON, REASON, messages, notice_table, table

ROOT = Path(__file__).parents[1]


def test_every_error_has_a_code() -> None:
    errors = (*messages(), *messages(REASON))
    without = [f"{each.place}: {each.kind} {each.text}" for each in errors if not each.code]
    assert not without


def test_codes_have_one_form() -> None:
    codes = {each.code for each in (*messages(), *messages(REASON))} - {PASSED_ON}
    assert len(codes) > 200
    assert not [code for code in codes if not FORM.fullmatch(code)]


def test_the_list_of_errors_is_that_of_the_code() -> None:
    written = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert written == table(), "python -m tests.messages > docs/errors.md"


def test_the_list_of_notices_is_that_of_the_code() -> None:
    written = (ROOT / "docs" / "notices.md").read_text(encoding="utf-8")
    assert written == notice_table(), "python -m tests.messages notices > docs/notices.md"


def test_an_error_that_a_library_makes_from_its_text_keeps_its_class() -> None:
    assert ConfigError("data.sources is empty").code == "internal.code_lost"
    assert BadDocumentError("a.jsonl: 'text' is null").reason_code is None


@pytest.mark.parametrize(
    "error", [ConfigError("a is 1", code="config.wrong_type"), Format1Error("run.json is of format 1")]
)
def test_an_error_keeps_its_code_and_text_across_processes(error: OrchestratorError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert error_document(again) == error_document(error)


@pytest.mark.parametrize("kind", [MissingFieldError, UnrenderableError])
def test_a_reason_for_a_bad_document_keeps_its_code_and_text_across_processes(
    kind: type[MissingFieldError | UnrenderableError],
) -> None:
    again = pickle.loads(pickle.dumps(kind("no field `text`", code="record.missing_field")))
    assert type(again) is kind
    assert (again.code, str(again)) == ("record.missing_field", "no field `text`")
