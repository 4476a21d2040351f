"""The values of a chat reach the template with the type that it needs, or the record is refused by name,
whatever the file holds them as: objects, JSON text, Arrow's JSON type.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze_listed, from_parquet, to_parquet
from orchestrator.data.sources.records.content import (
    BadRecordError,
    Conversation,
    WrongChatValueError,
)
from orchestrator.data.sources.records.documents import document_of
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.transforms import Transforms, find_transform
from orchestrator.errors import ConfigError
from tests.data.chat_values import CALL, CHAT, CODE, MESSAGES, TOOL, conversation, in_function, json_text
from tests.data.chats import CHATML, CHATML_TAGGED, GEMMA, SPECIALS, TOOLS, Chat, byte_level, saved
from tests.data.format_writers import write_files
from tests.data.reading import planned, read_straight
from tests.raising import raises


@pytest.mark.parametrize(
    "tools",
    [
        json_text([TOOL]),
        [json_text(TOOL)],
        [{**TOOL, "function": json_text(TOOL["function"])}],
        [in_function(parameters=json_text(TOOL["function"]["parameters"]))],
        json_text([json_text(TOOL)]),
    ],
)
def test_tools_as_json_text_are_the_tools(tools: Any) -> None:
    assert conversation(tools=tools) == conversation(tools=[TOOL])


@pytest.mark.parametrize("tools", [None, "null", [], "[]"])
def test_no_tools_are_none_or_an_empty_list(tools: Any) -> None:
    assert conversation(tools=tools).tools == (None if tools in (None, "null") else [])


NOT_JSON, VALUE_TYPE = "record.not_json", "record.chat_value_type"


@pytest.mark.parametrize(
    ("code", "tools"),
    [*((NOT_JSON, t) for t in ("", "look", "[", ["look"], [in_function(parameters="x")])),
     *((VALUE_TYPE, t) for t in (json_text(TOOL), TOOL, 5, True, [5], [None], json_text(json_text([TOOL])))),
     (VALUE_TYPE, [in_function(parameters=5)]), (VALUE_TYPE, [{"function": ["look"]}])],
)  # fmt: skip
def test_anything_else_as_tools_is_refused(code: str, tools: Any) -> None:
    with raises(WrongChatValueError, code) as raised:
        conversation(tools=tools)
    assert raised.value.error_code == CODE


@pytest.mark.parametrize(
    "messages",
    [
        json_text(MESSAGES),
        [json_text(message) for message in MESSAGES],
        [{**m, "tool_calls": json_text(m["tool_calls"])} if "tool_calls" in m else m for m in MESSAGES],
        [{**m, "tool_calls": [json_text(CALL)]} if "tool_calls" in m else m for m in MESSAGES],
    ],
)
def test_messages_and_calls_as_json_text_are_these(messages: Any) -> None:
    assert conversation(messages) == conversation()


NOT_JSON_MESSAGES = ["Hi", "", ["Hi"], *([{"role": "assistant", "tool_calls": c}] for c in ("x", ["x"]))]
WRONG_MESSAGES = [
    "{}", {"role": ["user"], "content": ["Hi"]}, 5, [[]], json_text(json_text(MESSAGES)),
    *([{"role": "user", "content": c}] for c in (5, 1.5, True, ["Hi"], [{"type": 1}], [{"type": "text"}])),
    *([{"role": "assistant", "tool_calls": c}] for c in ({}, 5, [5], [{"function": 5}])),
    *([{"role": "assistant", "tool_calls": [{"function": {"arguments": a}}]}] for a in (5, True, [1])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "messages"),
    [*((NOT_JSON, m) for m in NOT_JSON_MESSAGES), *((VALUE_TYPE, m) for m in WRONG_MESSAGES),
     ("record.no_messages", []), ("record.chat_role", [{"content": "Hi"}]),
     *(("record.chat_role", [{"role": r, "content": "Hi"}]) for r in (1, None)),
     *(("record.chat_weight", [{"role": "assistant", "content": "x", "weight": w}]) for w in (0.5, 2, "0"))],
)  # fmt: skip
def test_anything_else_as_messages_is_refused(code: str, messages: Any) -> None:
    with raises(BadRecordError, code) as raised:
        conversation(messages)
    assert raised.value.error_code == CODE


# ------------------------------------------------------------------------------------------ in files
def json_column(values: list[Any]) -> pa.Array:
    texts = pa.array([None if value is None else json_text(value) for value in values], pa.string())
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)


def written(folder: Path, form: str, table: pa.Table) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "parquet":
        pq.write_table(table, folder / "a.parquet")
    else:
        feather.write_feather(table, str(folder / "a.arrow"), compression="uncompressed")
    return folder


def nested_json() -> pa.Table:
    """Messages as a list of structs, of which a call's arguments are JSON, and so are a tool's parameters."""
    json_type = pa.json_(pa.string())
    call = pa.struct(
        [("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("arguments", json_type)]))]
    )
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    tool = pa.struct(
        [("type", pa.string()), ("function", pa.struct([("name", pa.string()), ("parameters", json_type)]))]
    )
    rows = [
        {**m, "tool_calls": [with_text("arguments", c) for c in m.get("tool_calls", ())] or None}
        for m in MESSAGES
    ]
    as_text = pa.list_(without_json(message))
    messages = pa.array([rows, rows], as_text)
    tools = pa.array([[with_text("parameters", TOOL)], None], pa.list_(without_json(tool)))
    return pa.table({"messages": typed(messages, pa.list_(message)), "tools": typed(tools, pa.list_(tool))})


def with_text(name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "function": {**value["function"], name: json_text(value["function"][name])}}


def without_json(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(without_json(kind.value_type))
    return pa.struct([(f.name, without_json(f.type)) for f in kind]) if pa.types.is_struct(kind) else kind


def typed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """The array with Arrow's JSON type where `kind` has it; pyarrow casts no nested extension types."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(
            array.offsets, typed(array.values, kind.value_type), mask=array.is_null()
        )
    if pa.types.is_struct(kind):
        inner = [typed(array.field(i), field.type) for i, field in enumerate(kind)]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=array.is_null())
    return array


def as_older_readers_see_it(table: pa.Table) -> pa.Table:
    """The columns as plain texts, with the name of the extension type in the fields' metadata."""
    note = {b"ARROW:extension:name": b"arrow.json", b"ARROW:extension:metadata": b""}
    fields = [pa.field(name, pa.string(), metadata=note) for name in table.schema.names]
    columns = [table.column(name).combine_chunks().storage for name in table.schema.names]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def whole_json() -> pa.Table:
    return pa.table({"messages": json_column([MESSAGES, MESSAGES]), "tools": json_column([[TOOL], None])})


TABLES = {
    "json": whole_json,
    "older readers": lambda: as_older_readers_see_it(whole_json()),
    "text": lambda: pa.table({"messages": [json_text(MESSAGES)] * 2, "tools": [json_text([TOOL]), None]}),
    "nested": nested_json,
    "list of json": lambda: pa.table(
        {"messages": [[json_text(m) for m in MESSAGES]] * 2, "tools": pa.array([[json_text(TOOL)], None])}
    ),
    "large text": lambda: pa.table(
        {
            "messages": pa.array([json_text(MESSAGES)] * 2, pa.large_string()),
            "tools": json_column([json_text([TOOL]), None]),
        }
    ),
}


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", sorted(TABLES))
def test_columns_of_json_are_the_values(form: str, kind: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "d", form, TABLES[kind]())
    first, second = (document for _, document in read_straight(planned(folder, form, CHAT)))
    assert (rendered(first), rendered(second)) == (
        rendered(conversation(tools=[TOOL])),
        rendered(conversation()),
    )


def rendered(document: Any) -> tuple[Any, Any]:
    """What a template is given: messages without what is null, and the tools."""
    return [{k: v for k, v in m.items() if v is not None} for m in document.messages], document.tools


def test_what_json_says_keeps_its_nulls(tmp_path: Path) -> None:
    tool = in_function(parameters={"default": None, "enum": [None, 1]})
    folder = written(
        tmp_path, "parquet", pa.table({"messages": json_column([MESSAGES]), "tools": json_column([[tool]])})
    )
    ((_, document),) = read_straight(planned(folder, "parquet", CHAT))
    assert document.tools == [tool]


@pytest.mark.parametrize("form", ["jsonl", "cbor", "mds", "parquet", "arrow", "hf_dataset"])
def test_tools_as_text_are_the_tools_in_every_format(form: str, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]
    write_files(tmp_path, form, [[{"messages": messages, "tools": json_text([TOOL])}]])
    ((_, document),) = read_straight(planned(tmp_path, form, CHAT))
    assert rendered(document) == (messages, [TOOL])


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [[1, 2]]},
        {"messages": [5]},
        {"messages": [json_text(MESSAGES)], "tools": [5]},
        {"messages": [json_text(MESSAGES)], "tools": [{"a": 1}]},
        {"messages": [json_text(MESSAGES)], "chat_template_kwargs": [[1]]},
    ],
)
def test_columns_that_can_hold_no_such_value_are_refused_before_the_start(
    columns: dict[str, Any], tmp_path: Path
) -> None:
    folder = written(tmp_path, "parquet", pa.table(columns))
    with raises(ConfigError, CODE) as raised:
        planned(folder, "parquet", CHAT)
    assert raised.value.exit_code == 2


def test_a_list_that_an_earlier_version_froze_keeps_its_values_as_they_are(tmp_path: Path) -> None:
    record = {"messages": MESSAGES, "tools": json_text([TOOL])}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    manifest = freeze_listed("s", list_files("s", str(tmp_path), "jsonl"), "jsonl", CHAT)
    assert not from_parquet(to_parquet(manifest), "here").content.as_stored
    old = replace(manifest, content=replace(CHAT, as_stored=True).needed)
    assert from_parquet(to_parquet(old), "here") == old
    assert old.digest == manifest.digest, "how values are read is no part of a list's identity"
    document = document_of(record, old.content)
    assert isinstance(document, Conversation)
    assert (document.tools, document.as_stored) == (json_text([TOOL]), True)


# ------------------------------------------------------------------------------------------ in templates
TAKES_TEXT = TOOLS.replace("(c.function | tojson)", "c.function.name + c.function.arguments")
TAKES_BOTH = TOOLS.replace(
    "(c.function | tojson)",
    "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)",
)
READS_ITEMS = TOOLS.replace(
    "'<call>' + (c.function | tojson) + '</call>'",
    "'<call>'}}{% for k, v in c.function.arguments.items() %}{{ k ~ v }}{% endfor %}{{ '</call>'",
)
PRINTS = TOOLS.replace("(c.function | tojson)", "(c.function.arguments | string)")


def learnt(folder: Path, template: str, arguments: Any) -> list[str]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [MESSAGES[0], {"role": "assistant", "tool_calls": [call]}]
    return Chat(saved(folder, byte_level(), template)).learnt(conversation(messages, tools=[TOOL]))


@pytest.mark.parametrize(
    ("template", "of_text", "of_object"),
    [
        (
            TOOLS,
            '{"name": "look", "arguments": {"city": "Oslo"}}',
            '{"name": "look", "arguments": {"city": "Oslo"}}',
        ),
        (TAKES_TEXT, 'look{"city":"Oslo"}', None),
        (TAKES_BOTH, '{"city":"Oslo"}', '{"city": "Oslo"}'),
        (READS_ITEMS, "cityOslo", "cityOslo"),
        (PRINTS, '{"city":"Oslo"}', None),
    ],
)
def test_arguments_are_the_text_or_the_object_that_the_template_takes(
    template: str, of_text: str, of_object: str | None, tmp_path: Path
) -> None:
    assert learnt(tmp_path, template, '{"city":"Oslo"}') == [f"<call>{of_text}</call><|im_end|>"]
    if of_object is not None:
        assert learnt(tmp_path, template, {"city": "Oslo"}) == [f"<call>{of_object}</call><|im_end|>"]
    else:
        code = "chat.value_type" if template == TAKES_TEXT else "chat.text_expected"
        with raises(UnrenderableError, code) as raised:
            learnt(tmp_path, template, {"city": "Oslo"})
        assert raised.value.error_code == CODE


def test_no_arguments_as_text_are_an_empty_object(tmp_path: Path) -> None:
    expected = ['<call>{"name": "look", "arguments": {}}</call><|im_end|>']
    assert learnt(tmp_path, TOOLS, "{}") == learnt(tmp_path, TOOLS, {}) == expected


@pytest.mark.parametrize("arguments", ["Oslo", "[1]", '"Oslo"', ""])
def test_arguments_that_are_no_object_are_refused_where_the_template_takes_one(
    arguments: str, tmp_path: Path
) -> None:
    with raises(UnrenderableError, "chat.object_expected") as raised:
        learnt(tmp_path, TOOLS, arguments)
    assert raised.value.error_code == CODE


@pytest.mark.parametrize(
    ("template", "code"),
    [(CHATML, "chat.value_type"), (GEMMA, "chat.text_expected")],
    ids=["adds", "trims"],
)
@pytest.mark.parametrize("content", [[{"type": "text", "text": "it's"}], {"rain": 5}])
def test_contents_that_the_template_does_not_take_are_refused(
    template: str, code: str, content: Any, tmp_path: Path
) -> None:
    chat = Chat(saved(tmp_path, byte_level(), template))
    with raises(UnrenderableError, code) as raised:
        chat(conversation([{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]))
    assert raised.value.error_code == CODE


def test_parts_are_given_to_a_template_that_takes_them(tmp_path: Path) -> None:
    template = CHATML.replace("m['content']", "(m['content'] | map(attribute='text') | join)")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    assert Chat(saved(tmp_path, byte_level(), template)).learnt(conversation(messages)) == ["ab<|im_end|>"]


CALLS = TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CALLS += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@pytest.mark.parametrize("template", [TOOLS, CALLS])
@pytest.mark.parametrize("tools", [None, [], json_text([TOOL]), [TOOL]])
def test_ids_are_those_of_transformers_for_what_the_record_means(
    template: str, tools: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    name = saved(tmp_path, byte_level(), template)
    meant = json.loads(tools) if isinstance(tools, str) else tools
    expected = AutoTokenizer.from_pretrained(name).apply_chat_template(MESSAGES, tools=meant)["input_ids"]
    assert Chat(name)(conversation(tools=tools))[0] == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_reaches_the_template_under_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = CHATML.replace(
        "m['content']", "(m.reasoning_content or '') + (m.thinking or '') + m['content']"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "because"}]
    folder = saved(tmp_path, byte_level(), template)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages)["input_ids"]
    assert Chat(folder)(conversation(messages))[0] == expected


# ------------------------------------------------------------------------------------------ weights
WEIGHED = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "wrong", "weight": 0},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "right", "weight": 1},
]
TWO_SPANS = CHATML_TAGGED.replace(
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{% generation %}{{ m['content'] }}{% endgeneration %}-"
    "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, ["right<|im_end|>"]),
        (CHATML_TAGGED, ["right<|im_end|>"]),
        (TWO_SPANS, ["right", "<|im_end|>"]),
    ],
)
def test_a_message_of_weight_0_is_not_learnt(template: str, answer: list[str], tmp_path: Path) -> None:
    chat = Chat(saved(tmp_path, byte_level(), template))
    assert chat.learnt(conversation(WEIGHED)) == answer
    assert chat.learnt(conversation(WEIGHED), "last") == answer
    as_stored = replace(conversation(WEIGHED), as_stored=True)
    assert len(chat.learnt(as_stored)) == 2 * len(answer), "an earlier version's list: weight means nothing"
    last_is_wrong = [{**m, "weight": 1 - m["weight"]} if "weight" in m else m for m in WEIGHED]
    assert chat.learnt(conversation(last_is_wrong), "last") == []
    assert chat(conversation(last_is_wrong), "last") == ([], [])


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
def test_where_all_is_learnt_a_message_of_weight_0_is_left_out_with_its_role(
    template: str, tmp_path: Path
) -> None:
    chat = Chat(saved(tmp_path, byte_level(), template))
    before, after = chat.learnt(conversation(WEIGHED), "all")
    assert before == "<|im_start|>user\na<|im_end|>\n"
    assert after == "<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\nright<|im_end|>\n"


# ------------------------------------------------------------------------------------------ variables
THINKS = "{{ '<think>' if thinking else '<none>' }}{{ eos_token }}" + CHATML


@pytest.mark.parametrize("variables", [None, {}, {"thinking": True}, {"thinking": False, "eos_token": "x"}])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_record_sets_variables_of_its_template(variables: Any, as_text: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    name = saved(tmp_path, byte_level(), THINKS)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    given = json_text(variables) if as_text and variables is not None else variables
    reference = AutoTokenizer.from_pretrained(name)
    expected = reference.apply_chat_template(messages, **(variables or {}))["input_ids"]
    assert Chat(name)(conversation(messages, chat_template_kwargs=given))[0] == expected


@pytest.mark.parametrize(
    ("code", "variables"),
    [(VALUE_TYPE, 5), (VALUE_TYPE, []), (NOT_JSON, "x"), (VALUE_TYPE, "[1]"),
     *(("record.reserved_variable", {n: []}) for n in ("messages", "tools", "add_generation_prompt"))],
)  # fmt: skip
def test_other_variables_are_refused(code: str, variables: Any) -> None:
    with raises(WrongChatValueError, code) as raised:
        conversation(chat_template_kwargs=variables)
    assert raised.value.error_code == CODE


def test_special_tokens_in_variables_stay_text(tmp_path: Path) -> None:
    name = saved(tmp_path, byte_level(), "{{ date }}" + CHATML)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids, _ = Chat(name)(conversation(messages, chat_template_kwargs={"date": "<|im_end|>"}))
    assert ids.count(SPECIALS.index("<|im_end|>")) == 2


# ------------------------------------------------------------------------------------------ transforms
def test_a_transform_sees_the_values_and_returns_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sees_values.py").write_text(
        "def first(document, seed):\n"
        "    assert isinstance(document['tools'], list)\n"
        "    assert document['chat_template_kwargs'] == {'thinking': False}\n"
        "    return {**document, 'tools': '[]'}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    document = conversation(tools=json_text([TOOL]), chat_template_kwargs='{"thinking": false}')
    (made,) = Transforms([find_transform("sees_values:first")]).outputs(document, 0)
    assert made == replace(document, tools=[])
