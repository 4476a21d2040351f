"""The audit's own packer gives the canonical stream at every place and shares nothing with the trainer's;
what samples hold is summed up from their own tokens, and every single wrong value in them is found.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.loading import parse_config
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.dataset import prepare_data
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.inspect.audit import (
    audit,
    audit_processes,
    epoch_checksum,
    file_checksum,
    source_walk,
    stream_recheck,
)
from orchestrator.inspect.audit.epoch_checksum import EpochChecksums
from orchestrator.inspect.audit.file_checksum import checksum_files
from orchestrator.inspect.audit.reference import reference_encoding, reference_windows
from orchestrator.inspect.audit.reference import reference_packing as reference
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.inspect.audit.source_walk import TrainedTokens
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StepRange
from orchestrator.records.tokens import BAD, EMPTY, PIECE, TokenChunk
from tests.conftest import TinyConfig
from tests.data.making import expected, job, plain, samples, some_texts, spec_of, write_corpus
from tests.data.packed import hand_made
from tests.num_examples import examples
from tests.raising import raises

SEQ_LEN = 37


def endless(spec: DataSpec) -> DataSpec:
    return replace(spec, settings=replace(spec.settings, num_epochs=None))


def packer_at(spec: DataSpec, cursor: Cursor) -> ReferencePacker:
    source = cursor.sources.get(spec.plans[0].source, SourceCursor())
    return ReferencePacker(endless(spec).chunks(cursor), source)


@pytest.mark.parametrize(
    "module",
    [
        audit,
        audit_processes,
        stream_recheck,
        source_walk,
        reference,
        reference_encoding,
        reference_windows,
        epoch_checksum,
        file_checksum,
    ],
)
def test_the_audit_imports_nothing_of_the_trainers_packer(module) -> None:
    names = ("stream", "packer", "segments", "step_samples", "samples", "sample_spans", "chunk_order")
    names += ("window_packer", "packed_window", "pack_place", "bin_packing")
    packing = {f"orchestrator.data.packing.{name}" for name in names}
    packing |= {f"orchestrator.data.feed.{name}" for name in ("stream_session", "replay")}
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert found
    assert not found & packing


@pytest.mark.quick("jsonl.gz", "parquet", "text")
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "text", "lines"])
def test_it_gives_the_samples_of_the_reference_and_the_trainers_cursors_at_every_place(
    tmp_path: Path, tiny_config: TinyConfig, kind: str
) -> None:
    write_corpus(tmp_path, some_texts(40, lines=kind != "lines"), kind)
    config = job(tiny_config, tmp_path, kind, num_epochs=2)
    spec = spec_of(config)
    canonical, wanted = samples(spec, SEQ_LEN), expected(config, spec, SEQ_LEN)
    assert plain(canonical) == wanted
    packer = packer_at(spec, Cursor())
    for sample in canonical:
        num = int((sample.labels >= 0).sum())
        found = packer.samples(num, SEQ_LEN)
        rows = found.input_ids[0], found.labels[0], found.document_ids[0]
        assert tuple(row.tolist() for row in rows) == wanted[sample.index]
        assert packer.cursor() == sample.cursor.sources["made"]
    assert packer.ends_epoch(spec.num_blocks("made", 1))


def test_it_goes_on_at_every_cursor_with_steps_of_any_shape(tmp_path: Path, tiny_config: TinyConfig) -> None:
    write_corpus(tmp_path, some_texts(40), "jsonl")
    spec = spec_of(job(tiny_config, tmp_path, num_epochs=2))
    canonical = samples(spec, SEQ_LEN)[:-1]
    for at in range(0, len(canonical) - 4, 5):
        packer = packer_at(spec, canonical[at].cursor)
        assert packer.cursor() == canonical[at].cursor.sources["made"]
        found, rest = packer.samples(3 * SEQ_LEN, SEQ_LEN), canonical[at + 1 : at + 4]
        assert np.array_equal(found.labels, np.stack([sample.labels for sample in rest]))
        assert np.array_equal(found.document_ids, np.stack([sample.document_ids for sample in rest]))
        assert packer.cursor() == rest[-1].cursor.sources["made"]
        assert packer.samples(2, 5).input_ids.shape == (1, 5)


def test_an_epoch_ends_at_its_last_token_and_not_at_a_chunks(tmp_path: Path, tiny_config: TinyConfig) -> None:
    write_corpus(tmp_path, some_texts(8), "jsonl")
    spec = spec_of(job(tiny_config, tmp_path), chunk_tokens=20)
    lengths = [len(chunk.tokens) for chunk in spec.chunks(Cursor())]
    assert sum(length > 0 for length in lengths) > 5
    packer = packer_at(spec, Cursor())
    for left in range(sum(lengths), 0, -1):
        assert packer.ends_epoch(spec.num_blocks("made", 0)) is (left == 1), left
        packer.samples(1, 1)


def test_the_next_epoch_is_not_read_to_see_that_one_ends(tmp_path: Path, tiny_config: TinyConfig) -> None:
    write_corpus(tmp_path, some_texts(8), "jsonl")
    spec = spec_of(job(tiny_config, tmp_path))
    chunks = list(spec.chunks(Cursor()))
    packer = ReferencePacker(iter(chunks), SourceCursor())  # what would be read after them is an error
    packer.samples(sum(len(chunk.tokens) for chunk in chunks) - 1, 1)
    assert packer.ends_epoch(spec.num_blocks("made", 0))


def test_after_an_older_versions_cursor_the_earlier_pieces_are_known_from_the_next_document_on(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_corpus(tmp_path, some_texts(40), "jsonl")
    spec = spec_of(job(tiny_config, tmp_path), piece_bytes=64)
    canonical = [sample.cursor.sources["made"] for sample in samples(spec, SEQ_LEN)[:-1]]

    def document(at: SourceCursor) -> tuple[int, ...]:
        return at.epoch, at.block, at.window, at.record

    old = [replace(at, earlier_tokens=0, earlier_digest="") for at in canonical]
    later_pieces = [i for i, at in enumerate(canonical) if at.earlier_digest][:6]
    assert later_pieces
    for first in later_pieces:
        cursor = Cursor(sources={"made": old[first]})
        packer = packer_at(spec, cursor)
        for i in range(first + 1, min(first + 12, len(canonical))):
            packer.samples(SEQ_LEN, SEQ_LEN)
            unknown = document(canonical[i]) == document(canonical[first])
            assert packer.cursor() == (old if unknown else canonical)[i]


def test_a_cursor_whose_tokens_are_not_reproduced_is_refused_with_both_values(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_corpus(tmp_path, some_texts(40), "jsonl")
    spec = spec_of(job(tiny_config, tmp_path))
    cursor = next(sample.cursor for sample in samples(spec, SEQ_LEN) if sample.cursor.sources["made"].token)
    source = cursor.sources["made"]
    wrong = replace(cursor, sources={"made": replace(source, prefix_digest="0" * 16)})
    with raises(DataIdentityError, "resume.cursor_mismatch", "0" * 16, source.prefix_digest):
        packer_at(spec, wrong).samples(1, SEQ_LEN)


def test_files_without_a_token_end_the_audit_and_not_its_patience(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_corpus(tmp_path, ["", ""], "jsonl", num_files=1)
    with raises(DataError, "data.too_few_tokens", "epoch 0", "source made"):
        packer_at(spec_of(job(tiny_config, tmp_path)), Cursor()).samples(1, SEQ_LEN)


# ------------------------------------------------------------------------------------ chunks made by hand
# pieces of a document by their numbers of tokens; EMPTY and BAD stand alone
DOCUMENT = st.one_of(
    st.lists(st.integers(0, 5), min_size=1, max_size=4), st.just("empty"), st.just("bad"), st.just([2])
)
WINDOW = st.tuples(st.lists(DOCUMENT, max_size=5), st.lists(st.integers(0, 9), max_size=3))
BLOCKS = st.lists(st.lists(WINDOW, min_size=1, max_size=3), min_size=1, max_size=3)


def epoch_chunks(blocks, epoch: int) -> list[TokenChunk]:
    """The chunks of an epoch whose windows hold these documents and are cut at these entries."""
    found = []
    for block, windows in enumerate([*blocks, [([[3]], [])]]):  # an epoch has at least two tokens
        for window, (documents, cuts) in enumerate(windows):
            entries = []  # record, piece, number of tokens, kind, last piece
            for record, document in enumerate(documents):
                if isinstance(document, str):
                    entries.append((record, 0, 0, EMPTY if document == "empty" else BAD, 1))
                    continue
                last = len(document) - 1
                entries += [(record, i, num, PIECE, int(i == last)) for i, num in enumerate(document)]
            borders = sorted({0, *(min(cut, len(entries)) for cut in cuts), len(entries)})
            parts = [entries[a:b] for a, b in pairwise(borders)] or [[]]
            for number, part in enumerate(parts):
                ends = number == len(parts) - 1
                found.append(
                    hand_made(
                        part, epoch, block, window, ends, ends and window == len(windows) - 1, len(found)
                    )
                )
    return found


@settings(max_examples=examples(50, chaos=200), deadline=None)
@given(BLOCKS, st.lists(st.tuples(st.integers(1, 7), st.integers(1, 20)), min_size=1, max_size=5))
def test_both_packers_agree_on_chunks_of_any_kind(blocks, shapes) -> None:
    chunks = [chunk for epoch in range(3) for chunk in epoch_chunks(blocks, epoch)]
    of_the_run = [chunk for chunk in chunks if chunk.epoch < 2]
    wide = StreamSettings(num_epochs=2, max_bad_share=1.0)
    source = StreamSource(name="made", number=0, num_blocks=lambda _: len(blocks) + 1, num_epochs=2)
    trainer = Stream(Cursor(), [source], wide)
    for chunk in of_the_run:
        trainer.feed(chunk)
    trainer.finish("made")
    counted = TrainedTokens(0)
    packer = ReferencePacker(counted.watch(chunks), SourceCursor())
    first = 0
    for seq_len, num_tokens in cycle(shapes):
        asked = StepRange(
            first_sample=first, num_samples=-(-num_tokens // seq_len), num_tokens=num_tokens, seq_len=seq_len
        )
        drawn = trainer.draw(asked)
        assert drawn is not None
        found = packer.samples(drawn.step.num_tokens, seq_len)
        _, *arrays = drawn.arrays(0, drawn.step.num_samples)
        for one, other in zip((found.input_ids, found.labels, found.document_ids), arrays, strict=True):
            assert np.array_equal(one, other)
        assert counted.add(found, drawn.step.num_tokens) is None
        assert packer.cursor() == drawn.cursor.sources["made"]
        first += drawn.step.num_samples
        if drawn.end_of_data:
            break
    assert packer.ends_epoch(1 + max(chunk.block for chunk in of_the_run))
    assert counted.end() is None
    expected_sums = EpochChecksums()
    for chunk in of_the_run:
        expected_sums.count(chunk, chunk.tokens)
    assert [counted.checksums.of(epoch) for epoch in (0, 1)] == [expected_sums.of(epoch) for epoch in (0, 1)]


# ---------------------------------------------------------------------------------------- samples
STEP_TOKENS = 8 * SEQ_LEN - 3  # the last sample of each step is padded


class Trained:
    """The samples of the first epoch's steps, to be counted again and again."""

    def __init__(self, spec: DataSpec) -> None:
        self.files = checksum_files(spec, spec.encoders[0].encoder)
        num_steps = self.files.tokens // STEP_TOKENS + 1
        self.chunks = []
        packer = ReferencePacker(self._noted(endless(spec).chunks(Cursor())), SourceCursor())
        self.steps = [packer.samples(STEP_TOKENS, SEQ_LEN) for _ in range(num_steps)]
        # so many chunks hold the tokens of the steps before each, and the label of their last input
        ends = np.cumsum([len(chunk.tokens) for chunk in self.chunks])
        self.num_chunks = [int((ends <= stop * STEP_TOKENS).sum()) + 1 for stop in range(num_steps + 1)]

    def _noted(self, chunks):
        for chunk in chunks:
            self.chunks.append(chunk)
            yield chunk

    def count(self, wrong: Samples, at: int, stop: int) -> tuple[TrainedTokens, list[str | None]]:
        """All steps before `stop`, with `wrong` for step `at`; what was said of each."""
        counted = TrainedTokens(0)
        for _ in counted.watch(self.chunks[: self.num_chunks[stop]]):
            pass
        steps = [*self.steps[:at], wrong, *self.steps[at + 1 : stop]]
        return counted, [counted.add(step, STEP_TOKENS) for step in steps]

    def copy(self, at: int) -> Samples:
        step = self.steps[at]
        return Samples(
            input_ids=step.input_ids.copy(),
            labels=step.labels.copy(),
            document_ids=step.document_ids.copy(),
            masked=step.masked,
        )


@pytest.fixture(scope="module")
def steps(tiny_config: TinyConfig) -> Trained:
    return Trained(prepare_data(parse_config(tiny_config())))


def test_what_was_trained_is_summed_up_from_the_samples_own_tokens(steps: Trained) -> None:
    stop, middle = len(steps.steps), len(steps.steps) // 2
    counted, told = steps.count(steps.copy(middle), middle, stop)
    assert counted.checksums.of(0) == steps.files
    assert (set(told), counted.end()) == ({None}, None)

    another = steps.copy(middle)
    another.labels[2, 5] = another.input_ids[2, 6] = another.labels[2, 5] + 1
    counted, told = steps.count(another, middle, stop)
    assert set(told) == {None}, "in themselves they can be trained"
    found = counted.checksums.of(0)
    assert found != steps.files
    assert replace(found, digest=0) == replace(steps.files, digest=0)
    assert "one after the other" in str(counted.end())


@pytest.mark.parametrize("rows", [7, 8])  # the 8th is padded itself
def test_a_sample_of_padding_alone_is_none_that_can_be_trained(steps: Trained, rows: int) -> None:
    step = steps.steps[0]
    wrong = Samples(
        input_ids=np.vstack([step.input_ids[:rows], np.full((1, SEQ_LEN), 0, np.int32)]),
        labels=np.vstack([step.labels[:rows], np.full((1, SEQ_LEN), -100, np.int32)]),
        document_ids=np.vstack([step.document_ids[:rows], np.full((1, SEQ_LEN), -1, np.int32)]),
        masked=np.zeros((rows + 1, SEQ_LEN), np.bool_),
    )
    told = TrainedTokens(0).add(wrong, min(rows * SEQ_LEN, STEP_TOKENS))
    assert told == "padding is not all that follows the last target of its last sample"


@pytest.mark.parametrize("name", ["input_ids", "labels", "document_ids"])
def test_every_single_wrong_value_is_found(steps: Trained, name: str) -> None:
    for row, column in np.ndindex(8, SEQ_LEN):
        for by in (-1, 1, 5):
            wrong = steps.copy(2)
            getattr(wrong, name)[row, column] += by
            counted, told = steps.count(wrong, 2, 3)
            assert told[-1] or counted.end(), (row, column, by)
