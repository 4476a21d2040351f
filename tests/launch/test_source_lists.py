"""Starts that begin sources anew, add them, take them away and refresh their lists: real claims, points and
data, batches of the real feed, and no model. What was trained is compared, as multisets, with documents that
are encoded here, by nothing of the stream.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import orchestrator
from orchestrator.cli.tables import plan_lines
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.launch_attempts import continue_launch
from orchestrator.data import frozen
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.faults import no_fault
from orchestrator.history.claims.claims import ClaimParent
from orchestrator.inspect.audit import audit
from orchestrator.inspect.audit.audit_run import AuditRun, StepsCompared
from orchestrator.launch.start import preview
from orchestrator.planning.resume import source_lists
from orchestrator.planning.resume.source_lists import ListSpan
from orchestrator.records.steps import BatchSlice
from orchestrator.storage.files import Storage
from tests.launch.skipping_run import BATCH, SEQ_LEN, SkippingRun
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def write(folder: Path, name: str, texts: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def documents(mark: str, num: int) -> list[str]:
    return [f"{mark} {i}: " + " ".join(f"w{(i * j) % 13}" for j in range(3 + i % 17)) for i in range(num)]


class ListsRun(SkippingRun):
    """A run of sources `a`, `b`, … in folders of those names below `data`."""

    def __init__(self, mapping: Mapping[str, Any], data: Path) -> None:
        super().__init__(mapping)
        self.data = data
        self.of_attempt: dict[int, list[BatchSlice]] = {}

    def sources(self, *names: str, **more: Any) -> str:
        listed = [{"name": n, "path": str(self.data / n), "format": "jsonl", **more} for n in names]
        return f"data.sources={json.dumps(listed)}"

    def train(self, attempt: Attempt, num_steps: int, *overrides: str, save: bool = True) -> Any:
        before = len(self.batches)
        key = super().train(attempt, num_steps, *overrides, save=save)
        self.of_attempt[attempt.number] = self.batches[before:]
        return key

    def streams(self, attempts: list[int], number: int) -> np.ndarray:
        """The tokens that these attempts trained of a source, in order: its first input, and all targets."""
        inputs, labels = list[np.ndarray](), list[np.ndarray]()
        for attempt in attempts:
            for batch in self.of_attempt[attempt]:
                mine = batch.source_numbers == number
                inputs.append(batch.input_ids[mine].ravel())
                labels.append(batch.labels[mine].ravel())
        targets = np.concatenate(labels)
        first = np.concatenate(inputs)[:1]
        return np.concatenate([first, targets[targets >= 0]])


@pytest.fixture
def run(tmp_path: Path, tiny_config: Make) -> ListsRun:
    data = tmp_path / "data"
    for name in "abc":
        write(data / name, "one.jsonl", documents(name, 150))
    source = {"name": "a", "path": str(data / "a"), "format": "jsonl"}
    small = {"data.fragment_bytes": 700, "data.window_bytes": 1500, "train.max_steps": 1000}
    shape = {"train.global_batch_size": BATCH, "pack.seq_len": SEQ_LEN, "data.num_epochs": 2}
    return ListsRun(tiny_config({"data.sources": [source], **small, **shape}), data)


@pytest.fixture
def encoded(corpus: Path) -> Callable[[list[str]], Counter[tuple[int, ...]]]:
    """Documents as tokens with EOS, counted; by the library itself."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id("<|endoftext|>")
    assert end is not None

    def count(texts: list[str]) -> Counter[tuple[int, ...]]:
        return Counter((*tokenizer.encode(text, add_special_tokens=False).ids, end) for text in texts)

    count.end = end  # type: ignore[attr-defined]
    return count


def split(tokens: np.ndarray, end: int) -> Counter[tuple[int, ...]]:
    """The whole documents of a stream that begins with one."""
    borders = np.flatnonzero(tokens == end) + 1
    return Counter(tuple(part.tolist()) for part in np.split(tokens, borders)[:-1])


def test_a_restart_begins_anew_with_the_files_as_they_are_now(run: ListsRun, encoded: Any) -> None:
    run.launch(3)
    write(run.data / "a", "two.jsonl", documents("new", 25))
    plan = run.plan("resume.data=restart")
    (change,) = plan.lists
    assert (change.change, change.epoch, change.files_before, change.files_now) == ("restarted", 1, 1, 2)
    assert any("source a begins anew with its 2 files" in line for line in plan_lines(plan))
    assert plan.consumed_samples == 3 * BATCH, "counts, budgets and schedule stay"
    run.launch(1000, "resume.data=restart")
    assert "source a begins anew with its 2 files as they are now (1 file before), as epoch 1" in run.said
    now = documents("a", 150) + documents("new", 25)
    found = split(run.streams([2], 0), encoded.end)
    twice = Counter({each: 2 * num for each, num in encoded(now).items()})
    assert found == twice, "num_epochs=2 counts from the restart"
    report = run.audit()
    assert report["exactly_once"], report
    assert any("restarted inside it" in text for text in report["not_shown"])
    assert not any("epoch 1" in text or "epoch 2" in text for text in report["not_shown"])


def test_a_plan_of_a_run_that_is_done_restarts_nothing(run: ListsRun) -> None:
    run.launch(3)
    write(run.data / "a", "two.jsonl", documents("new", 25))
    done = "train.max_steps=3"
    plan = run.plan("resume.data=restart", done)
    assert (plan.remaining_steps, plan.lists) == (0, ())
    assert {at.epoch for at in plan.cursor.sources.values()} == {0}, "it stands where its point stands"
    said = "nothing is left to train, so this is not done: source a begins anew with its 2 files"
    assert any(said in line for line in plan_lines(plan))
    assert said in preview.stop_is_reached(run.job(done), plan)
    assert plan.to_json()["lists"] == []


def test_epochs_that_were_seen_count_from_the_restart(run: ListsRun) -> None:
    run.launch(3)
    run.launch(3, "resume.data=restart")
    (seen,) = run.plan().sources
    assert 0 < seen.epochs < 1
    assert run.store.read_point("00000006-a0002-g0001").cursor.sources["a"].epoch == 1


def test_a_restart_of_one_file_is_said_in_the_singular(run: ListsRun) -> None:
    run.launch(3)
    (change,) = run.plan("resume.data=restart").lists
    assert "begins anew with its 1 file as it is now (1 file before), as epoch 1" in str(change)


def test_under_a_refresh_a_file_that_came_later_is_read_by_the_next_epoch(run: ListsRun) -> None:
    run.launch(3, "data.refresh=epoch")
    write(run.data / "a", "two.jsonl", documents("new", 25))
    came = "1 file of source a came after its list was made and is"
    assert any(f"{came} read from the next epoch on" in note for note in run.plan("data.refresh=epoch").notes)
    assert any(f"{came} not read" in note for note in run.plan().notes)
    last = "data.refresh=epoch", "data.num_epochs=1"
    assert any(f"{came} not read" in note for note in run.plan(*last).notes), "there is no next one"


@pytest.mark.parametrize("change", ["changed", "grown", "gone"])
def test_a_refusal_of_files_names_the_restart_and_that_helps(run: ListsRun, change: str) -> None:
    write(run.data / "a", "two.jsonl", documents("two", 25))
    run.launch(3)
    file = run.data / "a" / "two.jsonl"
    text = file.read_text()
    if change == "gone":
        file.unlink()
    else:
        file.write_text(text.replace("two", "owt") + (text if change == "grown" else ""))
    code = "data.missing_files" if change == "gone" else "data.changed_files"
    with raises(DataIdentityError, code, "two.jsonl", "resume.restart_sources=[a]"):
        run.launch(3)
    run.launch(3, "resume.restart_sources=[a]")


def test_what_is_learnt_of_a_source_stays_when_it_comes_back(run: ListsRun) -> None:
    lines = [json.dumps({"prompt": text, "completion": text}) for text in documents("q", 40)]
    (run.data / "d").mkdir()
    (run.data / "d" / "one.jsonl").write_text("\n".join(lines) + "\n")

    def both(loss: str) -> str:
        texts = {"name": "a", "path": str(run.data / "a"), "format": "jsonl", "weight": 1}
        prompts = {"name": "d", "path": str(run.data / "d"), "format": "jsonl", "weight": 1}
        return f"data.sources={json.dumps([texts, {**prompts, 'content': 'prompt', 'loss': loss}])}"

    more = "data.on_end=drop", "data.num_epochs=1"
    run.launch(3, *more)
    run.launch(3, both("all"), *more)
    run.launch(3, *more)
    refused = run.plan(both("assistant"), *more)
    assert any("data.sources.d.loss" in text for text in refused.refusals), refused.refusals
    assert run.plan(both("all"), *more).action == "resume"
    restarted = run.plan(both("assistant"), "resume.restart_sources=[d]", *more)
    assert any("data.sources.d.loss" in text for text in restarted.refusals), "as of any source"


def test_an_audit_from_a_restart_on_says_nothing_of_the_epoch_before(run: ListsRun) -> None:
    run.launch(3)
    run.launch(1000, "resume.data=restart")
    report = run.audit("4:")
    assert report["exactly_once"]
    assert report["not_shown"] == []
    report = run.audit("3:")
    assert any("epoch 0" in text for text in report["not_shown"]), "of that a step was trained"


def test_an_audit_names_lists_that_lack_files_before_it_reads_and_the_steps_without_them(
    run: ListsRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run.data / "a", "two.jsonl", documents("two", 25))
    run.launch(3)
    (run.data / "a" / "two.jsonl").unlink()
    run.launch(4, "resume.data=restart")
    write(run.data / "a", "three.jsonl", documents("three", 25))
    run.launch(2, "resume.data=restart", f"resume.from={run.store.point_names()[-1]}")
    (run.data / "a" / "three.jsonl").unlink()

    class NothingIsRead(AuditRun):
        def compare_steps(self) -> StepsCompared:
            raise AssertionError("it was known before")

    with monkeypatch.context() as patched:
        patched.setattr(audit, "AuditRun", NothingIsRead)
        values = "epoch 0 of source a", "two.jsonl", "three.jsonl", "--steps 4:7"
        with raises(DataIdentityError, "data.changed_files", *values) as refused:
            run.audit()
    assert "resume." not in str(refused.value), "it is no start"
    assert run.audit("4:7")["exactly_once"]
    with raises(DataIdentityError, "data.changed_files", "three.jsonl") as refused:
        run.audit("8:")
    assert "--steps" not in str(refused.value), "each of these steps needs them"


def test_the_same_command_restarts_once(run: ListsRun) -> None:
    run.launch(3)
    run.launch(3, "resume.data=restart")
    place = run.claim(2).sources
    run.launch(3, "resume.data=restart")
    assert "resume.data=restart is done: attempt 2 began there" in run.said
    assert run.claim(3).sources == place
    assert run.claim(3).restart is None
    point = run.launch(3)  # and without it
    assert run.claim(4).sources == place
    run.launch(3, "resume.data=restart", f"resume.from={point.point_name}")
    assert [span.start for span in run.claim(5).sources[0].spans] == [0, 1, 2]
    assert run.audit()["exactly_once"]


def test_a_restart_left_from_the_first_start_on_is_done_then(run: ListsRun) -> None:
    run.launch(3, "resume.data=restart")
    run.launch(3, "resume.data=restart")
    assert "is done: attempt 1" in run.said
    assert [source.spans for source in run.claim(2).sources] == [(ListSpan(begin=0),)]


def test_a_start_that_trained_nothing_restarts_again_from_its_point(run: ListsRun) -> None:
    run.launch(3)
    run.train(run.begin("resume.data=restart"), 2, "resume.data=restart", save=False)  # killed
    run.launch(3, "resume.data=restart")
    spans = run.claim(3).sources[0].spans
    assert spans == (ListSpan(begin=0), ListSpan(begin=1, start=2)), "a list is never written twice"
    assert run.audit()["exactly_once"]


def test_a_restart_of_another_path_is_another_wish(run: ListsRun, encoded: Any) -> None:
    write(run.data / "other", "x.jsonl", documents("other", 30))
    run.launch(3)
    run.launch(3, "resume.data=restart")
    path = f"data.sources.0.path={run.data / 'other'}"
    run.launch(1000, "resume.data=restart", path)
    assert set(split(run.streams([3], 0), encoded.end)) == set(encoded(documents("other", 30)))
    assert run.audit()["exactly_once"]


def test_a_restarted_coordinator_does_not_restart_the_sources_again(run: ListsRun) -> None:
    run.launch(3)
    attempt = run.begin("resume.data=restart")
    run.train(attempt, 3, "resume.data=restart")
    (run.folder / "attempts" / f"{attempt.number:04d}.end.json").unlink()
    again = continue_launch(run.store, attempt, "host", no_fault)
    assert (again.number, again.why) == (3, "coordinator_restarted")
    run.train(again, 3, "resume.data=restart")
    assert run.claim(3).sources == run.claim(2).sources
    assert run.claim(3).restart is None
    assert run.audit()["exactly_once"]


def test_named_sources_begin_anew_and_the_others_go_on(run: ListsRun, encoded: Any) -> None:
    both = run.sources("a", "b", weight=1), "data.on_end=drop", "data.num_epochs=1"
    run.launch(3, *both)
    write(run.data / "b", "two.jsonl", documents("new", 20))
    run.launch(1000, *both, "resume.restart_sources=[b]")
    assert split(run.streams([1, 2], 0), encoded.end) == encoded(documents("a", 150))
    assert split(run.streams([2], 1), encoded.end) == encoded(documents("b", 150) + documents("new", 20))
    assert run.audit()["exactly_once"]


def test_a_source_that_is_added_changes_nothing_of_the_others(run: ListsRun, encoded: Any) -> None:
    run.launch(3, "data.num_epochs=1")
    more = run.sources("c", "a", weight=1), "data.on_end=drop", "data.num_epochs=1"
    plan = run.plan(*more)
    assert [(each.source, each.change) for each in plan.lists] == [("c", "added")]
    assert "data.sources.c" in [difference.field for difference in plan.differences]
    run.launch(1000, *more)
    assert {source.name: source.number for source in run.claim(2).sources} == {"a": 0, "c": 1}
    assert split(run.streams([1, 2], 0), encoded.end) == encoded(documents("a", 150))
    assert split(run.streams([2], 1), encoded.end) == encoded(documents("c", 150))
    report = run.audit()
    assert report["exactly_once"]
    assert report["not_shown"] == []


def test_a_source_that_is_taken_away_goes_on_where_it_was_when_it_comes_back(
    run: ListsRun, encoded: Any
) -> None:
    once = "data.on_end=drop", "data.num_epochs=1"
    run.launch(3, run.sources("a", "b", weight=1), *once)
    place = run.store.read_point("00000003-a0001-g0001").cursor.sources["a"]
    plan = run.plan(run.sources("b"), *once)
    assert [(each.source, each.change) for each in plan.lists] == [("a", "removed")]
    run.launch(2, run.sources("b"), *once)
    point = run.store.read_point("00000005-a0002-g0001")
    assert point.cursor.sources["a"] == place
    run.launch(1000, run.sources("b", "c", "a", weight=1), *once)
    assert "source a comes back and continues in epoch 0" in run.said
    for number, name in enumerate("abc"):
        tokens = run.streams([1, 2, 3] if name != "c" else [3], number)
        assert split(tokens, encoded.end) == encoded(documents(name, 150)), name
    report = run.audit()
    assert report["exactly_once"]
    assert report["not_shown"] == []


def test_without_refresh_new_files_stay_out(run: ListsRun, encoded: Any) -> None:
    run.launch(3)
    write(run.data / "a", "two.jsonl", documents("new", 25))
    run.launch(1000)
    assert set(split(run.streams([1, 2], 0), encoded.end)) == set(encoded(documents("a", 150)))


def test_with_refresh_they_come_in_with_the_next_epoch(run: ListsRun, encoded: Any) -> None:
    run.launch(3, "data.refresh=epoch")
    write(run.data / "a", "two.jsonl", documents("new", 25))
    run.launch(1000, "data.refresh=epoch", "data.num_epochs=3")
    later = encoded(documents("a", 150) + documents("new", 25))
    assert split(run.streams([1, 2], 0), encoded.end) == encoded(documents("a", 150)) + later + later
    assert frozen.later_versions(Storage(str(run.folder)))["a"] == ("0e1", "0e2")
    report = run.audit()
    assert report["exactly_once"]
    assert report["not_shown"] == []


def test_a_file_that_left_its_folder_is_missed_in_its_own_epoch_alone(run: ListsRun, encoded: Any) -> None:
    write(run.data / "a", "old.jsonl", documents("old", 5))
    run.launch(1000, "data.refresh=epoch", "data.num_epochs=1")
    (run.data / "a" / "old.jsonl").unlink()
    with raises(DataIdentityError, "data.missing_files", "old.jsonl"):
        run.launch(2, "data.refresh=epoch", "data.num_epochs=2")
    refused = run.plan("data.refresh=epoch", "data.num_epochs=2")
    assert refused.action == "refuse", "the cursor names the last token of the epoch, which is read once more"


def test_refreshing_begins_and_ends_at_a_border(run: ListsRun, encoded: Any) -> None:
    run.launch(3)
    write(run.data / "a", "two.jsonl", documents("new", 25))
    plan = run.plan("data.refresh=epoch")
    assert [(each.change, each.epoch) for each in plan.lists] == [("refreshed", 1)]
    run.launch(1000, "data.refresh=epoch")
    write(run.data / "a", "three.jsonl", documents("three", 9))
    run.launch(1000, "data.num_epochs=4")  # without it, the newest list stays
    old, new = encoded(documents("a", 150)), encoded(documents("a", 150) + documents("new", 25))
    assert split(run.streams([1, 2, 3], 0), encoded.end) == old + new + new + new
    assert run.audit()["exactly_once"]


def test_a_rewind_before_a_restart_leaves_it_behind(run: ListsRun, encoded: Any) -> None:
    point = run.launch(3)
    run.launch(3, "resume.data=restart")
    run.launch(1000, f"resume.from={point.point_name}", "data.num_epochs=1")
    assert run.claim(3).sources == run.claim(1).sources
    assert split(run.streams([1, 3], 0), encoded.end) == encoded(documents("a", 150))
    assert run.audit()["exactly_once"]


def test_a_skip_and_a_change_of_sources_are_refused_together(run: ListsRun) -> None:
    run.launch(3)
    with raises(RefusedError, "resume.skip_with_changed_sources", "resume.skip_steps=1", "source b"):
        run.launch(3, run.sources("a", "b", weight=1), "resume.skip_steps=1")


def test_fields_of_a_source_may_change_with_its_restart_alone(run: ListsRun) -> None:
    run.launch(3)
    (run.data / "a" / "one.jsonl").write_text('{"body": "now it is called body"}\n' * 50)
    field = "data.sources.0.text_field=body"
    with raises(DataIdentityError, "data.changed_files", "one.jsonl"):
        run.launch(3, field)
    run.launch(3, field, "resume.data=restart")
    run.launch(3, field)
    with raises(RefusedError, "resume.changed_setting", "text_field", "restart_sources=[a]"):
        run.launch(3, "data.sources.0.text_field=text")


def test_replay_and_the_stream_of_an_attempt_have_the_same_lists(run: ListsRun) -> None:
    run.launch(3)
    run.launch(4, "resume.data=restart")
    found = orchestrator.open(run.folder).list_samples("6")
    assert found["matches"]
    assert {document["epoch"] for sample in found["samples"] for document in sample["documents"]} == {1}


# ------------------------------------------------------------------------------------ planted faults
def faulty(run: ListsRun, number: int, change: Callable[[ClaimParent], ClaimParent]) -> dict[str, Any]:
    run.rewrite_claim(number, change)
    report = run.audit()
    assert not report["exactly_once"]
    found: dict[str, Any] = report["first_difference"]
    return found


def test_the_audit_catches_a_second_restart_of_one_launch(run: ListsRun) -> None:
    run.launch(3)
    attempt = run.begin("resume.data=restart")
    run.train(attempt, 3, "resume.data=restart")
    (run.folder / "attempts" / f"{attempt.number:04d}.end.json").unlink()
    (source,) = attempt.sources
    twice = replace(source, spans=(*source.spans, ListSpan(begin=2, start=2)))
    first = replace(attempt, sources=(twice,))
    now = frozen.read_later(Storage(str(run.folder)), "a", "1")
    assert now is not None
    frozen.write_later(Storage(str(run.folder)), replace(now, version="2"))
    again = continue_launch(run.store, first, "host", no_fault)
    assert again.point is not None
    cursor = source_lists.moved(again.sources, again.point.cursor)
    run.train(replace(again, point=replace(again.point, cursor=cursor)), 3, "resume.data=restart")
    report = run.audit()
    assert "a launch restarts once" in report["first_difference"]["reason"]


def test_the_audit_catches_a_restart_that_nobody_asked_for(run: ListsRun) -> None:
    run.launch(3)
    run.launch(3, "resume.data=restart")
    reason = faulty(run, 2, lambda claim: replace(claim, restart=None))["reason"]
    assert "whose claim asks for no restart" in reason


def test_the_audit_catches_a_number_that_shifted(run: ListsRun) -> None:
    run.launch(3)
    run.launch(3, run.sources("c", "a", weight=1))

    def shifted(claim: ClaimParent) -> ClaimParent:
        return replace(claim, sources=tuple(replace(s, number=1 - s.number) for s in claim.sources))

    assert "stream gives" in faulty(run, 2, shifted)["reason"], "the digests hold it"


def test_a_refreshed_list_that_is_written_twice_is_caught(run: ListsRun) -> None:
    run.launch(1000, "data.refresh=epoch", "data.num_epochs=2")
    write(run.data / "a", "two.jsonl", documents("new", 25))
    # the fault: whoever comes to the epoch writes its list, although there was one
    Storage(str(run.folder)).delete("manifest/a@0e1.parquet")
    run.launch(3, "data.refresh=epoch", "data.num_epochs=3")
    assert not run.audit()["exactly_once"]


# ------------------------------------------------------------------------------------ any history
@st.composite
def histories(draw: st.DrawFn) -> list[tuple[tuple[str, ...], str, int, bool]]:
    """Launches: (the sources that it has, what it asks for, how many steps, whether it saves a point)."""
    found = []
    for _ in range(draw(st.integers(2, 5))):
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        asks = draw(
            st.sampled_from(["", "", "resume.data=restart", *(f"resume.restart_sources=[{names[0]}]",)])
        )
        found.append((tuple(names), asks, draw(st.integers(1, 9)), draw(st.booleans())))
    return [(names, asks, steps, saves or not i) for i, (names, asks, steps, saves) in enumerate(found)]


@pytest.mark.chaos
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_any_history_of_launches_trains_each_list_once(
    history: list[tuple[tuple[str, ...], str, int, bool]],
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Make,
    encoded: Any,
) -> None:
    """Of each source and start what was trained is the beginning of its stream: no document twice in an
    epoch, none that is not of the list, and whole epochs hold all of it.
    """
    folder = tmp_path_factory.mktemp("history")
    data, texts = folder / "data", {name: [documents(name, 40)] for name in "abc"}
    for name in "abc":
        write(data / name, "0.jsonl", texts[name][0])
    source = {"name": "a", "path": str(data / "a"), "format": "jsonl"}
    small = {"data.fragment_bytes": 700, "data.window_bytes": 1500, "train.max_steps": 10000}
    shape = {"train.global_batch_size": BATCH, "pack.seq_len": SEQ_LEN, "data.num_epochs": 3}
    run = ListsRun(tiny_config({"data.sources": [source], **small, **shape}), data)
    kept: list[int] = []
    for number, (names, asks, steps, saves) in enumerate(history, 1):
        overrides = [run.sources(*names, weight=1), "data.on_end=drop", *([asks] if asks else [])]
        plan = run.plan(*overrides)
        if plan.refusals:
            reason = "a restart whose point is not on the history"
            assert plan.codes[0] == "resume.request_at_another_point", reason
            break
        attempt = run.begin(*overrides)
        run.train(attempt, steps, *overrides, save=saves)
        kept += [number] if saves else []
        for name in "abc":  # a file more, for whoever begins anew after this
            write(data / name, f"{number}.jsonl", documents(f"{name}{number}", 9))
            texts[name].append(documents(f"{name}{number}", 9))
    report = run.audit()
    assert report["exactly_once"], report
    last = max(run.of_attempt)
    history_of = [number for number in run.of_attempt if number in kept or number == last]
    sources = run.claim(last).sources
    for source_ in sources:
        starts = {span.start for span in source_.spans}
        for start in starts:
            mine = [n for n in history_of if _start(run, n, source_.name) == start]
            if not any(
                (batch.source_numbers == source_.number).any() for n in mine for batch in run.of_attempt[n]
            ):
                continue
            found = split(run.streams(mine, source_.number), encoded.end)
            version = str(start) if start else ""
            files = _texts_of(run, source_.name, version, texts)
            of_list = encoded(files)
            assert set(found) <= set(of_list), (source_.name, start)
            least, most = min(found[each] for each in of_list), max(found[each] for each in of_list)
            assert most - least <= 1, "epochs follow one another"


def _start(run: ListsRun, attempt: int, name: str) -> int | None:
    return next((s.spans[-1].start for s in run.claim(attempt).sources if s.name == name and s.active), None)


def _texts_of(run: ListsRun, name: str, version: str, texts: dict[str, list[list[str]]]) -> list[str]:
    later = frozen.read_later(Storage(str(run.folder)), name, version) if version else None
    there = frozen.read_frozen(Storage(str(run.folder)))
    assert there is not None
    manifest = there.manifests[name] if later is None else later.manifest
    return [text for row in manifest.files for text in texts[name][int(row.path.partition(".")[0])]]
