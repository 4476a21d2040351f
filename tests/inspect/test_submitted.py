"""A launch that was submitted from Python: what is known before it has begun, and when it never does."""

from __future__ import annotations

from typing import Any

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.config.loading import parse_config
from orchestrator.errors import ConfigError, RefusedError, ResourceError
from tests.raising import raises

ON_GPUS = {"cluster.use_gpu": True, "train.numerics": "fast"}


def test_what_plan_refuses_starts_no_process(tiny_config: Any) -> None:
    with raises(ConfigError, "config.out_of_range", "pack.seq_len"):
        orchestrator.submit(tiny_config({}), ["pack.seq_len=0"])
    with raises(RefusedError, "storage.not_found", "nowhere"):
        orchestrator.runs("nowhere")


def test_whoever_is_given_a_uri_of_another_kind_says_which_there_are(
    tiny_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for ask in (orchestrator.open, orchestrator.runs):
        with raises(ConfigError, "config.storage_uri", "hdfs://"):
            ask("hdfs://x/y")
    with raises(ConfigError, "config.storage_uri", "run.storage", "hdfs://"):
        orchestrator.plan(tiny_config({"run.storage": "hdfs://x/y"}))
    for command in (["status"], ["points"], ["dashboard"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "hdfs://x/y"])
        assert ended.value.code == 2
        assert "hdfs://" in capsys.readouterr().err


@pytest.mark.chaos
@pytest.mark.usefixtures("begun_warm")
def test_a_launch_that_is_refused_says_so_wherever_it_is_asked(tiny_config: Any) -> None:
    config = parse_config(tiny_config(ON_GPUS))
    run = orchestrator.submit(config)
    assert run.status().state in ("starting", "failed")
    with raises(ResourceError, "cluster.too_small", "GPU") as refused:
        run.wait()
    view = run.watch()
    assert (view.state, view.alive) == ("failed", False)
    assert str(refused.value) in view.verdict
    assert orchestrator.runs(config.run.storage) == [], "nothing was written"
