"""An epoch holds every document of the files once, in any order; an order that repeats one is found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources import windows as sources
from orchestrator.data.spec import DataSpec
from orchestrator.inspect.audit.epoch_checksum import EpochChecksums
from orchestrator.inspect.audit.file_checksum import checksum_files
from orchestrator.planning.order import block_at, window_order
from orchestrator.records.cursor import Cursor
from orchestrator.records.tokens import PIECE
from tests.conftest import TinyConfig
from tests.data.making import job, some_texts, spec_of, write_corpus
from tests.data.packed import hand_made


@pytest.fixture(scope="module")
def spec(tiny_config: TinyConfig) -> DataSpec:
    return prepare_data(parse_config(tiny_config({"data.num_epochs": 2})))


def checksums_of(spec: DataSpec) -> EpochChecksums:
    checksums = EpochChecksums()
    for chunk in spec.chunks(Cursor()):
        checksums.count(chunk, chunk.tokens)
        checksums.note_records(chunk)
    return checksums


def test_every_epoch_holds_what_the_files_hold(spec: DataSpec) -> None:
    files, stream = checksum_files(spec, spec.encoders[0].encoder), checksums_of(spec)
    assert files.documents > 50
    assert stream.of(0) == stream.of(1) == files
    assert stream.twice(0) is stream.twice(1) is None
    assert str(files.documents) in str(files).replace(",", "")


def a_block_twice(seed: int, source: str, epoch: int, position: int, num_blocks: int, shuffle: str) -> int:
    """Position 1 gives the block of position 0 again."""
    return block_at(seed, source, epoch, 0 if position == 1 else position, num_blocks, shuffle)


def a_record_twice(*arguments):
    """Within a window the second record is the first one again."""
    order = window_order(*arguments).copy()
    order[1:2] = order[:1]
    return order


WRONG = [("block_at", a_block_twice), ("window_order", a_record_twice)]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_an_order_that_repeats_something_is_found_out(
    spec: DataSpec, monkeypatch: pytest.MonkeyPatch, name: str, wrong
) -> None:
    files = checksum_files(spec, spec.encoders[0].encoder)
    monkeypatch.setattr(sources, name, wrong)
    once = replace(spec, settings=replace(spec.settings, num_epochs=1))
    found = checksums_of(once)
    assert found.of(0) != files
    assert found.twice(0) is not None


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "text", "lines"])
def test_files_read_whole_hold_what_their_fragments_hold(
    tmp_path: Path, tiny_config: TinyConfig, kind: str
) -> None:
    write_corpus(tmp_path, some_texts(40, lines=kind != "lines"), kind)
    made = spec_of(job(tiny_config, tmp_path, kind))
    assert made.plans[0].num_fragments > 3 or kind.endswith(("gz", "zst"))
    found = checksums_of(made)
    assert found.of(0) == checksum_files(made, made.encoders[0].encoder)
    assert found.twice(0) is None


def test_bad_and_empty_records_are_counted_in_the_stream_as_in_the_files(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    lines = [f'{{"text": "number {i} of some"}}' for i in range(40)]
    lines[3::9] = ["broken"] * 5
    lines[5::12] = ['{"text": ""}'] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = job(tiny_config, tmp_path, on_bad_document="skip", max_bad_share=1.0)
    made = spec_of(config, chunk_tokens=30)
    files, stream = checksum_files(made, made.encoders[0].encoder), checksums_of(made)
    assert (files.documents, files.empty, files.bad) == (32, 3, 5)
    assert stream.of(0) == files
    assert stream.twice(0) is None


@pytest.mark.parametrize(
    ("first", "second", "twice"),
    [
        (range(4), range(4, 7), None),
        (range(4), range(3, 7), (0, 3)),
        (range(3, 7), range(4), (0, 3)),
        (range(3, 4), range(3, 4), (0, 3)),
        (range(9), range(4, 5), (0, 4)),
    ],
)
def test_blocks_that_have_one_record_in_common_are_found(
    first: range, second: range, twice: tuple[int, int] | None
) -> None:
    checksums = EpochChecksums()
    for block, records in enumerate((first, second)):
        entries = [(record, 0, 2, PIECE, 1) for record in records]
        checksums.note_records(hand_made(entries, 0, block, 0, True, True, block))
    assert checksums.twice(0) == twice
    assert checksums.twice(1) is None


@pytest.mark.parametrize(("bos_id", "eos_id"), [(5, None), (5, 7), (None, None)])
def test_files_hold_their_documents_with_the_ids_around_them(
    spec: DataSpec, bos_id: int | None, eos_id: int | None
) -> None:
    made = replace(spec, settings=replace(spec.settings, bos_id=bos_id, eos_id=eos_id, num_epochs=1))
    files, plain = (
        checksum_files(made, made.encoders[0].encoder),
        checksum_files(spec, spec.encoders[0].encoder),
    )
    assert checksums_of(made).of(0) == files
    around = (bos_id is not None) + (eos_id is not None)
    assert files.tokens - plain.tokens == (around - 1) * files.documents, "the plain ones have an EOS"


def test_equal_documents_at_different_places_are_different_documents(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_corpus(tmp_path, ["the same"] * 12, "jsonl")
    made = spec_of(job(tiny_config, tmp_path))
    files, stream = checksum_files(made, made.encoders[0].encoder), checksums_of(made)
    assert stream.of(0) == files
    assert stream.twice(0) is None
    write_corpus(tmp_path / "b", ["the same"] * 12, "jsonl", num_files=2)
    other = spec_of(job(tiny_config, tmp_path / "b"))
    moved = checksum_files(other, other.encoders[0].encoder)
    assert (moved.documents, moved.tokens) == (files.documents, files.tokens)
    assert moved.digest != files.digest
