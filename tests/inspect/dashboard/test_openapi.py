"""The API answers whatever its own schema allows, as the schema says, and never with an error of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks

from orchestrator.inspect.dashboard.app import make_app
from orchestrator.storage.files import Storage
from tests.inspect.dashboard.serving import TOKEN, client, served

HEADERS = {"Authorization": f"Bearer {TOKEN}", "Host": "127.0.0.1"}
KNOWN = [checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
EXAMPLES = settings(
    max_examples=12, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
)
ENDLESS = "/api/runs/{run}/stream"


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served(tmp_path_factory.mktemp("storage")).storage


@pytest.fixture(scope="module")
def schema(storage: Path) -> Any:
    app = make_app(Storage(str(storage)), TOKEN)
    return schemathesis.openapi.from_asgi("/api/openapi.json", app, headers=HEADERS)


@pytest.mark.chaos
def test_what_the_schema_allows_is_answered_as_it_says(schema: Any) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    asked = []
    for operation in operations:
        if operation.path == ENDLESS:
            continue

        @EXAMPLES
        @given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            if len(asked) % 3 and "run" in (case.path_parameters or {}):
                case.path_parameters["run"] = "made"  # else no example would find a run
            response = case.call(headers=HEADERS)
            case.validate_response(response, checks=KNOWN)
            asked.append(response.status_code)

        answers()
    assert {200, 404, 422} <= set(asked)


def test_the_schema_lists_every_route_and_only_actions_change_anything(storage: Path) -> None:
    paths = client(storage).get("/api/openapi.json").json()["paths"]
    assert len(paths) >= 15
    for path, methods in paths.items():
        assert set(methods) <= {"get", "post"}, path
        assert ("post" in methods) == ("{action}" in path), path
        for operation in methods.values():
            assert {"401", "403", "404", "422"} <= set(operation["responses"])
