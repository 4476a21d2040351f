"""Formats outside of the package: a class by its name or by an entry point gives the stream that the same
records give in `jsonl`, its code is part of the run, and no process that only reads runs imports it.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.code_process import names_code
from orchestrator.data.common.user_code import reading_only
from orchestrator.data.sources import formats
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed, from_parquet, to_parquet
from orchestrator.data.sources.records.content import Content
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError, RefusedError
from orchestrator.launch.start import run_preparation
from orchestrator.storage.files import Storage
from tests.conftest import TinyConfig
from tests.data.making import plain as as_lists
from tests.data.making import samples
from tests.raising import raises

MODULE = '''
import json
import os

from orchestrator import BadDocument, RecordFormat

with open(os.path.join(os.path.dirname(__file__), "imported"), "a") as file:
    print(os.getpid(), file=file)


class Lines(RecordFormat):
    suffixes = (".records", ".records.gz")

    def records(self, file):
        for line in file:
            if line.startswith(b"?"):
                yield BadDocument("a question")
            elif line.startswith(b"!"):
                raise ValueError("what is this?")
            else:
                yield json.loads(line)


class Indexed(Lines):
    has_index = True


class NeedsMore(Lines):
    def __init__(self, size):
        pass


no_format = dict
'''
NAME = "own_format:Lines"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module, in the current folder, and imported by nobody yet."""
    path = tmp_path / "own_format.py"
    path.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    formats._formats.clear()
    formats.recorded_format.cache_clear()
    yield path
    sys.modules.pop("own_format", None)


def write_records(folder: Path, num: int = 60) -> list[dict[str, Any]]:
    """The same records as `.records`, compressed too, and as `.jsonl`."""
    records = [{"text": f"document {number} " * (1 + number % 7)} for number in range(num)]
    lines = [json.dumps(record) + "\n" for record in records]
    for name in ("own", "plain"):
        (folder / name).mkdir()
    for part, some in enumerate((lines[: num // 2], lines[num // 2 :])):
        text = "".join(some).encode()
        own = folder / "own" / (f"{part}.records.gz" if part else f"{part}.records")
        own.write_bytes(gzip.compress(text) if part else text)
        (folder / "plain" / f"{part}.jsonl").write_bytes(text)
    return records


def job_of(tiny_config: TinyConfig, path: Path, form: str, **data: Any) -> Any:
    source = {"name": "own", "path": str(path), "format": form}
    return parse_config(tiny_config({"data.sources": [source], "data.shuffle": "none", **data}))


def prepared(job: Any) -> Any:
    return run_preparation.prepare(job, Storage(job.run.storage), freeze=False)


def test_the_stream_is_that_of_the_same_records_in_another_format(
    module: Path, tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_records(tmp_path)
    own = prepared(job_of(tiny_config, tmp_path / "own", NAME))
    plain = prepared(job_of(tiny_config, tmp_path / "plain", "jsonl"))
    first, second = (as_lists(samples(spec, 64)) for spec in (own, plain))
    assert first == second
    assert len(first) > 10


def test_the_modules_code_is_imported_by_another_process_and_is_part_of_the_run(
    module: Path, tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_records(tmp_path)
    job = job_of(tiny_config, tmp_path / "own", NAME)
    assert names_code(job)
    spec = prepared(job)
    importers = (tmp_path / "imported").read_text().split()
    assert importers
    assert str(os.getpid()) not in importers
    (plan,) = spec.plans
    assert plan.num_blocks > 0, "what a plan needs of the format is in the list"
    assert spec.identity().transforms.keys() == {NAME}
    module.write_text(MODULE + "\nVERSION = 2\n")
    assert prepared(job).identity().transforms[NAME] != spec.identity().transforms[NAME]
    with raises(DataIdentityError, "resume.changed_format", NAME, "VERSION 2"):
        list(samples(spec, 64))


def test_a_list_of_files_remembers_the_format_and_its_code(module: Path, tmp_path: Path) -> None:
    write_records(tmp_path)
    listing = list_files("own", str(tmp_path / "own"), NAME)
    assert [name.rpartition("/")[2] for name in listing.names] == ["0.records", "1.records.gz"]
    manifest = freeze_listed("own", listing, NAME, Content())
    again = from_parquet(to_parquet(manifest), "own.parquet")
    assert again == manifest
    assert again.user_format is not None
    with reading_only():
        assert (again.cut, again.unit) == (formats.Cut.STREAM, "record")
        formats.recorded_format.cache_clear()
        with raises(RefusedError, "user_code.reading_only", NAME):
            _ = again.form


def test_bad_records_and_failing_formats_are_named_with_their_file(
    module: Path, tmp_path: Path, tiny_config: TinyConfig
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    file = folder / "a.records"
    file.write_bytes(b'{"text": "one"}\n? or not\n{"text": "two"}\n')
    job = job_of(tiny_config, folder, NAME)
    with raises(BadDocumentError, "data.bad_document", "a.records: record 1", "a question"):
        list(samples(run_preparation.prepare(job, Storage(job.run.storage), freeze=False), 64))
    skip = {"data.on_bad_document": "skip", "data.max_bad_share": 0.9}
    skipping = job_of(tiny_config, folder, NAME, **skip)
    list(samples(prepared(skipping), 64))
    file.write_bytes(b'{"text": "one"}\n! no\n')
    with raises(DataError, "user_code.format_failed", "a.records", "ValueError: what is this?"):
        list(samples(prepared(skipping), 64))


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("own_format:Missing", "user_code.missing_function", "Missing"),
        ("no_such_module:Lines", "user_code.missing_module", "no_such_module"),
        ("own_format:no_format", "user_code.no_format", "a dict"),
        ("own_format:Indexed", "user_code.no_format", "has_index is True"),
        ("own_format:NeedsMore", "user_code.format_failed", "without arguments"),
    ],
)
def test_what_is_no_format_is_refused_by_name(module: Path, name: str, code: str, value: str) -> None:
    with raises(ConfigError, code, name, value):
        format_of(name)


def test_a_package_adds_a_format_by_an_entry_point(
    module: Path, tmp_path: Path, tiny_config: TinyConfig
) -> None:
    records = write_records(tmp_path)
    with raises(ConfigError, "config.invalid_value", "blocks", "jsonl"):
        job_of(tiny_config, tmp_path / "own", "blocks")
    about = tmp_path / "own_format-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-format\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[orchestrator.formats]\nblocks = {NAME}\n")
    spec = prepared(job_of(tiny_config, tmp_path / "own", "blocks"))
    assert spec.plans[0].manifest.format == "blocks"
    assert list(samples(spec, 64))
    assert len(records) == 60
