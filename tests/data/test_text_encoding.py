"""A file of text in UTF-16 or UTF-32 stops by name, in every format and compression; one in UTF-8 is read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data.first_records import check_first_records
from orchestrator.data.sources.formats import format_of
from orchestrator.data.sources.readers import read_files, read_fragment
from orchestrator.data.sources.records.content import BadRecordError, Content
from orchestrator.data.sources.records.line_records import TEXT_ENCODING, other_encoding
from orchestrator.errors import ConfigError, DataError
from orchestrator.records.cursor import Cursor
from tests.data.making import job, spec_of
from tests.data.reading import planned, read_straight
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
ENCODINGS = ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
TEXTS = {
    "short": "hi",
    "lines": "a\nb\r\nc\n\n",
    "German": "Grüße für alle\n",
    "Russian": "Привет, мир — это «текст».\n",
    "capitals": "МОСКВА И ПОДМОСКОВЬЕ\n",
    "Hindi": "नमस्ते दुनिया यह एक\n",
    "Thai": "สวัสดีชาวโลก นี่คือ ข้อความ\n",
    "Arabic": "مرحبا بالعالم هذا نص\n",
    "JSON of Chinese": '{"text": "你好，世界。这是"}\n',
}
WRITERS: dict[str, Callable[[list[str]], str]] = {
    "jsonl": lambda texts: "".join(json.dumps({"text": text}) + "\n" for text in texts),
    "lines": lambda texts: "".join(text + "\n" for text in texts),
    "text": "\n".join,
    "csv": lambda texts: "text\n" + "".join(text + "\n" for text in texts),
    "tsv": lambda texts: "text\tn\n" + "".join(text + "\t1\n" for text in texts),
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def mark(encoding: str) -> bytes:
    return "\ufeff".encode(encoding)


# ------------------------------------------------------------------------------------------ by first bytes
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoding_shows_with_and_without_its_mark(encoding: str, name: str) -> None:
    for times in (1, 20, 500):
        data = (TEXTS[name] * times).encode(encoding)
        expected = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
        assert other_encoding(data) == expected
        assert other_encoding(mark(encoding) + data) == expected


@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_text_without_zero_bytes_is_utf_8(text: str) -> None:
    assert other_encoding(text.encode()) is None
    assert other_encoding(text.encode("utf-8-sig")) is None


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF), min_size=2, max_size=9)))
def test_texts_of_two_letters_or_more_with_zero_bytes_between_are_utf_8(texts: list[str]) -> None:
    assert other_encoding("\0".join(texts).encode()) is None


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"a\0", b"\0a", b"a\0b", b"\0" * 99, b"one\0" * 9, b"abc\0\0\0" * 9]
)
def test_zero_bytes_elsewhere_stay_text(data: bytes) -> None:
    assert other_encoding(data) is None


# ------------------------------------------------------------------------------------------ in every format
@pytest.mark.quick("jsonl-", "lines-.gz", "text-.zst", "csv-.bz2", "tsv-.xz", "text-", "jsonl-.zst")
@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("form", WRITERS)
def test_a_file_in_another_encoding_stops_with_its_name(
    form: str, suffix: str, tmp_path: Path, tiny_config: Make
) -> None:
    texts = [f"document {i} has words" for i in range(50)]
    for number, encoding in enumerate(ENCODINGS):
        for begin in (b"", mark(encoding)):
            folder = tmp_path / f"{number}{bool(begin)}"
            folder.mkdir()
            path = folder / f"a.{form}{suffix}"
            path.write_bytes(COMPRESSIONS[suffix](begin + WRITERS[form](texts).encode(encoding)))
            with raises(DataError, TEXT_ENCODING, path, encoding[:6].upper()):
                list(read_straight(planned(folder, form, Content())))
    with raises(ConfigError, TEXT_ENCODING):  # tokenizing libraries are compared on these documents first
        spec_of(job(tiny_config, folder, form))
    skipping = {"on_bad_document": "skip", "max_bad_share": 1.0, "encoder": "tokenizers"}
    spec = spec_of(job(tiny_config, folder, form, **skipping))
    with raises(ConfigError, TEXT_ENCODING) as refused:
        check_first_records(spec)
    assert refused.value.exit_code == 2
    with raises(DataError, TEXT_ENCODING):
        list(spec.chunks(Cursor()))
    path.write_bytes(COMPRESSIONS[suffix](b"\xef\xbb\xbf" + WRITERS[form](texts).encode()))
    check_first_records(spec_of(job(tiny_config, folder, form, **skipping)))


def test_every_part_of_a_large_file_stops(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(mark("utf-16-le") + ("你好，世界。" * 99 + "\n").encode("utf-16-le") * 9000)
    plan = planned(tmp_path, "lines", Content())
    assert plan.num_fragments > 2
    for fragment in range(plan.num_fragments):
        with raises(DataError, TEXT_ENCODING):
            list(read_fragment(plan, fragment))


def test_a_member_in_another_encoding_is_a_bad_record(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, data in enumerate((b"h\0e\0l\0l\0o\0", b"hello", "hello".encode("utf-16"))):
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    content = Content(text_field="txt")
    parse = format_of("webdataset").parser(content)
    (part,) = read_files(planned(tmp_path, "webdataset", content))
    wrong, right, marked = part.records
    assert parse(right) == "hello"
    for sample in (wrong, marked):
        with raises(BadRecordError, "record.not_utf8"):
            parse(sample)
