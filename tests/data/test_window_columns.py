"""Records whose texts are taken at once give the chunks of those that are added one by one, to the last
entry, and stop at the same record with the same words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources import windows
from orchestrator.data.sources.windows import WindowColumns
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens import chunk_writer, chunks
from orchestrator.errors import OrchestratorError
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import TokenChunk
from tests.conftest import TinyConfig
from tests.data.making import job, spec_of

# What may be among texts that are records as they are; the last three are bad.
LINES: list[bytes] = [
    *(json.dumps({"text": f"text number {i}: " + "some words of it " * (i + 3)}).encode() for i in range(5)),
    b'{"text": "the same key", "text": "\xe6\x97\xa5\xe6\x9c\xac twice over ' + b"x" * 40 + b'"}',
    json.dumps({"text": "with <|endoftext|> in it " * 4}).encode(),
    json.dumps({"text": "much longer than a piece is " * 20}).encode(),
    json.dumps({"text": "", "more": "x" * 70}).encode(),
    b"",
    b" \t ",
    json.dumps({"text": "a carriage return at its end " * 3}).encode() + b"\r",
    json.dumps({"text": None, "more": "x" * 60}).encode(),
    json.dumps({"body": "another field " * 6}).encode(),
    b"no JSON at all, for more than sixty-four bytes, so that the mean is not pulled down",
]
GOOD = len(LINES) - 3


def mixed(seed: int, num: int, kinds: int) -> list[bytes]:
    return [LINES[i] for i in np.random.default_rng(seed).integers(0, kinds, num).tolist()]


def write(folder: Path, form: str, records: list[bytes]) -> None:
    folder.mkdir()
    half = len(records) // 3
    for number, some in enumerate((records[:half], records[half:])):
        if form == "parquet":
            found = [None if b"null" in r else r.decode() for r in some]
            pq.write_table(pa.table({"text": found}), folder / f"{number}.parquet", row_group_size=150)
        else:
            data = b"\n".join(some) + b"\n" * number
            (folder / f"{number}.{form}").write_bytes(b"\xef\xbb\xbf" * number + data)


def columns(chunk: TokenChunk) -> dict[str, Any]:
    values = {name: getattr(chunk, name) for name in TokenChunk.__slots__}
    return {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in values.items()}


def outcome(spec: DataSpec, cursor: Cursor) -> Iterator[Any]:
    """The chunks, and how it ends."""
    try:
        for chunk in spec.chunks(cursor):
            yield columns(chunk)
    except OrchestratorError as error:
        yield str(error)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One record in seven is encoded twice, and a call of the encoder takes 50 entries at most."""
    monkeypatch.setattr(chunks, "CHECK_ONE_IN", 7)
    monkeypatch.setattr(chunk_writer, "_BATCH_ENTRIES", 50)
    monkeypatch.setattr(windows, "_RUN_RECORDS", 60)


@pytest.mark.quick("parquet-text-auto")
@pytest.mark.parametrize(
    ("form", "special", "encoder"),
    [
        ("jsonl", "text", "auto"),
        ("jsonl", "parse", "auto"),
        ("jsonl", "stop", "tokenizers"),
        ("lines", "text", "tokenizers"),
        ("parquet", "text", "auto"),
        ("parquet", "stop", "auto"),
    ],
)
@pytest.mark.usefixtures("few")
def test_runs_give_what_single_records_give(
    form: str,
    special: str,
    encoder: str,
    tmp_path: Path,
    tiny_config: TinyConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = list[int]()
    texts = windows.OrderedWindow.texts

    def counted(self: windows.OrderedWindow, *arguments: Any) -> Any:
        found = texts(self, *arguments)
        runs.append(0 if found is None else len(found))
        return found

    for seed, kinds in enumerate((5, GOOD, len(LINES))):
        folder = tmp_path / str(seed)
        write(folder, form, mixed(seed, 700, kinds))
        strict = seed == 2 and special != "text"
        bad = {"on_bad_document": "stop" if strict else "skip", "max_bad_share": 1.0, "encoder": encoder}
        made = job(
            tiny_config,
            folder,
            form,
            fragment_bytes=20_000,
            window_bytes=40_000,
            special_tokens_in_text=special,
            **bad,
        )
        spec = spec_of(made)
        begins = [Cursor()]
        for at in ((0, 0, 0, 100, 0), (0, 0, 0, 3, 0), (0, 1, 0, 5, 0)):
            names = ("epoch", "block", "window", "record", "piece")
            begins.append(Cursor(sources={"made": SourceCursor(**dict(zip(names, at, strict=True)))}))
        for begin in begins:
            with monkeypatch.context() as patch:
                patch.setattr(windows.OrderedWindow, "texts", counted)
                found = list(outcome(spec, begin))
            with monkeypatch.context() as patch:
                patch.setattr(windows, "columns_of", lambda parts: None)
                expected = list(outcome(spec, begin))
            assert found == expected
            assert len(found) > (0 if begin.sources or strict or special == "stop" else 5)
    assert max(runs) == 60


@pytest.mark.usefixtures("few")
def test_a_place_or_a_sample_that_is_off_by_one_is_found_out(
    tmp_path: Path, tiny_config: TinyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the comparison above is worth."""
    write(tmp_path / "a", "jsonl", mixed(1, 700, 5))
    spec = spec_of(job(tiny_config, tmp_path / "a", fragment_bytes=20_000, window_bytes=40_000))
    whole, lie_at = list(outcome(spec, Cursor())), WindowColumns.lie_at
    records = WindowColumns.records

    def late(self: WindowColumns, numbers: Any, one_in: int) -> Any:
        files, places, sizes, sampled = lie_at(self, numbers, one_in)
        return files, places + 1, sizes, sampled

    def swapped(self: WindowColumns, numbers: Any) -> Any:
        return records(self, numbers)[::-1]

    for name, wrong in (("lie_at", late), ("records", swapped)):
        with monkeypatch.context() as patch:
            patch.setattr(WindowColumns, name, wrong)
            assert list(outcome(spec, Cursor())) != whole


def test_windows_of_short_records_or_of_many_files_have_no_columns(
    tmp_path: Path, tiny_config: TinyConfig
) -> None:
    for name, records in (("short", [b'{"text":"abc"}'] * 400), ("long", mixed(1, 400, 5))):
        write(tmp_path / name, "jsonl", records)
        spec = spec_of(job(tiny_config, tmp_path / name, fragment_bytes=1 << 20, window_bytes=1 << 20))
        (window,) = windows.read_windows(spec.plans[0], StreamSettings(), 0, 0)
        ordered = windows.OrderedWindow(window, spec.plans[0], StreamSettings(), 0)
        assert (ordered.texts(0, 1 << 20, 1000) is None) == (name == "short")
