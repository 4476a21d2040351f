"""A wrong `text_field` is known before the start, with the fields that the records have."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from orchestrator.data.first_records import check_first_records
from orchestrator.errors import ConfigError, DataError
from tests.data.making import job, spec_of

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
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, tiny_config, {f"a.{kind}": PRESS[kind](data)})
    assert str(caught.value) == (
        f"data.sources made: {tmp_path / f'a.{kind}'}: line 2: "
        "no field `text`; it has: content, meta. Set text_field"
    )


def test_a_field_that_holds_no_text_is_told(tmp_path: Path, tiny_config: Make) -> None:
    with pytest.raises(ConfigError, match=r"'text' is a JSON array, a string is expected.*Set text_field"):
        check(tmp_path, tiny_config, {"a.jsonl": jsonl({"text": [{"role": "user"}]})})


def test_a_record_without_the_field_among_others_is_the_streams_business(
    tmp_path: Path, tiny_config: Make
) -> None:
    check(
        tmp_path, tiny_config, {"a.jsonl": jsonl({"title": 1}, {"title": 2}), "b.jsonl": jsonl({"text": "x"})}
    )


def test_what_says_nothing_of_the_field_passes(tmp_path: Path, tiny_config: Make) -> None:
    check(tmp_path, tiny_config, {"a.jsonl": b"no json\n[1]\n" + jsonl({"text": None}), "b.jsonl": b""})
    (tmp_path / "lines").mkdir()
    check(tmp_path / "lines", tiny_config, {"a": jsonl({"content": "a"})}, "lines")


def test_of_many_fields_the_first_are_named(tmp_path: Path, tiny_config: Make) -> None:
    with pytest.raises(ConfigError, match=r"it has: k0, k1, .*, k11 and 28 more\. Set text_field"):
        check(tmp_path, tiny_config, {"a.jsonl": jsonl({f"k{i}": "x" for i in range(40)})})


def test_a_file_that_is_no_gzip_file_is_told(tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl({"text": "a"})))
    spec = spec_of(job(tiny_config, tmp_path, encoder="tokenizers"))
    (tmp_path / "a.jsonl.gz").write_bytes(b"no gzip file")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
        check_first_records(spec)
