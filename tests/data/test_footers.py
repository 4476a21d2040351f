"""A Parquet file's footer is read once for all of its row groups, and taken for no other file's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.formats import parquet
from orchestrator.data.sources.formats.parquet import footer
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.manifest import freeze
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.errors import DataIdentityError
from tests.raising import raises


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose footers were read."""
    found, right = list[str](), pq.read_metadata

    def read(file: Any) -> Any:
        found.append(Path(file).name)
        return right(file)

    monkeypatch.setattr(pq, "read_metadata", read)
    monkeypatch.setattr(parquet, "_footers", {})
    return found


def write(file: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), file, row_group_size=3)


def read(plan: SourcePlan) -> list[Any]:
    found = []
    for block in range(plan.num_blocks):
        for window in read_windows(plan, StreamSettings(shuffle="none"), 0, block):
            ordered = OrderedWindow(window, plan, StreamSettings(shuffle="none"), 0)
            found += [ordered.document(i) for i in range(len(ordered))]
    return found


def test_all_row_groups_of_a_file_are_read_by_one_footer(tmp_path: Path, reads: list[str]) -> None:
    texts = [[f"file {n}, text {i}" for i in range(20)] for n in range(3)]
    for number, own in enumerate(texts):
        write(tmp_path / f"{number}.parquet", own)
    plan = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 1 << 20, 1)
    assert plan.num_blocks == 21
    assert read(plan) == [text for own in texts for text in own]
    assert reads == ["0.parquet", "1.parquet", "2.parquet"]


def test_another_file_of_the_same_name_has_its_own_footer(tmp_path: Path, reads: list[str]) -> None:
    write(tmp_path / "a.parquet", ["one", "two"])
    plan = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 1 << 20, 1)
    assert read(plan) == ["one", "two"]
    write(tmp_path / "a.parquet", ["six", "ten"])
    os.utime(tmp_path / "a.parquet", ns=(1, 1))
    with raises(DataIdentityError, "data.changed_files", "a.parquet", "digest"):
        read(plan)
    again = plan_source(freeze("s", str(tmp_path), "parquet", "text"), 1 << 20, 1)
    assert read(again) == ["six", "ten"]
    assert len(reads) == 2


def test_of_many_footers_the_last_are_kept_and_a_large_one_while_it_is_the_newest(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        write(tmp_path / f"{number}.parquet", ["a text"])
    write(tmp_path / "5.parquet", ["a text"] * 300)
    small, large = (pq.ParquetFile(tmp_path / f"{n}.parquet").metadata.serialized_size for n in (0, 5))
    monkeypatch.setattr(parquet, "FOOTERS_BYTES", 3 * small)
    assert large > parquet.FOOTERS_BYTES
    for number in (0, 1, 2, 0, 3, 0, 1, 5, 5, 0, 5):
        with open_input(str(tmp_path), f"{number}.parquet") as file:
            assert footer(file).num_rows == (300 if number == 5 else 1)
    assert [name[0] for name in reads] == ["0", "1", "2", "3", "1", "5", "0", "5"]
