"""Every format by one check: what an independent writer has written comes out, at its place, however it is
cut.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from orchestrator.config.sections import FORMAT_NAMES
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.first_records import check_first_records
from orchestrator.data.sources.formats import arrow, format_of
from orchestrator.data.sources.formats.text import fields_of, stream_rows
from orchestrator.data.sources.lists.fragments import plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Conversation,
    Prompted,
)
from orchestrator.data.sources.records.line_records import other_encoding
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.errors import ConfigError, DataError
from tests.data import format_writers
from tests.data.format_writers import PRESS, Record, write_files
from tests.data.making import job, plain, samples, spec_of
from tests.data.reading import planned, read, read_straight
from tests.num_examples import examples
from tests.raising import raises

Make = Callable[..., dict[str, Any]]

ROWS = ("parquet", "arrow", "hf_dataset")
STREAMS = ("jsonl", "lines", "text", "csv", "tsv", "webdataset", "mds", "cbor")
EVERY = [(form, press) for form in (*ROWS, *STREAMS) for press in (PRESS if form in STREAMS else [""])]
# What a text may have in it that some format could trip over.
TRICKY = [
    "",
    " ",
    "a",
    'a "quoted" word, and a comma',
    "tab\there",
    "é日本\U0001f3f3",
    "\u2028x\u2029",
    "\0 NUL",
    "\ufeffBOM",
]
MULTI = ["two\nlines", "end\n", "\r\nDOS\r\n", '"\n"', '""', "\n\n"]
SIZES = [(60, 100), (900, 2500), (1 << 20, 1 << 20)]


def texts_for(form: str, num: int) -> list[str]:
    tricky = TRICKY[2:] if form == "lines" else [*TRICKY, *MULTI]
    return [
        f"{i}:{tricky[i % len(tricky)] * (i % 5 + 1)}" if i % 3 else tricky[i % len(tricky)]
        for i in range(num)
    ]


def dealt(form: str, texts: Sequence[str], more: bool = True) -> list[list[Record]]:
    """The texts in files of different lengths, one of them empty."""
    records = [{"text": text, **({"id": str(i)} if more else {})} for i, text in enumerate(texts)]
    if form == "text":
        return [[record] for record in records]
    third = len(records) // 3
    empty = [] if form in ("parquet", "arrow", "hf_dataset", "mds", "csv", "tsv") else [[]]
    return [records[:third], *empty, records[third : third + 1], records[third + 1 :]]


def as_documents(form: str, texts: Sequence[str]) -> list[str]:
    """The texts as documents: blank lines are none, and a file's first mark of byte order is dropped."""
    if form == "text":
        return [text.removeprefix("\ufeff") for text in texts]
    return [text for text in texts if form != "lines" or text.strip()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few KB have several units."""
    monkeypatch.setattr(arrow, "_UNIT_BYTES", 500)


@pytest.mark.quick(
    "csv--sizes31",
    "mds-.xz-sizes57",
    "jsonl--sizes11",
    "lines-.bz2-sizes21",
    "cbor-.zst-sizes62",
    "tsv-.gz-sizes40",
    "hf_dataset--sizes7",
    "parquet--sizes2",
    "arrow--sizes5",
    "webdataset--sizes44",
    "text--sizes24",
)
@pytest.mark.parametrize(
    ("form", "press", "sizes"),
    [(form, press, sizes) for form, press in EVERY for sizes in (SIZES[:1] if press else SIZES)],
)
@pytest.mark.usefixtures("small")
def test_what_was_written_comes_out_however_it_is_cut(
    form: str, press: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    texts = texts_for(form, 40)
    write_files(tmp_path, form, dealt(form, texts, more=form != "lines"), press)
    plan = planned(tmp_path, form, Content(), sizes)
    straight = read_straight(plan)
    assert [text for _, text in straight if text is not None] == as_documents(form, texts)
    assert len({origin for origin, _ in straight}) == len(straight)
    assert read(plan, sizes[1], "none") == straight
    assert sorted(read(plan, sizes[1], "block"), key=str) == sorted(straight, key=str)
    if sizes[0] < 100 and form in (*ROWS, *(("jsonl", "lines") if not press else ())):
        assert plan.num_fragments > 3, "a large file is many fragments"


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "cbor"])
def test_a_place_in_bytes_is_where_the_record_begins(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, dealt(form, texts_for(form, 30)))
    plan = planned(tmp_path, form, Content())
    write = format_writers.WRITERS[form][1]
    for (file, place), text in read_straight(plan):
        data = Path(plan.manifest.path(file)).read_bytes()[place:]
        alone = write([{"text": text}]).split(b"\n" if form == "tsv" else b"\r\n", 1)[-1]
        body = {"jsonl": json.dumps(text).encode(), "cbor": str(text).encode()}.get(
            form, alone.rstrip(b"\r\n")
        )
        assert body in data[: len(body) + 10]


def test_every_format_has_a_file_that_gives_it(tmp_path: Path) -> None:
    assert [format_of(name).name for name in FORMAT_NAMES] == list(FORMAT_NAMES)
    assert {form for form, _ in EVERY} == {name for name in FORMAT_NAMES if format_of(name).has_files}


# ---------------------------------------------------------------------------------------- inner fields
NESTED = ("jsonl", "parquet", "arrow", "hf_dataset", "mds", "cbor", "webdataset")


@pytest.mark.parametrize("form", NESTED)
def test_dots_lead_to_an_inner_field(form: str, tmp_path: Path) -> None:
    files = [[{"meta": {"body": text, "n": {"deep": f"{i}"}}} for i, text in enumerate(TRICKY)]]
    write_files(tmp_path, form, files)
    begin = "json." if form == "webdataset" else ""
    for field, expected in (("meta.body", TRICKY), ("meta.n.deep", [f"{i}" for i in range(len(TRICKY))])):
        plan = planned(tmp_path, form, Content(text_field=begin + field))
        assert [text for _, text in read(plan, 1000, "none")] == expected


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "cbor"])
def test_a_field_whose_own_name_has_dots_comes_first(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"a.b": "outer", "a": {"b": "inner"}}]])
    plan = planned(tmp_path, form, Content(text_field="a.b"))
    assert [text for _, text in read(plan, 1000, "none")] == ["outer"]


@pytest.mark.parametrize("form", ["parquet", "arrow", "hf_dataset"])
@pytest.mark.parametrize(
    ("content", "code", "values"),
    [
        (Content(text_field="body"), "missing_field", ("`body`", "meta, text, n", "text_field")),
        (Content(text_field="meta.x"), "missing_field", ("`meta.x`", "`meta` has: body", "text_field")),
        (Content(text_field="text.x"), "missing_field", ("`text.x`", "'text' is string", "text_field")),
        (Content(text_field="n"), "field_type", ("'n' is int64", "text_field")),
        (Content(kind="chat", messages_field="n"), "chat_value_type", ("'n' is int64", "messages_field")),
        (Content(kind="prompt"), "missing_field", ("`prompt`", "meta, text, n", "prompt_field and")),
    ],
)
def test_columns_that_are_not_there_are_refused_with_those_that_are(
    form: str, content: Content, code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    write_files(tmp_path, form, [[{"meta": {"body": "x"}, "text": "y", "n": 1}]])
    with raises(ConfigError, f"data.{code}", *values):
        planned(tmp_path, form, content)


# ---------------------------------------------------------------------------------------- chats and prompts
CHATS = [
    [{"role": "user", "content": f"question {i} é"}, *([{"role": "assistant", "content": "\n"}] * (i % 4))]
    for i in range(40)
]
HOLDING = ("jsonl", "parquet", "arrow", "hf_dataset", "mds", "cbor", "webdataset")


@pytest.mark.parametrize("sizes", SIZES[:2])
@pytest.mark.parametrize("form", HOLDING)
@pytest.mark.usefixtures("small")
def test_messages_become_conversations(form: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"messages": chat, "n": "x"} for chat in CHATS]])
    field = "json.messages" if form == "webdataset" else "messages"
    plan = planned(tmp_path, form, Content(kind="chat", messages_field=field), sizes)
    expected = [Conversation(messages=tuple(chat)) for chat in CHATS]
    assert [chat for _, chat in read(plan, sizes[1], "none")] == expected
    assert {origin for origin, _ in read(plan, sizes[1], "block")} == {o for o, _ in read_straight(plan)}


@pytest.mark.parametrize("form", HOLDING)
def test_the_tools_beside_the_messages_go_with_them(form: str, tmp_path: Path) -> None:
    tools = [{"name": "look", "strict": True}]
    write_files(tmp_path, form, [[{"inner": {"messages": CHATS[1], "tools": tools}}]])
    field = "json.inner.messages" if form == "webdataset" else "inner.messages"
    ((_, chat),) = read_straight(planned(tmp_path, form, Content(kind="chat", messages_field=field)))
    assert chat == Conversation(messages=tuple(CHATS[1]), tools=tools)


@pytest.mark.parametrize("form", [*HOLDING, "csv", "tsv"])
def test_a_prompt_and_its_completion_are_one_document(form: str, tmp_path: Path) -> None:
    pairs = list(zip(TRICKY, reversed(TRICKY), strict=True))
    write_files(tmp_path, form, [[{"q": q, "completion": c} for q, c in pairs]])
    plan = planned(tmp_path, form, Content(kind="prompt", prompt_field="q"))
    assert [d for _, d in read_straight(plan)] == [Prompted(prompt=q, completion=c) for q, c in pairs]


@pytest.mark.parametrize(
    ("record", "code", "values"),
    [
        ({"text": "x"}, "record.missing_field", ("`messages`", " text")),
        ({"messages": None}, "record.null_field", ("'messages'",)),
        ({"messages": "x"}, "record.not_json", ("'messages'",)),
        ({"messages": []}, "record.no_messages", ("'messages'",)),
        ({"messages": ["x"]}, "record.not_json", ("message 1 of 'messages'",)),
        ({"messages": [{"from": "a", "value": "b"}]}, "record.chat_role", ("`role`", "from, value")),
        ({"messages": [{"role": 1}]}, "record.chat_role", ("message 1 of 'messages'", "role 1", ": role")),
    ],
)
def test_a_record_that_is_no_chat_says_which_fields_it_has(
    record: Record, code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    for form in ("jsonl", "cbor"):
        write_files(tmp_path / form, form, [[record]])
        with raises(BadRecordError, code, *values):
            read_straight(planned(tmp_path / form, form, Content(kind="chat")))


@pytest.mark.parametrize("form", ["lines", "text", "csv", "tsv"])
def test_a_format_that_cannot_hold_a_chat_refuses_it(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"text": "x"}]])
    with raises(ConfigError, "config.unsupported_content", "chat", f"format {form}"):
        planned(tmp_path, form, Content(kind="chat"))


def test_of_columns_inner_nulls_are_left_out_but_for_role_and_content(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": None, "name": "x"}, {"role": "user", "content": "y"}]
    write_files(tmp_path, "parquet", [[{"messages": chat}]])
    ((_, found),) = read_straight(planned(tmp_path, "parquet", Content(kind="chat")))
    assert found == Conversation(messages=tuple(chat))


# ---------------------------------------------------------------------------------------- each format's own
def test_a_folder_of_several_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    write_files(tmp_path / "train", "hf_dataset", [[{"text": "x"}]])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with raises(ConfigError, "data.several_splits", "['train', 'test']", f"path={tmp_path}/train"):
        planned(tmp_path, "hf_dataset", Content())


@pytest.mark.parametrize("form", ["hf_dataset", "mds"])
def test_a_dataset_that_lacks_one_of_its_files_is_refused(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"text": "x"}], [{"text": "y"}]])
    gone = sorted(p for p in tmp_path.iterdir() if p.suffix in (".arrow", ".mds") and "0001" in p.name)[0]
    gone.unlink()
    with raises(ConfigError, "data.contradicting_index", " 2 ", " 1 ", gone.name):
        planned(tmp_path, form, Content())


@pytest.mark.parametrize(("form", "name"), [("hf_dataset", "state.json"), ("mds", "index.json")])
def test_a_folder_without_its_index_is_refused(form: str, name: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"text": "x"}]])
    (tmp_path / name).unlink()
    with raises(ConfigError, "data.missing_index", name):
        planned(tmp_path, form, Content())


def test_a_format_whose_package_is_missing_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, "cbor", [[{"text": "x"}]])
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with raises(ConfigError, "machine.missing_package", "cbor2", "pip install -e '.[cbor]'"):
        planned(tmp_path, "cbor", Content())


def test_a_pickled_column_is_never_read(tmp_path: Path) -> None:
    write_files(tmp_path, "mds", [[{"text": "x"}]])
    for name in ("part.00000.mds", "index.json"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes().replace(b'["int", "str"]', b'["int", "pkl"]'))
    with raises(BadRecordError, "record.field_type", "'text'", "pkl"):
        read_straight(planned(tmp_path, "mds", Content()))


@pytest.mark.parametrize("kind", ["uncompressed", "lz4", "zstd", "stream", "dictionary", "views"])
@pytest.mark.usefixtures("small")
def test_arrow_files_of_every_kind_are_read(kind: str, tmp_path: Path) -> None:
    texts = texts_for("arrow", 60)
    table = pa.table({"text": texts})
    if kind == "dictionary":
        table = pa.table({"text": pa.array(texts).dictionary_encode()})
    elif kind == "views":
        table = pa.table({"text": pa.array(texts, pa.string_view())})
    out = io.BytesIO()
    if kind in ("lz4", "zstd", "uncompressed"):
        out.write(format_writers.arrow_file([{"text": text} for text in texts], kind))
    else:
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    (tmp_path / "a.arrow").write_bytes(out.getvalue())
    plan = planned(tmp_path, "arrow", Content(), (60, 100))
    assert plan.num_fragments > 3
    assert [text for _, text in read(plan, 100, "none")] == texts


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_samples_of_a_tar_file_have_fields_by_their_extensions(kind: int, tmp_path: Path) -> None:
    records = [{"txt": f"text {i}", "cls": "0"} for i in range(30)]
    (tmp_path / "a.tar").write_bytes(format_writers.tar(records, kind))
    plan = planned(tmp_path, "webdataset", Content(text_field="txt"))
    assert [text for _, text in read(plan, 5000, "none")] == [f"text {i}" for i in range(30)]
    with raises(BadRecordError, "record.missing_field", "`text`", "txt, cls, json"):
        read_straight(planned(tmp_path, "webdataset", Content()))


def tar_of(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            opened.addfile(info, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize(
    ("members", "code", "value"),
    [
        ([("a.txt", b"x"), ("README", b"y")], "record.stray_member", "'README'"),
        ([("a.txt", b"x"), ("a.txt", b"y")], "record.duplicate_member", "a.txt"),
        ([("a.txt", b"\xff")], "record.not_utf8", "byte 0"),
    ],
)
def test_members_that_make_no_sample_are_bad_records(
    members: list[tuple[str, bytes]], code: str, value: str, tmp_path: Path
) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(*members))
    with raises(BadRecordError, code, value):
        read_straight(planned(tmp_path, "webdataset", Content(text_field="txt")))


def test_a_place_in_a_tar_file_names_the_sample(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(("dir/one.txt", b"1"), ("dir/two.txt", b"2")))
    plan = planned(tmp_path, "webdataset", Content(text_field="txt"))
    (window,) = read_windows(plan, StreamSettings(shuffle="none"), 0, 0)
    assert (
        OrderedWindow(window, plan, StreamSettings(shuffle="none"), 0)
        .place(1)
        .endswith("a.tar: sample 1 (dir/two)")
    )


@pytest.mark.parametrize(
    ("row", "code", "values"),
    [
        (b'"a"b,c', "record.csv_after_quote", ("field 1 ",)),
        (b'x"y",c"', "record.csv_stray_quote", ("field 1,",)),
        (b"a,b,c", "record.num_fields", (" 3 fields", " 2: text, n")),
        (b'"\xff",c', "record.not_utf8", ("byte 1 ",)),
    ],
)
def test_a_row_that_is_not_as_rfc_4180_has_it_is_bad(
    row: bytes, code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,n\r\n" + row + b"\r\n")
    with raises(BadRecordError, code, *values):
        read_straight(planned(tmp_path, "csv", Content()))


@pytest.mark.parametrize(
    ("header", "code", "values"),
    [
        (b"body,n\r\n", "data.missing_field", ("`text`", "body, n", "text_field")),
        (b"text,text\r\n", "data.ambiguous_field", ("`text`", "text_field")),
        (b'"text\r\n', "data.invalid_header", ("quote",)),
    ],
)
def test_a_header_without_the_column_stops_the_reading(
    header: bytes, code: str, values: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(header)
    with raises(DataError, code, "a.csv", *values):
        read_straight(planned(tmp_path, "csv", Content()))


def test_a_header_may_begin_with_a_byte_order_mark_and_rows_may_be_blank(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("\ufefftext,n\r\n\r\nx,1\r\n,2".encode())
    found = read_straight(planned(tmp_path, "csv", Content()))
    assert [text for _, text in found] == [None, "x", ""]


# ---------------------------------------------------------------------------------------- any lines, any rows
FIELD = st.text(alphabet='a",\t\r\né', max_size=6)


@settings(
    max_examples=examples(25, chaos=80),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(rows=st.lists(st.tuples(FIELD, FIELD), max_size=6), piece=st.integers(1, 40), tabs=st.booleans())
def test_any_rows_that_pythons_csv_writes_come_out(
    rows: list[tuple[str, str]], piece: int, tabs: bool
) -> None:
    delimiter = "\t" if tabs else ","
    data = format_writers.separated(delimiter, "\r\n")([{"text": a, "n": b} for a, b in rows])
    pieces = [data[i : i + piece] for i in range(0, len(data), piece)]
    found, at = [], 0
    for number, records, place in stream_rows(iter(pieces)):
        assert (number, place) == (len(found) + 1, at)
        for i in range(len(records)):
            raw = records[i]
            assert data[at : at + records.size(i)].removesuffix(b"\n") == raw
            at += records.size(i)
            found.append(tuple(fields_of(bytes(raw or b"").decode().removesuffix("\r"), delimiter)))
    assert found == ([("text", "n"), *rows] if rows else found)
    assert at == len(data)


@settings(
    max_examples=examples(15, chaos=40),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    texts=st.lists(st.text(max_size=12), max_size=12),
    press=st.sampled_from(list(PRESS)),
    newline_ends=st.booleans(),
    sizes=st.tuples(st.integers(1, 60), st.integers(60, 200)),
)
def test_any_texts_come_out_of_jsonl_in_order_wherever_files_are_cut(
    texts: list[str], press: str, newline_ends: bool, sizes: tuple[int, int], tmp_path: Path
) -> None:
    data = "\n".join(json.dumps({"text": text}) for text in texts) + "\n" * newline_ends
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / f"a.jsonl{press}").write_bytes(PRESS[press](data.encode()))
    plan = planned(tmp_path, "jsonl", Content(), sizes)
    found = [text for _, text in read(plan, sizes[1], "none") if text is not None]
    assert found == texts
    assert {origin for origin, _ in read(plan, sizes[1], "block")} == {o for o, _ in read_straight(plan)}


@settings(
    max_examples=examples(20, chaos=60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(
    data=st.text(alphabet="a \r\né\ufeff\u2028\0", max_size=40),
    press=st.sampled_from(list(PRESS)),
    sizes=st.tuples(st.integers(1, 20), st.integers(20, 60)),
)
def test_any_lines_come_out_of_lines(data: str, press: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    assume(other_encoding(data.encode()) is None)
    for old in tmp_path.iterdir():
        old.unlink()
    (tmp_path / f"a{press}").write_bytes(PRESS[press](data.encode()))
    found = read(planned(tmp_path, "lines", Content(), sizes), sizes[1], "none")
    lines = data.removeprefix("\ufeff").split("\n")
    # what is blank is judged by bytes
    expected = [line.removesuffix("\r") for line in lines if line.encode().strip()]
    assert [text for _, text in found if text is not None] == expected


# ---------------------------------------------------------------------------------------- before a start
@pytest.mark.parametrize("form", [*ROWS, *STREAMS])
def test_every_format_gives_the_stream_that_jsonl_gives(form: str, tmp_path: Path, tiny_config: Make) -> None:
    texts = [f"{i} {text}" for i, text in enumerate(TRICKY[3:8] * 5)]
    made = {}
    for kind in ("jsonl", form):
        write_files(tmp_path / kind, kind, dealt(kind, texts, more=kind != "lines"))
        spec = spec_of(job(tiny_config, tmp_path / kind, kind, shuffle="none", encoder="tokenizers"))
        check_first_records(spec)
        made[kind] = plain(samples(spec, 16))
    assert made[form] == made["jsonl"]


@pytest.mark.parametrize("form", [*ROWS, *(form for form in STREAMS if form not in ("lines", "text"))])
def test_a_field_that_no_record_has_is_refused_before_the_start(
    form: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_files(tmp_path, form, [[{"body": "x", "id": "1"}]])
    with raises(ConfigError, "data.missing_field", "`text`", "has: body, id", "Set text_field"):
        check_first_records(spec_of(job(tiny_config, tmp_path, form, encoder="tokenizers")))


def test_maps_of_cbor_inside_of_tags_are_maps(tmp_path: Path) -> None:
    import cbor2

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for number, value in enumerate([{"messages": messages}, {"meta": {"chat": messages}}]):
        item = cbor2.dumps(cbor2.CBORTag(55799, value))
        (tmp_path / f"{number}.cbor").write_bytes(item)
    for number, field in enumerate(["messages", "meta.chat"]):
        content = Content(kind="chat", messages_field=field)
        manifest = freeze_listed(
            "s", list_files("s", str(tmp_path / f"{number}.cbor"), "cbor"), "cbor", content
        )
        ((_, document),) = read_straight(plan_source(manifest, 1 << 20, 1 << 20))
        assert document == Conversation(messages=tuple(messages))
