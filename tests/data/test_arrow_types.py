"""Arrow files of any writer and any layout of their values: read as pyarrow reads them, or refused by column
and type before a start.
"""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.data.sources.formats import arrow
from orchestrator.data.sources.records.columns import value_sizes
from orchestrator.data.sources.records.content import BadRecordError, Content, Conversation, Described
from orchestrator.data.sources.records.plain_values import is_text, plain_array, plain_type, require_sound
from orchestrator.errors import ConfigError, DataError
from tests.data.reading import described_straight, planned, read_straight
from tests.num_examples import examples
from tests.raising import raises

TEXTS = [None, "", "a", "é日本" * 9, "a", "a long text that no view holds itself"]
# Polars 2.1 writes no message of the schema before the first record batch: it is in the footer alone.
POLARS = base64.b64decode(
    "QVJST1cxAAAEAAAA8v///xQAAAAEAAEAAAAKAAsACAAKAAQA+P///wwAAAAIAAgAAAAEAAEAAAAEAAAA7P///ywAAAAgAAAA"
    "GAAAAAEYAAAQABIABAAQABEACAAAAAwAAAAAAPz///8EAAQABAAAAHRleHQAAAAA/////5gAAAAEAAAA7P///0AAAAAAAAAA"
    "FAAAAAQAAwAMABMAEAASAAwABADm////AgAAAAAAAABUAAAAKAAAABQAAAAAAA4AGAAEAAwAEAAAABQAAQAAAAAAAAAAAAAA"
    "AAAAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAgAAAAAAAAAAAAAAABAAAAAgAAAAAAAAAAAAAAAAAAAAMAAABvbmUA"
    "AAAAAAAAAAADAAAAdHdvAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAD/////AAAAAAQAAADs////"
    "QAAAADgAAAAUAAAABAAAAAwAEgAQAAQACAAMAAEAAAB4AAAAAAAAAKAAAAAAAAAAQAAAAAAAAAAAAAAAAAAAAPj///8MAAAA"
    "CAAIAAAABAABAAAABAAAAOz///8sAAAAIAAAABgAAAABGAAAEAASAAQAEAARAAgAAAAMAAAAAAD8////BAAEAAQAAAB0ZXh0"
    "AJkAAABBUlJPVzE="
)
LEAVES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.uint32(), pa.string_view()),
    pa.dictionary(pa.uint64(), pa.large_string()),
    pa.run_end_encoded(pa.int16(), pa.string()),
    pa.run_end_encoded(pa.int32(), pa.string_view()),
    pa.run_end_encoded(pa.int32(), pa.dictionary(pa.int8(), pa.string_view())),
]
TEXT = Content()
LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


def made(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values as an array of this type, which pyarrow cannot make of every type itself."""
    types = pa.types
    if types.is_dictionary(kind):
        distinct = list(dict.fromkeys(values))
        indices = [None if value is None else distinct.index(value) for value in values]
        return pa.DictionaryArray.from_arrays(
            pa.array(indices, kind.index_type), made(distinct, kind.value_type)
        )
    if types.is_run_end_encoded(kind):
        ends = pa.array(range(1, len(values) + 1), kind.run_end_type)
        return pa.RunEndEncodedArray.from_arrays(ends, made(values, kind.value_type))
    mask = pa.array([value is None for value in values], pa.bool_())
    if types.is_struct(kind):
        inner = [made([(v or {}).get(f.name) for v in values], f.type) for f in kind]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=mask)
    if types.is_map(kind):
        pairs = [pair for value in values for pair in value or ()]
        ends = np.cumsum([0, *(len(value or ()) for value in values)])
        keys, items = ([pair[i] for pair in pairs] for i in (0, 1))
        return pa.MapArray.from_arrays(
            pa.array(ends, pa.int32()),
            made(keys, kind.key_type),
            made(items, kind.item_type),
            type=kind,
            mask=mask,
        )
    if not hasattr(kind, "value_type"):
        return pa.array(values, kind)
    items = made([item for value in values for item in value or ()], kind.value_type)
    sizes = [len(value or ()) for value in values]
    ends = np.cumsum([0, *sizes])
    number = pa.int64() if types.is_large_list(kind) or types.is_large_list_view(kind) else pa.int32()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        form = pa.LargeListViewArray if types.is_large_list_view(kind) else pa.ListViewArray
        return form.from_arrays(
            pa.array(ends[:-1], number), pa.array(sizes, number), items, type=kind, mask=mask
        )
    form = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    return form.from_arrays(pa.array(ends, number), items, type=kind, mask=mask)


def stored(table: pa.Table, kind: str) -> bytes:
    out = io.BytesIO()
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return out.getvalue()


def texts_in(folder: Path, content: Content) -> list[Any]:
    return [document for _, document in read_straight(planned(folder, "arrow", content))]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_UNIT_BYTES", 300)


# ---------------------------------------------------------------------------------------- layouts of values
@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize(
    "kind", [*LEAVES, pa.binary_view(), pa.dictionary(pa.int8(), pa.binary_view())], ids=str
)
def test_a_text_is_read_in_every_layout(kind: pa.DataType, form: str, tmp_path: Path) -> None:
    values = TEXTS[1:] * 4
    given = [v.encode() for v in values] if "binary" in str(kind) else values
    (tmp_path / "a.arrow").write_bytes(stored(pa.table({"text": made(given, kind)}), form))
    assert texts_in(tmp_path, TEXT) == values


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("many", LISTS)
@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_a_chat_is_read_in_every_layout(leaf: pa.DataType, many: Any, form: str, tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": t or "x"}, {"role": "assistant", "content": "y"}] for t in TEXTS]
    kind = many(pa.struct([("role", leaf), ("content", leaf)]))
    (tmp_path / "a.arrow").write_bytes(stored(pa.table({"messages": made(chats * 3, kind)}), form))
    found = texts_in(tmp_path, Content(kind="chat"))
    assert found == [Conversation(messages=tuple(chat)) for chat in chats * 3]


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        st.tuples(st.sampled_from(LISTS), inner).map(lambda pair: pair[0](pair[1])),
        inner.map(lambda kind: pa.struct([("a", kind), ("b", pa.int8())])),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
        inner.map(lambda kind: pa.dictionary(pa.int16(), kind) if is_text(kind) else kind),
    ).filter(lambda kind: not (pa.types.is_dictionary(kind) and pa.types.is_dictionary(kind.value_type)))


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        some = st.fixed_dictionaries({f.name: values_of(f.type) for f in kind})
    elif pa.types.is_map(kind):
        some = st.lists(st.tuples(st.sampled_from("xyz"), values_of(kind.item_type)), max_size=3)
    elif hasattr(kind, "value_field"):
        some = st.lists(values_of(kind.value_type), max_size=3)
    else:
        some = st.integers(-9, 9) if pa.types.is_integer(kind) else st.sampled_from(TEXTS[1:])
    return st.none() | some


KINDS = st.recursive(st.sampled_from([*LEAVES, pa.int8()]), nested, max_leaves=4)


@settings(max_examples=examples(50, chaos=150), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_nesting_has_the_same_values_in_plain_layouts(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    values = data.draw(st.lists(values_of(kind), max_size=6))
    array = made(values, kind)
    require_sound(array)
    start = data.draw(st.integers(0, len(values)))
    plain = plain_array(array[start:])
    assert plain.type == plain_type(kind)
    plain.validate(full=True)
    assert plain.to_pylist() == array[start:].to_pylist() == array.to_pylist()[start:]
    joined = pa.concat_arrays([plain, plain_array(array)])
    assert len(value_sizes(joined)) == len(joined)


def test_a_type_that_arrow_cannot_compute_with_is_refused_by_column_and_type(tmp_path: Path) -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["x"])])
    arrays = {
        "run_end_encoded": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), union),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0]), union),
        "month_day_nano_interval": pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
    }
    for kind, array in arrays.items():
        (tmp_path / "a.arrow").write_bytes(stored(pa.table({"text": array}), "stream"))
        with raises(ConfigError, "data.field_type", "'text'", kind):
            planned(tmp_path, "arrow", Content())


def test_transforms_see_the_values_of_list_views(tmp_path: Path) -> None:
    table = pa.table(
        {"text": ["x"], "n": made([[["a", None], []]], pa.list_view(pa.list_view(pa.string_view())))}
    )
    (tmp_path / "a.arrow").write_bytes(stored(table, "file"))
    (found,) = described_straight(planned(tmp_path, "arrow", Content(transform_fields=("n",))))
    assert found == Described(document="x", fields={"n": [["a", None], []]})


def test_a_parquet_file_of_views_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": made(TEXTS[1:], pa.string_view())}), tmp_path / "a.parquet")
    assert [d for _, d in read_straight(planned(tmp_path, "parquet", Content()))] == TEXTS[1:]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_a_text_that_is_no_utf_8_is_one_bad_record(kind: pa.DataType, tmp_path: Path) -> None:
    data = stored(pa.table({"text": made(["good", "a text that is none"], kind)}), "stream")
    (tmp_path / "a.arrow").write_bytes(data.replace(b"a text that", b"a text \xffhat"))
    with raises(BadRecordError, "record.not_utf8"):
        texts_in(tmp_path, TEXT)


@pytest.mark.parametrize("name", ["offsets", "sizes"])
def test_list_views_that_end_behind_their_items_are_damage(name: str) -> None:
    places = {"offsets": [0, 1], "sizes": [1, 1], name: [0, 1 << 20]}
    array = pa.ListViewArray.from_arrays(
        pa.array(places["offsets"], pa.int32()), pa.array(places["sizes"], pa.int32()), pa.array(["a", "b"])
    )
    with pytest.raises(pa.ArrowInvalid):
        require_sound(array)


# ---------------------------------------------------------------------------------------- footers
def test_a_file_of_polars_is_read_by_its_footer(tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(POLARS)
    assert (
        texts_in(tmp_path, TEXT) == pa.ipc.open_file(pa.BufferReader(POLARS)).read_all()["text"].to_pylist()
    )


@pytest.mark.parametrize("gap", [0, 8, 4096])
def test_what_lies_between_the_messages_of_a_file_is_not_read(gap: int, tmp_path: Path) -> None:
    """As a writer that pads, or one that writes the schema otherwise: all that a footer lists is moved."""
    texts = [f"text {i}" for i in range(40)]
    data = stored(pa.table({"text": made(texts, LEAVES[4])}), "file")
    size = int.from_bytes(data[-10:-6], "little")
    footer, begin = bytearray(data[-10 - size : -10]), len(b"ARROW1\0\0")
    first = min(block for block in range(len(data)) if data[block : block + 4] == b"\xff\xff\xff\xff")
    assert first == begin
    second = data.index(b"\xff\xff\xff\xff", first + 4)  # what follows the schema
    starts = {at for at in range(second, len(data) - size, 8) if data[at : at + 4] == b"\xff\xff\xff\xff"}
    shift = gap - second + begin
    for at in range(0, len(footer) - 23, 4):
        start, head, padding, body = struct.unpack_from("<qiiq", footer, at)
        if start in starts and head > 8 and body > 0 == padding:
            struct.pack_into("<q", footer, at, start + shift)
    moved = data[:begin] + b"\x07" * gap + data[second : -10 - size] + footer + data[-10:]
    assert pa.ipc.open_file(pa.BufferReader(moved)).read_all()["text"].to_pylist() == texts
    (tmp_path / "a.arrow").write_bytes(moved)
    assert texts_in(tmp_path, TEXT) == texts


def test_dictionaries_that_grow_between_the_record_batches_of_a_file_are_read(tmp_path: Path) -> None:
    batches = [
        pa.record_batch(
            {"text": pa.DictionaryArray.from_arrays(pa.array([i, 0], pa.int8()), list("abcd"[: i + 1]))}
        )
        for i in range(4)
    ]
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(out, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    (tmp_path / "a.arrow").write_bytes(out.getvalue())
    assert texts_in(tmp_path, TEXT) == ["a", "a", "b", "a", "c", "a", "d", "a"]


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_a_file_without_its_footer_is_cut_off(share: float, tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(POLARS[: int(share * len(POLARS)) - 1])
    with raises(DataError, "data.damaged_file", "a.arrow"):
        texts_in(tmp_path, TEXT)
