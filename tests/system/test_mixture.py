"""A run on several sources, one with loss masks, one that is code, with transforms and a hold-out, through
kills and changes of shape and weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import survey
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.planning.batches import next_range
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data.made_transforms import HERE, told_texts
from tests.data.making import some_texts, write_corpus
from tests.system.harness import Job

pytestmark = [pytest.mark.system, pytest.mark.chaos, pytest.mark.xdist_group("ray")]


def sources(folder: Path, weights: tuple[float, ...]) -> list[dict[str, Any]]:
    if not (folder / "web").exists():
        write_corpus(folder / "web", told_texts(800, 60), "jsonl.gz", num_files=2)
        asked = [{"prompt": f"{i}?", "completion": text} for i, text in enumerate(some_texts(200, 30))]
        (folder / "asked.jsonl").write_text("\n".join(json.dumps(each) for each in asked))
    return [
        {"name": "web", "path": str(folder / "web"), "format": "jsonl", "weight": weights[0]}
        | {"transforms": [f"{HERE}:as_told", f"{HERE}:half"]},
        {"name": "books", "path": "tests.data.code_sources:books", "format": "python", "weight": weights[1]}
        | {"holdout": 0.1},
        {"name": "asked", "path": str(folder / "asked.jsonl"), "format": "jsonl", "content": "prompt"}
        | {"weight": weights[2], "max_epochs": 2},
    ]


def test_a_mixture_is_trained_exactly_once_through_kills_and_changes_of_shape_and_weights(
    llama: Job, cluster: Any, tmp_path: Path
) -> None:
    first: dict[str, Any] = {"data__sources": sources(tmp_path, (0.5, 0.3, 0.2)), "data__on_end": "drop"}
    first |= {"data__on_bad_document": "skip", "data__max_bad_share": 1.0}
    first |= {"train__global_batch_size": 16}
    plan = llama.faults().kill("summary_received", step=5, rank=1)
    begun = llama.train(plan, **first, train__max_steps=20)
    assert begun.outcome == "done", begun.reason
    second = {**first, "data__sources": sources(tmp_path, (0.2, 0.3, 0.5)), "cluster__num_workers": 1}
    other = llama.faults().kill("votes_complete")
    shape = {"train__global_batch_size": 24, "pack__seq_len": 48, "train__max_steps": 34}
    gone_on = llama.train(other, **{**second, **shape})
    assert gone_on.outcome == "done", gone_on.reason
    assert [len(p.struck()) for p in (plan, other)] == [1, 1]

    # the same stream in this process, step by step; the token budget shortens the last sample of a launch
    seen = survey(RunStore(Storage(llama.run.uri)))
    shapes = {start.id: (start.global_batch_size, start.seq_len) for start in seen.journal.generations}
    records, cursor = list(seen.lineage.records), Cursor()
    for changes in (first, {**second, **shape}):
        config = llama.config(**changes)
        here = (config.train.global_batch_size, config.pack.seq_len)
        stop = begun.consumed_tokens if changes is first else gone_on.consumed_tokens
        feed = InProcessFeed(prepare_data(config))
        for record in [r for r in records if shapes[r.attempt, r.generation] == here]:
            step = next_range(cursor.consumed_samples, cursor.consumed_tokens, *here, max_tokens=stop)
            assert step is not None
            part = feed.get(step, 0, 1, 2, cursor)
            assert record.digest == f"{part.step_digest:016x}", f"step {record.step}"
            cursor = part.cursor
            assert record.target_tokens == cursor.target_tokens < record.consumed_tokens
        feed.close()
    assert cursor.consumed_tokens == gone_on.consumed_tokens
    found = orchestrator.open(llama.run.uri).audit()
    assert found["exactly_once"], found
    assert found["left_out_documents"]["web"]["filtered"] > 20
    assert found["left_out_documents"]["books"]["held_out"] > 5
