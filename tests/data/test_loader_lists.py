"""What a stream without a run cannot do with lists of files, and says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.errors import RefusedError
from tests.data.making import some_texts, write_corpus

Make = Callable[..., dict[str, Any]]


def test_a_stream_without_a_run_keeps_no_lists(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(20), "jsonl")
    source = {"name": "made", "path": str(tmp_path / "data"), "format": "jsonl"}
    config = tiny_config({"data.sources": [source]})
    with pytest.raises(RefusedError, match="kept in a run's folder"):
        orchestrator.open_stream(config, overrides=["data.refresh=epoch"])
    stream = orchestrator.open_stream(config, overrides=["resume.data=restart"])  # from the start anyway
    next(stream)
    state = stream.state_dict()
    for restart in ("resume.data=restart", "resume.restart_sources=[made]"):
        with pytest.raises(RefusedError, match="only a run can begin sources anew"):
            orchestrator.open_stream(config, state, [restart])
    with pytest.raises(RefusedError, match="only a run can begin sources anew"):
        stream.load_state_dict(state)
