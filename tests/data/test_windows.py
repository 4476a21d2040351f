"""Files as records: ranges of lines, compressed streams, windows, fragments and blocks."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access import compressed
from orchestrator.data.sources.access.input_file import InputFile, open_input
from orchestrator.data.sources.access.records_in_memory import split_lines
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.manifest import freeze
from orchestrator.data.sources.readers import read_files, read_fragment
from orchestrator.data.sources.records import line_records
from orchestrator.data.sources.records.line_records import read_range
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.data.tokens.chunks import tokenize_block
from orchestrator.errors import DataError, DataIdentityError
from orchestrator.records.cursor import Cursor
from tests.data.making import job, spec_of, write_corpus
from tests.raising import raises

Range = Callable[[InputFile, int, int, int], tuple[int, bytes]]
FILES = st.lists(st.sampled_from([b"", b"a", b"bc\r", b"d" * 9]), max_size=9).flatmap(
    lambda lines: st.sampled_from([b"\n".join(lines), b"\n".join(lines) + b"\n"])
)


def lines_of(data: bytes, cuts: list[int], read: Range) -> list[tuple[int, bytes]]:
    """(offset, line) over all ranges between the cuts."""
    borders = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    handle = os.memfd_create("lines")
    try:
        os.write(handle, data)
        found = []
        with open_input("/proc/self/fd", str(handle)) as file:
            for low, high in zip(borders, borders[1:], strict=False):
                start, content = read(file, low, high, len(data))
                lines = split_lines(content)
                for line, size in zip(lines, lines.sizes.tolist(), strict=True):
                    found.append((start, line))
                    start += size
        return found
    finally:
        os.close(handle)


def all_lines(data: bytes) -> list[tuple[int, bytes]]:
    found, offset = [], 0
    for line in data.splitlines(keepends=True) if b"\r" not in data else _only_newlines(data):
        found.append((offset, line.removesuffix(b"\n")))
        offset += len(line)
    return found


def _only_newlines(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]


@given(data=FILES, cuts=st.lists(st.integers(1, 60), max_size=6))
def test_every_line_belongs_to_exactly_one_range(data: bytes, cuts: list[int]) -> None:
    assert lines_of(data, cuts, read_range) == all_lines(data)


def from_the_start_itself(file: InputFile, start: int, stop: int, size: int) -> tuple[int, bytes]:
    """The usual mistake: skip to behind the first newline at or after `start`, not at or after start - 1."""
    if start == 0:
        return read_range(file, start, stop, size)
    return read_range(file, start + 1, stop, size) if start + 1 < stop else (stop, b"")


def up_to_the_stop(file: InputFile, start: int, stop: int, size: int) -> tuple[int, bytes]:
    """Another one: the last line is cut where the range ends."""
    begin, data = read_range(file, start, stop, size)
    return begin, data[: max(0, stop - begin)]


@pytest.mark.parametrize("wrong", [from_the_start_itself, up_to_the_stop])
def test_the_property_catches_readers_that_lose_lines(wrong: Range) -> None:
    caught = 0
    for size in range(1, 8):
        data = b"".join(b"x" * (i % size) + b"\n" for i in range(12))
        for cut in range(1, len(data)):
            caught += lines_of(data, [cut], wrong) != all_lines(data)
    assert caught > 20


def made(folder: Path, files: dict[str, bytes], form: str = "jsonl") -> SourcePlan:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return plan_source(freeze("s", str(folder / "*"), form, "text"), 100, 1000)


def records(plan: SourcePlan) -> list[bytes | None]:
    return [r for f in range(plan.num_fragments) for part in read_fragment(plan, f) for r in part.records]


LINES = b"".join(b'{"text": "%d"}\n' % i for i in range(3000))


def frames(press: Callable[[bytes], bytes]) -> bytes:
    return press(LINES[:1000]) + press(b"") + press(LINES[1000:])


COMPRESSED = {
    "a.jsonl.gz": (gzip.compress, b"\0" * 8),
    "a.jsonl.zst": (
        zstandard.ZstdCompressor(write_checksum=True).compress,
        b"\x50\x2a\x4d\x18\x04\0\0\0skip",
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_files_are_read_across_frames(name: str, tmp_path: Path) -> None:
    press, padding = COMPRESSED[name]
    plan = made(tmp_path, {name: frames(press) + padding})
    assert records(plan) == LINES.split(b"\n")[:-1]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_files_that_are_cut_off_or_damaged_stop(name: str, tmp_path: Path) -> None:
    press = COMPRESSED[name][0]
    whole = frames(press)
    second = len(press(LINES[:1000]) + press(b""))
    middle = second + (len(whole) - second) // 2
    damages = {
        "cut": [whole[:middle], whole[:-1], whole[:-5], whole[: second + 3], whole[:5], b""],
        "other": [
            b"no compressed file",
            whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :],
            whole + b"more",
        ],
    }
    for data in [d for group in damages.values() for d in group]:
        plan = made(tmp_path, {name: data})
        with raises(DataError, "data.damaged_file", f"{name}: "):
            records(plan)


def test_an_error_of_the_system_is_no_damage(tmp_path: Path) -> None:
    plan = made(tmp_path, {"a.jsonl": LINES})
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").mkdir()
    with raises(DataError, "data.unreadable_file", "a.jsonl: "):
        list(read_fragment(plan, 0, accept_changed=True))


def test_a_damaged_parquet_file_stops(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": [str(i) * 50 for i in range(500)]}), tmp_path / "a.parquet", compression="zstd"
    )
    plan = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 100, 1000)
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    data[200:400] = bytes(200)
    (tmp_path / "a.parquet").write_bytes(bytes(data))
    with raises(DataError, "data.damaged_file", "a.parquet: "):
        [part for part in read_fragment(plan, 0, accept_changed=True)]
    (tmp_path / "a.parquet").write_bytes(bytes(data[:-20]))
    with raises(DataError, "data.damaged_file", "a.parquet: "):
        freeze("s", str(tmp_path), "parquet", "text")


def test_an_accepted_parquet_file_that_lacks_a_row_group_is_named(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "n": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    plan = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 100, 1000)
    pq.write_table(table.slice(1), tmp_path / "a.parquet")
    with raises(DataError, "data.damaged_file", "a.parquet: ", "row group 1", "has 1"):
        [part for part in read_fragment(plan, 1, accept_changed=True)]
    pq.write_table(table.drop_columns(["text"]), tmp_path / "a.parquet")
    with raises(DataError, "data.damaged_file", "a.parquet: ", "column 'text'"):
        [part for part in read_fragment(plan, 0, accept_changed=True)]


def test_a_file_that_changes_while_the_run_reads_is_noticed_when_it_is_opened(tmp_path: Path) -> None:
    plan = made(tmp_path, {"a.jsonl": LINES})
    (tmp_path / "a.jsonl").write_bytes(LINES + b"more")
    num_bytes = f"{len(LINES)} bytes", len(LINES) + 4
    with raises(DataIdentityError, "data.changed_files", "a.jsonl", *num_bytes):
        records(plan)
    (tmp_path / "a.jsonl").unlink()
    with raises(DataIdentityError, "data.missing_files", "a.jsonl"):
        records(plan)


def test_large_files_are_cut_and_small_ones_joined_and_every_byte_is_in_one_fragment(tmp_path: Path) -> None:
    sizes = [10, 20, 30, 350, 60, 60, 5, 100, 101, 0, 3]
    plan = made(tmp_path, {f"{i:02d}.jsonl": b"x" * size for i, size in enumerate(sizes)})
    parts = [[(p.file, p.start, p.stop) for p in plan.parts(f)] for f in range(plan.num_fragments)]
    assert parts == [
        [(0, 0, 10), (1, 0, 20), (2, 0, 30)],
        *[[(3, a, b)] for a, b in ((0, 87), (87, 175), (175, 262), (262, 350))],
        [(4, 0, 60)],
        [(5, 0, 60), (6, 0, 5)],
        [(7, 0, 100)],
        *[[(8, 0, 50)], [(8, 50, 101)]],
        [(9, 0, 0), (10, 0, 3)],
    ]
    mean = sum(sizes) / 11
    assert plan.fragments_per_block == int(1000 // (2 * mean))
    blocks = [plan.fragments(b) for b in range(plan.num_blocks)]
    assert [f for block in blocks for f in block] == list(range(11))


def test_compressed_and_text_files_are_never_cut(tmp_path: Path) -> None:
    assert made(tmp_path / "a", {"a.jsonl.gz": b"x" * 5000, "b.jsonl.zst": b"x" * 300}).num_fragments == 2
    assert made(tmp_path / "b", {"a": b"x" * 5000, "b": b"y" * 40, "c": b"z" * 40}, "text").num_fragments == 2


def test_windows_take_what_fits_and_a_longer_record_is_one_alone(tmp_path: Path) -> None:
    sizes = [40, 50, 10, 1, 300, 5, 95, 100, 101, 99]
    data = b"".join(b"x" * (size - 1) + b"\n" for size in sizes)
    (tmp_path / "a").write_bytes(data)
    plan = plan_source(freeze("s", str(tmp_path / "a"), "lines", "text"), 1 << 20, 100)
    settings = StreamSettings(window_bytes=100, shuffle="none")
    windows = list(read_windows(plan, settings, 0, 0))
    found = [[int(n) for p in w.parts for n in p.records.sizes] for w in windows]
    assert found == [[40, 50, 10], [1], [300], [5, 95], [100], [101], [99]]
    assert [w.last for w in windows] == [False] * 6 + [True]
    assert [w.number for w in windows] == list(range(7))
    numbers = [p.number + i for w in windows for p in w.parts for i in range(len(p.records))]
    assert numbers == list(range(10))


@pytest.mark.parametrize("fragment_bytes", [1, 1 << 20])
def test_a_window_ends_at_a_files_border_where_the_next_files_first_record_does_not_fit(
    fragment_bytes: int, tmp_path: Path
) -> None:
    files = {"a": [40, 50], "b": [11, 60], "c": [29, 30], "d": [150], "e": [20, 50, 30], "f": [1]}
    for name, sizes in files.items():
        (tmp_path / name).write_bytes(b"".join(b"x" * (size - 1) + b"\n" for size in sizes))
    plan = plan_source(freeze("s", str(tmp_path), "lines", "text"), fragment_bytes, 1 << 20)
    assert plan.num_blocks == 1
    settings = StreamSettings(window_bytes=100, shuffle="none")
    windows = list(read_windows(plan, settings, 0, 0))
    found = [[int(n) for p in w.parts for n in p.records.sizes] for w in windows]
    assert found == [[40, 50], [11, 60, 29], [30], [150], [20, 50, 30], [1]]


@pytest.mark.parametrize("form", ["jsonl", "lines", "text"])
@pytest.mark.parametrize("name", ["a.jsonl", *COMPRESSED])
def test_what_is_appended_to_a_file_is_not_the_runs(name: str, form: str, tmp_path: Path) -> None:
    press = COMPRESSED[name][0] if name in COMPRESSED else bytes
    data = LINES.removesuffix(b"\n")  # its last line goes on with what is appended
    (tmp_path / name).write_bytes(press(data))
    plan = plan_source(freeze("s", str(tmp_path), form, "text"), 5000, 1000)
    with (tmp_path / name).open("ab") as file:
        file.write(press(b', "more": 1}\n{"text": "later"}\n'))
    parts = [p for f in range(plan.num_fragments) for p in read_fragment(plan, f, accept_changed=True)]
    expected = [data] if form == "text" else data.split(b"\n")
    for found in (parts, read_files(plan, accept_changed=True)):
        assert [record for part in found for record in part.records] == expected


@pytest.mark.parametrize("name", ["a.jsonl", *COMPRESSED])
def test_what_is_appended_while_a_file_is_read_is_not_the_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (compressed, line_records):
        monkeypatch.setattr(module, "READ_BYTES", 1000)
    press = COMPRESSED[name][0] if name in COMPRESSED else bytes
    (tmp_path / name).write_bytes(press(LINES))
    plan = plan_source(freeze("s", str(tmp_path), "jsonl", "text"), 1 << 20, 1 << 20)
    reading = read_fragment(plan, 0)
    found = [next(reading)]
    with (tmp_path / name).open("ab") as file:
        file.write(press(LINES))
    found += reading
    assert [record for part in found for record in part.records] == LINES.split(b"\n")[:-1]


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_longer_compressed_file_in_place_of_the_runs_own_says_what_is_read_of_it(
    name: str, tmp_path: Path
) -> None:
    plan = made(tmp_path, {name: COMPRESSED[name][0](LINES[:2000])})
    was = (tmp_path / name).stat().st_size
    (tmp_path / name).write_bytes(COMPRESSED[name][0](LINES))
    now = (tmp_path / name).stat().st_size
    with raises(DataError, "data.damaged_file", f"{now} bytes", was):
        list(read_fragment(plan, 0, accept_changed=True))


def test_a_window_knows_every_records_place(tmp_path: Path) -> None:
    data = b"\n".join(b"line %d" % i for i in range(400))
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b.gz").write_bytes(gzip.compress(data))
    for name in ("a", "b.gz"):
        plan = plan_source(freeze("s", str(tmp_path / name), "lines", "text"), 500, 4000)
        settings = StreamSettings(window_bytes=700)
        seen = set()
        for position in range(plan.num_blocks):
            for window in read_windows(plan, settings, 0, position):
                ordered = OrderedWindow(window, plan, settings, 0)
                for i in range(len(ordered)):
                    number = int(str(ordered.document(i)).split()[1])
                    offset = len(b"\n".join(b"line %d" % k for k in range(number))) + (number > 0)
                    assert ordered.place(i) == f"{tmp_path / name}: byte {offset}, line {number + 1}"
                    seen.add(number)
        assert seen == set(range(400))


def test_bom_carriage_returns_and_blank_lines_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfone\r\n\r\n   \n\ntwo\r\r\n\xef\xbb\xbfthree")
    plan = plan_source(freeze("s", str(tmp_path / "a"), "lines", "text"), 1000, 1000)
    settings = StreamSettings(shuffle="none")
    (window,) = read_windows(plan, settings, 0, 0)
    ordered = OrderedWindow(window, plan, settings, 0)
    documents = [ordered.document(i) for i in range(len(ordered))]
    assert documents == ["one", None, None, None, "two\r", "\ufeffthree"]


def test_reopening_in_a_large_block_parses_nothing_before_the_cursor(
    tmp_path: Path, tiny_config: Callable[..., dict[str, Any]]
) -> None:
    write_corpus(tmp_path / "data", [f"document {i}" for i in range(50)], "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", window_bytes=1 << 20, fragment_bytes=1 << 20))
    (task,) = spec.tasks_from(Cursor())
    whole = [n for chunk in spec.chunks(Cursor()) for n in chunk.record.tolist()]

    encoders = spec.build_encoders()
    rest = tokenize_block(replace(task, record=40), spec.plans[0], encoders, spec.settings)
    assert [n for chunk in rest for n in chunk.record.tolist()] == [n for n in whole if n >= 40]
