"""The audit of a run on several sources, through changes of weights and ends of sources; planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.packing.packer import Packer, Run
from orchestrator.data.packing.step_samples import StepSamples
from orchestrator.planning.mixture import Mixture
from orchestrator.records.cursor import Cursor
from tests.data.making import some_texts, write_corpus
from tests.inspect.trained_run import TrainedRun, changed

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    """Three sources of different sizes, kinds and weights."""
    sources = []
    for i, (name, kind) in enumerate({"web": "jsonl", "code": "jsonl.gz", "books": "parquet"}.items()):
        texts = [f"{name} {text}" for text in some_texts(30 + 25 * i, 30)]
        write_corpus(tmp_path / name, texts, kind)
        format_ = kind.partition(".")[0]
        sources.append(
            {"name": name, "path": str(tmp_path / name), "format": format_, "weight": (0.5, 0.2, 0.3)[i]}
        )
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "data.on_end": "drop"}
    return tiny_config({"data.sources": sources, **small})


def test_a_mixture_through_changes_of_weights_shape_and_epochs_is_shown_exactly_once(
    mapping: dict[str, Any],
) -> None:
    run = TrainedRun(mapping)
    run.attempt(5)
    changed(run, (0.1, 0.6, 0.3))
    run.attempt(6, batch=5, seq_len=48)
    changed(run, weight_by="samples")
    run.attempt(4, batch=6, seq_len=32)
    changed(run, num_epochs=2, weight_by="tokens")
    run.attempt(1000, batch=7)
    found = run.audit()
    assert (found["exactly_once"], found["not_shown"]) == (True, [])
    totals = run.cursor.mixture
    assert sum(share.tokens for share in totals.values()) == found["tokens"] == run.cursor.consumed_tokens
    assert {name: share.ended for name, share in totals.items()} == {"books": 0, "code": 2, "web": 2}
    assert found["skipped_documents"] == {"web": 0, "code": 0, "books": 0}
    later = run.audit("9:")
    assert later["exactly_once"] is True
    assert any("source books: completeness of epoch" in text for text in later["not_shown"])


def test_a_mixture_that_stops_ends_before_the_first_sample_that_cannot_be_filled(
    mapping: dict[str, Any],
) -> None:
    run = TrainedRun({**mapping, "data": {**mapping["data"], "on_end": "stop"}})
    run.attempt(1000)
    found = run.audit()
    assert found["exactly_once"] is True
    assert any("completeness of epoch 0" in text for text in found["not_shown"])
    assert run.cursor.consumed_tokens == 64 * run.cursor.consumed_samples


def drifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth sample comes from the source with the last name."""
    right = Mixture.next

    def wrong(self: Mixture, seq_len: int) -> str | None:
        drawn = sum(share.samples for share in self.shares.values())
        return self.live[-1] if drawn % 10 == 5 and self.live else right(self, seq_len)

    monkeypatch.setattr(Mixture, "next", wrong)


def forgets_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume begins the mixture anew."""
    right = Mixture.at.__func__  # type: ignore[attr-defined]

    def wrong(cls: type[Mixture], weights: Any, limits: Any, before: Any, by: str = "tokens") -> Mixture:
        found: Mixture = right(cls, weights, limits, {n: replace(s, count=0) for n, s in before.items()}, by)
        return found

    monkeypatch.setattr(Mixture, "at", classmethod(wrong))


def swaps_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StepSamples.rows

    def wrong(self: StepSamples, start: int, stop: int) -> Any:
        numbers, *tables = (array.copy() for array in right(self, start, stop))
        return (np.roll(numbers, 1), *tables)

    monkeypatch.setattr(StepSamples, "rows", wrong)


def mask_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of a source is no target."""
    right = Packer._gather

    def wrong(self: Packer, start: int, stop: int) -> Run:
        run = right(self, start, stop)
        loss = np.ones(len(run.tokens), np.bool_)
        loss[len(loss) // 2] = self._source != "code"
        return replace(run, loss=loss)

    monkeypatch.setattr(Packer, "_gather", wrong)


@pytest.mark.parametrize("plant", [drifts, forgets_its_counts, swaps_two_samples, mask_off_by_one])
def test_what_a_mixture_does_wrong_is_found(
    mapping: dict[str, Any], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    run = TrainedRun(mapping)
    with monkeypatch.context() as planted:
        plant(planted)
        run.attempt(5, batch=7)
        run.attempt(8, batch=7)
    found = run.audit()["first_difference"]
    assert found is not None
    assert "trained samples have digest" in found["reason"]


def test_the_counts_of_a_source_are_those_of_its_samples(mapping: dict[str, Any]) -> None:
    run = TrainedRun(mapping)
    run.attempt(6)
    assert run.cursor.drawn_from(("web", "code")) == {
        name: (run.cursor.mixture[name].samples, run.cursor.mixture[name].tokens) for name in ("web", "code")
    }
    assert Cursor().drawn_from(("web", "code")) == {"web": (0, 0), "code": (0, 0)}
