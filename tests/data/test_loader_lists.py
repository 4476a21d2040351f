"""Lists of files of a stream without a run: restarts, refreshes and gone files, exact from every state on.
What is read is compared, as multisets, with documents that are encoded here, by nothing of the stream.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import orchestrator
from orchestrator.data import frozen
from orchestrator.data.loading import sample_stream as stream_lists
from orchestrator.data.loading.sample_stream import SampleStream
from orchestrator.errors import ConfigError, DataIdentityError, OrchestratorError, RefusedError
from orchestrator.storage.files import Storage
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
Documents = Counter[tuple[int, ...]]
RESTART = ["resume.data=restart"]
REFRESH = ["data.refresh=epoch", "data.num_epochs=4"]
OTHER_STREAM = "resume.other_stream"


def documents(mark: str, num: int) -> list[str]:
    return [f"{mark} {i}: " + " ".join(f"w{(i * j) % 13}" for j in range(3 + i % 17)) for i in range(num)]


def write(folder: Path, name: str, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / name


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "data" / "a", "one.jsonl", documents("a", 60))
    return tmp_path / "data"


@pytest.fixture
def config(data: Path, tiny_config: Make) -> dict[str, Any]:
    small = {"data.fragment_bytes": 700, "data.window_bytes": 1500, "pack.seq_len": 32}
    batch = {"train.global_batch_size": 4, "train.micro_batch_size": 2}
    return tiny_config({"data.sources": [source(data, "a")], **small, **batch})


def source(data: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": str(data / name), "format": "jsonl", **more}


@pytest.fixture
def encoded(corpus: Path) -> Callable[[list[str]], Documents]:
    """Documents as tokens with EOS, counted; by the library itself."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id("<|endoftext|>")
    return lambda texts: Counter((*tokenizer.encode(t, add_special_tokens=False).ids, end) for t in texts)


def tokens_of(samples: list[Any]) -> list[int]:
    """The first input, and all targets."""
    targets = [label for sample in samples for label in sample.labels.tolist() if label >= 0]
    return [int(samples[0].input_ids[0]), *targets]


def whole(samples: list[Any], end: int) -> Documents:
    """The whole documents of samples that begin with one."""
    tokens = np.array(tokens_of(samples))
    parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
    return Counter(tuple(part.tolist()) for part in parts)


def end_of(encoded: Any) -> int:
    return next(iter(encoded(["x"])))[-1]


def rest_of(stream: Any) -> list[Any]:
    return list(stream)


def is_the_same_stream(
    config: dict[str, Any], state: Any, follows: list[Any], how: list[str], **at: Any
) -> None:
    """The state opens with exactly what `follows` it, by one rank or two, in steps of other sizes."""
    state = json.loads(json.dumps(state))
    again = orchestrator.open_stream(config, state, how, **at)
    assert [s.labels.tolist() for s in again] == [s.labels.tolist() for s in follows]
    other = [*how, "pack.seq_len=7", "train.global_batch_size=6", "train.micro_batch_size=3"]
    ranks = [
        orchestrator.open_stream(config, state, other, rank=rank, world_size=2, **at).batches()
        for rank in range(2)
    ]
    inputs: list[int] = []
    for step in zip(*ranks, strict=True):
        for batch in step:
            inputs += batch["input_ids"][batch["document_ids"] >= 0].tolist()
    assert inputs == [t for s in follows for t in s.input_ids[s.document_ids >= 0].tolist()]


# ------------------------------------------------------------------------------------ restarts
@pytest.mark.chaos
def test_a_state_is_opened_with_its_sources_anew(config: dict[str, Any], data: Path, encoded: Any) -> None:
    stream = orchestrator.open_stream(config)
    before = list(islice(stream, 5))
    state = stream.state_dict()
    write(data / "a", "two.jsonl", documents("new", 20))
    values = ("1 file then, 2 now", "resume.restart_sources=[a]")
    with raises(DataIdentityError, OTHER_STREAM, *values):
        orchestrator.open_stream(config, state)
    anew = orchestrator.open_stream(config, state, RESTART)
    assert (
        "source a begins anew with its 2 files as they are now (1 file before), as epoch 1" in anew.notes[0]
    )
    assert anew.cursor.consumed_samples == len(before), "counts stay"
    samples = rest_of(anew)
    assert [sample.index for sample in samples] == list(range(5, 5 + len(samples)))
    found = whole(samples, end_of(encoded))
    assert found == encoded(documents("a", 60) + documents("new", 20)), "one epoch from the restart on"


@pytest.mark.quick("36")
@pytest.mark.parametrize("every", [9, 36])
def test_every_state_after_a_restart_goes_on_exactly_with_the_same_settings(
    config: dict[str, Any], data: Path, every: int
) -> None:
    stream = orchestrator.open_stream(config)
    list(islice(stream, 3))
    state = stream.state_dict()
    write(data / "a", "two.jsonl", documents("new", 9))
    anew = orchestrator.open_stream(config, state, RESTART)
    states, samples = [anew.state_dict()], []
    for sample in anew:
        samples.append(sample)
        states.append(anew.state_dict())
    for at in range(0, len(states), every):
        again = orchestrator.open_stream(config, states[at], RESTART)
        assert "resume.data=restart is already done" in again.notes[0]
        is_the_same_stream(config, states[at], samples[at:], RESTART)
    is_the_same_stream(config, states[2], samples[2:], [])
    loader = orchestrator.open_stream(config, state, RESTART).batches()
    for step in range(3):
        next(loader)
        state_of_loader = loader.state_dict()
        assert state_of_loader == states[4 * step + 4]
    loader.load_state_dict(states[4])
    assert next(loader)["labels"].tolist() == [s.labels.tolist() for s in samples[4:8]]
    loader.close()


def test_a_state_of_a_stream_without_the_restart_may_begin_anew_once_more(
    config: dict[str, Any],
) -> None:
    stream = orchestrator.open_stream(
        config, overrides=RESTART
    )  # from the beginning anyway: it counts as done
    next(stream)
    again = orchestrator.open_stream(config, stream.state_dict(), RESTART)
    assert next(again).cursor.sources["a"].epoch == 0
    without = orchestrator.open_stream(config, again.state_dict())
    anew = orchestrator.open_stream(config, without.state_dict(), RESTART)
    assert next(anew).cursor.sources["a"].epoch == 1
    twice = orchestrator.open_stream(config, anew.state_dict())
    thrice = orchestrator.open_stream(config, twice.state_dict(), ["resume.restart_sources=[a]"])
    assert next(thrice).cursor.sources["a"].epoch == 2
    assert len(thrice.state_dict()["sources"][0]["spans"]) == 3


def test_named_sources_begin_anew_and_the_others_go_on(
    config: dict[str, Any], data: Path, encoded: Any
) -> None:
    write(data / "b", "one.jsonl", documents("b", 40))
    sources = f"data.sources={json.dumps([source(data, 'a', weight=1), source(data, 'b', weight=1)])}"
    both = [sources, "data.on_end=drop"]
    stream = orchestrator.open_stream(config, overrides=both)
    before = list(islice(stream, 10))
    write(data / "b", "one.jsonl", documents("other", 30))
    anew = orchestrator.open_stream(config, stream.state_dict(), [*both, "resume.restart_sources=[b]"])
    after = rest_of(anew)

    def of(name: str, samples: list[Any]) -> list[Any]:
        return [sample for sample in samples if sample.source == name]

    assert whole(of("a", before + after), end_of(encoded)) == encoded(documents("a", 60))
    assert whole(of("b", after), end_of(encoded)) == encoded(documents("other", 30))


def test_fields_of_a_source_may_change_with_its_restart_alone(config: dict[str, Any], data: Path) -> None:
    stream = orchestrator.open_stream(config)
    next(stream)
    state = stream.state_dict()
    (data / "a" / "one.jsonl").write_text('{"body": "now it is called body"}\n' * 50)
    body = "data.sources.0.text_field=body"
    with raises(DataIdentityError, OTHER_STREAM, "text_field"):
        orchestrator.open_stream(config, state, [body])
    anew = orchestrator.open_stream(config, state, [body, *RESTART])
    next(anew)
    assert next(orchestrator.open_stream(config, anew.state_dict(), [body])).index == 2
    with raises(DataIdentityError, OTHER_STREAM, "data.seed"):
        orchestrator.open_stream(config, state, [body, *RESTART, "data.seed=5"])


def test_a_restart_at_a_bare_cursor_is_refused(config: dict[str, Any]) -> None:
    cursor = next(orchestrator.open_stream(config)).cursor
    with raises(RefusedError, "command.restart_at_cursor", "resume.data=restart", "state_dict()"):
        orchestrator.open_stream(config, cursor, RESTART)


def test_states_of_older_versions_are_read(config: dict[str, Any], data: Path) -> None:
    stream = orchestrator.open_stream(config)
    next(stream)
    old = {k: v for k, v in stream.state_dict().items() if k in ("version", "cursor", "identity")}
    assert next(orchestrator.open_stream(config, old)).labels.tolist() == next(stream).labels.tolist()
    write(data / "a", "two.jsonl", documents("new", 9))
    assert next(orchestrator.open_stream(config, old, RESTART)).cursor.sources["a"].epoch == 1


# ------------------------------------------------------------------------------------ a folder of lists
def test_in_a_folder_lists_are_kept_and_later_files_stay_out(
    config: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    kept = {"frozen_dir": tmp_path / "lists"}
    samples = rest_of(orchestrator.open_stream(config))
    stream = orchestrator.open_stream(config, **kept)
    states = [stream.state_dict()]
    for _ in range(4):
        next(stream)
        states.append(stream.state_dict())
    write(data / "a", "0.jsonl", documents("new", 20))  # it would come first
    for at, state in enumerate(states):
        is_the_same_stream(config, state, samples[at:], [], **kept)
    again = orchestrator.open_stream(config, states[1], **kept)
    assert any("1 file of source a came after" in note for note in again.notes)


def test_ranks_that_open_one_after_the_other_have_one_list(
    config: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    """The fault would be a list for each rank: files come between their openings."""
    ranks = []
    for rank in range(3):
        where: dict[str, Any] = {"rank": rank, "world_size": 3, "frozen_dir": tmp_path / "lists"}
        ranks.append(orchestrator.open_stream(config, **where))
        write(data / "a", f"0{rank}.jsonl", documents("new", 9))
    assert len({json.dumps(stream.state_dict()) for stream in ranks}) == 1
    state = ranks[0].state_dict()
    restarted = []
    for rank in range(3):
        where = {"rank": rank, "world_size": 3, "frozen_dir": tmp_path / "lists"}
        restarted.append(orchestrator.open_stream(config, state, RESTART, **where))
        write(data / "a", f"1{rank}.jsonl", documents("new", 9))
    states = {json.dumps(stream.state_dict()) for stream in restarted}
    assert len(states) == 1
    assert json.loads(states.pop())["files"]["a"]["num"] == 4


def test_a_folder_of_a_run_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    with raises(RefusedError, "command.folder_of_run", f"frozen_dir={tmp_path / 'run'}"):
        orchestrator.open_stream(config, frozen_dir=tmp_path / "run")
    with raises(ConfigError, "config.storage_uri", "frozen_dir: ", "hdfs://"):
        orchestrator.open_stream(config, frozen_dir="hdfs://bucket/lists")


# ------------------------------------------------------------------------------------ refreshes
def test_refreshed_lists_need_a_folder(config: dict[str, Any], tmp_path: Path) -> None:
    with raises(RefusedError, "command.no_frozen_dir", "data.refresh=", "frozen_dir="):
        orchestrator.open_stream(config, overrides=REFRESH)
    stream = orchestrator.open_stream(config, overrides=REFRESH, frozen_dir=tmp_path / "lists")
    while next(stream).cursor.sources["a"].epoch == 0:
        pass
    with raises(RefusedError, "command.no_frozen_dir", "(sources a", "frozen_dir="):
        orchestrator.open_stream(config, stream.state_dict(), ["data.num_epochs=4"])
    with raises(DataIdentityError, "data.frozen_gone") as caught:
        orchestrator.open_stream(config, stream.state_dict(), REFRESH, frozen_dir=tmp_path / "other")
    assert re.search(r"a@\d+e1.parquet", str(caught.value))


@pytest.mark.quick("92")
@pytest.mark.parametrize("every", [23, 92])
def test_each_epoch_has_the_files_of_its_time_and_every_state_goes_on_in_them(
    config: dict[str, Any], data: Path, tmp_path: Path, encoded: Any, every: int
) -> None:
    kept = {"frozen_dir": tmp_path / "lists"}
    stream = orchestrator.open_stream(config, overrides=REFRESH, **kept)
    samples, states, texts, lists = [], [stream.state_dict()], documents("a", 60), list[str]()
    for number in range(4):
        lists += texts
        for sample in stream:
            samples.append(sample)
            states.append(stream.state_dict())
            if sample.cursor.sources["a"].epoch > number:
                break
        texts = texts + documents(f"new{number}", 9)
        write(data / "a", f"0{number}.jsonl", documents(f"new{number}", 9))
    # a file comes when the first token of the next epoch is read: that epoch has its list by then
    expected = documents("a", 60) * 4 + documents("new0", 9) * 2 + documents("new1", 9)
    assert whole(samples, end_of(encoded)) == encoded(expected)
    for at in range(0, len(states), every):
        is_the_same_stream(config, states[at], samples[at:], REFRESH, **kept)


def test_ranks_that_come_to_an_epoch_one_after_the_other_read_one_list(
    config: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    kept = {"frozen_dir": tmp_path / "lists", "world_size": 2}
    found = []
    for rank in range(2):
        loader = orchestrator.open_stream(config, None, REFRESH, rank=rank, **kept).batches()
        found.append(list(loader))
        write(data / "a", f"0{rank}.jsonl", documents("new", 40))
    assert len(found[0]) == len(found[1]), "the second rank has the lists of the first one"
    assert [batch["step_targets"] for batch in found[0]] == [batch["step_targets"] for batch in found[1]]


def test_a_refresh_begins_and_ends_with_an_epoch(config: dict[str, Any], data: Path, tmp_path: Path) -> None:
    kept, four = {"frozen_dir": tmp_path / "lists"}, ["data.num_epochs=4"]
    stream = orchestrator.open_stream(config, overrides=four, **kept)
    next(stream)
    write(data / "a", "two.jsonl", documents("new", 9))
    stream = orchestrator.open_stream(config, stream.state_dict(), REFRESH, **kept)
    assert any("listed anew for each epoch from epoch 1 on" in note for note in stream.notes)
    while next(stream).cursor.sources["a"].epoch == 0:
        pass
    write(data / "a", "three.jsonl", documents("three", 9))
    state = stream.state_dict()
    assert state["files"]["a"]["num"] == 2
    stream = orchestrator.open_stream(config, state, four, **kept)
    while next(stream).cursor.sources["a"].epoch == 1:
        pass
    assert stream.state_dict()["files"]["a"]["num"] == 2, "without it, the newest list stays"


def test_a_restart_under_a_refresh_begins_with_a_list_of_its_own(
    config: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    kept = {"frozen_dir": tmp_path / "lists"}
    stream = orchestrator.open_stream(config, overrides=REFRESH, **kept)
    while next(stream).cursor.sources["a"].epoch < 2:
        pass
    state = stream.state_dict()
    write(data / "a", "two.jsonl", documents("new", 9))
    anew = orchestrator.open_stream(config, state, [*REFRESH, *RESTART], **kept)
    assert (anew.cursor.sources["a"].epoch, anew.state_dict()["files"]["a"]["num"]) == (3, 2)
    samples = rest_of(anew)
    assert samples[-1].cursor.sources["a"].epoch == 6, "four epochs from there"
    again = orchestrator.open_stream(config, state, [*REFRESH, *RESTART], **kept)
    assert [s.labels.tolist() for s in again] == [s.labels.tolist() for s in samples]


# ------------------------------------------------------------------------------------ changed and gone files
def test_files_that_are_gone_cannot_be_accepted(config: dict[str, Any], data: Path, tmp_path: Path) -> None:
    write(data / "a", "two.jsonl", documents("two", 9))
    accept = ["resume.accept_changed=true"]
    states = []
    for kept in ({}, {"frozen_dir": tmp_path / "lists"}):
        stream: SampleStream = orchestrator.open_stream(config, **kept)
        next(stream)
        states.append(stream.state_dict())
    (data / "a" / "two.jsonl").write_text((data / "a" / "two.jsonl").read_text().replace("w", "v"))
    codes = OTHER_STREAM, "data.changed_files"
    for state, kept, code in zip(states, ({}, {"frozen_dir": tmp_path / "lists"}), codes, strict=True):
        with raises(DataIdentityError, code, "restart_sources=[a]"):
            orchestrator.open_stream(config, state, **kept)
        next(orchestrator.open_stream(config, state, accept, **kept))  # changed, and all there
    (data / "a" / "two.jsonl").unlink()
    with raises(DataIdentityError, OTHER_STREAM, "2 files", "1 now"):
        orchestrator.open_stream(config, states[0], accept)
    with raises(DataIdentityError, "data.missing_files", "two.jsonl"):
        orchestrator.open_stream(config, states[1], accept, frozen_dir=tmp_path / "lists")
    write(data / "a", "three.jsonl", documents("three", 9))
    with raises(DataIdentityError, OTHER_STREAM, "2 files", "2 now", "names"):
        orchestrator.open_stream(config, states[0], accept)
    assert rest_of(orchestrator.open_stream(config, states[0], RESTART))


# ------------------------------------------------------------------------------------ any history
Opening = tuple[bool, int, int, int, int]  # begins anew?, seq_len, samples of a step, world size, steps


def batches_of(
    config: dict[str, Any], state: Any, opening: Opening, folder: Path
) -> tuple[list[dict[str, Any]], Any]:
    """What all ranks of an opening get, in the order of the stream, and the state behind it."""
    anew, seq_len, batch, world_size, steps = opening
    shape = [f"pack.seq_len={seq_len}", f"train.global_batch_size={batch}", "train.micro_batch_size=1"]
    how, where = [*REFRESH, *shape, *(RESTART if anew else [])], {"frozen_dir": folder}
    ranks = [
        orchestrator.open_stream(config, state, how, rank=rank, world_size=world_size, **where).batches()
        for rank in range(world_size)
    ]
    found = []
    for _ in range(steps):
        found += [batch for rank in ranks if (batch := next(rank, None)) is not None]
    states = {json.dumps(rank.state_dict()) for rank in ranks}
    for rank in ranks:
        rank.close()
    assert len(states) == 1, "the same on every rank"
    return found, json.loads(states.pop())


@pytest.mark.chaos
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from([7, 32, 65]),
            *(st.integers(1, most) for most in (6, 3, 9)),
        ),
        min_size=2,
        max_size=6,
    )
)
def test_through_any_openings_each_list_is_read_once_to_its_end(
    history: list[Opening], tmp_path_factory: pytest.TempPathFactory, tiny_config: Make, encoded: Any
) -> None:
    """Files come before each opening, and under it; each is of another shape. What was read from a start on
    are the documents of the lists of its epochs, one list after the other.
    """
    folder = tmp_path_factory.mktemp("history")
    data, lists = folder / "data", folder / "lists"
    write(data / "a", "first.jsonl", documents("first", 12))
    small = {"data.fragment_bytes": 700, "data.window_bytes": 1500}
    config = tiny_config({"data.sources": [source(data, "a")], **small})
    state, streams, before = None, dict[int, list[int]](), False
    for number, opening in enumerate(history):
        anew = opening[0]
        found, state = batches_of(config, state, opening, lists)
        write(data / "a", f"{number}.jsonl", documents(f"n{number}", 5))
        start = state["sources"][0]["spans"][-1]["start"]
        assert (start in streams) != (number == 0 or (anew and not before)), "asked for once, it begins once"
        before = anew
        for batch in found:
            rows = batch["labels"][batch["document_ids"] >= 0]
            if len(rows):
                streams.setdefault(start, [int(batch["input_ids"][0, 0])]).extend(rows.tolist())
        streams.setdefault(start, [])
    for start, tokens in streams.items():
        read = list(whole_in_order(tokens, end_of(encoded)))
        first = min(span["begin"] for span in state["sources"][0]["spans"] if span["start"] == start)
        for epoch in range(first, first + 4):
            version = f"{start}e{epoch}" if epoch > first else str(start)
            listed = frozen.read_later(Storage(str(lists)), "a", version)
            if listed is None:
                break
            files = [(data / "a" / path).read_text() for path in listed.manifest.files.paths]
            texts = [json.loads(line)["text"] for file in files for line in file.splitlines()]
            part, read = read[: len(texts)], read[len(texts) :]
            of_list = encoded(texts)
            assert Counter(part) == of_list if len(part) == len(texts) else Counter(part) <= of_list
        assert not read, "there are no more epochs"


def whole_in_order(tokens: list[int], end: int) -> Iterator[tuple[int, ...]]:
    begin = 0
    for at, token in enumerate(tokens):
        if token == end:
            yield tuple(tokens[begin : at + 1])
            begin = at + 1


# ------------------------------------------------------------------------------------ planted faults
def test_a_restart_that_every_state_begins_once_more_is_caught(
    config: dict[str, Any], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: what was carried out is not remembered."""
    monkeypatch.setattr(stream_lists.RestartRequest, "repeats", lambda *_: False)
    with pytest.raises((AssertionError, OrchestratorError)):
        test_every_state_after_a_restart_goes_on_exactly_with_the_same_settings(config, data, 9)


def test_lists_that_each_opening_makes_for_itself_are_caught(
    config: dict[str, Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a list's number depends on who asks."""
    numbers = iter(range(1, 100))
    monkeypatch.setattr(stream_lists, "_number", lambda *_: next(numbers))
    with pytest.raises((AssertionError, OrchestratorError)):
        test_ranks_that_open_one_after_the_other_have_one_list(config, data, tmp_path)
