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
from orchestrator.data.sources.lists.fragments import plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed, from_parquet, to_parquet
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.records.content import BadRecordError, Content
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError, RefusedError
from orchestrator.launch.start import run_preparation
from orchestrator.storage.files import Storage
from tests.conftest import TinyConfig
from tests.data.making import plain as as_lists
from tests.data.making import samples
from tests.launch.runner import Runner
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


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("    cut = Cut.RANGES\n", "cut is"),
        ('    suffixes = [".x"]\n', "write a tuple"),
    ],
)
def test_attributes_that_a_format_cannot_have_are_refused_when_it_is_loaded(
    module: Path, body: str, value: str
) -> None:
    module.write_text(
        "from orchestrator import RecordFormat\nfrom orchestrator.data.sources.formats import Cut\n\n\n"
        f"class Odd(RecordFormat):\n{body}\n    def records(self, file):\n        yield {{}}\n"
    )
    with raises(ConfigError, "user_code.import_failed", value):
        format_of("own_format:Odd")


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("yield {'text': 'a'}; open('/not/there')", ("after record 1", "FileNotFoundError", "/not/there")),
        ("raise EOFError('mine'); yield", ("after record 0", "EOFError: mine")),
        ("yield {'text': 'a'}; file.seek(0)", ("after record 1", "not seekable")),
        ("raise SystemExit(3); yield", ("SystemExit",)),
        ("return None", ("must yield the records",)),
        ("raise BadDocument('no'); yield", ("; yield BadDocument",)),
    ],
)
def test_a_fault_of_the_class_is_not_taken_for_one_of_the_file(
    module: Path, tmp_path: Path, body: str, values: tuple[str, ...]
) -> None:
    module.write_text(
        "from orchestrator import BadDocument, RecordFormat\n\n\n"
        f"class Odd(RecordFormat):\n    def records(self, file):\n        {body}\n"
    )
    (tmp_path / "a.records").write_bytes(b"x")
    with raises(DataError, "user_code.format_failed", "a.records", *values):
        read_all(tmp_path / "a.records", "own_format:Odd")


def test_a_cut_off_file_is_a_fault_of_the_file(module: Path, tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(5000))
    (tmp_path / "a.records.gz").write_bytes(gzip.compress(lines)[:-20])
    with raises(DataError, "data.damaged_file", "a.records.gz"):
        read_all(tmp_path / "a.records.gz", NAME)


@pytest.mark.parametrize("value", ["float('nan')", "{1}", "{2: 3}", "object()", "'\\udcff'"])
def test_values_that_json_does_not_have_make_a_record_bad(module: Path, tmp_path: Path, value: str) -> None:
    module.write_text(
        "from orchestrator import RecordFormat\n\n\n"
        "class Odd(RecordFormat):\n"
        f"    def records(self, file):\n        yield {{'text': 'a', 'more': {value}}}\n"
    )
    (tmp_path / "a.records").write_bytes(b"x")
    if value == "{2: 3}":
        read_all(tmp_path / "a.records", "own_format:Odd")  # json makes texts of inner names
        return
    with raises(BadRecordError, "record.value_type"):
        read_all(tmp_path / "a.records", "own_format:Odd")


def read_all(path: Path, name: str) -> list[object]:
    """Every document of a file, as the tokenizers read it."""
    content = Content()
    manifest = freeze_listed("own", list_files("own", str(path), name), name, content)
    parse = manifest.form.parser(content)
    plan = plan_source(manifest, 1 << 20, 1 << 20)
    return [parse(record) for part in read_files(plan) for record in part.records]


def test_sources_with_code_are_planned_anew_in_another_process(
    module: Path, tmp_path: Path, tiny_config: TinyConfig
) -> None:
    write_records(tmp_path)
    source = {"name": "own", "path": str(tmp_path / "own"), "format": NAME}
    runner = Runner(tiny_config({"data.sources": [source], "train.max_steps": 1000}))
    runner.launch()
    with (tmp_path / "own" / "0.records").open("ab") as file:
        file.write(b'{"text": "one more"}\n')
    anew = {"resume": {"restart_sources": ["own"]}}
    plan = runner.plan(**anew)
    assert plan.action == "resume"
    assert not (runner.folder / "manifest" / "own@1.parquet").exists()
    runner.launch(**anew)
    assert [path.name for path in (runner.folder / "manifest").glob("own@*")]
