"""Reads all records of a source, by windows and straight from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze, freeze_listed, from_parquet, to_parquet
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.records.content import Content, Document
from orchestrator.data.sources.windows import OrderedWindow, Window, read_windows


def planned(
    folder: Path, form: str, content: Content, sizes: tuple[int, int] = (1 << 20, 1 << 20)
) -> SourcePlan:
    manifest = freeze_listed("s", list_files("s", str(folder), form), form, content)
    assert from_parquet(to_parquet(manifest), "here") == manifest
    return plan_source(manifest, *sizes)


def read(plan: SourcePlan, window_bytes: int, shuffle: str) -> list[tuple[tuple[int, int], Document | None]]:
    """(origin, document) of every record of an epoch."""
    found, stream = [], StreamSettings(window_bytes=window_bytes, shuffle=shuffle)
    for position in range(plan.num_blocks):
        windows = list(read_windows(plan, stream, 0, position))
        assert [window.last for window in windows] == [False] * (len(windows) - 1) + [True]
        for window in windows:
            ordered = OrderedWindow(window, plan, stream, 0)
            sizes = [ordered.size(i) for i in range(len(ordered))]
            assert len(sizes) == 1 or sum(sizes) <= window_bytes
            found += [(ordered.origin(i), ordered.document(i)) for i in range(len(ordered))]
    return found


def read_straight(plan: SourcePlan) -> list[tuple[tuple[int, int], Document | None]]:
    """The same from the files, without fragments and windows."""
    found = []
    for part in read_files(plan):
        ordered = OrderedWindow(
            Window(number=0, last=False, parts=(part,)), plan, StreamSettings(shuffle="none"), 0
        )
        found += [(ordered.origin(i), ordered.document(i)) for i in range(len(ordered))]
    return found


def plan_of(path: Path, form: str = "lines", fragment_bytes: int = 2 << 20) -> SourcePlan:
    return plan_source(freeze("s", str(path), form, "text"), fragment_bytes, 16 << 20)


def described_straight(plan: SourcePlan) -> list[Any]:
    """The same of whole files, as an audit reads them."""
    found, stream = [], StreamSettings(shuffle="none")
    for part in read_files(plan):
        ordered = OrderedWindow(Window(number=0, last=False, parts=(part,)), plan, stream, 0)
        found += [ordered.described(i) for i in range(len(ordered))]
    return found
