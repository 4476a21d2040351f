"""Bad documents: named with file, byte offset, line and reason, or counted the same every time."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.packing.samples import open_samples
from orchestrator.data.sources.access.input_file import LocalFile
from orchestrator.data.sources.records import line_records
from orchestrator.errors import BadDocumentError, DataError
from orchestrator.records.cursor import Cursor
from tests.data.making import job, samples, spec_of
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
GOOD = b'{"text": "a good document"}\n'
BAD_LINES = {
    "cut": (b'{"text": "a', "record.not_json", ("unexpected end of data",)),
    "no json": (b"text", "record.not_json", ()),
    "two values": (b'{"text": "a"} {"text": "b"}', "record.not_json", ()),
    "nan": (b'{"text": "a", "x": NaN}', "record.not_json", ("NaN",)),
    "control character": (b'{"text": "a\x01b"}', "record.not_json", ()),
    "latin-1": (b'{"text": "gr\xfc\xdfe"}', "record.not_json", ()),
    "lone surrogate": (rb'{"text": "\ud800"}', "record.not_json", ()),
    "utf-16": ('{"text": "a"}'.encode("utf-16-le"), "record.not_json", ("UTF-16",)),
    "array": (b'["text"]', "record.json_array_file", (" array, ",)),
    "string": (b'"text"', "record.not_object", (" string, ",)),
    "null itself": (b"null", "record.not_object", (" null, ",)),
    "no field": (
        b'{"txt": "a", "n": 1}',
        "record.missing_field",
        ("`text`", ": txt, n; ", "; set text_field or "),
    ),
    "null": (b'{"text": null}', "record.null_field", ("'text'",)),
    "number": (
        b'{"text": 7}',
        "record.field_type",
        ("'text'", " number, ", ": text; ", "; set text_field or "),
    ),
    "boolean": (b'{"text": true}', "record.field_type", ("'text'", " boolean, ")),
    "object": (b'{"text": {"text": "a"}}', "record.field_type", ("'text'", " object, ")),
    "second of two": (b'{"text": "a", "text": null}', "record.null_field", ("'text'",)),
    "a later byte order mark": (b'\xef\xbb\xbf{"text": "a"}', "record.not_json", ()),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_document_stops_with_its_place_and_reason(case: str, tmp_path: Path, tiny_config: Make) -> None:
    line, code, values = BAD_LINES[case]
    (tmp_path / "a.jsonl").write_bytes(GOOD * 50 + b"\n" + line + b"\n" + GOOD * 50)
    config = job(tiny_config, tmp_path / "a.jsonl", encoder="tokenizers")
    place = f"{tmp_path / 'a.jsonl'}: byte {50 * len(GOOD) + 1}, line 52: "
    with raises(BadDocumentError, "data.bad_document", *values) as caught:
        samples(spec_of(config), 64)
    assert caught.value.reason_code == code
    assert str(caught.value).startswith(place)
    advice = str(caught.value)[len(place) :]
    assert "data.on_bad_document=skip in a new run (another run.name; a run keeps" in advice
    assert advice.endswith("at the same length, and continue with resume.accept_changed=true")


def test_the_advice_for_a_bad_document_can_be_followed(tmp_path: Path, tiny_config: Make) -> None:
    bad = b'{"text": "bad", }'
    (tmp_path / "a.jsonl").write_bytes(GOOD * 20 + bad + b"\n" + GOOD * 20)
    config = job(tiny_config, tmp_path / "a.jsonl", encoder="tokenizers")
    folder = tmp_path / "run"
    with pytest.raises(BadDocumentError):
        samples(spec_of(config, folder=folder), 8)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 20 + b'{"text": "bad" } \n'[: len(bad)] + b"\n" + GOOD * 20)
    accepting = config.model_copy(
        update={"resume": config.resume.model_copy(update={"accept_changed": True})}
    )
    found = samples(spec_of(accepting, folder=folder), 8)
    assert found, "the stream goes over the mended document"


def test_other_formats_name_bad_documents_too(tmp_path: Path, tiny_config: Make) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a").write_bytes(b"good\n" * 3 + b"gr\xfc\n")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a").write_bytes(b"gr\xfc")
    (tmp_path / "parquet").mkdir()
    column = pa.array([b"good", None, b"gr\xfc"], pa.binary())
    pq.write_table(pa.table({"text": column}), tmp_path / "parquet" / "a.parquet", row_group_size=2)
    expected = {
        "lines": ("record.not_utf8", "a: byte 15, line 4: ", " byte 2 "),
        "text": ("record.not_utf8", "a: byte 0, line 1: "),
        "parquet": ("record.null_field", "a.parquet: row 1: ", "'text'"),
    }
    for kind, (code, *values) in expected.items():
        config = job(tiny_config, tmp_path / kind, kind, shuffle="none", encoder="tokenizers")
        with raises(BadDocumentError, "data.bad_document", *values) as caught:
            samples(spec_of(config), 64)
        assert caught.value.reason_code == code
    skipping = job(tiny_config, tmp_path / "parquet", "parquet", on_bad_document="skip", max_bad_share=1.0)
    reasons = [r for chunk in spec_of(skipping).chunks(Cursor()) for r in chunk.bad_reasons]
    assert sorted(r.partition("a.parquet: ")[2] for r in reasons) == [
        "row 1: 'text' is null",
        "row 2: not UTF-8: invalid start byte at byte 2 of the record",
    ]


def test_the_advice_fits_what_the_source_is(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advice(path: str, kind: str, **data: Any) -> str:
        config = job(tiny_config, Path(path), kind, encoder="tokenizers", **data)
        with pytest.raises(BadDocumentError) as caught:
            samples(spec_of(config), 64)
        return str(caught.value).partition("; set ")[2]

    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        "from orchestrator import BadDocument\n\n\ndef texts():\n    return ['good words ' * 9] * 9 + [7]\n"
    )
    code += "\n\ndef refuse(document, seed):\n    raise BadDocument('no')\n"
    (tmp_path / "advised.py").write_text(code)
    good = [{"text": "good words"}] * 9
    pq.write_table(pa.table({"text": ["good", None]}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(GOOD + b"bad\n"))
    (tmp_path / "b.jsonl").write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in good))
    new_run = "in a new run (another run.name; a run keeps its own), or fix the document"
    go_on = ", and continue with resume.accept_changed=true"
    skip = f"data.on_bad_document=skip {new_run}"
    assert advice("advised:texts", "python") == (
        f"{skip} in what advised:texts returns, as many records as before{go_on}"
    )
    assert advice(str(tmp_path / "a.parquet"), "parquet") == (
        f"{skip} and keep the rows and row groups of its file{go_on}"
    )
    assert advice(str(tmp_path / "a.jsonl.gz"), "jsonl") == f"{skip} in a file of no more bytes{go_on}"
    assert advice(str(tmp_path / "b.jsonl"), "jsonl", transforms=["advised:refuse"]) == (
        "data.on_bad_document=skip, or let the transform drop it (return None), "
        f"{new_run} at the same length{go_on}"
    )


def test_an_invalid_string_column_of_parquet_is_a_bad_document_not_a_crash(
    tmp_path: Path, tiny_config: Make
) -> None:
    raw = pa.array([b"good", b"\xff\xfe"], pa.binary())
    strings = pa.StringArray.from_buffers(2, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": strings}), tmp_path / "a.parquet")
    with raises(BadDocumentError, "data.bad_document", "row 1: ") as caught:
        samples(spec_of(job(tiny_config, tmp_path, "parquet", encoder="tokenizers")), 64)
    assert caught.value.reason_code == "record.not_utf8"


def count_bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each reading for the sake of a line's number."""
    counted = []

    class Counting(LocalFile):
        def read_at(self, offset: int, num_bytes: int) -> bytes:
            counted.append(num_bytes)
            return super().read_at(offset, num_bytes)

    def opened(base: str, path: str) -> Counting:
        return Counting(os.path.join(base, path))

    monkeypatch.setattr(line_records, "open_input", opened)
    return counted


def test_lines_are_counted_once_however_many_documents_are_bad(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 80_000
    lines = [GOOD if i % 2 else b"bad %d\n" % i for i in range(size // len(GOOD))]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    config = job(tiny_config, tmp_path, on_bad_document="skip", max_bad_share=1.0, encoder="tokenizers")
    spec = spec_of(config)
    counted = count_bytes_read(monkeypatch)
    reasons = [r for chunk in spec.chunks(Cursor()) for r in chunk.bad_reasons]
    found = {int(r.partition("line ")[2].partition(":")[0]) for r in reasons}
    assert found == set(range(1, len(lines) + 1, 2)), "every line is named by its number"
    assert spec.plans[0].num_fragments > 50
    assert sum(counted) < 3 * size, "newlines were counted from the file's begin for every bad document"


def test_a_line_far_behind_in_a_file_is_counted_in_stretches(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a line\n" * 1000)
    numbers = line_records.LineNumbers(str(tmp_path), "a")
    assert numbers.newlines_before(6999, limit_bytes=4000) is None
    assert numbers.newlines_before(6999, limit_bytes=4000) == 999
    assert numbers.newlines_before(6999, limit_bytes=0) == 999
    assert numbers.newlines_before(3500, limit_bytes=4000) == 500
    assert numbers.newlines_before(0) == 0


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    """Good documents with every kind of bad one between them, in two files."""
    lines = [line for line, _, _ in BAD_LINES.values() if b"\n" not in line]
    for name in ("a.jsonl", "b.jsonl"):
        parts = [
            GOOD.replace(b"good", b"good %d" % i) * (i % 4 + 1) + line + b"\n" for i, line in enumerate(lines)
        ]
        (tmp_path / name).write_bytes(b"".join(parts))
    return tmp_path


def test_skipped_documents_are_counted_the_same_from_every_cursor(spoiled: Path, tiny_config: Make) -> None:
    config = job(tiny_config, spoiled, on_bad_document="skip", max_bad_share=0.9, num_epochs=2)
    spec = spec_of(config)
    whole = samples(spec, 8)
    for at in range(0, len(whole), 5):
        rest = list(open_samples(spec, whole[at].cursor, 8))
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]
    one = samples(spec_of(job(tiny_config, spoiled, on_bad_document="skip", max_bad_share=0.9)), 8)
    more = list(open_samples(spec, one[-1].cursor, 8))
    last = whole[-1].cursor.sources["made"]
    # what follows the very last token is not passed, and another seq_len border changes no count
    assert more[-1].cursor.sources["made"] == last
    reasons = [r for chunk in spec.chunks(Cursor()) for r in chunk.bad_reasons]
    assert len(reasons) == 2 * 2 * len(BAD_LINES)
    assert 0 <= len(reasons) - last.bad_documents <= 4


def test_more_bad_documents_than_allowed_stop_the_run(spoiled: Path, tiny_config: Make) -> None:
    config = job(tiny_config, spoiled, on_bad_document="skip")
    with raises(DataError, "data.too_many_bad", "data.max_bad_share=0.01"):
        samples(spec_of(config), 8)


def test_what_comes_before_and_after_a_skipped_document_is_unmoved(tmp_path: Path, tiny_config: Make) -> None:
    texts = [b'{"text": "document %d"}\n' % i for i in range(60)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    spoiled = [b"{" + b"x" * (len(t) - 2) + b"\n" if i == 20 else t for i, t in enumerate(texts)]
    for name, lines in (("a", texts), ("b", spoiled)):
        (tmp_path / name / "p.jsonl").write_bytes(b"".join(lines))
    found = []
    for name in ("a", "b"):
        spec = spec_of(job(tiny_config, tmp_path / name, on_bad_document="skip", max_bad_share=1.0))
        eos = spec.settings.eos_id
        tokens = [t for chunk in spec.chunks(Cursor()) for t in chunk.tokens.tolist()]
        ends = [i for i, token in enumerate(tokens) if token == eos]
        found.append([tuple(tokens[a + 1 : b]) for a, b in zip([-1, *ends], ends, strict=False)])
    whole, without = found
    assert len(whole) == 60
    assert len(set(whole) - set(without)) == 1
    assert [document for document in whole if document in without] == without


@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_lines_asked_for_in_any_order_cost_little_more_than_one_reading(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, num = 1 << 19, 200
    (tmp_path / "a").write_bytes(b"x\n" * (size // 2))
    counted = count_bytes_read(monkeypatch)
    monkeypatch.setattr(line_records, "READ_BYTES", 64)
    monkeypatch.setattr(line_records, "_NOTE_EVERY_BYTES", 1 << 10)
    places = list(range(0, size, size // num))
    if order == "random":
        random.Random(1).shuffle(places)
    numbers = line_records.LineNumbers(str(tmp_path), "a")
    for place in reversed(places) if order == "descending" else places:
        assert numbers.newlines_before(place) == place // 2
    assert sum(counted) <= size + num * (1 << 10)
