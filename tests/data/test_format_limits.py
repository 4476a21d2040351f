"""What no format may trip over: files that are cut off or empty, bombs, very long records, half characters.
The rows of the table in docs/formats.md are shown here.
"""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import cbor2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources import windows
from orchestrator.data.sources.access import compressed
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.formats import cbor, mds, text, webdataset
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.records import line_records
from orchestrator.data.sources.records.content import BadRecordError, Content, WrongFieldError
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.errors import ConfigError, DataError
from tests.data import format_writers
from tests.data.format_writers import PRESS, WRITERS, write_files
from tests.data.reading import planned, read, read_straight
from tests.raising import check_error, raises
from tests.traced import traced

pytestmark = pytest.mark.xdist_group("forked")

MB = 1 << 20
PRESSED = [press for press in PRESS if press]
RECORDS = [{"text": f"text number {i} " * (i % 7)} for i in range(40)]
FILES = {form: f"part.00000.{suffix}" for form, (suffix, _) in WRITERS.items()} | {
    "hf_dataset": "data-00000-of-00001.arrow"
}
# A cut shows in these themselves; in lines and rows of text only where they are compressed.
SELF_ENDING = ("parquet", "arrow", "hf_dataset", "webdataset", "mds", "cbor")


def outcome(folder: Path, form: str) -> None:
    """Plans and reads all of it."""
    read_straight(planned(folder, form, Content()))


@pytest.mark.quick(
    "mds-.zst-1.0",
    "arrow--0.7",
    "cbor-.bz2-0.3",
    "lines-.xz-0.7",
    "csv-.gz-1.0",
    "parquet--0.3",
    "hf_dataset--0.7",
    "jsonl-.xz-1.0",
    "webdataset-.bz2-0.7",
)
@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(
    ("form", "press"),
    [
        *((form, "") for form in SELF_ENDING),
        *(
            (form, press)
            for form in ("jsonl", "lines", "csv", "webdataset", "mds", "cbor")
            for press in PRESSED
        ),
    ],
)
def test_a_file_that_is_cut_off_stops_wherever_it_was_cut(
    form: str, press: str, share: float, tmp_path: Path
) -> None:
    write_files(tmp_path, form, [RECORDS], press)
    file = tmp_path / f"{FILES[form]}{press}"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole)) - 1])
    # the index of MDS shards has their sizes
    with pytest.raises((DataError, ConfigError) if form == "mds" else DataError) as raised:
        outcome(tmp_path, form)
    by_index = isinstance(raised.value, ConfigError)
    check_error(raised.value, "data.contradicting_index" if by_index else "data.damaged_file", file)


def test_a_tar_file_without_its_end_is_cut_off_even_between_two_members(tmp_path: Path) -> None:
    whole = format_writers.tar([{"text": "x"}])
    (tmp_path / "a.tar").write_bytes(whole.rstrip(b"\0").ljust(2048, b"\0"))
    with raises(DataError, "data.damaged_file", "a.tar", "byte 2048"):
        outcome(tmp_path, "webdataset")
    (tmp_path / "a.tar").write_bytes(whole + whole)
    with raises(DataError, "data.damaged_file", "a.tar", f"byte {len(whole)}"):
        outcome(tmp_path, "webdataset")


@pytest.mark.parametrize("press", PRESSED)
def test_compressed_streams_that_follow_each_other_are_read_on(press: str, tmp_path: Path) -> None:
    pressed = PRESS[press]
    padding = b"\0" * 8 if press in (".gz", ".xz") else b""
    data = pressed(b"one\ntw") + padding + pressed(b"") + pressed(b"o\n") + padding
    (tmp_path / f"a{press}").write_bytes(data)
    assert [d for _, d in read_straight(planned(tmp_path, "lines", Content()))] == ["one", "two"]


@pytest.mark.parametrize("press", PRESSED)
@pytest.mark.parametrize("rest", [b"garbage", b"one more line\n" * 99])
def test_what_follows_a_compressed_stream_and_is_none_stops(press: str, rest: bytes, tmp_path: Path) -> None:
    (tmp_path / f"a{press}").write_bytes(PRESS[press](b"one\n") + rest)
    with raises(DataError, "data.damaged_file", f"a{press}"):
        outcome(tmp_path, "lines")


@pytest.mark.parametrize("press", PRESSED)
def test_an_empty_file_is_no_compressed_one(press: str, tmp_path: Path) -> None:
    (tmp_path / f"a.jsonl{press}").write_bytes(b"")
    with raises(DataError, "data.damaged_file", f"a.jsonl{press}"):
        outcome(tmp_path, "jsonl")


@pytest.mark.parametrize("form", [*WRITERS, "text"])
def test_an_empty_file_has_no_records_or_is_none_of_the_format(form: str, tmp_path: Path) -> None:
    write_files(tmp_path, form, [[{"text": "x"}]])
    for file in tmp_path.iterdir():
        if file.name != "index.json":
            file.write_bytes(b"")
    if form in ("jsonl", "lines", "csv", "tsv", "cbor"):
        assert read_straight(planned(tmp_path, form, Content())) == []
    elif form == "text":
        assert [d for _, d in read_straight(planned(tmp_path, form, Content()))] == [""]
    else:
        with pytest.raises((DataError, ConfigError)) as raised:
            outcome(tmp_path, form)
        assert raised.value.code in ("data.damaged_file", "data.wrong_format", "data.contradicting_index")


# ---------------------------------------------------------------------------------------- long records
BOMB = 12 * MB
LONGEST = MB // 4


def limit(patch: pytest.MonkeyPatch) -> None:
    """A record may have 256 KiB."""
    for module in (windows, line_records, text, webdataset, mds, cbor):
        patch.setattr(module, "MAX_RECORD_BYTES", LONGEST)


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch)


def a_long_member() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        info = tarfile.TarInfo("a.text")
        info.size = BOMB
        opened.addfile(info, io.BytesIO(bytes(BOMB)))
    return out.getvalue()


BOMBS: dict[str, Callable[[], bytes]] = {
    "jsonl": lambda: bytes(BOMB),
    "lines": lambda: bytes(BOMB),
    "text": lambda: bytes(BOMB),
    "csv": lambda: b'text\n"' + bytes(BOMB) + b'"\n',
    "webdataset": a_long_member,
}


def read_a_bomb(plan: SourcePlan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        limit(patch)
        (window,) = [w for w in read_windows(plan, StreamSettings(), 0, 0) if w.parts]
        ordered = OrderedWindow(window, plan, StreamSettings(), 0)
        with raises(BadRecordError, "record.too_long", f" {LONGEST:,};"):
            ordered.document(len(ordered) - 1)


@pytest.mark.quick("jsonl-.bz2", "jsonl-.xz", "lines-.gz", "csv-.gz", "webdataset-.gz")
@pytest.mark.parametrize(
    # zstd may give 64 MiB at once: see test_memory
    ("form", "press"),
    [("jsonl", ".bz2"), ("jsonl", ".xz"), *((form, ".gz") for form in BOMBS)],
)
def test_a_record_that_a_few_bytes_decode_to_is_bad_and_never_held(
    form: str, press: str, tmp_path: Path
) -> None:
    suffix = WRITERS.get(form, ("txt", None))[0]
    file = tmp_path / f"a.{suffix}{press}"
    file.write_bytes(PRESS[press](BOMBS[form]()))
    assert file.stat().st_size < BOMB / 100
    _, peak = traced(read_a_bomb, planned(tmp_path, form, Content()))
    assert peak < 8 * MB


@pytest.mark.parametrize("press", PRESSED)
def test_pieces_of_a_bomb_are_small(press: str, tmp_path: Path) -> None:
    (tmp_path / f"a{press}").write_bytes(PRESS[press](bytes(BOMB)))
    with open_input(str(tmp_path), f"a{press}") as file:
        sizes = [len(piece) for piece in compressed.decoded(file, f"a{press}", file.size)]
    assert sum(sizes) == BOMB
    assert max(sizes) <= compressed.READ_BYTES


def read_one(plan: SourcePlan, num_characters: int) -> None:
    (found,) = [document for _, document in read(plan, 16 * MB, "block")]
    assert len(str(found)) == num_characters


@pytest.mark.quick("jsonl-104857600")
@pytest.mark.parametrize(("form", "num_bytes"), [("jsonl", 100 * MB), ("text", 200 * MB)])
def test_a_document_of_a_hundred_megabytes_and_more_is_one_document(
    form: str, num_bytes: int, tmp_path: Path
) -> None:
    body = b"a line of the text\\n " * (num_bytes // 21)
    whole = b'{"text": "' + body + b'"}\n' if form == "jsonl" else body
    (tmp_path / f"a.{WRITERS.get(form, ('txt', None))[0]}").write_bytes(whole)
    size = len(body) - (num_bytes // 21 if form == "jsonl" else 0)
    _, peak = traced(read_one, planned(tmp_path, form, Content(), (2 * MB, 16 * MB)), size)
    # orjson takes 12 bytes for each of a line with escapes
    assert peak < (16 if form == "jsonl" else 4) * num_bytes


@pytest.mark.usefixtures("limited")
def test_an_item_whose_end_never_comes_stops(tmp_path: Path) -> None:
    (tmp_path / "a.cbor").write_bytes(b"\x5b" + (1 << 40).to_bytes(8, "big") + bytes(4 * MB))
    with raises(DataError, "data.damaged_file", "a.cbor", "byte 0"):
        outcome(tmp_path, "cbor")


@pytest.mark.parametrize("data", [b"\xff", b"\x1c", b"\x81" * 1000, b"\xf8\x20\xfe"])
def test_what_is_no_cbor_stops_or_is_bad(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.cbor").write_bytes(data)
    with pytest.raises((DataError, BadRecordError)):
        outcome(tmp_path, "cbor")


# ---------------------------------------------------------------------------------------- characters and keys
def test_half_a_character_makes_a_bad_record_in_every_format(tmp_path: Path) -> None:
    half = b"\xed\xa0\x80"  # of a surrogate alone, as UTF-8 would have it
    column = pa.array([half]).cast(pa.binary())
    files: dict[str, tuple[str, bytes, str]] = {
        "jsonl": ("a.jsonl", rb'{"text": "\ud800"}', "record.not_json"),
        "lines": ("a.txt", half, "record.not_utf8"),
        "text": ("a.txt", half, "record.not_utf8"),
        "csv": ("a.csv", b"text\n" + half, "record.not_utf8"),
        "cbor": ("a.cbor", b"\xa1\x64text\x63" + half, "record.not_cbor"),
        "mds": ("a.mds", format_writers.mds([{"text": "xyz"}]).replace(b"xyz", half), "record.not_utf8"),
        "webdataset": (
            "a.tar",
            format_writers.tar([{"text": "xyz"}]).replace(b"xyz", half, 1),
            "record.not_utf8",
        ),
    }
    for form, (name, data, code) in files.items():
        (tmp_path / form).mkdir()
        (tmp_path / form / name).write_bytes(data)
        path = tmp_path / form / ("*.mds" if form == "mds" else "")
        with raises(BadRecordError, code):
            read_straight(planned(path, form, Content()))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with raises(BadRecordError, "record.not_utf8"):
        read_straight(planned(tmp_path / "a.parquet", "parquet", Content()))


@pytest.mark.parametrize("kind", ["chat", "prompt"])
def test_half_a_character_inside_of_columns_is_a_bad_record_and_its_neighbours_are_none(
    kind: str, tmp_path: Path
) -> None:
    texts = pa.array([b"good", b"\xed\xa0\x80", b"good"]).view(pa.string())
    roles = pa.array(["user"] * 3)
    message = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), message)
    pq.write_table(
        pa.table({"messages": chats, "prompt": texts, "completion": roles}), tmp_path / "a.parquet"
    )
    plan = planned(tmp_path, "parquet", Content(kind=kind))
    (window,) = read_windows(plan, StreamSettings(shuffle="none"), 0, 0)
    ordered = OrderedWindow(window, plan, StreamSettings(shuffle="none"), 0)
    assert ordered.document(0) == ordered.document(2)
    with raises(BadRecordError, "record.not_utf8"):
        ordered.document(1)


def test_of_equal_keys_the_last_counts(tmp_path: Path) -> None:
    twice = b'{"text": "first", "text": "last"}'
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as opened:
        info = tarfile.TarInfo("a.json")
        info.size = len(twice)
        opened.addfile(info, io.BytesIO(twice))
    first, last = cbor2.dumps("first"), cbor2.dumps("last")
    key = cbor2.dumps("text")
    for form, data, field in [
        ("jsonl", twice, "text"),
        ("webdataset", out.getvalue(), "json.text"),
        ("cbor", b"\xa2" + key + first + key + last, "text"),
    ]:
        (tmp_path / form).mkdir()
        (tmp_path / form / f"a.{WRITERS[form][0]}").write_bytes(data)
        assert [d for _, d in read_straight(planned(tmp_path / form, form, Content(text_field=field)))] == [
            "last"
        ]


def test_a_missing_field_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    for form in ("jsonl", "cbor"):
        write_files(tmp_path / form, form, [[{"body": "x", "n": 1}]])
        plan = planned(tmp_path / form, form, Content())
        (part,) = read_files(plan)
        ordered = OrderedWindow(next(read_windows(plan, StreamSettings(), 0, 0)), plan, StreamSettings(), 0)
        with raises(WrongFieldError, "record.missing_field", "`text`", "body, n"):
            ordered.document(0)
        assert len(part.records) == 1


def test_a_carriage_return_before_the_newline_is_of_the_line_end_in_lines_and_rows(tmp_path: Path) -> None:
    for form, name, data in [
        ("lines", "a.txt", b"one\r\ntwo\r\r\n"),
        ("csv", "a.csv", b'text\r\none\r\n"two\r"\r\n'),
        (
            "jsonl",
            "a.jsonl",
            json.dumps({"text": "one"}).encode() + b"\r\n" + json.dumps({"text": "two\r"}).encode(),
        ),
    ]:
        (tmp_path / form).mkdir()
        (tmp_path / form / name).write_bytes(data)
        assert [d for _, d in read_straight(planned(tmp_path / form, form, Content()))] == ["one", "two\r"]


# ---------------------------------------------------------------------------------------- damage
def damaged(data: bytes, chance: random.Random) -> bytes:
    """A byte that is another one, a few that are gone, or a few more."""
    at, kind = chance.randrange(len(data)), chance.randrange(3)
    if kind == 0:
        return (
            data[:at] + bytes([chance.choice([0, 255, data[at] ^ 1 << chance.randrange(8)])]) + data[at + 1 :]
        )
    return data[:at] + (chance.randbytes(4) if kind == 1 else b"") + data[at + (0 if kind == 1 else 4) :]


# a damaged footer of a Parquet file can end pyarrow's process
@pytest.mark.quick("jsonl", "tsv", "arrow", "webdataset", "mds", "cbor")
@pytest.mark.parametrize("form", [form for form in (*WRITERS, "hf_dataset") if form != "parquet"])
def test_whatever_is_damaged_the_errors_are_ours(form: str, tmp_path: Path) -> None:
    records = [{"text": f"text {i}", "messages": [{"role": "user", "content": f"q {i}"}]} for i in range(12)]
    flat = form in ("lines", "csv", "tsv")
    write_files(tmp_path, form, [[{"text": r["text"]} for r in records] if flat else records])
    file, chance = tmp_path / FILES[form], random.Random(form)
    whole, wrong = file.read_bytes(), 0
    chat = "json.messages" if form == "webdataset" else "messages"
    for number in range(40):
        file.write_bytes(damaged(whole, chance))
        content = Content(kind="text" if flat or number % 2 else "chat", messages_field=chat)
        try:
            plan = planned(tmp_path, form, content)
            for window in (
                w for b in range(plan.num_blocks) for w in read_windows(plan, StreamSettings(), 0, b)
            ):
                ordered = OrderedWindow(window, plan, StreamSettings(), 0)
                for position in range(len(ordered)):
                    assert ordered.place(position).startswith(str(file))
                    try:
                        ordered.document(position)
                    except BadRecordError:
                        wrong += 1
        except (DataError, ConfigError):
            wrong += 1
    assert wrong or flat
