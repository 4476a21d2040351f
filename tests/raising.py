"""Asserts errors by class, code and values, so that their sentences can change; and exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from orchestrator.data.sources.records.content import BadContentError
from orchestrator.errors import OrchestratorError

E = TypeVar("E", bound=OrchestratorError | BadContentError)


@contextmanager
def raises(kind: type[E], code: str, *values: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """`pytest.raises(kind)`, and the error has this `code` and its text contains each of `values`."""
    with pytest.raises(kind) as caught:
        yield caught
    check_error(caught.value, code, *values)


def check_error(error: OrchestratorError | BadContentError, code: str, *values: object) -> None:
    """Asserts the code of an error, and that its text contains each of `values`."""
    assert error.code == code, f"{error.code} instead of {code}: {error}"
    text = str(error)
    missing = [value for value in values if str(value) not in text]
    assert not missing, f"{missing} are not in the text: {text}"


@contextmanager
def exits(code: int) -> Iterator[None]:
    """Asserts that the command ends with this exit code."""
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == code
