"""The stream: equal to an independent reference, and the same from every cursor on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import orchestrator
from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.packing.samples import open_samples
from orchestrator.data.packing.stream import Stream
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.json_form import decode, encode
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from tests.data.making import expected, job, plain, samples, some_texts, spec_of, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text", "lines"]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A jsonl corpus with a document of many pieces."""
    long = "".join(f"line {i} of a long document, {i * i}\n" for i in range(60))
    write_corpus(tmp_path / "data", [*some_texts(40), long, "x" * 900, "é" * 500], "jsonl")
    return tmp_path / "data"


@pytest.mark.quick(
    "jsonl-block", "jsonl.gz-none", "jsonl.zst-block", "parquet-none", "text-block", "lines-none"
)
@pytest.mark.parametrize("shuffle", ["block", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_samples_of_the_reference(
    kind: str, shuffle: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", some_texts(70, lines=kind != "lines"), kind)
    config = job(tiny_config, tmp_path / "data", kind, num_epochs=2, shuffle=shuffle)
    spec = spec_of(config, piece_bytes=128)
    assert spec.plans[0].num_blocks > 1
    found = samples(spec, 48)
    assert plain(found) == expected(config, spec, 48)
    assert [s.index for s in found] == list(range(len(found)))
    assert found[-1].cursor.sources["made"].epoch == 1


def test_long_documents_are_read_in_pieces_as_the_reference_does(made: Path, tiny_config: Make) -> None:
    config = job(tiny_config, made)
    spec = spec_of(config)
    assert plain(samples(spec, 64)) == expected(config, spec, 64)
    pieces = [int(n) for chunk in spec.chunks(Cursor()) for n in chunk.piece]
    assert max(pieces) > 4
    windows = [(chunk.block, chunk.window) for chunk in spec.chunks(Cursor())]
    assert max(window for _, window in windows) > 0
    assert max(block for block, _ in windows) > 0


@pytest.mark.chaos
def test_a_real_corpus_with_default_sizes_gives_the_samples_of_the_reference(
    corpus: Path, tiny_config: Make
) -> None:
    config = parse_config(tiny_config({"pack.seq_len": 256}))
    spec = prepare_data(config)
    assert plain(list(orchestrator.open_stream(config))) == expected(config, spec, 256)


@pytest.mark.quick("jsonl-7", "jsonl.zst-7", "parquet-7")
@pytest.mark.parametrize(("kind", "every"), [("jsonl", 1), ("jsonl", 7), ("jsonl.zst", 7), ("parquet", 7)])
def test_a_stream_opened_at_any_samples_cursor_goes_on_exactly(
    kind: str, every: int, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", [*some_texts(12), "y z\n" * 200], kind)
    spec = spec_of(job(tiny_config, tmp_path / "data", kind, num_epochs=2))
    whole = samples(spec, 100)
    for at in range(0, len(whole), every):
        cursor = decode(Cursor, encode(whole[at].cursor))
        rest = samples(spec, 100, cursor)
        assert plain(rest) == plain(whole[at + 1 :])
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]
        assert [s.index for s in rest] == [s.index for s in whole[at + 1 :]]


def stream_of(spec: DataSpec) -> list[int]:
    """All tokens, read off samples of length 1."""
    return [t for chunk in spec.chunks(Cursor()) for t in chunk.tokens.tolist()]


def test_any_sequence_of_seq_lens_gives_every_token_once(made: Path, tiny_config: Make) -> None:
    spec = spec_of(job(tiny_config, made, num_epochs=2))
    stream = stream_of(spec)
    cursor, inputs, targets = Cursor(), [], []
    for seq_len in [1, 7, 64, 3, 129, 500, 2, 31, 1000, 5000, 4000]:
        found = list(islice(open_samples(spec, cursor, seq_len), 3 if seq_len < 4000 else None))
        for sample in found:
            inputs += sample.input_ids[sample.labels != -100].tolist()
            targets += sample.labels[sample.labels != -100].tolist()
        cursor = found[-1].cursor if found else cursor
    assert inputs == stream[:-1]
    assert targets == stream[1:]
    assert cursor.consumed_tokens == cursor.target_tokens == len(stream) - 1


def test_more_epochs_continue_exactly_behind_the_last_token(made: Path, tiny_config: Make) -> None:
    one, three = (spec_of(job(tiny_config, made, num_epochs=n)) for n in (1, 3))
    ended = samples(one, 100)
    assert samples(one, 100, ended[-1].cursor) == []
    more = samples(three, 100, ended[-1].cursor)
    stream = stream_of(three)
    inputs = [t for s in [*ended, *more] for t in s.input_ids[s.labels != -100].tolist()]
    assert inputs == stream[:-1]
    last = more[-1].cursor.sources["made"]
    # 43 documents of which 4 are empty; the very last one is not passed: its last token is the next input
    assert (last.epoch, last.documents, last.empty_documents) == (2, 3 * 39 - 1, 3 * 4)


def test_counts_do_not_depend_on_where_the_stream_was_opened(made: Path, tiny_config: Make) -> None:
    spec = spec_of(job(tiny_config, made, num_epochs=2))
    whole = samples(spec, 160)
    counted = whole[-1].cursor.sources["made"]
    assert counted.empty_documents > 0
    assert counted.special_texts > 0
    cursor = Cursor()
    for _ in whole:  # opened again for every sample
        cursor = next(open_samples(spec, cursor, 160)).cursor
    assert cursor == whole[-1].cursor


def test_the_cursor_at_an_epochs_border_is_the_epochs_beginning(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", ["", "one two", "", "three four five", ""], "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", num_epochs=2, shuffle="none"))
    length = len(stream_of(spec)) // 2
    first, *rest = samples(spec, length)
    source = first.cursor.sources["made"]
    assert source == SourceCursor(epoch=1, documents=2, empty_documents=3)
    assert plain(samples(spec, length, first.cursor)) == plain(rest)
    assert rest[-1].cursor.sources["made"].empty_documents == 3 + 2


def test_fewer_epochs_than_the_cursor_has_seen_give_nothing_and_no_error(
    made: Path, tiny_config: Make
) -> None:
    three, one = (spec_of(job(tiny_config, made, num_epochs=n)) for n in (3, 1))
    cursor = samples(three, 64)[-1].cursor
    assert samples(one, 64, cursor) == []


def test_epochs_have_different_orders_and_seeds_too(made: Path, tiny_config: Make) -> None:
    def first_tokens(seed: int) -> list[list[int]]:
        spec = spec_of(job(tiny_config, made, num_epochs=2, seed=seed))
        stream = stream_of(spec)
        return [stream[: len(stream) // 2], stream[len(stream) // 2 :]]

    (a, b), (c, d) = first_tokens(0), first_tokens(1)
    assert len({tuple(x) for x in (a, b, c, d)}) == 4
    assert sorted(a) == sorted(b) == sorted(c) == sorted(d)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefix_digest", "0" * 16),
        ("record", 9999),
        ("window", 99),
        ("block", 99),
        ("piece", 50),
        ("token", 100_000),
    ],
)
def test_a_cursor_that_the_files_do_not_reproduce_is_refused(
    field: str, value: Any, made: Path, tiny_config: Make
) -> None:
    spec = spec_of(job(tiny_config, made))
    found = next(s for s in samples(spec, 50) if s.cursor.sources["made"].token > 0)
    source = replace(found.cursor.sources["made"], **{field: value})
    with raises(DataIdentityError, "resume.cursor_mismatch"):
        samples(spec, 50, replace(found.cursor, sources={"made": source}))


def digests_in(error: DataIdentityError) -> set[str]:
    """The digests that the error's text contains."""
    return set(re.findall(r"\b[0-9a-f]{16}\b", str(error)))


def test_a_document_changed_before_the_cursor_is_refused_with_both_digests(
    made: Path, tiny_config: Make
) -> None:
    spec = spec_of(job(tiny_config, made))
    found = next(s for s in samples(spec, 50) if s.cursor.sources["made"].token > 20)
    other = replace(
        spec, settings=replace(spec.settings, bos_id=5)
    )  # every document begins with another token
    digest = found.cursor.sources["made"].prefix_digest
    with raises(DataIdentityError, "resume.cursor_mismatch", digest) as caught:
        samples(other, 50, found.cursor)
    assert len(digests_in(caught.value)) == 2, "both digests"


def inside_later_pieces(spec: DataSpec, least: int = 1) -> list[Cursor]:
    """Cursors in the second piece of a document or behind it, from samples of 50 tokens."""
    found = [s.cursor for s in samples(spec, 50) if s.cursor.sources["made"].piece >= least]
    assert len(found) > 3
    return found


def without_earlier(cursor: Cursor) -> Cursor:
    """As an older version wrote it."""
    document = encode(cursor)
    for source in document["sources"].values():
        del source["earlier_tokens"], source["earlier_digest"]
    return decode(Cursor, document)


def test_a_cursor_has_number_and_digest_of_the_documents_earlier_tokens(
    made: Path, tiny_config: Make
) -> None:
    spec = spec_of(job(tiny_config, made))
    pieces: dict[tuple[int, int, int], list[list[int]]] = {}
    for chunk in spec.chunks(Cursor()):
        ends = np.cumsum(chunk.num_tokens).tolist()
        for i, record in enumerate(chunk.record.tolist()):
            piece = chunk.tokens[ends[i] - int(chunk.num_tokens[i]) : ends[i]].tolist()
            pieces.setdefault((chunk.block, chunk.window, record), []).append(piece)
    for cursor in inside_later_pieces(spec):
        at = cursor.sources["made"]
        before = [t for piece in pieces[at.block, at.window, at.record][: at.piece] for t in piece]
        digest = xxhash.xxh3_64_hexdigest(np.array(before, "<i4").tobytes())
        assert (at.earlier_tokens, at.earlier_digest) == (len(before), digest)
    first = next(s.cursor.sources["made"] for s in samples(spec, 50) if s.cursor.sources["made"].piece == 0)
    assert (first.earlier_tokens, first.earlier_digest) == (0, "")


def test_a_document_changed_in_an_earlier_piece_is_refused_with_both_digests(
    made: Path, tiny_config: Make
) -> None:
    spec = spec_of(job(tiny_config, made, shuffle="none"))
    cursor = inside_later_pieces(spec, least=5)[0]
    for file in made.iterdir():
        file.write_bytes(file.read_bytes().replace(b"line 1 of a", b"line 7 of a"))
    changed = replace(spec, settings=replace(spec.settings, accept_changed=True))
    at = cursor.sources["made"]
    values = (f"{at.earlier_tokens} tokens", at.earlier_digest)
    with raises(DataIdentityError, "resume.cursor_mismatch", *values) as caught:
        samples(changed, 50, cursor)
    assert len(digests_in(caught.value)) == 2, "both digests"
    assert samples(changed, 50, without_earlier(cursor)), "the piece at hand alone has not changed"


@pytest.mark.quick("10-28")
@pytest.mark.parametrize(("chunk_tokens", "every"), [(10, 7), (10, 28), (1 << 20, 7)])
def test_cursors_without_that_digest_are_read_and_agree_with_those_that_have_it(
    chunk_tokens: int, every: int, made: Path, tiny_config: Make
) -> None:
    spec = spec_of(job(tiny_config, made), chunk_tokens=chunk_tokens)
    whole = samples(spec, 50)
    for cursor in inside_later_pieces(spec)[::every]:
        old, rest = without_earlier(cursor), whole[cursor.consumed_samples :]
        assert old != cursor
        assert old.agrees_with(cursor)
        assert cursor.agrees_with(old)
        found = samples(spec, 50, cursor)
        assert plain(found) == plain(rest)
        assert [s.cursor for s in found] == [s.cursor for s in rest]
        found = samples(spec, 50, old)
        assert plain(found) == plain(rest)
        assert all(a.cursor.agrees_with(b.cursor) for a, b in zip(found, rest, strict=True))
        at = cursor.sources["made"]
        for wrong in (replace(at, token=at.token + 1), replace(at, earlier_digest="0" * 16)):
            assert not cursor.agrees_with(replace(cursor, sources={"made": wrong}))


def test_bos_and_eos_stand_around_every_document_once(made: Path, tiny_config: Make) -> None:
    spec = spec_of(job(tiny_config, made))
    wrapped = replace(spec, settings=replace(spec.settings, bos_id=1001))
    bare = replace(spec, settings=replace(spec.settings, eos_id=None))
    stream, eos = stream_of(wrapped), spec.settings.eos_id
    assert [t for t in stream if t not in (1001, eos)] == stream_of(bare)
    marks = [t for t in stream if t in (1001, eos)]
    assert marks == [1001, eos] * 39


def test_the_stream_does_not_depend_on_the_size_of_chunks(made: Path, tiny_config: Make) -> None:
    config = job(tiny_config, made)
    small, large = (spec_of(config, chunk_tokens=n) for n in (10, 1 << 20))
    assert plain(samples(small, 64)) == plain(samples(large, 64))
    assert len(list(small.chunks(Cursor()))) > 3 * len(list(large.chunks(Cursor())))


def test_endless_epochs_do_not_end(made: Path, tiny_config: Make) -> None:
    spec = spec_of(job(tiny_config, made, num_epochs=None))
    packer, chunks = spec.stream(Cursor()), spec.chunks(Cursor())
    step = StepRange(first_sample=0, num_samples=500, num_tokens=500 * 64, seq_len=64)
    while (drawn := packer.draw(step)) is None:
        packer.feed(next(chunks))
    assert drawn.step == step
    assert not drawn.end_of_data
    assert drawn.cursor.sources["made"].epoch > 1


def full_packer(spec: DataSpec, cursor: Cursor) -> Stream:
    packer = spec.stream(cursor)
    for chunk in spec.chunks(cursor):
        packer.feed(chunk)
    packer.finish("made")
    return packer


def test_a_step_is_the_same_samples_as_one_by_one(made: Path, tiny_config: Make) -> None:
    spec = spec_of(job(tiny_config, made))
    whole = samples(spec, 32)
    packer, first = full_packer(spec, Cursor()), 0
    while True:
        asked = StepRange(first_sample=first, num_samples=7, num_tokens=7 * 32, seq_len=32)
        drawn = packer.draw(asked)
        assert drawn is not None
        num = min(7, len(whole) - first)
        assert drawn.step.num_samples == num
        batch = drawn.slice(first, first + num)
        found = zip(batch.input_ids, batch.labels, batch.document_ids, strict=True)
        assert [tuple(a.tolist() for a in row) for row in found] == plain(whole[first : first + num])
        assert drawn.end_of_data == (first + num == len(whole))
        first += num
        if drawn.end_of_data:
            break
        assert drawn.cursor == whole[first - 1].cursor
    assert np.array_equal(batch.source_numbers, np.zeros(num, np.int32))
