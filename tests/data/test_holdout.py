"""The hold-out: a share of the records that no run trains, and that `open_stream(part="holdout")` reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import orchestrator
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.dataset import prepare_data
from orchestrator.data.spec import DataSpec
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError, RefusedError
from orchestrator.json_form import decode, encode
from orchestrator.planning.order import holdout_bound, holdout_key, is_held_out
from orchestrator.planning.resume.identity import compare
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data.making import job, plain, samples, some_texts, spec_of, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
KINDS = ["jsonl", "jsonl.gz", "parquet", "text", "lines"]


def texts_of(spec: DataSpec, seq_len: int = 48) -> Counter[tuple[int, ...]]:
    """The documents that samples hold, as their tokens; the stream's first token is no target, and is taken
    from its first sample.
    """
    eos, found, at_hand = spec.settings.eos_id, Counter[tuple[int, ...]](), list[int]()
    for number, sample in enumerate(samples(spec, seq_len)):
        tokens = sample.labels[sample.labels != -100].tolist()
        for token in [*sample.input_ids[:1].tolist(), *tokens] if number == 0 else tokens:
            at_hand.append(token)
            if token == eos:
                found[tuple(at_hand)] += 1
                at_hand = []
    assert not at_hand
    return found


def documents(spec: DataSpec) -> Counter[tuple[int, ...]]:
    return texts_of(spec) if spec.settings.pack_mode == "concat" else packed(spec)


def packed(spec: DataSpec) -> Counter[tuple[int, ...]]:
    found = Counter[tuple[int, ...]]()
    for sample in samples(spec, spec.settings.seq_len):
        for number in range(int(sample.document_ids.max()) + 1):
            here = sample.document_ids == number
            found[(*sample.input_ids[here].tolist(), int(sample.labels[here][-1]))] += 1
    return found


# ---------------------------------------------------------------------------------------- which records
def test_what_is_held_out_is_a_keyed_hash_of_file_and_place() -> None:
    key = xxhash.xxh3_64_intdigest(b"1,holdout,web,a/b.jsonl")
    assert holdout_key("web", "a/b.jsonl") == key
    for share in (0.001, 0.25, 0.5):
        held = [
            xxhash.xxh3_64_intdigest(place.to_bytes(8, "little"), key) < round(share * 2**64)
            for place in range(20_000)
        ]
        assert [is_held_out(place, key, holdout_bound(share)) for place in range(20_000)] == held
        assert abs(sum(held) - share * 20_000) < 5 * (share * 20_000) ** 0.5


@given(share=st.floats(0, 1, exclude_max=True), more=st.floats(0, 1, exclude_max=True))
def test_a_larger_share_holds_out_the_same_records_and_more(share: float, more: float) -> None:
    small, large = sorted((holdout_bound(share), holdout_bound(more)))
    assert 0 <= small <= large < 2**64
    key = holdout_key("web", "a")
    assert all(is_held_out(i, key, large) for i in range(50) if is_held_out(i, key, small))
    assert holdout_bound(0.0) == 0


@pytest.mark.quick("jsonl-concat", "jsonl.gz-pad", "parquet-bestfit", "text-pad", "lines-concat")
@pytest.mark.parametrize("mode", ["concat", "bestfit", "pad"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_and_what_is_held_out_are_apart_and_together_all(
    kind: str, mode: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", some_texts(80, 20, lines=kind != "lines"), kind)
    pack = {"pack.mode": mode, "pack.seq_len": 200} if mode != "concat" else {}
    make = lambda changes: tiny_config({**changes, **pack})  # noqa: E731
    whole, held = (spec_of(job(make, tmp_path / "data", kind, holdout=h), 1 << 20) for h in (0.0, 0.3))
    every, trained, evaluated = documents(whole), documents(held), documents(held.held_out())
    assert trained + evaluated == every
    assert not trained & evaluated
    assert 10 < evaluated.total() < 40


def test_epochs_and_seeds_hold_out_the_same_records(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(60), "jsonl")
    one, three, other = (
        spec_of(job(tiny_config, tmp_path / "data", holdout=0.3, num_epochs=n, seed=seed), 1 << 20)
        for n, seed in ((1, 0), (3, 0), (1, 9))
    )
    trained = texts_of(one)
    assert texts_of(three) == trained + trained + trained
    assert texts_of(other) == trained
    assert texts_of(three.held_out()) == texts_of(other.held_out())


@pytest.mark.quick("92")
@pytest.mark.parametrize("stride", [23, 92])
def test_what_is_held_out_is_counted_where_the_cursor_passes_it(
    tmp_path: Path, tiny_config: Make, stride: int
) -> None:
    write_corpus(tmp_path / "data", [*some_texts(60), "end", "end", "end"], "jsonl")
    config = job(tiny_config, tmp_path / "data", holdout=0.3, num_epochs=3)
    spec = spec_of(config)
    whole = samples(spec, 37)
    for at in range(0, len(whole), stride):
        rest = samples(spec, 37, decode(Cursor, encode(whole[at].cursor)))
        assert plain(rest) == plain(whole[at + 1 :])
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]
    border = next(s.cursor.sources["made"] for s in samples(spec, 1) if s.cursor.sources["made"].epoch == 1)
    every = samples(spec_of(job(tiny_config, tmp_path / "data", num_epochs=2)), 1)
    all_of_them = next(s.cursor.sources["made"] for s in every if s.cursor.sources["made"].epoch == 1)
    held = border.held_out_documents
    assert 0 < held < 40
    counts = [at.documents + at.empty_documents + at.held_out_documents for at in (border, all_of_them)]
    assert counts == [63, 63]


def test_bad_records_that_are_held_out_are_for_the_evaluation_to_report(
    tmp_path: Path, tiny_config: Make
) -> None:
    lines = [json.dumps({"text": f"document {i}"}) if i % 3 else "no json" for i in range(300)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines))
    skip: dict[str, Any] = {"on_bad_document": "skip", "max_bad_share": 1.0}
    spec = spec_of(job(tiny_config, tmp_path / "data", holdout=0.2, **skip))
    kinds = Counter(int(kind) for chunk in spec.chunks(Cursor()) for kind in chunk.kind)
    held = Counter(int(kind) for chunk in spec.held_out().chunks(Cursor()) for kind in chunk.kind)
    assert kinds[0] + held[0] == 200
    assert kinds[2] + held[2] == 100
    assert kinds[4] == held[0] + held[2]
    assert set(held) == {0, 2}
    stop = spec_of(job(tiny_config, tmp_path / "data", holdout=0.2))
    with pytest.raises(BadDocumentError):
        samples(stop.held_out(), 32)


# ---------------------------------------------------------------------------------------- the public stream
def two_sources(make: Make, folder: Path, **data: Any) -> JobConfig:
    listed = []
    for i, name in enumerate("ab"):
        write_corpus(folder / name, [f"{name} {text}" for text in some_texts(50 + 30 * i)], "jsonl")
        listed.append({"name": name, "path": str(folder / name), "format": "jsonl", "weight": 1 + 5 * i})
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500, "pack.seq_len": 64}
    return parse_config(make({"data.sources": listed, **small, **{f"data.{k}": v for k, v in data.items()}}))


def test_open_stream_reads_each_sources_hold_out_once_and_to_its_end(
    tmp_path: Path, tiny_config: Make
) -> None:
    config = two_sources(tiny_config, tmp_path, holdout=0.3, num_epochs=5)
    found = list(orchestrator.open_stream(config, part="holdout"))
    spec = prepare_data(config).held_out()
    for name in "ab":
        tokens = [t for chunk in spec.chunks(Cursor(), name) for t in chunk.tokens.tolist()]
        mine = [sample for sample in found if sample.source == name]
        labels = [t for s in mine for t in s.labels[s.labels != -100].tolist()]
        assert labels == tokens[1:]
    at = len(found) // 2
    rest = list(orchestrator.open_stream(config, cursor=found[at].cursor, part="holdout"))
    assert plain(rest) == plain(found[at + 1 :])
    rows = [
        row
        for rank in range(2)
        for batch in orchestrator.open_stream(config, rank=rank, world_size=2, part="holdout").batches()
        for row in batch["labels"].tolist()
        if any(token != -100 for token in row)
    ]
    assert sorted(rows) == sorted(labels for _, labels, _ in plain(found))


def test_a_source_without_a_hold_out_of_its_own_is_left_out(tmp_path: Path, tiny_config: Make) -> None:
    config = two_sources(tiny_config, tmp_path, holdout=0.3)
    own = [
        source.model_copy(update={"holdout": share})
        for source, share in zip(config.data.sources, (0.0, None), strict=True)
    ]
    one = config.model_copy(update={"data": config.data.model_copy(update={"sources": tuple(own)})})
    found = list(orchestrator.open_stream(one, part="holdout"))
    assert {sample.source for sample in found} == {"b"}
    both = orchestrator.open_stream(config, part="holdout")
    held = [t for s in both if s.source == "b" for t in s.labels[s.labels != -100].tolist()]
    assert [t for s in found for t in s.labels[s.labels != -100].tolist()] == held


def test_a_state_of_what_is_trained_is_no_place_in_the_hold_out(tmp_path: Path, tiny_config: Make) -> None:
    config = two_sources(tiny_config, tmp_path, holdout=0.3)
    held, trained = (orchestrator.open_stream(config, part=part) for part in ("holdout", "train"))
    next(held)
    next(trained)
    state = held.state_dict()
    more = orchestrator.open_stream(config, cursor=state, part="holdout")
    assert next(more).index == 1
    with raises(DataIdentityError, "resume.other_stream", 'part="holdout"', "nothing"):
        trained.load_state_dict(state)
    with raises(DataIdentityError, "resume.other_stream", "part=nothing", '"holdout"'):
        held.load_state_dict(trained.state_dict())


def test_a_hold_out_that_there_is_not_is_refused_and_an_empty_one_is_empty(
    tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", some_texts(4), "jsonl")
    with raises(RefusedError, "data.no_holdout", "data.holdout is 0"):
        orchestrator.open_stream(job(tiny_config, tmp_path / "data"), part="holdout")
    with raises(RefusedError, "command.argument_value", "part='test'", "'holdout'"):
        orchestrator.open_stream(job(tiny_config, tmp_path / "data"), part="test")  # type: ignore[arg-type]
    for mode in ({}, {"pack.mode": "pad", "pack.long_document": "split"}):
        make: Sequence[Any] = [lambda changes, mode=mode: tiny_config({**changes, **mode})]
        tiny = job(make[0], tmp_path / "data", holdout=1e-6)
        assert list(orchestrator.open_stream(tiny, part="holdout")) == []
    for wrong in (1, -0.1, 1.5):
        with raises(ConfigError, "config.out_of_range", "data.holdout is ", "a number >= 0 and < 1"):
            job(tiny_config, tmp_path / "data", holdout=float(wrong))


def test_of_a_source_that_is_all_held_out_it_is_said(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(12), "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", holdout=0.9999))
    with raises(DataError, "data.nothing_to_train", "0 documents", "12 held out"):
        samples(spec, 48)


def test_sources_that_have_files_in_common_are_named(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data" / "inner", some_texts(12), "jsonl")
    write_corpus(tmp_path / "data", some_texts(2), "lines", 1)
    write_corpus(tmp_path / "data-2", some_texts(2), "jsonl", 1)
    ways = {"all": "data/**/*.jsonl", "one": "data/inner/part-1.jsonl", "other": "data-2"}
    ways["texts"] = "data/*.txt"
    listed = [
        {"name": name, "path": str(tmp_path / way), "format": "lines" if name == "texts" else "jsonl"}
        for name, way in ways.items()
    ]
    config = parse_config(tiny_config({"data.sources": listed}))
    run = tmp_path / "run"
    for spec in (
        prepare_data(config),
        prepare_data(config, Storage(str(run))),
        prepare_data(config, Storage(str(run))),
    ):
        (note,) = (note for note in spec.notes if "in common" in note)
        assert note.startswith(
            "warning: sources all and one have 1 of their files in common, e.g. "
            f"{tmp_path}/data/inner/part-1.jsonl: each trains all of its own"
        )


def test_the_share_belongs_to_the_runs_identity(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    some, more = (
        prepare_data(job(tiny_config, tmp_path / "data", holdout=h)).run_identity for h in (0.1, 0.2)
    )
    (refusal,) = compare(some, more)
    assert refusal.code == "resume.changed_setting"
    assert all(value in refusal.text for value in ("data.sources.made.holdout=0.1,", " 0.2;"))


def test_the_same_text_in_two_files_is_two_records(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", ["the same text everywhere"] * 90, "jsonl")
    spec = spec_of(job(tiny_config, tmp_path / "data", holdout=0.3))
    assert texts_of(spec) & texts_of(spec.held_out()), "records are held out, not texts"
