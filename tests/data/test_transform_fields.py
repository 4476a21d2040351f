"""Fields of a record beside its document, for its transforms: the same values from every format, in each
window and from each cursor, and what is said of a field that is not there.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from blake3 import blake3

from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.dataset import prepare_data
from orchestrator.data.first_records import check_first_records
from orchestrator.data.sources.formats import arrow
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Conversation,
    Described,
    Prompted,
)
from orchestrator.data.sources.records.plain_values import plain
from orchestrator.data.sources.windows import OrderedWindow, Window, read_windows
from orchestrator.errors import ConfigError, DataError
from orchestrator.json_form import decode, encode
from orchestrator.planning.resume.identity import compare
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from tests.data import format_writers, reference
from tests.data.format_writers import Record, write_files
from tests.data.made_transforms import some_records
from tests.data.making import plain as as_lists
from tests.data.making import samples, spec_of
from tests.data.reading import described_straight, planned
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
HERE = "tests.data.made_transforms"
NESTED = ("jsonl", "cbor", "parquet", "arrow", "hf_dataset", "mds")
SIZES = [(60, 100), (900, 2500), (1 << 20, 1 << 20)]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_UNIT_BYTES", 500)


def content_of(*fields: str, **more: Any) -> Content:
    return Content(transform_fields=fields, **more)


def described(plan: SourcePlan, window_bytes: int) -> list[Any]:
    """What every record is, in the files' order."""
    found, stream = [], StreamSettings(window_bytes=window_bytes, shuffle="none")
    for position in range(plan.num_blocks):
        for window in read_windows(plan, stream, 0, position):
            ordered = OrderedWindow(window, plan, stream, 0)
            sizes = [ordered.size(i) for i in range(len(ordered))]
            assert len(sizes) == 1 or sum(sizes) <= window_bytes
            found += [ordered.described(i) for i in range(len(ordered))]
            for each, i in zip(found[len(found) - len(ordered) :], range(len(ordered)), strict=True):
                assert ordered.document(i) == each.document, (
                    "who does not transform it sees the document alone"
                )
    return found


def of(records: Sequence[Record], *names: str) -> list[Described]:
    """What is expected, by the test's own words."""
    found = []
    for record in records:
        flat = {**record, **{f"meta.{name}": value for name, value in record["meta"].items()}}
        found.append(Described(document=record["text"], fields={name: flat.get(name) for name in names}))
    return found


@pytest.mark.quick(
    "jsonl-sizes2",
    "cbor-sizes0",
    "arrow-sizes1",
    "mds-sizes0",
    "parquet-sizes0",
    "hf_dataset-sizes0",
)
# ---------------------------------------------------------------------------------------- formats
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("form", NESTED)
def test_fields_come_with_their_own_document_whatever_is_cut_where(
    form: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    records, names = some_records(40), ("meta.lang", "score", "tags", "meta")
    write_files(tmp_path, form, [records[:25], records[25:26], records[26:]])
    plan = planned(tmp_path, form, content_of(*names), sizes)
    assert described(plan, sizes[1]) == described_straight(plan) == of(records, *names)


@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_a_field_of_separated_values_is_a_text(form: str, tmp_path: Path) -> None:
    flat = [{"text": f"text {i}", "score": str(i), "meta.lang": "" if i % 2 else "en"} for i in range(20)]
    write_files(tmp_path, form, [flat[:5], flat[5:]])
    plan = planned(tmp_path, form, content_of("meta.lang", "score"), (100, 200))
    wanted = [
        Described(document=r["text"], fields={"meta.lang": r["meta.lang"], "score": r["score"]}) for r in flat
    ]
    assert described(plan, 200) == described_straight(plan) == wanted


def test_a_field_of_a_webdataset_is_a_member_or_a_way_into_one(tmp_path: Path) -> None:
    records = [{"text": f"text {i}", "cls": str(i), "meta": {"score": i / 4}} for i in range(20)]
    write_files(tmp_path, "webdataset", [records])
    names = ("cls", "json.meta.score", "json.cls", "json", "gone", "json.gone.too")
    found = described(planned(tmp_path, "webdataset", content_of(*names)), 1 << 20)
    for record, each in zip(records, found, strict=True):
        beside = {"json": json.dumps(record), "gone": None, "json.gone.too": None}
        wanted = {
            "cls": record["cls"],
            "json.meta.score": record["meta"]["score"],
            "json.cls": record["cls"],
        }
        assert each == Described(document=record["text"], fields={**wanted, **beside})


@pytest.mark.parametrize("form", ["jsonl", "parquet", "cbor", "mds"])
def test_chats_and_prompts_have_them_too(form: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    records = [
        {"messages": turns, "prompt": "p", "completion": f"c{i}", "score": i, "meta": {"lang": None}}
        for i in range(3)
    ]
    write_files(tmp_path, form, [records])
    plan = planned(tmp_path, form, content_of("score", "meta.lang", kind="chat"))
    chat = Conversation(messages=tuple(turns))
    assert described_straight(plan) == [
        Described(document=chat, fields={"score": i, "meta.lang": None}) for i in range(3)
    ]
    plan = planned(tmp_path, form, content_of("score", "meta", kind="prompt"))
    assert described_straight(plan) == [
        Described(
            document=Prompted(prompt="p", completion=f"c{i}"), fields={"score": i, "meta": {"lang": None}}
        )
        for i in range(3)
    ]


AT = datetime(2026, 7, 1, 12, 30, 15, 250_000)
TYPED: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("booleans", pa.bool_(), [True, None], [True, None]),
    ("bytes as numbers", pa.uint8(), [255, 0], [255, 0]),
    ("large numbers", pa.int64(), [2**62 + 1, -5], [2**62 + 1, -5]),
    ("floats", pa.float32(), [0.25, None], [0.25, None]),
    (
        "decimals",
        pa.decimal128(20, 4),
        [Decimal("12345678901.2500"), None],
        [Decimal("12345678901.2500"), None],
    ),
    ("texts", pa.large_string(), ["é", ""], ["é", ""]),
    ("bytes", pa.binary(), [b"\xff\0", None], [b"\xff\0", None]),
    ("dates", pa.date32(), [date(2026, 7, 1), None], [date(2026, 7, 1), None]),
    ("seconds", pa.timestamp("s"), [AT.replace(microsecond=0), None], [AT.replace(microsecond=0), None]),
    ("nanoseconds", pa.timestamp("ns"), [AT, None], [AT, None]),
    (
        "before 1970",
        pa.timestamp("us"),
        [datetime(1901, 2, 3, 4, 5, 6, 7)],
        [datetime(1901, 2, 3, 4, 5, 6, 7)],
    ),
    (
        "elsewhere",
        pa.timestamp("ms", "America/New_York"),
        [AT.replace(tzinfo=timezone(timedelta(hours=-4)))],
        [datetime(2026, 7, 1, 16, 30, 15, 250_000, UTC)],
    ),
    ("times of day", pa.time64("ns"), [time(23, 59, 59, 999_999), None], [time(23, 59, 59, 999_999), None]),
    (
        "durations",
        pa.duration("ms"),
        [timedelta(days=-1, milliseconds=1)],
        [timedelta(days=-1, milliseconds=1)],
    ),
    ("lists", pa.list_(pa.timestamp("ns")), [[AT, None], [], None], [[AT, None], [], None]),
    ("vectors", pa.list_(pa.float64(), 2), [[1.5, 2.5], None], [[1.5, 2.5], None]),
    (
        "structs",
        pa.struct([("a", pa.int8()), ("b", pa.struct([("c", pa.string())]))]),
        [{"a": 1, "b": None}, {"a": None, "b": {"c": None}}, None],
        [{"a": 1, "b": None}, {"a": None, "b": {"c": None}}, None],
    ),
    (
        "maps",
        pa.map_(pa.string(), pa.int32()),
        [[("a", 1), ("b", None)], [], None],
        [[("a", 1), ("b", None)], [], None],
    ),
    ("words of a dictionary", pa.dictionary(pa.int32(), pa.string()), ["x", None, "x"], ["x", None, "x"]),
]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("kind", "given", "wanted"), [each[1:] for each in TYPED], ids=[each[0] for each in TYPED]
)
def test_columns_of_every_type_are_plain_values_the_same_wherever_pandas_is_installed(
    kind: Any, given: list[Any], wanted: list[Any], form: str, tmp_path: Path
) -> None:
    table = pa.table({"text": [f"{i}" for i in range(len(given))], "field": pa.array(given, kind)})
    write_table(tmp_path, form, table)
    plan = planned(tmp_path, form, content_of("field"))
    found = [each.fields["field"] for each in described_straight(plan)]
    assert found == wanted
    assert list(map(type, found)) == list(map(type, wanted))
    assert [getattr(each, "tzinfo", None) for each in found] == [getattr(w, "tzinfo", None) for w in wanted]


def write_table(folder: Path, form: str, table: Any) -> None:
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet")
        return
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    (folder / "a.arrow").write_bytes(out.getvalue())


def test_a_time_that_python_cannot_hold_is_a_bad_record(tmp_path: Path) -> None:
    far = 400_000 * 366 * 86_400
    for name, kind, value, code, values in (
        ("ns", pa.timestamp("ns"), 1001, "record.nanoseconds", ("timestamp[ns] 1001",)),
        ("year", pa.timestamp("s"), far, "record.out_of_range", (f"timestamp[ms] {far}000",)),
        ("text", pa.string(), b"\xff", "record.not_utf8", ()),
    ):
        (folder := tmp_path / name).mkdir()
        numbers = [value, 0] if kind != pa.string() else None
        column = (
            pa.array(numbers, pa.int64()).cast(kind)
            if numbers
            else pa.Array.from_buffers(kind, 1, pa.array([value], pa.binary()).buffers())
        )
        pq.write_table(pa.table({"text": ["a", "b"][: len(column)], "field": column}), folder / "a.parquet")
        (part,) = read_files(planned(folder, "parquet", content_of("field")))
        with raises(BadRecordError, code, *values):
            part.records[0]


def test_numbers_of_mds_shards_are_numbers(tmp_path: Path) -> None:
    kinds = {
        "int": (np.int64, -(2**40)),
        "uint8": (np.uint8, 255),
        "int16": (np.int16, -3),
        "uint64": (np.uint64, 2**63 + 1),
        "float16": (np.float16, 0.5),
        "float32": (np.float32, 0.25),
        "float64": (np.float64, 1e300),
    }
    texts = {"str": "x", "str_int": str(10**30), "str_float": "0.1", "str_decimal": "1.50"}
    (tmp_path / "a.mds").write_bytes(
        mds_shard(
            {
                **{k: (k, t(v).tobytes(), t().nbytes) for k, (t, v) in kinds.items()},
                "text": ("str", b"t", None),
            }
            | {k: (k, v.encode(), None) for k, v in texts.items()}
        )
    )
    manifest = freeze_listed(
        "s", list_files("s", str(tmp_path / "*.mds"), "mds"), "mds", content_of(*kinds, *texts)
    )
    (found,) = described_straight(plan_source(manifest, 100, 100))
    wanted = {**{name: value for name, (_, value) in kinds.items()}, "str": "x"}
    wanted |= {"str_int": 10**30, "str_float": 0.1, "str_decimal": Decimal("1.50")}
    assert found.fields == wanted
    assert {name: type(value) for name, value in found.fields.items()} == {
        n: type(v) for n, v in wanted.items()
    }


def mds_shard(columns: dict[str, tuple[str, bytes, int | None]]) -> bytes:
    """A shard of one sample: (encoding, bytes, fixed size) by column."""
    facts = {
        "column_names": list(columns),
        "column_encodings": [kind for kind, _, _ in columns.values()],
        "column_sizes": [size for _, _, size in columns.values()],
    }
    config = json.dumps(facts).encode()
    given = [len(data) for _, data, size in columns.values() if size is None]
    sample = np.array(given, "<u4").tobytes() + b"".join(data for _, data, _ in columns.values())
    begin = 12 + len(config)
    return np.array([1, begin, begin + len(sample)], "<u4").tobytes() + config + sample


def test_values_of_cbor_are_those_of_its_library_as_long_as_they_are_plain(tmp_path: Path) -> None:
    values = [AT.replace(tzinfo=UTC), Decimal("1.5"), b"\xff", {"a": [1, None]}, cbor2.CBORTag(4000, 1)]
    (tmp_path / "a.cbor").write_bytes(b"".join(cbor2.dumps({"text": "t", "field": v}) for v in values))
    (part,) = read_files(plan := planned(tmp_path, "cbor", content_of("field")))
    ordered = OrderedWindow(
        Window(number=0, last=False, parts=(part,)), plan, StreamSettings(shuffle="none"), 0
    )
    found = [ordered.described(i) for i in range(4)]
    assert [each.fields["field"] for each in found if isinstance(each, Described)] == values[:4]
    with raises(BadRecordError, "record.value_type", "CBORTag"):
        ordered.described(4)


def test_plain_values_have_nothing_in_common_with_what_they_were_made_of() -> None:
    given = {
        "a": (1, [2.5, None]),
        "b": np.array([[1, 2]], np.int8),
        "c": np.float32(0.25),
        "d": np.str_("x"),
    }
    found = plain(given)
    assert found == {"a": [1, [2.5, None]], "b": [[1, 2]], "c": 0.25, "d": "x"}
    assert [type(found[name]) for name in "abcd"] == [list, list, float, str]
    given["a"][1].append(3)
    assert found["a"] == [1, [2.5, None]]
    with raises(BadRecordError, "record.value_type", " set;"):
        plain([{1, 2}])


# ---------------------------------------------------------------------------------------- the stream
def job(
    make: Make, folder: Path, form: str = "jsonl", data: dict[str, Any] | None = None, **source: Any
) -> JobConfig:
    entry = {"name": "made", "path": str(folder), "format": form, **source}
    small = {"fragment_bytes": 900, "window_bytes": 2500, "encoder": "tokenizers", **(data or {})}
    return parse_config(make({"data.sources": [entry], **{f"data.{k}": v for k, v in small.items()}}))


def saying_job(make: Make, folder: Path, form: str, **data: Any) -> JobConfig:
    fields = ["score", "meta.lang", "tags"]
    transforms = [f"{HERE}:says_its_fields"]
    return job(make, folder, form, {"transforms": transforms, **data}, transform_fields=fields)


def said(record: Record) -> str:
    beside = {"meta.lang": record["meta"]["lang"], "score": record["score"], "tags": record["tags"]}
    return f"{beside!r} {record['text']}"


@pytest.mark.parametrize("form", NESTED)
def test_the_stream_of_documents_with_their_fields_is_the_references(
    form: str, tmp_path: Path, tiny_config: Make
) -> None:
    records = some_records(40)
    write_files(tmp_path / "data", form, [records[:15], records[15:]])
    config = saying_job(tiny_config, tmp_path / "data", form, shuffle="none")
    spec = spec_of(config)
    check_first_records(spec)
    texts = map(said, records)
    stream = reference.tokens(texts, Path(config.data.tokenizer), spec.settings.piece_bytes)
    assert as_lists(samples(spec, 48)) == list(reference.cut(stream, 48))


@pytest.mark.chaos
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_restore_at_every_position_of_documents_with_their_fields(
    form: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_files(tmp_path / "data", form, [some_records(14), some_records(5)])
    spec = spec_of(saying_job(tiny_config, tmp_path / "data", form, num_epochs=2))
    whole = samples(spec, 73)  # some begin and some end within a document
    for at, sample in enumerate(whole):
        rest = samples(spec, 73, decode(Cursor, encode(sample.cursor)))
        assert as_lists(rest) == as_lists(whole[at + 1 :])
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_filter_by_other_columns_drops_what_it_should_and_counts_it(
    form: str, tmp_path: Path, tiny_config: Make
) -> None:
    records = some_records(60)
    write_files(tmp_path / "data", form, [records])
    config = job(
        tiny_config,
        tmp_path / "data",
        form,
        {"transforms": [f"{HERE}:english_with_a_score"], "shuffle": "none"},
        transform_fields=["score", "meta.lang"],
    )
    spec = spec_of(config)
    passes = [r["meta"]["lang"] == "en" and r["score"] >= 3 for r in records]
    kept = [r["text"] for r, good in zip(records, passes, strict=True) if good]
    stream = reference.tokens(iter(kept), Path(config.data.tokenizer), spec.settings.piece_bytes)
    found = samples(spec, 48)
    assert as_lists(found) == list(reference.cut(stream, 48))
    last = max(i for i, (r, good) in enumerate(zip(records, passes, strict=True)) if good and r["text"])
    assert found[-1].cursor.sources["made"].filtered_documents == passes[:last].count(False)


def test_a_transform_may_change_what_it_is_given(tmp_path: Path, tiny_config: Make) -> None:
    write_files(tmp_path / "data", "jsonl", [some_records(9)])
    data = {"transforms": [f"{HERE}:changes_its_fields"], "shuffle": "none", "num_epochs": 2}
    in_files = spec_of(job(tiny_config, tmp_path / "data", "jsonl", data, transform_fields=["tags"]))
    path = "tests.data.test_transform_fields:nine_records"
    in_code = spec_of(job(tiny_config, Path(path), "python", data, transform_fields=["tags"]))
    found = as_lists(samples(in_code, 16))
    assert found == as_lists(samples(in_code, 16)) == as_lists(samples(in_files, 16))


def nine_records() -> list[Record]:
    return NINE


NINE = some_records(9)


# ---------------------------------------------------------------------------------------- what is not there
def test_a_record_without_the_field_has_none_of_it(tmp_path: Path) -> None:
    records = [{"text": "a", "score": 1}, {"text": "b"}, {"text": "c", "score": None, "meta": 5}]
    for form in ("jsonl", "cbor"):
        (folder := tmp_path / form).mkdir()
        write_files(folder, form, [records])
        found = described_straight(planned(folder, form, content_of("score", "meta.lang")))
        assert [each.fields for each in found] == [
            {"score": score, "meta.lang": None} for score in (1, None, None)
        ]


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("parquet", ["has: text, score"]),
        ("arrow", ["has: text, score"]),
        ("csv", ["has: text, score"]),
        ("mds", ["has: number, score, text"]),
        ("jsonl", [" 3 ", "a.jsonl: line 1: ", "has: text, score"]),
        ("cbor", [" 3 ", "record 1: ", "has: text, score"]),
        ("webdataset", [" 3 ", "has: text, json"]),
    ],
)
def test_a_field_that_no_record_has_is_refused_before_the_start(
    form: str, values: list[str], tmp_path: Path, tiny_config: Make
) -> None:
    records = [{"text": f"text {i}", "score": 3 * i} for i in range(3)]
    write_files(tmp_path / "data", form, [records])
    for file in (tmp_path / "data").glob("part.00000.jsonl"):
        file.rename(file.with_name("a.jsonl"))
    config = job(
        tiny_config,
        tmp_path / "data",
        form,
        {"transforms": [f"{HERE}:says_its_fields"]},
        transform_fields=["score" if form != "webdataset" else "json.score", "scoer"],
    )
    with raises(ConfigError, "data.missing_field", "`scoer`", "transform_fields", *values):
        check_first_records(prepare_data(config))


def test_a_field_that_few_records_have_is_looked_for_in_files_from_all_of_a_source(
    tmp_path: Path, tiny_config: Make
) -> None:
    files = [
        [{"text": f"{i}"}] * 90 + [{"text": f"{i}", **({"rare": 1} if i > 7 else {})}] for i in range(12)
    ]
    write_files(tmp_path / "data", "jsonl", files)
    transforms = {"transforms": [f"{HERE}:says_its_fields"]}
    check_first_records(
        prepare_data(job(tiny_config, tmp_path / "data", "jsonl", transforms, transform_fields=["rare"]))
    )


@pytest.mark.parametrize(
    "kind", [pa.month_day_nano_interval(), pa.list_(pa.month_day_nano_interval())]
)
def test_a_column_without_plain_values_is_refused(kind: Any, tmp_path: Path) -> None:
    write_table(tmp_path, "arrow", pa.table({"text": ["a"], "field": pa.nulls(1, kind)}))
    with raises(ConfigError, "data.transform_field_type", "'field'", kind, "transform_fields"):
        planned(tmp_path, "arrow", content_of("field"))


@pytest.mark.parametrize("form", ["lines", "text"])
def test_a_format_without_fields_refuses_them(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"text": "a"}]])
    values = "transform_fields", "score", f"format {form}"
    with raises(ConfigError, "config.unsupported_transform_fields", *values):
        planned(tmp_path, form, content_of("score"))


@pytest.mark.parametrize(
    ("source", "code", "value"),
    [
        ({"transform_fields": ["a"]}, "config.conflict", "data.transforms"),
        ({"transform_fields": ["a"], "transforms": []}, "config.conflict", "data.transforms"),
        ({"transform_fields": ["a", "a"]}, "config.duplicate_entry", " a "),
        ({"transform_fields": ["text"]}, "config.conflict", "`text`"),
        ({"transform_fields": ["tools"], "content": "chat"}, "config.conflict", "`tools`"),
        ({"transform_fields": [""]}, "config.invalid_value", "a list of names of fields"),
        ({"transform_fields": "score"}, "config.wrong_type", "a list of names of fields"),
    ],
)
def test_fields_that_no_transform_could_see_are_refused_with_the_configuration(
    source: dict[str, Any], code: str, value: str, tmp_path: Path, tiny_config: Make
) -> None:
    everywhere = {} if value == "data.transforms" else {"transforms": [f"{HERE}:says_its_fields"]}
    with raises(ConfigError, code, "transform_fields", value):
        job(tiny_config, tmp_path, "jsonl", everywhere, **source)


# ---------------------------------------------------------------------------------------- identity
def test_other_fields_are_another_stream_and_their_order_is_none(tmp_path: Path, tiny_config: Make) -> None:
    write_files(tmp_path / "data", "jsonl", [some_records(9)])
    transforms = {"transforms": [f"{HERE}:says_its_fields"]}

    def config(*fields: str) -> JobConfig:
        return job(tiny_config, tmp_path / "data", "jsonl", transforms, transform_fields=fields)

    assert config("tags", "score").data == config("score", "tags").data
    began = prepare_data(config("score", "tags"), Storage(str(tmp_path / "run"))).identity()
    again = prepare_data(config("tags", "score"), Storage(str(tmp_path / "run")))
    assert again.identity() == began
    assert compare(again.in_force(began), again.identity()) == ()
    for fields in ((), ("score",), ("score", "tags", "meta.lang")):
        now = prepare_data(config(*fields), Storage(str(tmp_path / "run")))
        asked = json.dumps(sorted(fields), separators=(",", ":")) if fields else "nothing"
        (refusal,) = compare(now.in_force(began), now.identity())
        assert refusal.code == "resume.changed_setting"
        values = ('data.sources.made.transform_fields=["score","tags"],', f" {asked};")
        assert all(value in refusal.text for value in values)


def test_lists_without_such_fields_have_the_digest_that_they_always_had(tmp_path: Path) -> None:
    write_files(tmp_path, "jsonl", [some_records(3)])
    found = planned(tmp_path, "jsonl", Content(kind="chat")).manifest
    old = {"kind": "chat", "text_field": "text", "messages_field": "messages"}
    old |= {"prompt_field": "prompt", "completion_field": "completion"}
    (row,) = found.files
    line = [row.path, row.bytes, row.probe, [], []]
    wanted = orjson.dumps([1, "jsonl", orjson.dumps(old).decode(), [line]])
    assert found.digest == blake3(wanted).hexdigest()
    with_fields = planned(tmp_path, "jsonl", content_of("score")).manifest
    assert with_fields.digest != planned(tmp_path, "jsonl", Content()).manifest.digest


def test_records_of_other_fields_are_never_mixed_up_by_the_check(tmp_path: Path) -> None:
    """A reader that is one record off is seen by what the tests above compare."""
    records = some_records(40)
    (tmp_path / "a.parquet").write_bytes(format_writers.parquet(records))
    found = described_straight(planned(tmp_path, "parquet", content_of("meta.url")))
    fields = [each.fields for each in found]
    off = [
        Described(document=e.document, fields=f) for e, f in zip(found, fields[1:] + fields[:1], strict=True)
    ]
    assert found == of(records, "meta.url") != off


def test_a_transform_that_fails_by_a_missing_field_stops_with_its_place(
    tmp_path: Path, tiny_config: Make
) -> None:
    records = [{"text": "a", "score": 5, "meta": {"lang": "en"}}, {"text": "b", "meta": {"lang": "en"}}]
    write_files(tmp_path / "data", "jsonl", [records])
    config = job(
        tiny_config,
        tmp_path / "data",
        "jsonl",
        {"transforms": [f"{HERE}:english_with_a_score"], "shuffle": "none"},
        transform_fields=["score", "meta.lang"],
    )
    with raises(DataError, "user_code.raised", "line 2: ", "data.transforms", "TypeError: '>='"):
        check_first_records(prepare_data(config))
