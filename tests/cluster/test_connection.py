"""A Ray that is started on this machine, and takes long, or does not come."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import ray

from orchestrator.cluster import connection
from orchestrator.cluster.connection import (
    AUTH_MODE,
    TOKEN,
    TOKEN_PATH,
    ClusterConnection,
    token_for_local_ray,
)
from orchestrator.config.loading import load_config
from orchestrator.errors import ElasticError
from tests.raising import raises

QUICKSTART = Path(__file__).resolve().parents[2] / "configs/quickstart.yaml"
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the environment keep what a local Ray is given."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in connection._HEALTH.items():
        monkeypatch.setenv(name, value)


def test_a_ray_that_does_not_start_is_one_sentence_with_what_ray_said_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because of load.")  # noqa: TRY002  as Ray does

    monkeypatch.setattr(ray, "init", init)
    handlers = logging.getLogger("ray").handlers
    said = "The current node timed out during startup. This could happen because of load."
    with raises(ElasticError, "cluster.ray_not_started", "0 s", f"({said})") as raised:
        ClusterConnection(load_config(QUICKSTART), 1, 0, lambda _: None)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_code == 1
    assert logging.getLogger("ray").handlers is handlers, "nobody listens to it any more"


def test_a_ray_that_takes_long_to_start_is_said_once_and_one_that_is_quick_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    waits = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        waits.set()

    monkeypatch.setattr(ray, "init", lambda **_: None)
    ClusterConnection(load_config(QUICKSTART), 1, 0, lambda _: None, say).close()
    assert said == []
    monkeypatch.setattr(connection, "SLOW_START_S", 0.01)
    monkeypatch.setattr(ray, "init", lambda **_: waits.wait(LIMIT_S))
    ClusterConnection(load_config(QUICKSTART), 1, 0, lambda _: None, say).close()
    assert said == [
        "waiting for Ray, which is being started on this machine: it takes longer where that is busy"
    ]


def test_a_local_ray_gets_a_token_of_its_own_only_where_no_home_can_keep_one(tmp_path: Path) -> None:
    assert token_for_local_ray({}, tmp_path) == {}, "Ray makes ~/.ray/auth_token"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("kept")
    assert token_for_local_ray({}, tmp_path) == {}
    for without in (Path("/proc/nowhere"), tmp_path / "missing"):
        (made,) = token_for_local_ray({}, without).items()
        assert made[0] == TOKEN
        assert made[1]
        for name in (AUTH_MODE, TOKEN, TOKEN_PATH):
            assert token_for_local_ray({name: "chosen"}, without) == {}
