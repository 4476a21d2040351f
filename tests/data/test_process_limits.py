"""What a tokenizer process cannot hold stops the run, with the place, both values and what to do."""

from __future__ import annotations

import gzip
import lzma
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orchestrator.data.common.process_limits import ProcessLimits, limit_process
from orchestrator.data.feed.pipeline import OpenBlocks
from orchestrator.data.sources import readers
from orchestrator.data.sources.windows import Window
from orchestrator.errors import DataError
from orchestrator.records.cursor import Cursor
from tests.conftest import TinyConfig
from tests.data.making import job, plain, samples, spec_of
from tests.data.reading import plan_of
from tests.raising import raises

GIB = 1 << 30


@pytest.fixture
def limited() -> Iterator[Callable[..., None]]:
    """`limited(work_bytes=…)` until the test ends."""
    yield lambda **limits: limit_process(ProcessLimits(memory_bytes=GIB, num_tokenizers=2, **limits))
    limit_process(ProcessLimits())


def write(folder: Path, kind: str, text: str) -> None:
    folder.mkdir()
    if kind == "parquet":
        pq.write_table(pa.table({"text": ["short", text]}), folder / "a.parquet")
    elif kind == "text":
        (folder / "a.txt").write_text(text)
    else:
        (folder / "a.jsonl").write_text(f'{{"text": "short"}}\n{{"text": "{text}"}}\n')


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "text"])
def test_a_record_that_is_too_long_for_the_process_stops_whatever_bad_documents_do(
    kind: str, tmp_path: Path, tiny_config: TinyConfig, limited: Callable[..., None]
) -> None:
    write(tmp_path / "data", kind, "word " * 4000)
    options = {"on_bad_document": "skip", "max_bad_share": 1.0, "encoder": "tokenizers"}
    spec = spec_of(job(tiny_config, tmp_path / "data", kind, **options))
    whole = plain(samples(spec, 64))
    limited(work_bytes=8 * 10_000)
    values = (tmp_path / "data", "it has 20,0", f"data.memory_bytes={GIB}", "records of 10,000;")
    with raises(DataError, "feed.too_little_memory", *values) as caught:
        samples(spec, 64)
    found = re.search(r"continue with data\.memory_bytes=(\d+) or more", str(caught.value))
    assert found is not None
    assert int(found[1]) > GIB
    limited(work_bytes=8 * 21_000)
    assert plain(samples(spec, 64)) == whole, "a bound that suffices changes nothing"


def test_a_window_of_too_many_records_stops(
    tmp_path: Path, tiny_config: TinyConfig, limited: Callable[..., None]
) -> None:
    (tmp_path / "a").write_bytes(b"a\n" * 5000)
    spec = spec_of(job(tiny_config, tmp_path / "a", "lines", encoder="tokenizers", window_bytes=1 << 20))
    limited(work_bytes=100_000)
    values = (tmp_path / "a: ", "5,000 records", "200,000 bytes", " 100,000;")
    with raises(DataError, "feed.too_little_memory", *values):
        samples(spec, 64)


@pytest.mark.parametrize("name", ["a.zst", "a.xz"])
def test_a_decoder_that_asks_for_too_much_is_named(
    name: str, tmp_path: Path, limited: Callable[..., None]
) -> None:
    data = b"".join(b"%d\n" % number for number in range(200_000))
    if name == "a.xz":
        packed = lzma.compress(data, preset=9)
    else:
        given = zstandard.ZstdCompressionParameters(window_log=23)
        packing = zstandard.ZstdCompressor(compression_params=given).compressobj()
        packed = packing.compress(data) + packing.flush()
    (tmp_path / name).write_bytes(packed)
    plan = plan_of(tmp_path / name)
    assert sum(len(part.records) for part in readers.read_fragment(plan, 0)) == 200_000
    limited(decoder_bytes=4 << 20)
    with raises(DataError, "data.decoder_memory", name, "4,194,304 bytes", "data.memory_bytes=", "zstd"):
        list(readers.read_fragment(plan, 0))


def test_a_block_that_stays_open_keeps_no_window(tmp_path: Path, tiny_config: TinyConfig) -> None:
    with gzip.open(tmp_path / "a.gz", "wb") as file:
        for number in range(120_000):
            file.write(b"line %d %s\n" % (number, b"x" * 100))
    spec = spec_of(job(tiny_config, tmp_path / "a.gz", "lines", window_bytes=8 << 20, fragment_bytes=1 << 20))
    blocks, (plan,) = OpenBlocks(), spec.plans
    task = next(spec.tasks_from(Cursor(), plan.source))
    tracemalloc.start()
    try:
        found = blocks.read(task, plan, spec.settings)
        assert isinstance(found, Window)
        assert not found.last
        with_window, _ = tracemalloc.get_traced_memory()
        del found
        without, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert with_window - without > 7 << 20
    assert without < 5 << 20, "the reader's own buffers, and the lines that did not fit"
