"""Documents that are in no sample, of a run that goes on without them: how many there are, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import DataError
from orchestrator.inspect.run import open_run
from orchestrator.inspect.status.view import status_lines
from orchestrator.inspect.views.run_views import RunViews
from tests.data.making import some_texts, write_corpus
from tests.launch.skipping_run import SkippingRun, survey_newest
from tests.raising import raises

Make = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def packed(tiny_config: Make, tmp_path: Path) -> dict[str, Any]:
    """A job of two sources; of one documents are longer than a sample."""
    sources = []
    for name, longest in (("web", 40), ("books", 6)):
        write_corpus(tmp_path / name, [f"{name} {text}" for text in some_texts(60, longest)], "jsonl")
        sources.append({"name": name, "path": str(tmp_path / name), "format": "jsonl", "weight": 0.5})
    small = {"data.sources": sources, "data.fragment_bytes": 900, "data.window_bytes": 2500}
    pack = {"pack.mode": "bestfit", "pack.seq_len": 64, "pack.long_document": "skip", "data.num_epochs": 4}
    return tiny_config({**small, **pack, "train.global_batch_size": 4, "run.storage": str(tmp_path / "runs")})


def test_a_status_and_the_page_count_the_documents_that_are_too_long(packed: dict[str, Any]) -> None:
    run = SkippingRun(packed)
    run.launch(6)
    at = run.store.read_point(survey_newest(run)).cursor.sources
    assert (at["web"].long_documents > 0, at["books"].long_documents) == (True, 0)
    seen = open_run(run.folder).status(0)
    assert seen.left_out_documents is not None
    assert seen.left_out_documents["web"]["long"] == at["web"].long_documents
    (line,) = (line for line in status_lines(seen) if "pack.long_document" in line)
    assert line == (
        f"  left out    {at['web'].long_documents} documents of source web were longer than a sample holds "
        "and skipped (pack.long_document=skip)"
    )
    views = RunViews(run.store)
    views.refresh()
    (check,) = (check for check in views.summary()["checks"] if check["id"] == "long")
    assert (check["note"], check["limit"]) == ("of source web", "at most 50 %")
    assert check["value"].startswith(f"{at['web'].long_documents} (")


def test_a_run_of_which_most_documents_are_too_long_stops_and_a_start_that_allows_it_goes_on(
    packed: dict[str, Any],
) -> None:
    run = SkippingRun(packed)
    with raises(DataError, "data.too_many_long", "source web", "pack.max_long_share"):
        run.launch(60, "pack.seq_len=24")
    allowed = "pack.max_long_share=1.0"
    run.launch(6, "pack.seq_len=24", allowed)
    views = RunViews(run.store)
    views.refresh()
    assert views.sources()["max_long_share"] == 1.0
    plan = run.plan("pack.seq_len=24", "pack.max_long_share=0.9")
    assert [(d.field, d.rule) for d in plan.differences] == [("pack.max_long_share", "may_change")]
