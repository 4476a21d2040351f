"""Files beyond one read buffer: every byte of every line and row, at its place, however it is read."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.compressed import READ_BYTES
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.manifest import freeze
from orchestrator.data.sources.readers import Part, read_files, read_fragment
from orchestrator.data.sources.records import columns
from orchestrator.data.sources.records.columns import BATCH_BYTES
from orchestrator.data.sources.windows import OrderedWindow, read_windows

PRESS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda data: data,
    "gz": partial(gzip.compress, compresslevel=1),
    "zst": zstandard.ZstdCompressor().compress,
}
Found = list[tuple[int, bytes | None]]


def numbered(size: int) -> bytes:
    """So many bytes of which no two stretches are equal, without a newline."""
    return b"".join(b"%d " % i for i in range(size // 6))[:size].ljust(size, b".")


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    """Short ones, one that spans several buffers, short ones again, and a long last one without a newline."""
    made = [b"line %d" % i for i in range(60_000)]
    made[30_000] = numbered(3 * READ_BYTES + 12_345)
    return [*made, numbered(2 * READ_BYTES + 5)]


def by_place(parts: list[Part]) -> Found:
    found = []
    for part in parts:
        assert [p.number for p in parts] == sorted(p.number for p in parts)
        found += list(zip(part.places.tolist(), list(part.records), strict=True))
    return found


def of_fragments(plan: SourcePlan) -> Found:
    return [pair for f in range(plan.num_fragments) for pair in by_place(list(read_fragment(plan, f)))]


def expected_lines(lines: list[bytes]) -> Found:
    found, offset = Found(), 0
    for line in lines:
        found.append((offset, line))
        offset += len(line) + 1
    return found


@pytest.fixture(scope="module")
def placed(lines: list[bytes]) -> Found:
    return expected_lines(lines)


@pytest.mark.quick("plain-1073741824", "zst-300000", "gz-300000")
@pytest.mark.parametrize("fragment_bytes", [300_000, 1 << 30])
@pytest.mark.parametrize("kind", PRESS)
def test_every_line_of_a_large_file_is_read_whole_and_at_its_place(
    kind: str, fragment_bytes: int, tmp_path: Path, lines: list[bytes], placed: Found
) -> None:
    name = "a" if kind == "plain" else f"a.{kind}"
    (tmp_path / name).write_bytes(PRESS[kind](b"\n".join(lines)))
    plan = plan_source(freeze("s", str(tmp_path), "lines", "text"), fragment_bytes, 1 << 30)
    assert plan.num_fragments > 10 or kind != "plain" or fragment_bytes == 1 << 30
    assert of_fragments(plan) == placed
    assert by_place(list(read_files(plan))) == placed


@pytest.mark.quick("1048575", "1048576", "1048577")
@pytest.mark.parametrize("size", [READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 3 * READ_BYTES])
def test_a_line_that_ends_at_a_buffers_border_is_read_whole(size: int, tmp_path: Path) -> None:
    lines = [numbered(size - 1), b"x", numbered(size), b"", b"y"]
    for kind, press in PRESS.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / ("a" if kind == "plain" else f"a.{kind}")).write_bytes(press(b"\n".join(lines) + b"\n"))
        for fragment_bytes in (1000, size, 1 << 30):
            plan = plan_source(freeze("s", str(folder), "lines", "text"), fragment_bytes, 1 << 30)
            assert of_fragments(plan) == expected_lines(lines)


@pytest.mark.parametrize("kind", PRESS)
def test_a_large_text_file_is_one_whole_document(kind: str, tmp_path: Path, lines: list[bytes]) -> None:
    whole = b"\n".join(lines)
    (tmp_path / ("a.txt" if kind == "plain" else f"a.txt.{kind}")).write_bytes(PRESS[kind](whole))
    plan = plan_source(freeze("s", str(tmp_path), "text", "text"), 1000, 1 << 30)
    assert of_fragments(plan) == [(0, whole)]


ROWS = [None if i % 1000 == 7 else f"row {i}" if i % 7 else "again" for i in range(5000)]
COLUMNS = {
    "string": pa.array(ROWS, pa.string()),
    "large string": pa.array(ROWS, pa.large_string()),
    "binary": pa.array([None if r is None else r.encode() for r in ROWS], pa.binary()),
    "dictionary": pa.array(ROWS, pa.string()).dictionary_encode(),
    "dictionary of large strings": pa.array(ROWS, pa.large_string()).dictionary_encode(),
    "dictionary of bytes": pa.array([None if r is None else r.encode() for r in ROWS]).dictionary_encode(),
}


@pytest.mark.quick(
    "dictionary of large strings-4194304",
    "string-3000",
    "dictionary of bytes-4194304",
    "large string-4194304",
    "dictionary-4194304",
    "binary-4194304",
)
@pytest.mark.parametrize("stretch_bytes", [BATCH_BYTES, 3000])
@pytest.mark.parametrize("kind", COLUMNS)
def test_every_row_of_a_large_group_is_read_at_its_place(
    kind: str, stretch_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "BATCH_BYTES", stretch_bytes)  # the smaller: a group is many stretches
    table = pa.table({"n": range(len(ROWS)), "text": COLUMNS[kind]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3000)
    plan = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 1000, 1 << 30)
    assert plan.num_fragments == 2
    expected = [(i, None if row is None else row.encode()) for i, row in enumerate(ROWS)]
    assert of_fragments(plan) == expected
    assert by_place(list(read_files(plan))) == expected
    settings = StreamSettings(window_bytes=20_000, shuffle="none")
    seen = []
    for block in range(plan.num_blocks):
        for window in read_windows(plan, settings, 0, block):
            ordered = OrderedWindow(window, plan, settings, 0)
            assert sum(ordered.size(i) for i in range(len(ordered))) <= 20_000
            seen += [ordered.origin(i)[1] for i in range(len(ordered))]
    assert seen == list(range(len(ROWS)))
