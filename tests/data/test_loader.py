"""`open_stream` as a loader: the share of each rank, its state under every change of shape, its thread."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orchestrator
from orchestrator.data.loading.loader import Ahead, Loader
from orchestrator.data.loading.sample_stream import SampleStream
from orchestrator.errors import BadDocumentError, ConfigError, DataIdentityError, FeedError, RefusedError
from orchestrator.json_form import decode
from orchestrator.records.cursor import Cursor
from tests.data.making import plain, some_texts, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
LIMIT_S = 60.0


@pytest.fixture
def mapping(tmp_path: Path, tiny_config: Make) -> dict[str, Any]:
    """Two sources by weight, in small windows; only what data need."""
    sources = []
    for name, kind, weight in (("web", "jsonl", 0.7), ("code", "parquet", 0.3)):
        write_corpus(tmp_path / name, [f"{name} {text}" for text in some_texts(40, 20)], kind)
        sources.append({"name": name, "path": str(tmp_path / name), "format": kind, "weight": weight})
    data = {**tiny_config()["data"], "sources": sources, "fragment_bytes": 900, "window_bytes": 2500}
    return {
        "data": {**data, "on_end": "drop"},
        "pack": {"seq_len": 16},
        "train": {"global_batch_size": 10, "micro_batch_size": 3},
    }


def stream(mapping: dict[str, Any], at: Any = None, overrides: tuple[str, ...] = (), **rank: int) -> Any:
    return orchestrator.open_stream(mapping, at, overrides, **rank)


def trained(batches: list[dict[str, Any]]) -> list[tuple[list[int], list[int], list[int]]]:
    """The samples in batches as lists; rows of padding, which stand for no sample, are left out."""
    rows = []
    for batch in batches:
        for row in zip(*(batch[n].tolist() for n in ("input_ids", "labels", "document_ids")), strict=True):
            if set(row[2]) == {-1}:
                assert set(row[1]) == {-100}
            else:
                rows.append(row)
    return rows


def loaders(mapping: dict[str, Any], world_size: int, at: Any = None, **how: Any) -> list[Loader]:
    return [
        stream(mapping, at, rank=rank, world_size=world_size).batches(**how) for rank in range(world_size)
    ]


def close(opened: list[Loader]) -> None:
    for each in opened:
        each.close()


# ------------------------------------------------------------------------------------- what a rank gets
@pytest.mark.quick("1-False", "3-True", "5-False")
@pytest.mark.parametrize("micro_batches", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_the_ranks_batches_are_together_the_samples_of_the_stream(
    mapping: dict[str, Any], world_size: int, micro_batches: bool
) -> None:
    samples = list(stream(mapping))
    assert len(samples) % 10, "the last step is smaller"
    ranks = [list(loader) for loader in loaders(mapping, world_size, micro_batches=micro_batches)]
    assert len({len(batches) for batches in ranks}) == 1, "every rank runs as often"
    per_step = -(-4 // world_size) if micro_batches else 1
    steps = -(-len(samples) // 10)
    found = []
    for step in range(steps):
        part = slice(step * per_step, (step + 1) * per_step)
        found += trained([batch for batches in ranks for batch in batches[part]])
        firsts = [batch["first_index"] for batches in ranks for batch in batches[part]]
        assert firsts == sorted(firsts)
        assert firsts[0] == step * 10
        targets = sum((s.labels != -100).sum() for s in samples[step * 10 : step * 10 + 10])
        assert {batch["step_targets"] for batches in ranks for batch in batches[part]} == {targets}
    assert found == plain(samples)
    most = 3 if micro_batches else 3 * -(-4 // world_size)
    assert max(len(batch["input_ids"]) for batches in ranks for batch in batches) == min(most, 10)


def test_the_samples_of_one_rank_alone_are_refused(mapping: dict[str, Any]) -> None:
    with raises(RefusedError, "command.samples_with_ranks", "rank 1 of 2", ".batches()"):
        next(stream(mapping, rank=1, world_size=2))


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (True, 2), ("0", 1)])
def test_a_rank_that_there_is_not_is_refused(mapping: dict[str, Any], rank: Any, world_size: Any) -> None:
    values = (f"rank={rank!r}", f"world_size={world_size!r}")
    with raises(RefusedError, "command.argument_value", *values):
        stream(mapping, rank=rank, world_size=world_size)


@pytest.mark.parametrize("how", [{"tensors": "jax"}, {"prefetch": 0}, {"prefetch": True}])
def test_batches_of_another_kind_are_refused(mapping: dict[str, Any], how: dict[str, Any]) -> None:
    ((name, value),) = how.items()
    with raises(RefusedError, "command.argument_value", f"{name}={value!r}"):
        stream(mapping).batches(**how)


def test_what_data_do_not_need_may_be_left_out_and_everything_else_not(mapping: dict[str, Any]) -> None:
    assert next(stream(mapping, overrides=("pack.seq_len=5",))).input_ids.shape == (5,)
    for section, field in (("pack", "seq_len"), ("train", "global_batch_size"), ("data", "tokenizer")):
        lacking = {**mapping, section: {k: v for k, v in mapping[section].items() if k != field}}
        with raises(ConfigError, "config.missing_key", f"{section}.{field}"):
            stream(lacking)
    with raises(ConfigError, "config.invalid", "model.surprise"):
        stream({**mapping, "model": {"surprise": 1}})
    with raises(ConfigError, "config.invalid", "train.lr"):
        orchestrator.plan(mapping)


# ------------------------------------------------------------------------------------- its state
def test_a_state_opens_at_the_next_unread_token_under_any_shape(mapping: dict[str, Any]) -> None:
    def shaped(seq_len: int, batch: int) -> dict[str, Any]:
        train = {"global_batch_size": batch, "micro_batch_size": 2}
        return {**mapping, "pack": {"seq_len": seq_len}, "train": train}

    inputs: dict[str, list[int]] = {"web": [], "code": []}

    def take(samples: list[Any]) -> None:
        for sample in samples:
            inputs[sample.source] += sample.input_ids[sample.document_ids >= 0].tolist()

    state: Any = None
    for world_size, batch, seq_len in [(1, 10, 16), (3, 4, 16), (2, 7, 5), (4, 9, 33), (2, 10, 64)]:
        one_by_one = stream(shaped(seq_len, batch), state)
        samples = list(islice(one_by_one, 2 * batch))
        ranks = loaders(shaped(seq_len, batch), world_size, state)
        steps = [[next(loader) for loader in ranks] for _ in range(2)]
        assert trained([each for step in steps for each in step]) == plain(samples)
        states = [json.loads(json.dumps(loader.state_dict())) for loader in ranks]
        assert states == [one_by_one.state_dict()] * world_size, "the same on every rank"
        state = states[0]
        close(ranks)
        take(samples)
    take(list(stream(shaped(16, 1), state)))
    (whole, other) = list(stream(shaped(100_000, 1)))
    for sample in (whole, other):
        assert inputs[sample.source] == sample.input_ids[sample.document_ids >= 0].tolist()


def test_every_state_of_a_loader_and_of_a_stream_goes_on_exactly(mapping: dict[str, Any]) -> None:
    steps, states = [], []
    with stream(mapping).batches() as loader:
        begin = loader.state_dict()
        for batch in loader:
            steps.append(trained([batch]))
            states.append(loader.state_dict())
        assert next(loader, None) is None, "the end stays the end"
        for at in range(0, len(states), 3):
            loader.load_state_dict(states[at])
            assert loader.state_dict() == states[at]
            assert [trained([batch]) for batch in loader] == steps[at + 1 :]
        loader.load_state_dict(begin)
        assert trained([next(loader)]) == steps[0]
    one_by_one = stream(mapping, states[2])
    three = [next(one_by_one) for _ in range(3)]
    state = one_by_one.state_dict()
    four = plain([next(one_by_one)])
    assert plain(three) + four == steps[3][:4]
    one_by_one.load_state_dict(state)
    assert trained([next(one_by_one.batches())])[0] == four[0]
    assert plain([next(one_by_one)]) == four


def test_a_state_inside_a_step_is_refused_on_every_rank(mapping: dict[str, Any]) -> None:
    ranks = loaders(mapping, 2, micro_batches=True)
    for loader in ranks:
        before = loader.state_dict()
        next(loader)
        with raises(RefusedError, "command.inside_step", "1 of the 2"):
            loader.state_dict()
        next(loader)
        after = decode(Cursor, loader.state_dict()["cursor"])
        assert (decode(Cursor, before["cursor"]).consumed_samples, after.consumed_samples) == (0, 10)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    close(ranks)


def other_text(mapping: dict[str, Any]) -> dict[str, Any]:
    """The first file's last word is another one, of the same length."""
    file = min(Path(mapping["data"]["sources"][0]["path"]).iterdir())
    file.write_bytes(file.read_bytes()[:-6] + b"x" + file.read_bytes()[-5:])
    return mapping


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], tuple[str, ...]]] = {
    "files": (other_text, ("files of source web", "digest")),
    "seed": (lambda m: {**m, "data": {**m["data"], "seed": 5}}, ("data.seed=0", " 5")),
    "sources": (
        lambda m: {**m, "data": {**m["data"], "sources": m["data"]["sources"][:1], "on_end": None}},
        ("['code', 'web']", "['web']"),
    ),
    "encoder": (
        lambda m: {**m, "data": {**m["data"], "encoder": "tokenizers"}},
        ("gigatoken", "data.encoder=tokenizers"),
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_state_of_another_stream_is_refused_at_opening(mapping: dict[str, Any], what: str) -> None:
    change, values = OTHERS[what]
    with stream(mapping, overrides=("data.encoder=gigatoken",)).batches() as loader:
        next(loader)
        state = loader.state_dict()
    with raises(DataIdentityError, "resume.other_stream", *values):
        stream(change(mapping), state)


def test_a_state_that_is_still_a_text_is_refused(mapping: dict[str, Any]) -> None:
    with raises(RefusedError, "command.argument_value", "str", "state_dict()"):
        stream(mapping, "{}")


def test_a_refused_state_leaves_the_loader_where_it_stood(mapping: dict[str, Any]) -> None:
    other = stream({**mapping, "data": {**mapping["data"], "seed": 5}}).state_dict()
    samples = list(stream(mapping))
    with stream(mapping).batches() as loader:
        next(loader)
        with raises(DataIdentityError, "resume.other_stream"):
            loader.load_state_dict(other)
        with raises(DataIdentityError, "resume.other_version", "version 9"):
            loader.load_state_dict({**loader.state_dict(), "version": 9})
        assert trained([next(loader)]) == plain(samples[10:20])


def test_a_cursor_of_another_corpus_is_refused_at_opening(mapping: dict[str, Any], tmp_path: Path) -> None:
    cursor = next(stream(mapping)).cursor
    write_corpus(tmp_path / "web", [f"other {text}" for text in some_texts(40, 20)], "jsonl")
    with raises(DataIdentityError, "resume.cursor_mismatch", "source web") as caught:
        stream(mapping, cursor)
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", str(caught.value)))) == 2, "both digests"


def test_a_state_brings_the_encoder_that_made_its_stream(mapping: dict[str, Any]) -> None:
    slow = stream(mapping, overrides=("data.encoder=tokenizers",))
    first, second = plain([next(slow)]), slow.state_dict()
    assert second["identity"]["encoder_name"] == "tokenizers"
    again = stream(mapping, second)
    assert again.state_dict() == second
    assert stream(mapping).state_dict()["identity"]["encoder_name"] == "gigatoken"
    assert plain([next(again)]) == plain([next(slow)]) != first
    unknown = {**second, "identity": {**second["identity"], "encoder_version": "0.0.1"}}
    with raises(DataIdentityError, "machine.packages", "0.0.1"):
        stream(mapping, unknown)


# ------------------------------------------------------------------------------------- its thread
def test_what_goes_wrong_while_reading_ahead_is_raised_by_next_in_its_turn(
    mapping: dict[str, Any], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}) for text in some_texts(30, 20) if text]
    for name in ("a", "b"):
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / f"{name}.jsonl").write_text("\n".join([*lines, "{" * (name == "b")]) + "\n")
    source = {"name": "bad", "path": str(tmp_path / "bad"), "format": "jsonl"}
    data = {**mapping["data"], "sources": [source], "on_end": None, "shuffle": "none"}
    with stream({**mapping, "data": data}).batches() as loader:
        good = []
        with raises(BadDocumentError, "data.bad_document", "b.jsonl"):
            good.extend(loader)
        assert good, "what came before it is given"
        with raises(BadDocumentError, "data.bad_document", "b.jsonl"):
            next(loader)


def test_it_runs_ahead_by_as_many_items_as_were_asked_for() -> None:
    made, waits = [], threading.Semaphore(0)

    def items() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            waits.release()
            yield number

    ahead = Ahead(items(), 3, "test")
    for taken in range(20):
        for _ in range(4 if not taken else 1):  # three wait and one is made, and no fifth before one is taken
            assert waits.acquire(timeout=LIMIT_S)
        assert len(made) == taken + 4
        assert not waits.acquire(blocking=False)
        assert ahead.take() == taken
    ahead.close()
    with raises(FeedError, "command.stream_closed"):
        ahead.take()


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batches"]


def test_the_thread_ends_with_the_loader_however_that_ends(mapping: dict[str, Any]) -> None:
    assert batch_threads() == []
    endless = {**mapping, "data": {**mapping["data"], "on_end": "repeat"}}
    opened: SampleStream = stream(endless)
    with opened.batches() as loader:
        next(loader)
        assert len(batch_threads()) == 1
    assert batch_threads() == []
    with raises(FeedError, "command.stream_closed"):
        next(loader)
    forgotten = opened.batches()
    next(forgotten)
    del forgotten
    gc.collect()
    assert batch_threads() == []
    reloaded = opened.batches()
    reloaded.load_state_dict(reloaded.state_dict())
    assert len(batch_threads()) == 1
    reloaded.close()
    reloaded.close()
    assert batch_threads() == []


def test_collate_runs_in_the_thread_and_makes_what_the_loop_takes(mapping: dict[str, Any]) -> None:
    def collate(batch: dict[str, Any]) -> tuple[str, int]:
        return threading.current_thread().name, int(batch["first_index"])

    with stream(mapping).batches(collate=collate) as loader:
        assert [next(loader), next(loader)] == [("batches", 0), ("batches", 10)]


# ------------------------------------------------------------------------------------- torch
def test_tensors_are_the_arrays_and_torchs_own_dataloader_gives_them(mapping: dict[str, Any]) -> None:
    import torch
    from torch.utils.data import DataLoader

    arrays = list(stream(mapping).batches())
    tensors = list(stream(mapping).batches(tensors="torch"))
    opened = stream(mapping).batches(tensors="torch")
    through: list[Any] = []
    for batch in DataLoader(opened.dataset(), batch_size=None):
        through.append(batch)
        assert opened.state_dict()["cursor"]["consumed_samples"] == min(10 * len(through), arrays_end(arrays))
    assert len(arrays) == len(tensors) == len(through)
    for array, tensor, other in zip(arrays, tensors, through, strict=True):
        assert tensor["input_ids"].dtype == torch.int64
        assert array.keys() == tensor.keys() == other.keys()
        for name, value in array.items():
            assert np.array_equal(value, tensor[name])
            assert np.array_equal(value, other[name])


def arrays_end(arrays: list[dict[str, Any]]) -> int:
    last = arrays[-1]
    return int(last["first_index"]) + len(last["input_ids"])


def test_worker_processes_of_a_dataloader_are_refused(mapping: dict[str, Any]) -> None:
    from torch.utils.data import DataLoader

    with stream(mapping).batches(tensors="torch") as loader:
        workers = DataLoader(
            loader.dataset(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
        )
        # torch raises the worker's error again from its text alone, so the code is lost
        with raises(RefusedError, "internal.code_lost", "num_workers=1", "num_workers=0"):
            next(iter(workers))


def test_batches_of_arrays_load_no_torch(mapping: dict[str, Any], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(mapping))
    program = (
        "import json, sys, orchestrator\n"
        f"stream = orchestrator.open_stream(json.load(open({str(config)!r})))\n"
        "with stream.batches() as loader:\n"
        "    next(loader), loader.state_dict(), next(stream)\n"
        "sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
