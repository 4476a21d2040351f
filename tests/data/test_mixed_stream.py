"""Several sources in one stream: real corpora against an independent reference, at every cursor, whatever
ends, and chunks made by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.common.settings import MixtureSettings, StreamSettings
from orchestrator.data.dataset import prepare_data
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.packing.samples import Sample, draw_step, open_samples
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.data.spec import DataSpec
from orchestrator.errors import FeedError
from orchestrator.inspect.audit.reference.reference_mixture import MixtureRule, ReferenceMixture
from orchestrator.json_form import decode, encode
from orchestrator.planning.batches import next_range
from orchestrator.planning.mixture import whole_weights
from orchestrator.planning.resume.identity import RunIdentity, compare
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import PIECE, TokenChunk
from orchestrator.storage.files import Storage
from tests.data.making import plain, some_texts, spec_of, write_corpus
from tests.num_examples import examples
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
SEQ_LEN = 16


# ---------------------------------------------------------------------------------------- real corpora
def mixed_job(make: Make, folder: Path, sources: list[dict[str, Any]], **data: Any) -> JobConfig:
    """A job on corpora of different sizes and formats; further fields of each source by position."""
    kinds = ["jsonl", "parquet", "lines"]
    listed = []
    for i, more in enumerate(sources):
        name = "abc"[i]
        if not (folder / name).exists():
            texts = [f"{name}{t}" for t in some_texts(9 + 7 * i, 12, lines=kinds[i] != "lines")]
            write_corpus(folder / name, texts, kinds[i], num_files=2)
        listed.append({"name": name, "path": str(folder / name), "format": kinds[i], **more})
    small = {"fragment_bytes": 300, "window_bytes": 700, **data}
    return parse_config(make({"data.sources": listed, **{f"data.{k}": v for k, v in small.items()}}))


def expected(spec: DataSpec, stops: bool, seq_len: int) -> list[tuple[str, list[int], list[int]]]:
    """(source, inputs, labels) of all samples: each source's tokens one after the other, and data rule 20 in
    fractions.
    """
    assert spec.mixture is not None
    weights = {name: Fraction(weight) for name, weight in spec.mixture.weights.items()}
    stream = {n: [int(t) for chunk in spec.chunks(Cursor(), n) for t in chunk.tokens] for n in weights}
    at, counts, found = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0), []
    unit = 1 if spec.mixture.by == "samples" else seq_len
    while counts:
        whole, total = sum(weights[name] for name in counts), sum(counts.values())
        _, name = min(
            ((count + unit) / weights[name], name)
            for name, count in counts.items()
            if count * whole < weights[name] * (total + unit)
        )
        num = min(seq_len, len(stream[name]) - at[name] - 1)
        if num < seq_len and stops:
            return found
        if num == 0:
            del counts[name]
            counts = dict.fromkeys(counts, 0)
            continue
        tokens = stream[name][at[name] : at[name] + num + 1]
        found.append((name, tokens[:-1], tokens[1:]))
        at[name] += num
        counts[name] += 1 if unit == 1 else num
    return found


def without_padding(samples: list[Sample]) -> list[tuple[str, list[int], list[int]]]:
    return [
        (s.source, s.input_ids[s.document_ids >= 0].tolist(), s.labels[s.document_ids >= 0].tolist())
        for s in samples
    ]


MIXTURES: list[tuple[list[dict[str, Any]], dict[str, Any], bool]] = [
    ([{}, {}, {}], {}, False),  # by bytes, and dropped at the end
    ([{"weight": 0.7}, {"weight": 0.2}, {"weight": 0.1}], {}, True),
    ([{"weight": 1}, {"weight": 1}], {"on_end": "drop", "num_epochs": 2}, False),
    ([{"weight": 5}, {"weight": 1, "max_epochs": 3}], {"on_end": "drop", "weight_by": "samples"}, False),
]


@pytest.mark.quick("sources4-data4-True-12", "sources5-data5-False-12")
@pytest.mark.parametrize(
    ("sources", "data", "stops", "every"),
    [*((*mixture, 3) for mixture in MIXTURES), *((*mixture, 12) for mixture in MIXTURES[1:3])],
)
def test_a_mixture_gives_the_samples_of_the_reference_and_the_same_from_every_cursor_on(
    tmp_path: Path,
    tiny_config: Make,
    sources: list[dict[str, Any]],
    data: dict[str, Any],
    stops: bool,
    every: int,
) -> None:
    spec = spec_of(mixed_job(tiny_config, tmp_path, sources, **data))
    found = list(open_samples(spec, Cursor(), SEQ_LEN))
    assert without_padding(found) == expected(spec, stops, SEQ_LEN)
    assert [s.index for s in found] == list(range(len(found)))
    assert {s.source for s in found} == set(spec.mixture.weights if spec.mixture else ())
    cursors = [s.cursor for s in found]
    for at in range(0, len(found), every):
        rest = list(open_samples(spec, cursors[at], SEQ_LEN))
        assert plain(rest) == plain(found[at + 1 :]), f"after sample {at}"
        assert [s.cursor for s in rest] == cursors[at + 1 :]


def test_the_samples_of_a_mixture_do_not_depend_on_the_steps_they_are_drawn_in(
    tmp_path: Path, tiny_config: Make
) -> None:
    sources, data, _ = MIXTURES[2]
    spec = spec_of(mixed_job(tiny_config, tmp_path, sources, **data))
    one_by_one = list(open_samples(spec, Cursor(), SEQ_LEN))
    for batch in (1, 3, 7, 1000):
        feed, cursor, rows = InProcessFeed(spec), Cursor(), list[list[int]]()
        feed.open(None, cursor)  # type: ignore[arg-type]  # no other process is there to agree with
        while True:
            step = next_range(cursor.consumed_samples, cursor.consumed_tokens, batch, SEQ_LEN)
            assert step is not None
            part = feed.get(step, 0, 1, 2, cursor)
            rows += part.input_ids.tolist()
            cursor = part.cursor
            assert cursor == one_by_one[cursor.consumed_samples - 1].cursor
            if part.end_of_data:
                break
        feed.close()
        assert rows == [s.input_ids.tolist() for s in one_by_one]


def test_a_changed_seq_len_goes_on_at_each_sources_next_token(tmp_path: Path, tiny_config: Make) -> None:
    spec = spec_of(mixed_job(tiny_config, tmp_path, [{"weight": 2}, {"weight": 1}], on_end="drop"))
    stream = {
        p.source: [int(t) for c in spec.chunks(Cursor(), p.source) for t in c.tokens] for p in spec.plans
    }
    seen: dict[str, list[int]] = {name: tokens[:1] for name, tokens in stream.items()}
    cursor = Cursor()
    for seq_len in (5, 16, 9, 33, 7):
        for sample in [s for s, _ in zip(open_samples(spec, cursor, seq_len), range(6), strict=False)]:
            seen[sample.source] += sample.labels[sample.labels >= 0].tolist()
            cursor = sample.cursor
    for name, tokens in seen.items():
        assert tokens == stream[name][: len(tokens)]
    totals = {name: share.tokens for name, share in cursor.mixture.items()}
    assert totals == {name: len(tokens) - 1 for name, tokens in seen.items()}


def test_a_run_of_one_source_goes_on_as_a_mixture_and_the_first_source_loses_no_token(
    tmp_path: Path, tiny_config: Make
) -> None:
    both = mixed_job(tiny_config, tmp_path, [{"weight": 1}, {"weight": 1}])
    alone = spec_of(mixed_job(tiny_config, tmp_path, [{}]))
    begun = [s for s, _ in zip(open_samples(alone, Cursor(), SEQ_LEN), range(5), strict=False)]
    rest = list(open_samples(spec_of(both), begun[-1].cursor, SEQ_LEN))
    uninterrupted = list(open_samples(alone, Cursor(), SEQ_LEN))
    of_a = [s for s in [*begun, *rest] if s.source == "a"]
    assert plain(of_a) == plain(uninterrupted[: len(of_a)])
    assert [s.source for s in rest[:4]] == ["a", "b", "a", "b"]
    assert rest[3].cursor.mixture["a"].samples == 7
    # and back to one: its totals are still there
    back = [s for s, _ in zip(open_samples(alone, rest[3].cursor, SEQ_LEN), range(2), strict=False)]
    assert plain(back) == plain(uninterrupted[7:9])
    assert back[-1].cursor.mixture["a"].samples == 9
    assert back[-1].cursor.mixture["b"].weight == 0


# ---------------------------------------------------------------------------------------- chunks by hand
def chunks_of(source: str, tokens: list[int], sizes: list[int]) -> list[TokenChunk]:
    """One epoch of one block: a document per token, cut into chunks of these numbers of tokens."""
    found, first = [], 0
    cuts = [*sizes, len(tokens)]
    for size in cuts:
        num = min(size, len(tokens) - first)
        last = first + num == len(tokens)
        ones = np.ones(num, np.int32)
        found.append(
            TokenChunk(
                source=source,
                epoch=0,
                block=0,
                window=0,
                tokens=np.array(tokens[first : first + num], np.int32),
                record=np.arange(first, first + num, dtype=np.int32),
                piece=0 * ones,
                num_tokens=ones,
                kind=np.full(num, PIECE, np.int32),
                last_piece=ones,
                special_texts=0 * ones,
                file=0 * ones,
                place=np.arange(first, first + num, dtype=np.int64),
                loss=np.array([t % 3 > 0 for t in tokens[first : first + num]]) if source > "a" else None,
                ends_window=last,
                ends_block=last,
            )
        )
        first += num
        if last:
            break
    return found


def stream_of(sizes: dict[str, int], weights: dict[str, int], on_end: str, by: str) -> Stream:
    whole = whole_weights({name: Decimal(weight) for name, weight in weights.items()})
    sources = [
        StreamSource(name=name, number=number, num_blocks=lambda _: 1, num_epochs=1)
        for number, name in enumerate(sizes)
    ]
    return Stream(Cursor(), sources, StreamSettings(), MixtureSettings(weights=whole, on_end=on_end, by=by))


SIZES = st.lists(st.integers(2, 40), min_size=2, max_size=4)


@settings(max_examples=examples(40, chaos=150), deadline=None)
@given(
    sizes=SIZES,
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    cuts=st.lists(st.integers(1, 9), max_size=6),
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    on_end=st.sampled_from(["stop", "drop"]),
    by=st.sampled_from(["tokens", "samples"]),
    early=st.lists(st.integers(0, 3), max_size=9),
)
def test_any_mixture_drawn_in_any_steps_follows_the_rule_whenever_chunks_come(
    sizes: list[int],
    weights: list[int],
    cuts: list[int],
    shapes: list[tuple[int, int]],
    on_end: str,
    by: str,
    early: list[int],
) -> None:
    names = {"abcd"[i]: size for i, size in enumerate(sizes)}
    tokens = {name: [1000 * i + k for k in range(size)] for i, (name, size) in enumerate(names.items())}
    wanted = dict(zip(names, weights[: len(names)], strict=True))
    stream = stream_of(names, wanted, on_end, by)
    coming = {name: iter(chunks_of(name, tokens[name], cuts)) for name in names}
    for i in early:  # some chunks come before they are needed
        name = list(names)[i % len(names)]
        if (chunk := next(coming[name], None)) is not None:
            stream.feed(chunk)
    rule = MixtureRule(
        weights={name: Fraction(weight) for name, weight in wanted.items()},
        limits=dict.fromkeys(names, 1),
        stops=on_end == "stop",
        by_samples=by == "samples",
    )
    reference, at, cursor, turn = ReferenceMixture(rule, {}), dict.fromkeys(names, 0), Cursor(), 0
    while True:
        batch, seq_len = shapes[turn % len(shapes)]
        turn += 1
        step = next_range(cursor.consumed_samples, cursor.consumed_tokens, batch, seq_len)
        assert step is not None
        drawn = draw_step(stream, step, lambda source: next(coming[source], None))
        num, total = drawn.step.num_samples, drawn.step.num_tokens
        numbers, inputs, labels, documents = drawn.arrays(0, num)
        turns = reference.turns(num, total, seq_len, lambda n, k: min(k, names[n] - at[n] - 1)) if num else []
        assert not isinstance(turns, str), turns
        for row, (name, length) in enumerate(turns):
            run = tokens[name][at[name] : at[name] + length + 1]
            assert list(names)[numbers[row]] == name
            assert inputs[row].tolist() == run[:-1] + [0] * (seq_len - length)
            targets = [t if name == "a" or t % 3 else -100 for t in run[1:]]
            assert labels[row].tolist() == targets + [-100] * (seq_len - length)
            assert documents[row].tolist() == [*range(length)] + [-1] * (seq_len - length)
            at[name] += length
        assert drawn.targets == int((labels != -100).sum())
        assert drawn.cursor.target_tokens == cursor.target_tokens + drawn.targets
        cursor = drawn.cursor
        assert cursor.consumed_tokens == sum(at.values())
        if turns:
            assert cursor.mixture == reference.shares
        if drawn.end_of_data:
            break
        assert num == batch
    left = {name: names[name] - at[name] - 1 for name in names}
    if on_end == "drop":
        assert set(left.values()) == {0}, "every position of every source was a sample's"


def test_a_chunk_of_a_source_that_the_stream_does_not_have_is_refused() -> None:
    stream = stream_of({"a": 3, "b": 3}, {"a": 1, "b": 1}, "drop", "tokens")
    (chunk,) = chunks_of("a", [1, 2, 3], [9])
    with raises(FeedError, "feed.chunk_order", "source c", "a, b"):
        stream.feed(replace(chunk, source="c"))


def test_a_step_names_the_source_that_it_waits_for() -> None:
    stream = stream_of({"a": 9, "b": 9}, {"a": 1, "b": 1}, "drop", "tokens")
    step = StepRange(first_sample=0, num_samples=2, num_tokens=8, seq_len=4)
    assert stream.needs == {"a", "b"}
    assert stream.draw(step) is None
    assert stream.needs == {"a"}
    stream.feed(chunks_of("a", [*range(9)], [])[0])
    assert stream.draw(step) is None
    assert stream.needs == {"b"}
    (drawn,) = [stream.draw(replace(step, num_samples=1, num_tokens=4), whole=False)]
    assert drawn is not None
    assert drawn.cursor.sources["a"] == SourceCursor(record=4, documents=4)


def test_a_run_keeps_the_order_of_its_sources_whatever_their_names(tmp_path: Path, tiny_config: Make) -> None:
    """They are numbered by it, and run.json is sorted by keys."""
    mapping = mixed_job(tiny_config, tmp_path, [{"weight": 2}, {"weight": 1}, {"weight": 1}]).to_json()
    mapping["data"]["sources"].reverse()
    run = tmp_path / "run"
    run.mkdir()
    first = prepare_data(parse_config(mapping), Storage(str(run)))
    assert [plan.source for plan in first.plans] == ["c", "b", "a"]
    stored = decode(RunIdentity, json.loads(json.dumps(encode(first.identity()), sort_keys=True)))
    again = prepare_data(parse_config(mapping), Storage(str(run)))
    assert compare(stored, again.identity()) == ()
    assert plain(list(open_samples(again, Cursor(), 16))) == plain(list(open_samples(first, Cursor(), 16)))
    mapping["data"]["sources"].reverse()  # another order in the configuration changes nothing
    other = prepare_data(parse_config(mapping), Storage(str(run)))
    assert plain(list(open_samples(other, Cursor(), 16))) == plain(list(open_samples(first, Cursor(), 16)))
