"""Sources that are Python code: what their records become, what they are known by, and what is said when the
code is wrong.
"""

from __future__ import annotations

import importlib
import itertools
import json
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import orchestrator
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.common import user_code
from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.dataset import prepare_data, prepare_trained
from orchestrator.data.first_records import check_first_records
from orchestrator.data.sources.access.input_file import CodeRecords
from orchestrator.data.sources.formats import format_of, python
from orchestrator.data.sources.lists.fragments import SourcePlan, plan_source
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed, from_parquet, to_parquet
from orchestrator.data.sources.readers import read_files
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Content,
    Conversation,
    Document,
    Prompted,
)
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.errors import BadDocumentError, ConfigError, DataError, DataIdentityError
from orchestrator.storage.files import Storage
from tests.data.code_sources import Numbered
from tests.data.making import plain, samples, some_texts, spec_of
from tests.raising import check_error, raises

Make = Callable[..., dict[str, Any]]
FEW = "tests.data.code_sources:few"
numbers = itertools.count()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of this text into the current folder, the second time over the first; its name."""
    name = f"user_module_{next(numbers)}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def job(make: Make, path: str = FEW, changes: dict[str, Any] | None = None, **source: Any) -> JobConfig:
    entry = {"name": "made", "path": path, "format": "python", **source}
    small = {"data.fragment_bytes": 900, "data.window_bytes": 2500}
    return parse_config(make({"data.sources": [entry], **small, **(changes or {})}))


def planned(path: str, content: Content | None = None, window_bytes: int = 1 << 20) -> SourcePlan:
    manifest = freeze_listed("s", list_files("s", path, "python"), "python", content or Content())
    assert from_parquet(to_parquet(manifest), "here") == manifest
    return plan_source(manifest, 100, window_bytes)


def read(
    plan: SourcePlan, window_bytes: int = 1 << 20
) -> list[tuple[str, Document | BadRecordError | None]]:
    """(place, document or why it is bad) of every record, in the order of the source."""
    found = list[tuple[str, Document | BadRecordError | None]]()
    settings = StreamSettings(window_bytes=window_bytes, shuffle="none")
    for block in range(plan.num_blocks):
        for window in read_windows(plan, settings, 0, block):
            ordered = OrderedWindow(window, plan, settings, 0)
            for i in range(len(ordered)):
                try:
                    found.append((ordered.place(i), ordered.document(i)))
                except BadRecordError as error:
                    found.append((ordered.place(i), error))
    return found


def comparable(found: tuple[str, object]) -> object:
    """The document, or the code and text of why it is bad."""
    _, document = found
    return (document.code, str(document)) if isinstance(document, BadRecordError) else document


# ------------------------------------------------------------------------------ the stream
@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "_UNIT_BYTES", 700)


@pytest.mark.usefixtures("small_units")
def test_code_gives_the_stream_of_the_same_records_in_a_file_and_goes_on_from_every_cursor(
    tiny_config: Make, tmp_path: Path
) -> None:
    spec = spec_of(job(tiny_config, changes={"data.shuffle": "none"}))
    check_first_records(spec)
    found = samples(spec, 16)
    (tmp_path / "texts.jsonl").write_bytes(
        b"".join(json.dumps({"text": text}).encode() + b"\n" for text in some_texts(40))
    )
    in_file = job(tiny_config, str(tmp_path / "texts.jsonl"), {"data.shuffle": "none"}, format="jsonl")
    assert plain(found) == plain(samples(spec_of(in_file), 16))
    shuffled = spec_of(job(tiny_config, changes={"data.num_epochs": 2}))
    assert shuffled.plans[0].num_blocks > 3
    found = samples(shuffled, 16)
    copy = pickle.loads(pickle.dumps(shuffled))
    for at in range(0, len(found), 23):
        rest = samples(copy, 16, found[at].cursor)
        assert plain(rest) == plain(found[at + 1 :]), f"after sample {at}"


def test_a_frozen_run_reads_its_code_again_and_so_does_its_audit(tiny_config: Make, tmp_path: Path) -> None:
    config = job(tiny_config)
    first = prepare_data(config, Storage(str(tmp_path)))
    again, trained = (
        prepare_data(config, Storage(str(tmp_path))),
        prepare_trained(config, Storage(str(tmp_path))),
    )
    assert first.identity() == again.identity() == trained.identity()
    assert plain(samples(again, 64)) == plain(samples(trained, 64)) == plain(samples(first, 64))
    assert [str(p) for p in tmp_path.rglob("*.parquet")] == [str(tmp_path / "manifest" / "made.parquet")]


def test_open_stream_gives_it(tiny_config: Make) -> None:
    config = job(tiny_config)
    stream = orchestrator.open_stream(config)
    assert [s.input_ids.tolist() for s in stream] == [
        s.input_ids.tolist() for s in samples(prepare_data(config), config.pack.seq_len)
    ]


@given(num=st.integers(0, 300), size=st.integers(8, 40), unit=st.integers(1, 400), most=st.integers(1, 50))
def test_any_number_of_records_is_cut_into_runs_that_hold_each_once(
    num: int, size: int, unit: int, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python, "_UNIT_BYTES", unit)
        patch.setattr(python, "_MAX_UNITS", most)
        patch.setenv("NUMBERED", f"{num} {size}")
        name = "tests.data.code_sources:numbered"
        plan = planned(name, window_bytes=200)
        row = plan.manifest.files[0]
        assert (row.bytes, sum(row.group_rows)) == (num, num)
        assert len(row.group_rows) <= most
        assert all(row.group_rows)
        assert max(row.group_rows, default=0) - min(row.group_rows, default=0) <= 1
        expected = [(f"{name}[{i}]", Numbered(num, size)[i]) for i in range(num)]
        assert read(plan, 200) == expected
        straight = [part.records[i] for part in read_files(plan) for i in range(len(part.records))]
        assert straight == [text for _, text in expected]


# ------------------------------------------------------------------------------ what a record may be
RECORDS = """
def texts():
    return ["plain", {"text": "é", "image": object()}, {"text": ""}, {"text": None}, {"body": "x"}, 7, None,
            {"text": 5}, "half \\ud800", {"text": "half \\ud800"}, b"bytes"]

def chats():
    turns = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "a"}]
    return [{"messages": turns, "tools": [{"name": "t"}]}, {"messages": turns}, "text", {"messages": "no"},
            {"messages": [{"role": "user", "content": {1, 2}}]},
            {"messages": [{"role": "user", "content": "half \\ud800"}]}]

def prompts():
    return [{"prompt": "a", "completion": "é"}, "text", {"prompt": "a"}]
"""


def test_a_record_is_a_text_or_a_mapping_and_anything_else_is_bad(module: Callable[[str], str]) -> None:
    name = module(RECORDS)
    found = read(planned(f"{name}:texts"))
    assert [place for place, _ in found] == [f"{name}:texts[{i}]" for i in range(11)]
    read_back = [document for _, document in found]
    assert read_back[:3] == ["plain", "é", ""]
    require_bad(
        read_back[3:],
        [
            ("record.null_field", "'text'"),
            ("record.missing_field", "`text`", ": body"),
            ("record.not_object", " int,", " str "),
            ("record.not_object", " NoneType,", " str "),
            ("record.field_type", "'text'", "number", "string"),
            ("record.not_utf8", "character 5"),
            ("record.not_utf8", "character 5"),
            ("record.not_object", " bytes,", " str "),
        ],
    )


def require_bad(errors: Sequence[object], expected: Sequence[tuple[str, ...]]) -> None:
    """Asserts that these are bad records, each with a code and values."""
    for error, (code, *values) in zip(errors, expected, strict=True):
        assert isinstance(error, BadRecordError), error
        check_error(error, code, *values)


def test_records_of_code_may_be_chats_and_prompts(module: Callable[[str], str]) -> None:
    name = module(RECORDS)
    chats = [document for _, document in read(planned(f"{name}:chats", Content(kind="chat")))]
    turns = ({"role": "user", "content": "é?"}, {"role": "assistant", "content": "a"})
    assert chats[:2] == [
        Conversation(messages=turns, tools=[{"name": "t"}]),
        Conversation(messages=turns),
    ]
    require_bad(
        chats[2:],
        [
            ("record.not_object", " str,", " mapping "),
            ("record.not_json", "'messages'"),
            ("record.chat_value_type", "`content` of message 1 of 'messages'", " set,"),
            ("record.value_type", ": str"),
        ],
    )
    prompts = [document for _, document in read(planned(f"{name}:prompts", Content(kind="prompt")))]
    assert prompts[0] == Prompted(prompt="a", completion="é")
    require_bad(
        prompts[1:],
        [("record.not_object", " str,", " mapping "), ("record.missing_field", "`completion`", ": prompt")],
    )


def test_a_bad_record_stops_or_is_counted_as_one_in_a_file_is(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    name = module("def texts():\n    return ['some words ' * 9, 7, 'and more ' * 9] * 9")
    with raises(BadDocumentError, "data.bad_document", f"{name}:texts[", " int"):
        samples(spec_of(job(tiny_config, f"{name}:texts")), 16)
    skip = {"data.on_bad_document": "skip", "data.max_bad_share": 0.5}
    last = samples(spec_of(job(tiny_config, f"{name}:texts", skip)), 16)[-1]
    assert last.cursor.sources["made"].bad_documents > 0


def test_what_a_record_holds_beside_its_document_is_not_kept(module: Callable[[str], str]) -> None:
    name = module("turn = {'role': 'user', 'content': 'a'}\ndef f():\n    return [{'messages': [turn]}]")
    plan = planned(f"{name}:f", Content(kind="chat"))
    (part,) = read_files(plan)
    sys.modules[name].turn["content"] = "changed later"
    assert part.records[0] == Conversation(messages=({"role": "user", "content": "a"},))


def test_a_parsed_chat_shares_nothing_with_the_one_that_was_read() -> None:
    read_one = Conversation(
        messages=({"role": "user", "content": "a"},), tools=[{"name": "t"}], template_kwargs={"k": ["v"]}
    )
    parsed: Any = format_of("python").parser(Content(kind="chat"))(read_one)
    assert parsed == read_one
    parsed.messages[0]["content"] = parsed.tools[0]["name"] = parsed.template_kwargs["k"][0] = "changed"
    assert (read_one.messages[0]["content"], read_one.tools[0]["name"]) == ("a", "t")
    assert read_one.template_kwargs == {"k": ["v"]}


# ------------------------------------------------------------------------------ what it is known by
CODE = """
class Texts:
    def __len__(self):
        return {num}
    def __getitem__(self, i):
        return "some words of text " * (i % 5 + 1)
    {more}
def texts():
    return Texts()
"""


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (
            "",
            "# another comment",
            r"it was 30 records, module source \w{32}, and is 30 records, module source ",
        ),
        ("VERSION = 1", "VERSION = 2", r"source \w{32}, VERSION 1, and is 30 records, .*, VERSION 2"),
    ],
)
def test_other_code_is_refused_with_both_values_until_it_is_accepted(
    module: Callable[[str], str], tiny_config: Make, tmp_path: Path, then: str, now: str, said: str
) -> None:
    text = CODE.format(num=30, more="")
    path = f"{module(text + then)}:texts"
    config = job(tiny_config, path)
    began = prepare_data(config, Storage(str(tmp_path / "run")))
    trained = plain(samples(began, 16))
    module(text + now)
    with raises(DataIdentityError, "data.changed_files", path) as refused:
        prepare_data(config, Storage(str(tmp_path / "run")))
    assert re.search(said, str(refused.value))
    assert "resume.accept_changed=true" in str(refused.value)
    with raises(DataIdentityError, "data.changed_files", path, "audit") as refused:
        prepare_trained(config, Storage(str(tmp_path / "run")))
    assert re.search(said, str(refused.value))
    assert "resume.accept_changed" not in str(refused.value), "an audit cannot accept them"
    accepted = job(tiny_config, path, {"resume.accept_changed": True})
    gone_on = prepare_data(accepted, Storage(str(tmp_path / "run")))
    assert any("going on with a changed file" in note for note in gone_on.notes)
    assert plain(samples(gone_on, 16)) == trained
    module(text + then)
    assert prepare_data(config, Storage(str(tmp_path / "run"))).identity() == began.identity()


def test_what_the_code_returns_is_a_part_of_what_it_is_known_by(
    module: Callable[[str], str], tiny_config: Make, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("30 a")
    more = "def fingerprint(self):\n        return open('state').read().split()[1]"
    name = module(CODE.format(num="int(open('state').read().split()[0])", more=more))
    config = job(tiny_config, f"{name}:texts")
    prepare_data(config, Storage(str(tmp_path / "run")))
    accepting = job(tiny_config, f"{name}:texts", {"resume.accept_changed": True})
    (tmp_path / "state").write_text("30 b")
    with raises(DataIdentityError, "data.changed_files", "30 records", "fingerprint a", "fingerprint b"):
        prepare_data(config, Storage(str(tmp_path / "run")))
    (tmp_path / "state").write_text("31 a")
    with raises(DataIdentityError, "data.changed_files", "30 records", "31 records"):
        prepare_data(config, Storage(str(tmp_path / "run")))
    more_now = prepare_data(accepting, Storage(str(tmp_path / "run")))
    assert sum(more_now.plans[0].manifest.files[0].group_rows) == 30, "the frozen records are read"
    assert samples(more_now, 16)
    (tmp_path / "state").write_text("29 a")
    with raises(DataIdentityError, "data.missing_files", "30 records", "29"):
        prepare_data(accepting, Storage(str(tmp_path / "run")))


def test_another_function_is_refused(module: Callable[[str], str], tiny_config: Make, tmp_path: Path) -> None:
    name = module(CODE.format(num=30, more="") + "def others():\n    return Texts()\n")
    prepare_data(job(tiny_config, f"{name}:texts"), Storage(str(tmp_path / "run")))
    with raises(DataIdentityError, "data.other_path", f"{name}:texts", f"{name}:others"):
        prepare_data(job(tiny_config, f"{name}:others"), Storage(str(tmp_path / "run")))


def test_code_that_is_edited_while_it_is_read_is_read_as_it_was_loaded(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    name = module("def texts():\n    return ['old words ' * 30] * 30")
    config = job(tiny_config, f"{name}:texts")
    stream = orchestrator.open_stream(config)
    first = next(iter(stream)).input_ids.tolist()
    module("def texts():\n    return ['NEW WORDS ' * 30] * 30")
    assert sum(1 for _ in stream) > 3, "this stream goes on"
    assert next(iter(orchestrator.open_stream(config))).input_ids.tolist() != first


# ------------------------------------------------------------------------------ what a user is told
FAULTS = """
class Fails:
    def __len__(self):
        return 50
    def __getitem__(self, i):
        if i == 33:
            raise OSError("the database is gone")
        return "some words " * 5

class Counts:
    def __init__(self):
        self.calls = 0
    def __len__(self):
        return 5
    def __getitem__(self, i):
        self.calls += 1
        return f"call {self.calls} " * 5

def fails():
    return Fails()
def counts():
    return Counts()
def needs(argument):
    return []
def iterates():
    return iter("abc")
def a_set():
    return {"text"}
def empty():
    return []
"""


def test_code_that_fails_stops_with_its_place_and_traceback(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    name = module(FAULTS)
    skip = {"data.on_bad_document": "skip", "data.encoder": "tokenizers", "data.shuffle": "none"}
    config = job(tiny_config, f"{name}:fails", {**skip, "data.window_bytes": 1000})
    with raises(DataError, "user_code.raised", "__getitem__") as raised:
        samples(spec_of(config), 16)
    text = str(raised.value)
    assert text.startswith(f"{name}:fails[33]: ")
    assert f'{name}.py", line 7, in __getitem__' in text
    assert text.endswith("OSError: the database is gone\n")


def test_a_record_that_is_another_one_when_it_is_read_again_stops(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(FAULTS)
    with raises(DataError, "user_code.not_repeatable", f"{name}:counts[0]: ") as stopped:
        read(planned(f"{name}:counts"))
    assert len(set(re.findall(r"'call \d+ ", str(stopped.value)))) == 2
    monkeypatch.setattr(python, "_require_same", lambda *_: None)
    assert len(read(planned(f"{name}:counts"))) == 5, "it is this check that finds it"


# ------------------------------------------------------------------------------ several at once
TOGETHER = """
class Alone:
    def __init__(self, sizes):
        self.sizes = sizes
    def __len__(self):
        return len(self.sizes)
    def __getitem__(self, i):
        return f"{i} ".ljust(self.sizes[i], "x") if self.sizes[i] != 13 else 13

class Together(Alone):
    asked = []
    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[i] for i in indices]

class Broken(Together):
    gives = list
    def __getitems__(self, indices):
        return self.gives(super().__getitems__(indices))

sizes = [20] * 3000
def alone():
    return Alone(sizes)
def together():
    return Together(sizes)
def broken():
    return Broken(sizes)
"""


@given(
    sizes=st.lists(st.one_of(st.integers(8, 30), st.integers(8, 3000)), min_size=1, max_size=120),
    asked=st.integers(1, 5000),
    most=st.integers(1, 50),
    batch=st.integers(1, 3000),
)
def test_items_that_are_asked_for_together_are_those_that_are_asked_for_alone(
    sizes: list[int], asked: int, most: int, batch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("code")
    name = f"together_{next(numbers)}"
    (folder / f"{name}.py").write_text(TOGETHER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for limit, value in (("_ASKED_BYTES", asked), ("_MAX_ASKED", most), ("_BATCH_BYTES", batch)):
            patch.setattr(python, limit, value)
        patch.setattr(python, "_UNIT_BYTES", 900)
        module = importlib.import_module(name)
        module.sizes[:] = sizes
        patch.setattr(user_code, "_executed", {name: ((folder / f"{name}.py").read_bytes(), module)})
        alone = read(planned(f"{name}:alone", window_bytes=2000), 2000)
        together = read(planned(f"{name}:together", window_bytes=2000), 2000)
        assert [said.replace("together[", "alone[") for said, _ in together] == [said for said, _ in alone]
        assert list(map(comparable, together)) == list(map(comparable, alone))
        calls = module.Together.asked
        assert [i for indices in calls for i in indices] == list(range(len(sizes)))
        assert max(map(len, calls)) <= most


def test_an_item_that_fails_among_others_is_named_by_itself(module: Callable[[str], str]) -> None:
    text = TOGETHER.replace('return f"{i} "', '1 // (i - 33)\n        return f"{i} "')
    name = module(text)
    plan = planned(f"{name}:alone")
    for function in ("alone", "together"):
        plan = planned(f"{name}:{function}")
        place = f"{name}:{function}[33]: "
        with raises(DataError, "user_code.raised", place, "__getitem__", "ZeroDiv") as raised:
            read(plan)
        assert str(raised.value).startswith(place)


@pytest.mark.parametrize(
    ("gives", "code", "values"),
    [
        ("1 / 0", "user_code.raised", ("broken[0:256]: ", "__getitems__", "ZeroDivisionError")),
        ("found[:-1]", "user_code.wrong_result", ("__getitems__", "255 records", "256")),
        ("{'text': found}", "user_code.wrong_result", ("__getitems__", "a dict", "256")),
        ("found[::-1]", "user_code.not_repeatable", ("broken[0]: ", "'255 ", "'0 ")),
    ],
)
def test_several_items_that_are_not_those_that_were_asked_for_stop(
    gives: str, code: str, values: tuple[str, ...], module: Callable[[str], str]
) -> None:
    text = TOGETHER.replace("gives = list", f"gives = lambda self, found: {gives}")
    plan = planned(f"{module(text)}:broken")
    with raises(DataError, code, *values):
        read(plan)


def test_a_torch_subset_of_a_dataset_is_asked_for_several(module: Callable[[str], str]) -> None:
    text = (
        TOGETHER
        + "import torch.utils.data as d\ndef part():\n    return d.Subset(Together(sizes), range(7, 600))"
    )
    found = read(planned(f"{module(text)}:part"))
    assert [str(document).split()[0] for _, document in found] == [str(i) for i in range(7, 600)]


@pytest.mark.parametrize(
    ("path", "code", "values"),
    [
        ("no_such_module:f", "user_code.missing_module", ("'no_such_module'",)),
        ("{name}:absent", "user_code.missing_function", ("`absent`",)),
        ("{name}:needs", "user_code.raised", ("TypeError",)),
        ("{name}:iterates", "user_code.raised", ("TypeError", "has no len()")),
        ("{name}:a_set", "user_code.wrong_result", ("set", "__len__", "__getitem__")),
        ("{name}:empty", "data.no_records", ()),
        ("sys:getsizeof", "user_code.module_without_file", ("module sys",)),
    ],
)
def test_a_path_that_gives_no_records_is_refused(
    module: Callable[[str], str], tiny_config: Make, path: str, code: str, values: tuple[str, ...]
) -> None:
    path = path.format(name=module(FAULTS))
    with raises(ConfigError, code, *values) as raised:
        prepare_data(job(tiny_config, path))
    assert code == "data.no_records" or path in str(raised.value)


def test_a_module_that_cannot_be_imported_is_shown_with_its_traceback(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    name = module("1 / 0")
    values = f"path={name}:f: ", f"module {name} ", "line 1", "ZeroDivisionError"
    with raises(ConfigError, "user_code.import_failed", *values):
        prepare_data(job(tiny_config, f"{name}:f"))


@pytest.mark.parametrize("path", ["data/*.jsonl", "package.module", ["a:f", "b:f"], "a:f()"])
def test_a_path_that_names_no_function_is_a_mistake_of_the_configuration(
    path: str | list[str], tiny_config: Make
) -> None:
    with raises(ConfigError, "config.invalid_value", "format: python", "path=", "package.module:function"):
        job(tiny_config, path)  # type: ignore[arg-type]


def test_records_without_the_field_are_refused_before_the_start(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    name = module("def f():\n    return [{'body': 'x', 'id': 1}]")
    with raises(ConfigError, "data.missing_field", "f: [0]: ", "`text`", "has: body, id", "Set text_field"):
        check_first_records(spec_of(job(tiny_config, f"{name}:f", {"data.encoder": "tokenizers"})))


def test_a_factory_is_called_once_per_process_for_all_that_is_read(module: Callable[[str], str]) -> None:
    name = module("calls = []\ndef f():\n    calls.append(1)\n    return ['a'] * 50")
    plan = planned(f"{name}:f")
    read(plan)
    read(plan)
    assert len(sys.modules[name].calls) == 1
    assert CodeRecords.anew(f"{name}:f").size == 50
    assert len(sys.modules[name].calls) == 2


def test_the_example_of_the_documents_is_read(tmp_path: Path, module: Callable[[str], str]) -> None:
    module("")
    text = (Path(orchestrator.__file__).parents[1] / "docs" / "formats.md").read_text()
    (block,) = (b for b in text.split("```python\n")[1:] if b.startswith("# my_data/tasks.py"))
    (tmp_path / "my_data").mkdir()
    (tmp_path / "my_data" / "tasks.py").write_text(block.partition("```")[0])
    plan = planned("my_data.tasks:sums")
    assert plan.manifest.files[0].bytes == 100_000
    settings = StreamSettings(shuffle="none")
    first = OrderedWindow(next(read_windows(plan, settings, 0, 0)), plan, settings, 0)
    place, document = first.place(7), first.document(7)
    a, _, rest = str(document).partition(" + ")
    b, _, total = rest.partition(" = ")
    assert (place, int(total)) == ("my_data.tasks:sums[7]", int(a) + int(b))


def test_code_that_exits_is_refused_as_code_that_fails(
    module: Callable[[str], str], tiny_config: Make
) -> None:
    leaves = module("import sys\nsys.exit(3)\n")
    with raises(ConfigError, "user_code.import_failed", f"{leaves}:f", "SystemExit: 3"):
        prepare_data(job(tiny_config, f"{leaves}:f"))
    factory = module("import sys\n\n\ndef f():\n    sys.exit(4)\n")
    with raises(ConfigError, "user_code.raised", f"{factory}:f", "SystemExit: 4"):
        prepare_data(job(tiny_config, f"{factory}:f"))


@pytest.mark.parametrize(
    ("content", "setting"), [("text", "text_field"), ("prompt", "prompt_field or completion_field")]
)
def test_a_record_without_its_field_names_the_setting_of_its_content(
    module: Callable[[str], str], tiny_config: Make, content: str, setting: str
) -> None:
    name = module("def f():\n    return [{'body': 'x'}] * 3\n")
    config = tiny_config(
        {"data.sources": [{"name": "a", "path": f"{name}:f", "format": "python", "content": content}]}
    )
    with raises(BadDocumentError, "data.bad_document", " body", setting, "data.on_bad_document"):
        samples(prepare_data(parse_config(config)), 16)
