"""Packs of whole documents, `bestfit` and `pad`: windows made by hand against a rule of the test's own, and
real corpora at every cursor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.field_rules import field_rules
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.common.settings import SPLIT_WHOLE, MixtureSettings
from orchestrator.data.dataset import prepare_data, prepare_trained
from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.data.packing.packed_window import best_fit, few_packs
from orchestrator.data.packing.samples import Sample, draw_step, open_samples
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.planning.batches import next_range
from orchestrator.planning.order import pack_order
from orchestrator.planning.resume.identity import stream_settings
from orchestrator.planning.resume.resume_plan import PointInfo, plan_resume
from orchestrator.planning.schedule import budgets_for
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StateKey
from orchestrator.records.tokens import PIECE
from orchestrator.storage.files import Storage
from tests.data.making import plain, some_texts, spec_of, write_corpus
from tests.data.packed import WINDOWS, Documents, Row, chunks_of, documents, draw_all, settings_of
from tests.num_examples import examples
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


# ---------------------------------------------------------------------------------------- made by hand


def row_of(parts: list[tuple[list[int], list[bool]]], seq_len: int) -> Row:
    inputs, labels, numbers = list[int](), list[int](), list[int]()
    for number, (tokens, loss) in enumerate(parts):
        inputs += tokens[:-1]
        labels += [token if target else -100 for token, target in zip(tokens[1:], loss[1:], strict=True)]
        numbers += [number] * (len(tokens) - 1)
    pad = seq_len - len(inputs)
    assert pad >= 0
    return inputs + [0] * pad, labels + [-100] * pad, numbers + [-1] * pad


def expected(
    windows: Sequence[Documents], mode: str, seq_len: int, rule: str, seed: int = 0
) -> tuple[list[list[Row]], int, int]:
    """The samples of each window, the number of documents without a target and of those too long, by the
    words of the rules.
    """
    found, unpacked, long = [], 0, 0
    for block, window in enumerate(windows):
        parts: Documents = []
        for tokens, loss in window:
            if not any(loss[1:]):
                unpacked += 1
            elif len(tokens) <= seq_len + 1:
                parts.append((tokens, loss))
            elif rule == "skip":
                long += 1
            else:
                for at in range(0, len(tokens) - 1, seq_len):
                    part, mask = tokens[at : at + seq_len + 1], loss[at : at + seq_len + 1]
                    if any(mask[1:]) or rule == SPLIT_WHOLE:
                        parts.append((part, mask))
        if mode == "pad":
            packs = [[i] for i in range(len(parts))]
        else:
            rooms: list[int] = []
            packs = []
            for i in sorted(range(len(parts)), key=lambda i: -len(parts[i][0])):
                size = len(parts[i][0]) - 1
                fits = [room for room in rooms if room >= size]
                if fits:
                    at = rooms.index(min(fits))
                else:
                    at = len(rooms)
                    rooms.append(seq_len)
                    packs.append([])
                rooms[at] -= size
                packs[at].append(i)
            packs = sorted(sorted(pack) for pack in packs)
            order = pack_order(len(packs), block, 0, seed, "made", 0, "block")
            packs = [packs[number] for number in order]
        found.append([row_of([parts[i] for i in pack], seq_len) for pack in packs])
    return found, unpacked, long


@settings(max_examples=examples(30, chaos=120), deadline=None)
@given(
    windows=WINDOWS,
    mode=st.sampled_from(["bestfit", "pad"]),
    seq_len=st.integers(1, 12),
    rule=st.sampled_from(["split", SPLIT_WHOLE, "skip"]),
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    cuts=st.integers(1, 9),
    data=st.data(),
)
def test_any_windows_are_packed_by_the_rule_and_the_same_from_every_cursor_on(
    windows: list[list[tuple[int, str]]],
    mode: str,
    seq_len: int,
    rule: str,
    batches: list[int],
    cuts: int,
    data: st.DataObject,
) -> None:
    made, how = documents(windows), settings_of(mode, seq_len, rule)
    samples, unpacked, long = expected(made, mode, seq_len, rule)
    rows = [row for window in samples for row in window]
    if not rows:
        with raises(DataError, "data.nothing_to_train", f"pack.seq_len={seq_len}", "pack.long_document"):
            draw_all(made, how, batches, cuts)
        return
    found = draw_all(made, how, batches, cuts)
    assert found.rows == rows
    assert [c.consumed_samples for c in found.inside] == list(range(1, len(rows) + 1))
    targets = np.cumsum([sum(label != -100 for label in labels) for _, labels, _ in rows]).tolist()
    for number, cursor in enumerate(found.inside):
        assert cursor.target_tokens == targets[number]
        assert cursor.consumed_tokens == seq_len * (number + 1)
    assert found.cursors == [found.inside[c.consumed_samples - 1] for c in found.cursors]
    at_end = found.inside[-1].sources["made"]
    if samples[-1]:  # nothing follows the last pack
        assert (at_end.epoch, at_end.block, at_end.packs) == (1, 0, 0)
        assert (at_end.unpacked_documents, at_end.long_documents) == (unpacked, long)
        assert at_end.documents == sum(map(len, made))
    at = data.draw(st.integers(0, len(rows) - 1))
    rest = draw_all(made, how, [data.draw(st.integers(1, 4))], data.draw(st.integers(1, 9)), found.inside[at])
    assert rest.rows == rows[at + 1 :]
    assert rest.inside == found.inside[at + 1 :]


def test_a_packs_documents_stand_in_their_order_and_packs_in_an_order_of_their_own() -> None:
    sizes = np.array([3, 5, 2, 5, 4, 1, 8], np.int64)
    assert best_fit(sizes, 8) == [[0, 1], [2, 3, 5], [4], [6]]
    assert pack_order(6, 3, 1, 7, "web", 2, "block").tolist() == [2, 4, 1, 5, 3, 0]
    assert pack_order(3, 3, 1, 7, "web", 2, "none").tolist() == [0, 1, 2]


@settings(max_examples=examples(30, chaos=100), deadline=None)
@given(sizes=st.lists(st.integers(1, 30), max_size=60))
def test_best_fit_decreasing_takes_the_fullest_pack_that_has_room(sizes: list[int]) -> None:
    packs: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rooms = [30 - sum(sizes[i] for i in pack) for pack in packs]
        fits = [room for room in rooms if room >= sizes[item]]
        if fits:
            packs[rooms.index(min(fits))].append(item)
        else:
            packs.append([item])
    assert best_fit(np.array(sizes, np.int64), 30) == sorted(sorted(pack) for pack in packs)


def lengths_of_a_crawl(seed: int, num: int, seq_len: int) -> list[int]:
    """Log-normal lengths with a median of 400 tokens, one in a hundred longer than 6,500."""
    drawn = np.random.default_rng(seed).lognormal(np.log(400), 1.2, num).astype(int)
    return np.clip(drawn, 2, seq_len + 1).tolist()


@pytest.mark.quick("1-2048")
@pytest.mark.parametrize("seq_len", [2048, 4096])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_windows_of_realistic_lengths_are_filled_to_98_percent_and_more(seed: int, seq_len: int) -> None:
    lengths = lengths_of_a_crawl(seed, 64 * seq_len // 500, seq_len)
    made: Documents = [([1] * length, [True] * length) for length in lengths]
    found = draw_all([made], settings_of("bestfit", seq_len, "stop"), [16], 500)
    filled = sum(document >= 0 for _, _, numbers in found.rows for document in numbers)
    assert len(found.rows) >= 64
    assert filled == sum(length - 1 for length in lengths), "every document, once"
    assert filled >= 0.98 * seq_len * len(found.rows)


def test_packs_of_long_documents_do_not_come_first() -> None:
    made: Documents = [([1] * length, [True] * length) for length in lengths_of_a_crawl(4, 800, 1024)]
    found = draw_all([made], settings_of("bestfit", 1024, "stop"), [16], 500)
    per_pack = [max(numbers) + 1 for _, _, numbers in found.rows]
    half = len(per_pack) // 2
    assert abs(np.mean(per_pack[:half]) - np.mean(per_pack[half:])) < 0.5


def test_a_document_that_no_sample_holds_stops_the_run_and_is_named() -> None:
    made: list[Documents] = [[([1, 2, 3], [True] * 3), ([*range(9)], [True] * 9)]]
    for mode in ("bestfit", "pad"):
        values = ("0: the document at 1", "made", "9 tokens", "pack.seq_len=7", "pack.long_document")
        with raises(DataError, "data.long_document", *values):
            draw_all(made, settings_of(mode, 7, "stop"), [1], 9)
        assert len(draw_all(made, settings_of(mode, 8, "stop"), [1], 9).rows) == 2


def test_a_skipped_document_is_counted_and_reported() -> None:
    made: list[Documents] = [[([1, 2, 3], [True] * 3), ([*range(9)], [True] * 9)]]
    found = draw_all(made, settings_of("pad", 7, "skip"), [1], 9)
    assert found.rows == [([1, 2, 0, 0, 0, 0, 0], [2, 3, *[-100] * 5], [0, 0, *[-1] * 5])]
    assert found.cursors[-1].sources["made"].long_documents == 1
    (reason,) = found.reasons
    assert all(value in reason for value in ("9 tokens", "pack.seq_len=7", "8"))


def test_too_many_skipped_documents_stop_at_the_epochs_end_and_before_it_among_many() -> None:
    def of(*lengths: int) -> Documents:
        return [([*range(length)], [True] * length) for length in lengths]

    how = settings_of("pad", 7, "skip", max_long_share=0.5)
    assert len(draw_all([of(3, 9), of(9, 3)], how, [1], 9).rows) == 2, "half of them is not more than half"
    values = ("3 of the first 5", "source made", "pack.max_long_share=0.5", "pack.seq_len=7")
    with raises(DataError, "data.too_many_long", *values):
        draw_all([of(3, 9), of(3, 9, 9)], how, [1], 9)
    # a window before the epoch's end is judged once 1,000 documents were read
    few, many = of(*[9] * 600 + [3] * 399), of(*[9] * 600 + [3] * 400)
    rest = of(*[3] * 300)
    assert len(draw_all([few, rest], how, [1], 999).rows) == 699
    with raises(DataError, "data.too_many_long", "600 of the first 1,000"):
        draw_all([many, rest], how, [1], 999)
    wide = settings_of("pad", 9, "skip", max_long_share=0.0)
    assert len(draw_all([many, rest], wide, [1], 999).rows) == 1300


def test_a_token_budget_charges_the_last_sample_only_what_is_left() -> None:
    made: list[Documents] = [[([10 * i + k for k in range(4)], [True] * 4) for i in range(6)]]
    how = settings_of("pad", 5)
    found = draw_all(made, how, [2], 9, stop_tokens=12)
    whole = draw_all(made, how, [6], 9)
    assert found.rows == whole.rows[:3]
    assert (found.cursors[-1].consumed_tokens, found.cursors[-1].target_tokens) == (12, 9)
    rest = draw_all(made, how, [6], 9, found.cursors[-1])
    assert rest.rows == whole.rows[3:]
    exact = draw_all(made, how, [6], 9, stop_tokens=27)  # within the last sample
    assert exact.rows == whole.rows
    assert exact.cursors[-1].sources == whole.cursors[-1].sources


def test_another_length_is_refused_inside_a_windows_packs_and_taken_at_its_border() -> None:
    made: list[Documents] = [[([9 * b + i, 1, 2, 3], [True] * 4) for i in range(4)] for b in range(2)]
    found = draw_all(made, settings_of("bestfit", 7), [1], 9)
    inside, border = found.inside[0], found.inside[1]
    assert (inside.sources["made"].packs, border.sources["made"].packs) == (1, 0)
    values = ("1 packs of 7", "samples of 5", "pack.seq_len=7")
    with raises(DataIdentityError, "resume.seq_len_within_window", *values):
        draw_all(made, settings_of("bestfit", 5), [1], 9, inside)
    assert draw_all(made, settings_of("bestfit", 3), [1], 9, border).rows == [
        row for row in expected(made, "bestfit", 3, "split")[0][1]
    ]
    # a job of another length reads on what was trained with this one
    how, rest = settings_of("bestfit", 5), chunks_of(made, 9)
    other = Stream(inside, [StreamSource(name="made", number=0, num_blocks=lambda _: 2, num_epochs=1)], how)
    coming = iter(rest)
    step = next_range(1, 7, 1, 7)
    assert step is not None
    assert draw_step(other, step, lambda _: next(coming, None)).cursor == border
    # of an open stream, too
    source = StreamSource(name="made", number=0, num_blocks=lambda _: 2, num_epochs=1)
    stream, chunks = Stream(Cursor(), [source], settings_of("bestfit", 7)), iter(chunks_of(made, 9))
    for seq_len, samples in ((3, 4), (7, 2)):
        step = next_range(stream.cursor.consumed_samples, 0, samples, seq_len)
        assert step is not None
        drawn = draw_step(stream, step, lambda _: next(chunks, None))
        assert drawn.step.num_samples == samples
    assert drawn.end_of_data


def test_packs_that_are_not_those_that_were_taken_are_refused_with_both_values() -> None:
    made: list[Documents] = [[([9 * i, 1, 2, 3], [True] * 4) for i in range(6)]]
    how = settings_of("bestfit", 7)
    cursor = draw_all(made, how, [1], 9).inside[1]
    other: list[Documents] = [[([t + 1 for t in tokens], loss) for tokens, loss in made[0]]]
    digest = cursor.sources["made"].prefix_digest
    mismatch = "resume.cursor_mismatch"
    with raises(DataIdentityError, mismatch, digest) as caught:
        draw_all(other, how, [1], 9, cursor)
    assert len(set(re.findall(r"\b[0-9a-f]{16}\b", str(caught.value)))) == 2, "both digests"
    with raises(DataIdentityError, mismatch, "2 packs of 7", "1 packs"):
        draw_all([made[0][:2]], how, [1], 9, cursor)
    token = replace(cursor, sources={"made": SourceCursor(record=1, token=1, prefix_digest="0")})
    with raises(DataIdentityError, mismatch, "pack.mode", "bestfit"):
        draw_all(made, how, [1], 9, token)
    with raises(DataIdentityError, mismatch, "pack.mode", "concat"):
        draw_all(made, settings_of("concat", 7), [1], 9, cursor)


# ---------------------------------------------------------------------------------------- real corpora
def packed_job(make: Make, folder: Path, pack: dict[str, Any], **data: Any) -> JobConfig:
    """A job on two sources of different sizes and formats."""
    listed = []
    for i, (name, kind) in enumerate({"a": "jsonl", "b": "parquet"}.items()):
        if not (folder / name).exists():
            write_corpus(folder / name, [f"{name}{t}" for t in some_texts(15 + 9 * i, 12)], kind, 2)
        listed.append({"name": name, "path": str(folder / name), "format": kind, "weight": 1 + i})
    small = {"data.fragment_bytes": 300, "data.window_bytes": 700, "data.on_end": "drop"}
    more = {**{f"pack.{k}": v for k, v in pack.items()}, **{f"data.{k}": v for k, v in data.items()}}
    return parse_config(make({"data.sources": listed, **small, **more}))


def packed_spec(make: Make, folder: Path, mode: str, seq_len: int, **data: Any) -> DataSpec:
    pack = {"mode": mode, "seq_len": seq_len, "long_document": "split"}
    return spec_of(packed_job(make, folder, pack, **data))


def test_a_run_of_an_earlier_version_keeps_the_stretches_of_which_nothing_is_learnt(
    tmp_path: Path, tiny_config: Make
) -> None:
    pack = {"mode": "bestfit", "seq_len": 48, "long_document": "split"}
    config = packed_job(tiny_config, tmp_path, pack)
    assert prepare_data(config, Storage(str(tmp_path / "run"))).settings.long_document == "split"
    record = tmp_path / "run" / "manifest" / "data.json"
    earlier = {k: v for k, v in json.loads(record.read_bytes()).items() if k != "rules"}
    record.write_text(json.dumps(earlier))
    for spec in (
        prepare_data(config, Storage(str(tmp_path / "run"))),
        prepare_trained(config, Storage(str(tmp_path / "run"))),
    ):
        assert spec.settings.long_document == SPLIT_WHOLE


def texts_of(spec: DataSpec, source: str) -> Iterator[list[int]]:
    """The documents' tokens in stream order."""
    tokens: list[int] = []
    for chunk in spec.chunks(Cursor(), source):
        stops = np.cumsum(chunk.num_tokens)
        for start, stop, kind, last in zip(
            stops - chunk.num_tokens, stops, chunk.kind, chunk.last_piece, strict=True
        ):
            tokens += chunk.tokens[start:stop].tolist()
            if kind == PIECE and last:
                yield tokens
                tokens = []


def stretches_of(sample: Sample) -> Iterator[tuple[int, ...]]:
    for number in range(sample.document_ids.max() + 1):
        mine = sample.document_ids == number
        ids, labels = sample.input_ids[mine].tolist(), sample.labels[mine].tolist()
        assert ids[1:] == labels[:-1]
        yield (*ids, labels[-1])


@pytest.mark.parametrize("mode", ["bestfit", "pad"])
def test_a_mixture_of_packed_sources_holds_every_document_once_and_goes_on_at_every_cursor(
    tmp_path: Path, tiny_config: Make, mode: str
) -> None:
    seq_len = 48
    spec = packed_spec(tiny_config, tmp_path, mode, seq_len, num_epochs=2)
    found = list(open_samples(spec, Cursor(), seq_len))
    for plan in spec.plans:
        whole = sorted(
            tuple(tokens[at : at + seq_len + 1])
            for tokens in texts_of(spec, plan.source)
            for at in range(0, len(tokens) - 1, seq_len)
        )
        assert sorted(s for f in found if f.source == plan.source for s in stretches_of(f)) == whole
    cursors = [s.cursor for s in found]
    for at in range(0, len(found), 7):
        rest = list(open_samples(spec, cursors[at], seq_len))
        assert plain(rest) == plain(found[at + 1 :]), f"after sample {at}"
        assert [s.cursor for s in rest] == cursors[at + 1 :]
    shares = cursors[-1].mixture
    assert sum(share.tokens for share in shares.values()) == seq_len * len(found)


def test_packed_samples_do_not_depend_on_the_steps_they_are_drawn_in(
    tmp_path: Path, tiny_config: Make
) -> None:
    spec = packed_spec(tiny_config, tmp_path, "bestfit", 48)
    one_by_one = list(open_samples(spec, Cursor(), 48))
    for batch in (1, 3, 1000):
        feed, cursor, rows = InProcessFeed(spec), Cursor(), list[list[int]]()
        feed.open(None, cursor)  # type: ignore[arg-type]  # no other process is there to agree with
        while True:
            step = next_range(cursor.consumed_samples, cursor.consumed_tokens, batch, 48)
            assert step is not None
            part = feed.get(step, 0, 1, 2, cursor)
            rows += part.input_ids.tolist()
            cursor = part.cursor
            assert cursor == one_by_one[cursor.consumed_samples - 1].cursor
            if part.end_of_data:
                break
        feed.close()
        assert rows == [s.input_ids.tolist() for s in one_by_one]


def test_under_stop_a_mixture_ends_before_the_first_pack_that_is_not_there() -> None:
    how, made = settings_of("pad", 4), documents([[(4, "all")] * 5])
    sources = [
        StreamSource(name=name, number=number, num_blocks=lambda _: 1, num_epochs=1)
        for number, name in enumerate("ab")
    ]
    mixture = MixtureSettings(weights={"a": 2, "b": 1}, on_end="stop", by="tokens")
    stream = Stream(Cursor(), sources, how, mixture)
    coming = {name: iter(chunks_of(made, 9, name)) for name in "ab"}
    step = next_range(0, 0, 99, 4)
    assert step is not None
    drawn = draw_step(stream, step, lambda source: next(coming[source], None))
    assert (drawn.step.num_samples, drawn.end_of_data) == (7, True)
    assert drawn.numbers.tolist() == [0, 0, 1, 0, 0, 1, 0]


# ---------------------------------------------------------------------------------------- plans and encoders
def test_a_plan_warns_where_a_window_has_too_few_packs_to_be_full(tmp_path: Path, tiny_config: Make) -> None:
    few = packed_spec(tiny_config, tmp_path, "bestfit", 48).notes
    assert [note.split(" packs of")[0] for note in few] == [
        "source a has about 1",
        "source b has about 3",
    ]
    assert packed_spec(tiny_config, tmp_path, "pad", 48).notes == ()
    assert few_packs("a", 16 << 20, 1 << 16) == ()
    assert len(few_packs("a", 16 << 20, (1 << 16) + 1)) == 1


def test_another_encoder_takes_over_at_the_first_window_of_which_no_pack_is_taken(
    tmp_path: Path, tiny_config: Make
) -> None:
    spec = packed_spec(tiny_config, tmp_path, "bestfit", 48)
    for sample in open_samples(spec, Cursor(), 48):
        cursor = sample.cursor
        for name, place in spec.next_documents(cursor).items():
            at = cursor.sources[name]
            window = (at.epoch, at.block, at.window)
            assert place[:3] > window if at.packs else place[:3] >= window


def test_a_change_of_length_inside_a_window_is_refused_by_the_plan_and_a_runs_mode_stays(
    tmp_path: Path, tiny_config: Make
) -> None:
    mapping = packed_job(tiny_config, tmp_path, {"mode": "bestfit", "seq_len": 48}).to_json()
    rules = {rule.path: rule.rule for rule in field_rules()}

    def refusals(at: SourceCursor, **pack: Any) -> list[tuple[str | None, str]]:
        job = parse_config({**mapping, "pack": {**mapping["pack"], **pack}})
        point = PointInfo(
            name="00000001-a0001-g0001",
            key=StateKey(attempt=1, generation=1, step=1),
            cursor=Cursor(consumed_samples=1, consumed_tokens=48, sources={"a": at}),
            global_batch_size=1,
            seq_len=48,
            world_size=1,
            optimizer_steps=1,
            budgets=budgets_for(job, None, Cursor()),
        )
        old = parse_config(mapping).flat()
        plan = plan_resume(job, rules, point, old)
        return list(zip(plan.codes, plan.refusals, strict=True))

    inside = SourceCursor(window=1, packs=3, pack_seq_len=48, prefix_digest="0" * 16)
    assert refusals(inside) == []
    assert refusals(SourceCursor(window=1), seq_len=64) == []
    ((code, text),) = refusals(inside, seq_len=64)
    assert code == "resume.seq_len_within_window"
    for value in ("3 packs of 48 positions", "source a", "pack.seq_len=64", "pack.seq_len=48"):
        assert value in text
    for setting, change in (
        ("pack.mode=bestfit", {"mode": "pad"}),
        ("pack.long_document=stop", {"long_document": "skip"}),
    ):
        code, text = refusals(inside, **change)[0]
        assert (code, setting in text) == ("resume.changed_setting", True)


def test_the_identity_of_a_concatenated_run_is_what_older_versions_wrote(
    tmp_path: Path, tiny_config: Make
) -> None:
    def settings_of_run(mode: str) -> dict[str, str]:
        return stream_settings(packed_job(tiny_config, tmp_path, {"mode": mode, "seq_len": 48}).flat())

    assert not [name for name in settings_of_run("concat") if name.startswith("pack.") and "mode" not in name]
    assert settings_of_run("pad")["pack.long_document"] == '"stop"'
