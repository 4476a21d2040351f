"""What reading holds in memory is bounded by windows, pieces and pages, not by files, groups or lines."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orchestrator.config.loading import parse_config
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.dataset import prepare_data
from orchestrator.data.packing.stream import Stream
from orchestrator.data.sample_corpus import train_tokenizer
from orchestrator.data.sources import readers
from orchestrator.data.sources import windows as sources
from orchestrator.data.sources.access import compressed
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.formats import text
from orchestrator.data.sources.formats.parquet import read_row_group
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.records import columns, line_records
from orchestrator.data.sources.records.content import Content
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens import chunk_writer
from orchestrator.errors import BadDocumentError
from orchestrator.records.cursor import Cursor
from orchestrator.records.tokens import EMPTY, TokenChunk
from tests.data.making import job, plain, samples, spec_of
from tests.data.reading import plan_of
from tests.raising import raises
from tests.traced import traced

pytestmark = pytest.mark.xdist_group("forked")

Make = Callable[..., dict[str, Any]]
MB = 1_000_000


def read_all(plan: SourcePlan, settings: StreamSettings) -> int:
    """Decoded bytes of all records, each looked at once."""
    found = 0
    for block in range(plan.num_blocks):
        for window in read_windows(plan, settings, 0, block):
            ordered = OrderedWindow(window, plan, settings, 0)
            for position in range(len(ordered)):
                assert ordered.document(position) is None or ordered.size(position)
                found += ordered.size(position)
    return found


def windows_of(plan: SourcePlan, num_records: int) -> list[OrderedWindow]:
    settings = StreamSettings()
    found = [OrderedWindow(w, plan, settings, 0) for w in read_windows(plan, settings, 0, 0)]
    assert sum(map(len, found)) == num_records
    return found


@pytest.mark.parametrize("line", [b"abc\n", b"\n"])
def test_a_window_of_very_short_lines_takes_few_bytes_a_line(line: bytes, tmp_path: Path) -> None:
    num = 300_000
    (tmp_path / "a").write_bytes(line * num)
    held, peak = traced(windows_of, plan_of(tmp_path), num)
    assert held < 16 * num, "4 bytes for where it ends, 4 for its place in the order, and its own"
    assert peak < 64 * num


@pytest.fixture
def pool() -> Iterator[pa.MemoryPool]:
    """What Arrow allocates, with a peak of its own."""
    before = pa.default_memory_pool()
    proxy = pa.proxy_memory_pool(before)
    pa.set_memory_pool(proxy)
    yield proxy
    pa.set_memory_pool(before)


def numbered(num: int, size: int) -> list[str]:
    return [(f"{i} " * (size // 2))[:size] for i in range(num)]


# the column is made when its test begins
LARGE_GROUPS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "many rows": (
        lambda: numbered(60_000, 1000),
        {"use_dictionary": False, "data_page_size": 1 << 16, "compression": "NONE"},
    ),
    "large rows": (
        lambda: numbered(60, MB),
        {"use_dictionary": False, "data_page_size": 1 << 16, "write_batch_size": 1},
    ),
    "equal rows": (lambda: [t for t in numbered(4, MB // 8) for _ in range(125)], {}),
    "a dictionary": (
        lambda: pa.array([t for t in numbered(4, MB // 2) for _ in range(30)]).dictionary_encode(),
        {},
    ),
}


@pytest.mark.parametrize("kind", LARGE_GROUPS)
def test_a_row_group_is_never_held_whole(kind: str, tmp_path: Path, pool: pa.MemoryPool) -> None:
    make, options = LARGE_GROUPS[kind]
    column = make()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=1 << 30, **options)
    plan, settings = plan_of(tmp_path, "parquet"), StreamSettings(window_bytes=4 * MB)
    assert plan.num_fragments == 1
    reading = pa.proxy_memory_pool(pool)  # a peak without that of writing
    pa.set_memory_pool(reading)
    assert read_all(plan, settings) == sum(len(str(text)) for text in column) >= 60 * MB
    assert reading.max_memory() < 30 * MB


def test_a_row_group_is_not_read_ahead(tmp_path: Path) -> None:
    table = pa.table({"text": numbered(60_000, 1000)})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="NONE")
    # what is read ahead is allocated by the pool of Arrow's files, which no proxy stands for
    pool, most = pa.default_memory_pool(), 0
    del table
    before = pool.bytes_allocated()
    for _ in read_row_group(str(tmp_path / "a.parquet"), 0, Content(), 0):
        most = max(most, pool.bytes_allocated() - before)
    assert 0 < most < 30 * MB


@pytest.mark.parametrize("kind", ["values", "a dictionary"])
def test_short_values_are_handed_on_in_stretches_and_not_as_they_are_decoded(
    kind: str, tmp_path: Path
) -> None:
    texts = [None if i % 100 == 3 else f"value {i % 5000}" * 10 for i in range(50_000)]
    column = pa.array(texts) if kind == "values" else pa.array(texts).dictionary_encode()
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found = list(read_row_group(str(tmp_path / "a.parquet"), 0, Content(), 0))
    assert [value for _, records, _ in found for value in records] == [t and t.encode() for t in texts]
    places = [place for _, records, first in found for place in range(first, first + len(records))]
    assert places == list(range(len(texts)))
    sizes = [int(records.sizes.sum()) for _, records, _ in found]
    assert max(sizes) <= columns.BATCH_BYTES
    # a dictionary may be held once for each of the 782 that are decoded
    assert len(sizes) <= (100 if kind == "a dictionary" else 2 + 2 * sum(sizes) // columns.BATCH_BYTES)


def test_a_zstd_file_of_almost_nothing_is_decoded_piece_by_piece(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(zstandard.ZstdCompressor().compress(bytes(400 * MB)))
    assert (tmp_path / "a.zst").stat().st_size < 64 << 10
    with open_input(str(tmp_path), "a.zst") as file:
        sizes = [len(piece) for piece in compressed.decoded(file, "a.zst", file.size)]
    assert sum(sizes) == 400 * MB
    assert max(sizes) <= compressed.READ_BYTES


# ---------------------------------------------------------------------------------------- long records
LIMIT = 5000
PRESS: dict[str, Callable[[bytes], bytes]] = {
    "a": lambda data: data,
    "a.gz": gzip.compress,
    "a.zst": zstandard.ZstdCompressor().compress,
}
LINES = [b"one", b"x" * 12_000, b"two", b"y" * (LIMIT - 1), b"z" * LIMIT, b"three", b"v" * 7000, b"u" * 8000]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record may have 5,000 bytes, and a buffer has 1,000."""
    for module in (compressed, line_records):
        monkeypatch.setattr(module, "READ_BYTES", 1000)
    monkeypatch.setattr(columns, "BATCH_BYTES", 1000)
    for module in (line_records, text, columns, sources):
        monkeypatch.setattr(module, "MAX_RECORD_BYTES", LIMIT)


@pytest.mark.parametrize("fragment_bytes", [700, 6000, 1 << 20])
@pytest.mark.parametrize("name", PRESS)
@pytest.mark.usefixtures("limited")
def test_of_a_record_that_is_too_long_only_size_and_place_are_held(
    name: str, fragment_bytes: int, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(PRESS[name](b"\n".join(LINES)))
    plan = plan_of(tmp_path / name, fragment_bytes=fragment_bytes)
    expected, place = [], 0
    for number, line in enumerate(LINES, start=1):
        size = len(line) + (number < len(LINES))
        expected.append((number, place, size, None if size > LIMIT else line))
        place += size
    parts = [part for f in range(plan.num_fragments) for part in readers.read_fragment(plan, f)]
    for found in (parts, list(readers.read_files(plan))):
        listed = [
            (None if part.line is None else part.line + i, part.place_of(i), part.records.size(i), record)
            for part in found
            for i, record in enumerate(part.records)
        ]
        assert [entry[1:] for entry in listed] == [entry[1:] for entry in expected]
        assert all(line in (None, number) for (line, *_), (number, *_) in zip(listed, expected, strict=True))


@pytest.mark.usefixtures("limited")
def test_a_record_that_is_too_long_is_a_bad_document_with_its_place(
    tmp_path: Path, tiny_config: Make
) -> None:
    (tmp_path / "a").write_bytes(b"\n".join(LINES))
    stop = spec_of(job(tiny_config, tmp_path, "lines", encoder="tokenizers", shuffle="none"))
    with pytest.raises(BadDocumentError) as caught:
        samples(stop, 64)
    assert f"{tmp_path / 'a'}: byte 4, line 2: it has 12,001 bytes, and a record may have 5,000;" in str(
        caught.value
    )
    lax = {"on_bad_document": "skip", "max_bad_share": 1.0, "encoder": "tokenizers", "shuffle": "none"}
    skipping = spec_of(job(tiny_config, tmp_path, "lines", **lax))
    reasons = [r for chunk in skipping.chunks(Cursor()) for r in chunk.bad_reasons]
    assert [r.partition("line ")[2].partition(" bytes")[0] for r in reasons] == [
        "2: it has 12,001",
        "5: it has 5,001",
        "7: it has 7,001",
        "8: it has 8,000",
    ]
    short = tmp_path / "short"
    short.mkdir()
    (short / "a").write_bytes(b"\n".join(line for line in LINES if len(line) < LIMIT))
    assert plain(samples(skipping, 64)) == plain(
        samples(spec_of(job(tiny_config, short, "lines", **lax)), 64)
    )


@pytest.mark.usefixtures("limited")
def test_a_file_or_a_value_that_is_too_long_is_named(tmp_path: Path, tiny_config: Make) -> None:
    for name, press in PRESS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(press(b"x" * 6000))
        with raises(BadDocumentError, "data.bad_document", f"{name}: byte 0, line 1: ", "6,000 bytes"):
            samples(spec_of(job(tiny_config, tmp_path / name, "text", encoder="tokenizers")), 64)
    pq.write_table(pa.table({"text": ["a", "x" * 6000, "b"]}), tmp_path / "a.parquet")
    with raises(BadDocumentError, "data.bad_document", "a.parquet: row 1: ", "6,000 bytes"):
        samples(spec_of(job(tiny_config, tmp_path / "a.parquet", "parquet", encoder="tokenizers")), 64)


# ---------------------------------------------------------------------------------------- chunks
def test_documents_without_tokens_do_not_gather_in_a_chunk(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["" if i % 50 else f"text {i}" for i in range(3000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = spec_of(job(tiny_config, tmp_path, window_bytes=1 << 20, fragment_bytes=1 << 20))
    before = plain(samples(spec, 16))
    monkeypatch.setattr(chunk_writer, "_BATCH_ENTRIES", 20)
    monkeypatch.setattr(chunk_writer, "CHUNK_ENTRIES", 100)
    found = list(spec.chunks(Cursor()))
    assert sum(int((chunk.kind == EMPTY).sum()) for chunk in found) == 2940
    assert max(len(chunk.record) for chunk in found) <= 100
    assert plain(samples(spec, 16)) == before


@pytest.mark.quick("bestfit")
@pytest.mark.parametrize("mode", ["concat", "bestfit"])
def test_documents_without_tokens_leave_nothing_in_the_stream(
    mode: str, tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_writer, "_BATCH_ENTRIES", 500)
    monkeypatch.setattr(chunk_writer, "CHUNK_ENTRIES", 1000)
    lines = ['{"text": ""}\n'] * 60_000 + ['{"text": "some words"}\n']
    (tmp_path / "a.jsonl").write_text("".join(lines))
    source = {"name": "made", "path": str(tmp_path / "a.jsonl"), "format": "jsonl"}
    sizes = {"data.window_bytes": 1 << 24, "data.fragment_bytes": 1 << 21, "data.shuffle": "none"}
    spec = prepare_data(parse_config(tiny_config({"data.sources": [source], "pack.mode": mode, **sizes})))
    chunks = list(spec.chunks(Cursor()))
    assert sum(int((chunk.kind == EMPTY).sum()) for chunk in chunks) == 60_000
    assert len(chunks) > 10
    held, _ = traced(fed, spec, chunks[:-1])
    assert held < 8 * 60_000


def fed(spec: DataSpec, chunks: list[TokenChunk]) -> Stream:
    stream = spec.stream(Cursor())
    for chunk in chunks:
        stream.feed(copy.deepcopy(chunk))
    return stream


GROWTH = """
import sys
from pathlib import Path
from orchestrator.data.tokens import encoder as encoding

encoding.MAX_GROWTH_BYTES = int(sys.argv[2])
large = b"x" * int(sys.argv[3])
encoder = encoding.FastTokenizer(Path(sys.argv[1]).read_text(), parse=False)
encoder.encode(["a"])
del large
LETTERS = str.maketrans("0123456789", "ghijklmnop")  # a word is letters alone
before = most = encoding._resident_bytes()
for number in range(100):
    words = (hex(100_000_000 + number * 10_000 + word)[2:].translate(LETTERS) for word in range(10_000))
    encoder.encode([" ".join(words)])
    most = max(most, encoding._resident_bytes())
print(most - before)
"""


@pytest.mark.chaos
def test_words_that_never_come_again_do_not_pile_up_in_the_encoder(tmp_path: Path) -> None:
    train_tokenizer(["some text to begin with"], 300, tmp_path / "tokenizer")

    def growth(limit: int, before: int = 0) -> int:
        """Bytes by which 1,000,000 distinct words make a process grow, which was larger by `before` when the
        encoder was made.
        """
        arguments = [str(tmp_path / "tokenizer" / "tokenizer.json"), str(limit), str(before)]
        ended = subprocess.run([sys.executable, "-c", GROWTH, *arguments], capture_output=True, check=True)
        return int(ended.stdout)

    assert growth(16 * MB) < 60 * MB
    assert growth(16 * MB, 200 * MB) < 60 * MB
    assert growth(1 << 40) > 80 * MB, "else this shows nothing"
