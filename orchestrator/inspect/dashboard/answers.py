"""The answers of the API: JSON without secrets, and errors with a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson
from starlette.responses import Response

from orchestrator.config.redaction import HIDDEN, is_secret, redacted, redacted_text
from orchestrator.errors import BusyError, OrchestratorError, RefusedError, StorageError
from orchestrator.text import visible

UNANSWERABLE = 422
_PLAIN = frozenset({int, float, bool, type(None)})
# a text without any of this contains nothing that `redacted_text` would hide
_SUSPECT = re.compile(
    "token|secret|passw|key|credential|://|hf_|gh[opsur]_|github_pat|sk-|xox|AKIA|eyJ|Bearer", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a request is refused.

    `code` and `text` are those of the command line, word for word, if it has them. `do` is the remedy. `more`
    are further fields.
    """

    status: int
    code: str | None
    text: str
    do: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document of an error."""
        more = {name: visible(v) if isinstance(v, str) else v for name, v in self.more.items()}
        document = {"code": self.code, "text": visible(redacted_text(self.text)), **more}
        return {"error": {**document, "do": self.do} if self.do else document}


class RouteError(Exception):
    """Raised by a route: the answer is its problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


def not_found(code: str | None, text: str, do: str = "") -> RouteError:
    """Makes the error for an unknown name."""
    return RouteError(Problem(status=404, code=code, text=text, do=do))


class named:  # noqa: N801  it reads as a word
    """Turns a refusal inside the block into the answer for an unknown name."""

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Turns a refusal into the answer."""
        if isinstance(error, RefusedError):
            raise not_found(error.code, str(error)) from error


def problem_of(error: OrchestratorError) -> Problem:
    """The answer for one of our errors."""
    match error:
        case StorageError():
            status = 503
        case BusyError():
            status = 409
        case _:
            status = UNANSWERABLE
    return Problem(status=status, code=error.code, text=str(error))


def json_response(value: Any, status: int = 200) -> Response:
    """Makes a JSON answer. Numbers that are not finite are null."""
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type=JSON)


def shown(value: Any, status: int = 200) -> Response:
    """Makes an answer of a run's data, without secrets."""
    return json_response(without_secrets(value), status)


def without_secrets(value: Any, key: str = "") -> Any:
    """`config.redaction.redacted` for documents with many numbers. A source's cursor, where `token` is a
    position, is not changed.
    """
    if isinstance(value, str):
        value = visible(value)  # a command is copied from the page into a terminal
        return redacted(value, key) if _hides(key) or _SUSPECT.search(value) else value
    if isinstance(value, Mapping):
        if _hides(key):
            return HIDDEN
        return value if "prefix_digest" in value else {k: without_secrets(v, k) for k, v in value.items()}
    if isinstance(value, list | tuple):
        plain = frozenset[type]() if _hides_numbers(key) else _PLAIN
        return [each if type(each) in plain else without_secrets(each, key) for each in value]
    return HIDDEN if value is not None and _hides_numbers(key) else value


@lru_cache(1000)
def _hides(key: str) -> bool:
    return is_secret(key)


@lru_cache(1000)
def _hides_numbers(key: str) -> bool:
    return is_secret(key, 0)


def error_response(problem: Problem) -> Response:
    """Makes the answer to a wrong request."""
    response = json_response(problem.to_json(), problem.status)
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


JSON = "application/json"
