"""A manifest as columns is what it was as rows: the same digest, fragments and blocks, from the same stored
files; and a plan of many files travels as a name.
"""

from __future__ import annotations

import builtins
import io
import os
import pickle
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data.sources.lists import file_rows
from orchestrator.data.sources.lists.file_rows import FilePart, FileRow, Files
from orchestrator.data.sources.lists.fragments import (
    SourcePlan,
    frozen_at,
    load_plan,
    num_window_shuffled,
    plan_source,
)
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import Manifest, freeze, from_parquet, to_parquet
from orchestrator.data.sources.lists.source_diff import changes_since
from orchestrator.errors import DataIdentityError
from orchestrator.storage.files import Storage
from tests.num_examples import examples
from tests.raising import raises


# ------------------------------------------------------------ as it was before there were columns (version 1)
def digest_of_rows(format_: str, rows: list[FileRow]) -> str:
    every = [[f.path, f.bytes, f.probe, f.group_rows, f.group_bytes] for f in rows]
    return blake3(orjson.dumps([1, format_, "text", every])).hexdigest()


def plan_of_rows(
    format_: str, rows: list[FileRow], fragment_bytes: int, window_bytes: int
) -> tuple[list[int], list[int], int]:
    run_fragments, run_files, joined = [0], [0], 0
    for i, row in enumerate(rows):
        num = num_fragments(format_, row, fragment_bytes)
        alone = format_ == "parquet" or num > 1
        if run_files[-1] < i and (alone or joined + row.bytes > fragment_bytes):
            run_fragments.append(run_fragments[-1] + 1)
            run_files.append(i)
            joined = 0
        joined += row.bytes
        if alone:
            run_fragments.append(run_fragments[-1] + num)
            run_files.append(i + 1)
            joined = 0
    if run_files[-1] < len(rows):
        run_fragments.append(run_fragments[-1] + 1)
        run_files.append(len(rows))
    total = sum(sum(f.group_bytes) if format_ == "parquet" else f.bytes for f in rows)
    per_block = max(1, window_bytes * run_fragments[-1] // (2 * max(1, total)))
    return run_fragments, run_files, max(1, min(per_block, run_fragments[-1]))


def num_fragments(format_: str, row: FileRow, fragment_bytes: int) -> int:
    if format_ == "parquet":
        return len(row.group_rows)
    if format_ == "text" or row.path.endswith((".gz", ".zst")):
        return 1
    return max(1, -(-row.bytes // fragment_bytes))


def parts_of_rows(
    format_: str, rows: list[FileRow], run_fragments: list[int], run_files: list[int], fragment: int
) -> tuple[FilePart, ...]:
    run = bisect_right(run_fragments, fragment) - 1
    first, end = run_files[run], run_files[run + 1]
    part, num = fragment - run_fragments[run], run_fragments[run + 1] - run_fragments[run]
    sizes = [row.bytes for row in rows[first:end]]
    if format_ == "parquet":
        return (FilePart(file=first, start=0, stop=sizes[0], group=part),)
    if num == 1:
        return tuple(FilePart(file=first + i, start=0, stop=size) for i, size in enumerate(sizes))
    return (FilePart(file=first, start=part * sizes[0] // num, stop=(part + 1) * sizes[0] // num),)


def stored_rows(manifest: Manifest) -> bytes:
    kinds = {
        "path": pa.string(),
        "bytes": pa.int64(),
        "mtime_ns": pa.int64(),
        "probe": pa.string(),
        "group_rows": pa.list_(pa.int64()),
        "group_bytes": pa.list_(pa.int64()),
    }
    rows = list(manifest.files)
    facts = {"version": "1", "digest": digest_of_rows(manifest.format, rows)}
    facts |= {name: getattr(manifest, name) for name in ("source", "base", "format", "text_field")}
    columns = {name: [getattr(row, name) for row in rows] for name in kinds}
    out = io.BytesIO()
    pq.write_table(pa.table(columns, schema=pa.schema(list(kinds.items()), metadata=facts)), out)
    return out.getvalue()


def window_shuffled_rows(plan: SourcePlan, rows: list[FileRow], window_bytes: int) -> int:
    large = set[int]()
    for block in range(plan.num_blocks):
        parts = [part for fragment in plan.fragments(block) for part in plan.parts(fragment)]
        packed = {p.file for p in parts if p.group is not None or rows[p.file].path.endswith((".gz", ".zst"))}
        decoded = sum(
            rows[p.file].group_bytes[p.group]
            if p.group is not None
            else (p.stop - p.start) * (4 if p.file in packed else 1)
            for p in parts
        )
        large |= packed if decoded > window_bytes else set()
    return len(large)


# ------------------------------------------------------------- the columns are equal to it
SIZES = st.one_of(st.integers(0, 12), st.sampled_from([99, 100, 101, 199, 200, 201]), st.integers(0, 3000))
GROUPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900)), max_size=4)
ENDINGS = st.sampled_from([".jsonl", ".jsonl", ".jsonl.gz", ".zst", " é\n.txt"])
FORMATS = st.sampled_from(["jsonl", "lines", "text", "parquet"])


@st.composite
def lists(draw: Any) -> tuple[Manifest, list[FileRow]]:
    format_ = draw(FORMATS)
    rows = []
    drawn = draw(st.lists(st.tuples(SIZES, ENDINGS, GROUPS), max_size=25))
    for i, (size, ending, found) in enumerate(drawn):
        groups = found if format_ == "parquet" else []
        rows.append(
            FileRow(
                path=f"{i:03d}{ending}",
                bytes=size,
                mtime_ns=10**18 + draw(st.integers(0, 10**9)),
                probe=f"{size * 7919:016x}",
                group_rows=tuple(num for num, _ in groups),
                group_bytes=tuple(num_bytes for _, num_bytes in groups),
            )
        )
    manifest = Manifest(source="s", base="/b", format=format_, files=Files.of(rows))
    return manifest, rows


@pytest.mark.chaos
@settings(max_examples=examples(40, chaos=150), deadline=None)
@given(lists(), st.sampled_from([1, 100, 1000]), st.integers(1, 5000))
def test_columns_are_cut_as_rows_were(
    made: tuple[Manifest, list[FileRow]], fragment_bytes: int, window_bytes: int
) -> None:
    manifest, rows = made
    plan = plan_source(manifest, fragment_bytes, window_bytes)
    fragments, files, per_block = plan_of_rows(manifest.format, rows, fragment_bytes, window_bytes)
    assert (plan.run_fragments.tolist(), plan.run_files.tolist()) == (fragments, files)
    assert plan.fragments_per_block == per_block
    for fragment in range(plan.num_fragments):
        assert plan.parts(fragment) == parts_of_rows(manifest.format, rows, fragments, files, fragment)
    assert num_window_shuffled(plan, window_bytes) == window_shuffled_rows(plan, rows, window_bytes)


@settings(max_examples=examples(20, chaos=60), deadline=None)
@given(lists())
def test_lists_that_were_stored_as_rows_open_with_the_same_digest(
    made: tuple[Manifest, list[FileRow]],
) -> None:
    manifest, rows = made
    assert manifest.digest == digest_of_rows(manifest.format, rows)
    for stored in (stored_rows(manifest), to_parquet(manifest)):
        again = from_parquet(stored, "here")
        assert again == manifest
        assert list(again.files) == rows == [again.files[i] for i in range(len(rows))]
        assert again.digest == manifest.digest


@settings(max_examples=examples(30, chaos=100), deadline=None)
@given(st.lists(st.text('a/"\\\x1f\x7fé\u2028', max_size=5), max_size=14), st.integers(0, 1 << 62))
def test_any_names_give_the_digest_of_their_rows(paths: list[str], size: int) -> None:
    rows = [FileRow(path=p, bytes=size >> i, mtime_ns=i, probe=f"{i:016x}") for i, p in enumerate(paths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_rows, "_STRETCH", 3)
        assert Files.of(rows).digest("jsonl", "text") == digest_of_rows("jsonl", rows)


def test_no_number_overflows_where_files_are_large() -> None:
    rows = [
        FileRow(path=f"{i}{end}", bytes=size, mtime_ns=0, probe="")
        for i, (end, size) in enumerate([(".jsonl", 3 << 50), (".zst", 5 << 40), (".jsonl", 1 << 51)])
    ]
    manifest = Manifest(source="s", base="/b", format="jsonl", files=Files.of(rows))
    plan = plan_source(manifest, 1 << 41, 16 << 20)
    assert plan.run_fragments.tolist() == plan_of_rows("jsonl", rows, 1 << 41, 16 << 20)[0]
    assert num_window_shuffled(plan, 16 << 20) == window_shuffled_rows(plan, rows, 16 << 20) == 1


def test_a_stored_list_with_other_columns_or_without_a_value_is_refused() -> None:
    manifest = Manifest(source="s", base="/b", format="jsonl", files=Files.of([]))
    table = manifest.files.table({"digest": manifest.digest, "source": "s", "base": "/b", "format": "jsonl"})
    for other in (table.drop_columns(["probe"]), table):  # the second one has no text_field
        out = io.BytesIO()
        pq.write_table(other, out)
        with raises(DataIdentityError, "data.damaged_list", "there: "):
            from_parquet(out.getvalue(), "there")


def test_a_list_of_a_later_version_is_not_taken_for_a_damaged_one() -> None:
    manifest = Manifest(source="s", base="/b", format="jsonl", files=Files.of([]))
    out = io.BytesIO()
    pq.write_table(manifest.files.table({"version": "99", "digest": manifest.digest}), out)
    with raises(DataIdentityError, "storage.later_format", "there: ", "version 99") as refused:
        from_parquet(out.getvalue(), "there")
    assert "restore" not in str(refused.value)


# ------------------------------------------------------------- a plan travels as a name
@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for i in range(300):
        (tmp_path / "data" / f"part-{i:05d}.jsonl").write_text(f'{{"text": "{i}"}}\n')
    return tmp_path / "data"


def frozen_plan(data: Path) -> SourcePlan:
    manifest = freeze("s", str(data), "jsonl", "text")
    (data.parent / "s.parquet").write_bytes(to_parquet(manifest))
    return frozen_at(plan_source(manifest, 1000, 4000), Storage(str(data.parent)), "s.parquet", 1000, 4000)


def test_a_frozen_plan_pickles_as_the_name_of_its_list_and_is_read_once(data: Path) -> None:
    plan = frozen_plan(data)
    sent = pickle.dumps(plan)
    assert len(sent) < 600 < 300 * 60 < len(pickle.dumps(replace(plan, reference=None)))
    first, second = pickle.loads(sent), pickle.loads(sent)
    assert first is second, "a process reads it once"
    assert first == plan
    assert pickle.dumps(first) == sent


def test_a_plan_without_a_run_pickles_whole(data: Path) -> None:
    plan = replace(frozen_plan(data), reference=None)
    (data.parent / "s.parquet").unlink()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_whose_list_is_gone_or_another_one_is_refused_by_name(data: Path) -> None:
    plan = frozen_plan(data)
    load_plan.cache_clear()
    (data / "later.jsonl").write_text('{"text": "later"}\n')
    (data.parent / "s.parquet").write_bytes(to_parquet(freeze("s", str(data), "jsonl", "text")))
    now = freeze("s", str(data), "jsonl", "text").digest
    with raises(DataIdentityError, "data.damaged_list", "s.parquet", plan.manifest.digest, now):
        pickle.loads(pickle.dumps(plan))
    (data.parent / "s.parquet").unlink()
    with raises(DataIdentityError, "data.unreadable_list", "s.parquet"):
        pickle.loads(pickle.dumps(plan))


# ------------------------------------------------------------- files that did not change are not opened
def test_only_files_of_another_size_or_time_are_opened(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = freeze("s", str(data), "jsonl", "text")
    os.utime(data / "part-00007.jsonl", ns=(1, 1))
    (data / "part-00009.jsonl").write_text('{"text": "another one"}\n')
    (data / "part-00011.jsonl").unlink()
    opened = list[str]()

    def recorded(path: Any, *rest: Any, real: Any = builtins.open, **named: Any) -> Any:
        opened.append(str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(builtins, "open", recorded)
    for listing in (None, list_files("s", str(data), "jsonl")):
        opened.clear()
        found = changes_since(manifest, listing)
        assert {Path(path).name for path in opened} == {"part-00007.jsonl", "part-00009.jsonl"}
        assert [text.partition(": ")[2] for text in (*found.changed, *found.gone)] == [
            "it had 14 bytes and has 24",
            "it had 15 bytes and is gone",
        ]
        assert len(found.now.files) == 299


def test_a_file_that_was_listed_is_not_asked_for_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, asked = freeze("s", str(data), "jsonl", "text"), list[str]()

    def recorded(path: Any, real: Any = os.stat, **named: Any) -> Any:
        asked.append(str(path))
        return real(path, **named)

    monkeypatch.setattr(os, "stat", recorded)
    found = changes_since(manifest, list_files("s", str(data), "jsonl"))
    assert found.now == manifest
    assert sum("part-" in path for path in asked) == 300
