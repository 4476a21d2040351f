"""Transforms: equal to an independent reference, the same from every cursor on, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import orchestrator
from orchestrator.config.schema import JobConfig
from orchestrator.data.dataset import prepare_data, prepare_trained
from orchestrator.data.sources.records.content import BadRecordError, Conversation
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens import transforms as transforms_module
from orchestrator.data.tokens.transforms import Transforms, find_transform, first_difference
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError
from orchestrator.json_form import decode, encode
from orchestrator.launch.api import plan
from orchestrator.planning import order
from orchestrator.planning.resume.identity import compare
from orchestrator.records.cursor import Cursor
from orchestrator.records.tokens import BAD, EMPTY, FILTERED
from orchestrator.storage.files import Storage
from tests.data import made_transforms, reference
from tests.data.chat_chunks import chat_spec, entries
from tests.data.chat_chunks import chunks as chat_chunks
from tests.data.chats import CHATML_TAGGED, chat
from tests.data.made_transforms import HERE, told_texts
from tests.data.making import job, plain, samples, some_texts, spec_of, write_corpus
from tests.num_examples import examples
from tests.raising import raises

Make = Callable[..., dict[str, Any]]


def made_of(text: str) -> list[str | None]:
    """What `as_told` makes of a text, by the test's own words; None: a bad one; nothing: it is dropped."""
    told, bar, rest = text.partition("~")
    if not bar:
        return [text]
    if told == "b":
        return [None]
    if told == "e":
        return [""]
    words = rest.split(" ")
    return [" ".join(words[i :: int(told)]) for i in range(int(told))]


def told_job(make: Make, folder: Path, texts: Sequence[str], kind: str = "jsonl", **data: Any) -> JobConfig:
    write_corpus(folder, texts, kind)
    more = {"transforms": [f"{HERE}:as_told"], "on_bad_document": "skip", "max_bad_share": 1.0, **data}
    return job(make, folder, kind, **more)


def reference_documents(config: JobConfig, spec: DataSpec) -> Iterator[str | None]:
    manifest, data = spec.plans[0].manifest, config.data.model_dump()
    files = [Path(manifest.path(i)) for i in range(len(manifest.files))]
    per_block = spec.plans[0].fragments_per_block
    for epoch in range(config.data.num_epochs or 1):
        for text in reference.texts(files, manifest.format, manifest.source, data, epoch, per_block):
            yield from made_of(text)


def expected(config: JobConfig, spec: DataSpec, seq_len: int) -> list[Any]:
    texts = (text or "" for text in reference_documents(config, spec))
    stream = reference.tokens(texts, Path(config.data.tokenizer), spec.settings.piece_bytes)
    return list(reference.cut(stream, seq_len))


# ---------------------------------------------------------------------------------------- the stream
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet", "text"])
def test_the_documents_of_transforms_give_the_samples_of_the_reference(
    kind: str, tmp_path: Path, tiny_config: Make
) -> None:
    config = told_job(tiny_config, tmp_path / "data", told_texts(70), kind, num_epochs=2)
    spec = spec_of(config, piece_bytes=128)
    assert plain(samples(spec, 48)) == expected(config, spec, 48)


@pytest.mark.chaos
def test_restore_at_every_position_of_a_stream_of_transformed_documents(
    tmp_path: Path, tiny_config: Make
) -> None:
    long = "4~" + "".join(f"line {i} of a long document, {i * i}\n" for i in range(90))
    config = told_job(tiny_config, tmp_path / "data", [*told_texts(14, 25), long], num_epochs=2)
    spec = spec_of(config)
    whole = samples(spec, 37)
    at_hand = [s.cursor.sources["made"] for s in whole]
    assert max(at.output for at in at_hand) == 3
    assert any(at.output and at.piece for at in at_hand)
    for at, sample in enumerate(whole):
        rest = samples(spec, 37, decode(Cursor, encode(sample.cursor)))
        assert plain(rest) == plain(whole[at + 1 :])
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]


def test_what_transforms_drop_and_find_bad_is_counted_where_the_cursor_passes_it(
    tmp_path: Path, tiny_config: Make
) -> None:
    texts = [*told_texts(60), *["the end"] * 3]  # of each file: its last document is the one at hand
    config = told_job(tiny_config, tmp_path / "data", texts, num_epochs=2, shuffle="none")
    spec = spec_of(config)
    last = samples(spec, 64)[-1].cursor.sources["made"]
    made = [made_of(text) for text in texts]
    assert last.filtered_documents == 2 * sum(not each for each in made)
    assert last.bad_documents == 2 * sum(each == [None] for each in made)
    assert last.empty_documents == 2 * sum(text == "" for each in made for text in each)
    kinds = np.concatenate([chunk.kind for chunk in spec.chunks(Cursor())])
    assert {FILTERED, BAD, EMPTY} <= set(kinds.tolist())


@pytest.mark.quick("bestfit")
@pytest.mark.parametrize("mode", ["bestfit", "pad"])
def test_restore_at_every_position_of_packs_of_transformed_documents(
    mode: str, tmp_path: Path, tiny_config: Make
) -> None:
    texts = told_texts(30, 25)
    config = told_job(tiny_config, tmp_path / "data", texts, num_epochs=2)
    pack = config.pack.model_copy(update={"mode": mode, "seq_len": 48, "long_document": "split"})
    config = config.model_copy(update={"pack": pack})
    spec = spec_of(config)
    whole = samples(spec, 48)
    for at, sample in enumerate(whole):
        rest = samples(spec, 48, decode(Cursor, encode(sample.cursor)))
        assert plain(rest) == plain(whole[at + 1 :])
        assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]
    ids = [tuple(x for x, d in zip(row[0], row[2], strict=True) if d >= 0) for row in plain(whole)]
    made = [text for text in reference_documents(config, spec) if text]
    stream = reference.tokens(iter(made), Path(config.data.tokenizer), spec.settings.piece_bytes)
    assert sum(map(len, ids)) == len(stream) - len(made), "all tokens but the last of each document"


def test_chats_are_opened_at_each_of_their_documents(tmp_path: Path, tiny_config: Make) -> None:
    made = [
        chat("a", "b " * 90, "c", "d"),
        chat("nothing"),
        chat("e", "f"),
        chat("g", "h", "i", "j", "k", "l"),
    ]
    name = [f"{HERE}:shorter_chats"]
    spec = chat_spec(tmp_path, tiny_config, made, CHATML_TAGGED, shuffle="none", transforms=name)
    found = chat_chunks(spec, made)
    rows = entries(found)
    outputs = [int(n) for chunk in found for n in chunk.outputs]
    assert [row[0] for row in rows if row[1] == 0] == [0, 0, 1, 2, 3, 3, 3]
    assert max(outputs) == 2
    again = chat_spec(tmp_path / "plain", tiny_config, [*made[:1], made[2]], CHATML_TAGGED, shuffle="none")
    assert [row[1:] for row in rows if row[0] == 2] == [
        row[1:] for row in entries(chat_chunks(again, [made[2]] * 2)) if row[0] == 0
    ]
    for number, row in enumerate(rows):
        rest = chat_chunks(spec, made, row[0], row[1], outputs[number])
        assert entries(rest) == rows[number:]


COMMANDS = st.lists(
    st.tuples(st.sampled_from(["", "0~", "1~", "2~", "3~", "7~", "e~", "b~"]), st.integers(1, 30)),
    min_size=2,
    max_size=25,
)


@settings(
    max_examples=examples(10, chaos=30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(commands=COMMANDS, seq_len=st.integers(3, 60), epochs=st.integers(1, 2), data=st.data())
def test_whatever_transforms_do_the_stream_is_the_references_and_the_same_from_any_cursor(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Make,
    commands: list[tuple[str, int]],
    seq_len: int,
    epochs: int,
    data: st.DataObject,
) -> None:
    texts = [
        told + " ".join(f"word{i * 7 + j}" for j in range(num)) for i, (told, num) in enumerate(commands)
    ]
    folder = tmp_path_factory.mktemp("made") / "data"
    config = told_job(tiny_config, folder, [*texts, "two words"], num_epochs=epochs, encoder="tokenizers")
    spec = spec_of(config, piece_bytes=64, chunk_tokens=data.draw(st.sampled_from([10, 300, 1 << 20])))
    whole = samples(spec, seq_len)
    assert plain(whole) == expected(config, spec, seq_len)
    at = data.draw(st.integers(0, len(whole) - 1))
    rest = samples(spec, seq_len, whole[at].cursor)
    assert plain(rest) == plain(whole[at + 1 :])
    assert [s.cursor for s in rest] == [s.cursor for s in whole[at + 1 :]]


def test_transforms_follow_each_other_and_a_sources_own_take_the_place_of_all(
    tmp_path: Path, tiny_config: Make
) -> None:
    names = [f"{HERE}:as_told", f"{HERE}:short_ones_only"]
    config = told_job(tiny_config, tmp_path / "data", told_texts(40), transforms=names, shuffle="none")
    spec = spec_of(config)
    documents = [text for text in reference_documents(config, spec) if text is None or len(text) < 90]
    stream = reference.tokens(
        (t or "" for t in documents), Path(config.data.tokenizer), spec.settings.piece_bytes
    )
    assert plain(samples(spec, 48)) == list(reference.cut(stream, 48))
    own = config.data.sources[0].model_copy(update={"transforms": ()})
    without = config.model_copy(update={"data": config.data.model_copy(update={"sources": (own,)})})
    assert spec_of(without).settings.transforms == {}
    assert spec_of(without).run_identity.transforms == {}


def test_documents_of_one_record_have_nothing_in_common_that_one_could_change_for_the_other() -> None:
    outputs = Transforms([find_transform(f"{HERE}:one_dict_over_and_over")]).outputs("abcde", 0)
    assert outputs == ["0 abcde", "1 abcde", "2 abcde"]
    both = Transforms([find_transform(f"{HERE}:{name}") for name in ("twice", "louder")])
    said = Conversation(messages=({"role": "user", "content": "hello"},), tools=None)
    assert [each.messages for each in both.outputs(said, 0) if isinstance(each, Conversation)] == [
        ({"role": "user", "content": "hello!"},)
    ] * 2


def test_a_stream_without_transforms_has_no_column_for_them(tmp_path: Path, tiny_config: Make) -> None:
    spec = spec_of(told_job(tiny_config, tmp_path / "data", told_texts(20), transforms=[]))
    assert all(chunk.output is None for chunk in spec.chunks(Cursor()))
    assert not spec.chunks(Cursor()).__next__().outputs.any()


# ---------------------------------------------------------------------------------------- seeds
def test_the_seed_is_a_keyed_hash_of_the_records_place_and_the_epoch(
    tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", ["one", "two", "three"], "jsonl", 1)
    name = [f"{HERE}:with_its_seed"]
    spec = spec_of(job(tiny_config, tmp_path / "data", transforms=name, num_epochs=2, seed=5), 1 << 20)
    decoder = Tokenizer.from_file(
        str(Path(spec.tokenizer_folder or tiny_config()["data"]["tokenizer"]) / "tokenizer.json")
    )
    found: list[tuple[int, str]] = []
    for chunk in spec.chunks(Cursor()):
        stops = np.cumsum(chunk.num_tokens)
        for start, stop, output in zip(stops - chunk.num_tokens, stops, chunk.outputs, strict=True):
            text = decoder.decode(chunk.tokens[start:stop].tolist())
            if output == 0:
                found.append((chunk.epoch, text))
    lines, wanted, place = (tmp_path / "data" / "part-0.jsonl").read_bytes().split(b"\n"), [], 0
    for line in lines:
        for epoch in (0, 1):
            key = xxhash.xxh3_64_intdigest(f"1,transform,5,{epoch},made,part-0.jsonl".encode())
            seed = xxhash.xxh3_64_intdigest(place.to_bytes(8, "little"), key)
            if line:
                wanted.append((epoch, f"{seed} {json.loads(line)['text']}"))
        place += len(line) + 1
    assert sorted(found) == sorted(wanted)


def test_calls_of_one_record_have_seeds_of_their_own() -> None:
    seeds = {order.document_seed(9, i, j) for i in range(5) for j in range(5)}
    assert len(seeds) == 25
    assert order.document_seed(9, 0, 0) == 9
    dropped = [
        Transforms([find_transform(f"{HERE}:as_told"), find_transform(f"{HERE}:half")]).outputs(
            "5~a b c d e", seed
        )
        for seed in range(200)
    ]
    assert 300 < sum(each is None for outputs in dropped for each in outputs) < 700
    assert len({tuple(each is None for each in outputs) for outputs in dropped}) > 16


# ---------------------------------------------------------------------------------------- what stops
def test_an_exception_stops_with_file_line_and_the_users_traceback(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", transforms=[f"{HERE}:failing"]))
    with raises(DataError, "user_code.raised") as caught:
        samples(spec, 64)
    text = str(caught.value)
    assert re.match(rf"{tmp_path}/data/part-0.jsonl: byte \d+, line 13: data.transforms {HERE}:failing", text)
    assert "ValueError: no twelves" in text
    assert f'File "{made_transforms.__file__}"' in text
    assert 'raise ValueError("no twelves")' in text


def test_an_exit_is_an_exception_too() -> None:
    values = ("made_transforms:leaving", "SystemExit: 3", "sys.exit(3)")
    with raises(DataError, "user_code.raised", *values):
        Transforms([find_transform(f"{HERE}:leaving")]).outputs("x", 0)


def test_a_bad_document_follows_on_bad_document(tmp_path: Path, tiny_config: Make) -> None:
    config = told_job(tiny_config, tmp_path / "data", ["b~hello there"] * 3, on_bad_document="stop")
    values = ("as_told", "hello is bad", "data.on_bad_document=skip")
    with raises(BadDocumentError, "data.bad_document", *values) as caught:
        samples(spec_of(config), 64)
    assert re.search(r"line \d: ", str(caught.value))
    (tmp_path / "more").mkdir()
    few = told_job(tiny_config, tmp_path / "more" / "data", told_texts(40), max_bad_share=0.01)
    with raises(DataError, "data.too_many_bad", "source made"):
        samples(spec_of(few), 64)


def test_a_transform_that_is_not_pure_stops_with_file_and_line(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", transforms=[f"{HERE}:counting"], shuffle="none"))
    with raises(DataError, "user_code.nondeterministic") as caught:
        samples(spec, 64)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/data/part-0.jsonl: byte 0, line 1: data.transforms ")
    assert re.search(r"document 0 is '(\d+) 0: .*, and '(?!\1)\d+ 0: ", text, re.DOTALL)


def test_one_record_in_a_thousand_is_made_twice(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", ["some text"] * 5000, "lines", 1)
    sizes = {"fragment_bytes": 1 << 20, "window_bytes": 1 << 20}
    spec = spec_of(job(tiny_config, tmp_path / "data", "lines", transforms=[f"{HERE}:noted"], **sizes))
    (ref,) = spec.settings.transforms["made"]
    calls = transforms_module._function(ref).__globals__["CALLS"]
    calls.clear()
    samples(spec, 64)
    assert len(calls) - 5000 in (5, 6)  # a blank line is a record, too
    assert len(set(calls)) == 5000


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a_text", ["a str"]),
        ("another_field", ["content text", "no field `text`", "txt, seed"]),
        ("a_surrogate", ["content text", "'utf-8' codec can't encode"]),
    ],
)
def test_what_is_no_document_stops(name: str, values: list[str], tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(5), "jsonl", 1)
    spec = spec_of(job(tiny_config, tmp_path / "data", transforms=[f"{HERE}:{name}"]))
    with raises(DataError, "user_code.output", f"data.transforms {HERE}:{name}", *values):
        samples(spec, 64)


def test_a_function_that_does_not_end_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms_module, "MAX_OUTPUTS", 1000)
    with raises(DataError, "user_code.endless", "1,000 documents"):
        Transforms([find_transform(f"{HERE}:without_end")]).outputs("x", 0)


def test_two_results_are_compared_document_by_document() -> None:
    assert first_difference(["a", None], ["a", None]) is None
    assert first_difference(["a"], ["a", "b"]) == "1 documents, and 2"
    assert first_difference(["a", None], ["a", "b"]) == "document 1 is dropped, and 'b'"
    bad = BadRecordError("so", code="record.not_json"), BadRecordError("so", code="record.not_json")
    assert first_difference([bad[0]], [bad[1]]) is None


# ---------------------------------------------------------------------------------------- identity
@pytest.mark.quick(
    "tests.data.made_transforms:two_arguments_are_needed-user_code.signature-too many positional arguments",
    "nosuch:fn-user_code.missing_module-'nosuch'",
)
@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("no.such.module:fn", "user_code.missing_module", "'no'"),
        ("nosuch:fn", "user_code.missing_module", "'nosuch'"),
        (f"{HERE}:nothing", "user_code.missing_function", f"module {HERE} ("),
        (f"{HERE}:as_rubish", "user_code.missing_function", f"did you mean {HERE}:as_rubbish?"),
        (f"{HERE}:two_arguments_are_needed", "user_code.signature", "too many positional arguments"),
        ("sys:exit", "user_code.module_without_file", "module sys"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    name: str, code: str, value: str, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", some_texts(5), "jsonl", 1)
    config = job(tiny_config, tmp_path / "data", transforms=[name])
    for look in (prepare_data, plan, orchestrator.open_stream):
        with raises(ConfigError, code, f"data.transforms {name}: ", value):
            look(config)


def test_a_new_run_tries_its_transforms_before_anything_starts(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", [f"twelve {i}" for i in range(40)], "jsonl", 1)
    config = job(tiny_config, tmp_path / "data", transforms=[f"{HERE}:as_rubbish"])
    with raises(DataError, "user_code.output", "line ", "a int", "run.name"):
        plan(config)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the current folder, which is on no path."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_transforms.py"
    path.write_text("VERSION = 3\n\ndef same(document, seed):\n    return document\n")
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    yield path
    sys.modules.pop("my_transforms", None)
    sys.path[:] = before


def test_a_module_that_exits_is_refused(module: Path) -> None:
    module.write_text("import sys\nsys.exit('usage: …')\n")
    with raises(ConfigError, "user_code.import_failed", "SystemExit: usage"):
        find_transform(f"{module.stem}:f")


def test_a_module_is_known_by_its_source_and_version(module: Path) -> None:
    digest = blake3(module.read_bytes()).hexdigest()[:32]
    assert find_transform("my_transforms:same").source == f"module source {digest}, VERSION 3"
    # it was edited since, as in a notebook
    module.write_text("def same(document, seed):\n    return {'text': 'other'}\n")
    found = find_transform("my_transforms:same")
    assert found.source == f"module source {blake3(module.read_bytes()).hexdigest()[:32]}"
    assert Transforms([found]).outputs("x", 0) == ["other"]


def test_a_changed_module_is_refused_with_both_values(
    module: Path, tmp_path: Path, tiny_config: Make
) -> None:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    config = job(tiny_config, tmp_path / "data", transforms=["my_transforms:same"])
    began = prepare_data(config, Storage(str(tmp_path / "run")))
    old = began.run_identity.transforms["my_transforms:same"]
    module.write_text(module.read_text() + "# a comment\n")
    new = prepare_data(config, Storage(str(tmp_path / "run"))).run_identity.transforms["my_transforms:same"]
    assert old != new
    (refusal,) = compare(
        began.run_identity, prepare_data(config, Storage(str(tmp_path / "run"))).run_identity
    )
    assert refusal.code == "resume.changed_transform"
    assert all(value in refusal.text for value in ("my_transforms:same", old, new))
    # whoever reads the run once more, and a process that comes later, takes no other either
    for spec in (prepare_trained(config, Storage(str(tmp_path / "run"))), began):
        with raises(DataIdentityError, "resume.changed_transform", "my_transforms:same", old, new):
            samples(spec, 64)


def test_identities_of_runs_without_transforms_are_as_they_were(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "data", some_texts(30), "jsonl")
    identity = prepare_data(job(tiny_config, tmp_path / "data")).run_identity
    assert not [name for name in identity.settings if "transforms" in name or "holdout" in name]
    other = prepare_data(job(tiny_config, tmp_path / "data", transforms=[f"{HERE}:as_told"])).run_identity
    name = "data.sources.made.transforms"
    assert other.settings[name] == json.dumps([f"{HERE}:as_told"])
    assert any("data.sources.made.transforms" in refusal.text for refusal in compare(identity, other))
    assert compare(replace(identity, transforms={}), identity) == ()
