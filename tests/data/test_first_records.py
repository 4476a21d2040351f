"""A wrong `text_field` is known before the start, with the fields that the records have."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orchestrator.data.first_records import check_first_records
from orchestrator.errors import ConfigError, DataError
from tests.data.making import job, spec_of
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
PRESS: dict[str, Callable[[bytes], bytes]] = {
    "jsonl": lambda data: data,
    "jsonl.gz": gzip.compress,
    "jsonl.zst": zstandard.ZstdCompressor().compress,
}


def jsonl(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def check(folder: Path, make: Make, files: dict[str, bytes], kind: str = "jsonl") -> None:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    check_first_records(spec_of(job(make, folder, kind, encoder="tokenizers")))


@pytest.mark.parametrize("kind", PRESS)
def test_a_wrong_text_field_is_told_with_the_fields_that_are_there(
    kind: str, tmp_path: Path, tiny_config: Make
) -> None:
    data = b"\xef\xbb\xbf\n" + jsonl({"content": "a", "meta": 1}) + jsonl({"content": "b"}) * 5000
    place = f"data.sources made: {tmp_path / f'a.{kind}'}: line 2: "
    with raises(ConfigError, "data.missing_field", place, "`text`", "content, meta", "Set text_field"):
        check(tmp_path, tiny_config, {f"a.{kind}": PRESS[kind](data)})


def test_a_field_that_holds_no_text_is_told(tmp_path: Path, tiny_config: Make) -> None:
    with raises(ConfigError, "data.field_type", "'text'", "a JSON array", "a string", "Set text_field"):
        check(tmp_path, tiny_config, {"a.jsonl": jsonl({"text": [{"role": "user"}]})})


def test_a_record_without_the_field_among_others_is_the_streams_business(
    tmp_path: Path, tiny_config: Make
) -> None:
    check(
        tmp_path, tiny_config, {"a.jsonl": jsonl({"title": 1}, {"title": 2}), "b.jsonl": jsonl({"text": "x"})}
    )


def test_bad_records_among_others_are_the_streams_business(tmp_path: Path, tiny_config: Make) -> None:
    bad = b"no json\n[1]\n" + jsonl({"text": None})
    check(tmp_path, tiny_config, {"a.jsonl": bad, "b.jsonl": b"", "c.jsonl": jsonl({"text": ""})})
    (tmp_path / "lines").mkdir()
    check(tmp_path / "lines", tiny_config, {"a": jsonl({"content": "a"}), "b": b"gr\xfc\n"}, "lines")


@pytest.mark.parametrize("on_bad_document", ["stop", "skip"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [("jsonl", "not JSON: "), ("text", "not UTF-8: "), ("lines", "not UTF-8: ")],
)
def test_parquet_files_under_another_format_are_told_before_the_start(
    kind: str, reason: str, on_bad_document: str, tmp_path: Path, tiny_config: Make
) -> None:
    column = [f"document {i}\n" + "ü" * 6000 for i in range(120)]  # more than a MiB
    pq.write_table(pa.table({"text": column}), tmp_path / "p.parquet", compression="none")
    if kind == "lines":  # some of a Parquet file's may be UTF-8, by chance
        (tmp_path / "p.parquet").write_bytes(b"gr\xfc\n\n" * 100)
    config = job(
        tiny_config, tmp_path / "p.parquet", kind, encoder="tokenizers", on_bad_document=on_bad_document
    )
    place = f"data.sources made: {tmp_path / 'p.parquet'}: line 1: {reason}"
    with raises(ConfigError, "data.wrong_format", place, f"data.sources[].format={kind}") as caught:
        check_first_records(spec_of(config))
    assert caught.value.exit_code == 2


def test_a_source_of_which_nothing_was_looked_at_is_not_judged(tmp_path: Path, tiny_config: Make) -> None:
    check(tmp_path, tiny_config, {"a.jsonl": b"x" * (1 << 20) + b"y\n" + jsonl({"text": "a"})})
    (tmp_path / "text").mkdir()
    check(tmp_path / "text", tiny_config, {"a": b"x\nx" + "ü".encode() * (1 << 19) + b"\xfc"}, "text")


def test_files_that_are_no_parquet_files_are_a_wrong_configuration(tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl({"text": "a"}) * 100)
    values = tmp_path / "a.jsonl", b'{"te', "data.sources[].format=parquet"
    with raises(ConfigError, "data.wrong_format", *values):
        spec_of(job(tiny_config, tmp_path / "a.jsonl", "parquet", encoder="tokenizers"))


def test_of_many_fields_the_first_are_named(tmp_path: Path, tiny_config: Make) -> None:
    with raises(ConfigError, "data.missing_field", "k0, k1, ", ", k11 and 28 more", "Set text_field"):
        check(tmp_path, tiny_config, {"a.jsonl": jsonl({f"k{i}": "x" for i in range(40)})})


def test_a_file_that_is_no_gzip_file_is_told(tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl({"text": "a"})))
    spec = spec_of(job(tiny_config, tmp_path, encoder="tokenizers"))
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip file")
    with raises(DataError, "data.damaged_file", "a.jsonl.gz"):
        check_first_records(spec)
