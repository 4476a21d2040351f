"""The JSON schemas of tools, and every other value of a chat, reach the template as lists and objects, or the
record is refused with the place: no letters of a text are trained as names of parameters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.data.sources.records.content import WrongChatValueError
from orchestrator.data.tokens.chat_template import UnrenderableError
from tests.data.chat_values import CODE, conversation, in_function, json_text
from tests.data.chats import CHATML, TOOLS, Chat, byte_level, saved
from tests.num_examples import examples
from tests.raising import raises

LOOPS = (
    "{% macro shown(s) %}{% if s is mapping %}{% if s.required is not boolean %}"
    "{% for k in s.required or [] %}[{{ k }}]{% endfor %}{% endif %}"
    "{% for k, v in (s.properties or {}).items() %}({{ k }}:{{ shown(v) }}){% endfor %}"
    "{% for v in s.anyOf or [] %}|{{ shown(v) }}{% endfor %}{% for v in s.enum or [] %}={{ v }}{% endfor %}"
    "{{ shown(s['items']) }}{% endif %}{% endmacro %}"
    "{% for t in tools or [] %}{{ shown(t.function.parameters) }}{{ t | tojson }}{% endfor %}" + CHATML
)


# ------------------------------------------------------------------------------------------ any schema
@dataclass(frozen=True)
class Slot:
    """A list or an object in a schema, at a place where one is meant: it may be written as JSON text."""

    value: Any


NAMES = st.sampled_from(["city", "required", "items", "properties", "enum", "default", "type", "$ref", "ü"])
TEXTS = st.sampled_from(["", "x", "[", '["a"]', '{"a": 1}', "null"])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
KINDS = st.sampled_from(["string", "object", "array"])


def slots(strategy: Any) -> Any:
    return st.builds(Slot, strategy)


def schema_objects(inner: Any) -> Any:
    """Schemas with every kind of keyword; `inner` are those inside."""
    named = slots(st.dictionaries(NAMES, inner | st.none(), max_size=2))
    listed = slots(st.lists(inner, max_size=2))
    texts = slots(st.lists(st.sampled_from(["city", "unit"]), max_size=2))
    keywords = {name: named for name in ("properties", "patternProperties", "$defs", "definitions")}
    keywords |= {name: listed for name in ("anyOf", "oneOf", "allOf", "prefixItems")}
    keywords |= {name: inner for name in ("additionalProperties", "not", "if", "contains", "propertyNames")}
    keywords |= {name: DATA for name in ("default", "const", "examples", "x-own")}
    keywords |= {
        "items": inner | listed,
        "required": texts | st.booleans() | st.none(),
        "enum": slots(st.lists(DATA, max_size=2)) | st.none(),
        "type": KINDS | slots(st.lists(KINDS, max_size=2)),
        "description": TEXTS,
        "dependentRequired": slots(st.dictionaries(NAMES, texts, max_size=2)),
        "dependencies": slots(st.dictionaries(NAMES, texts | inner, max_size=2)),
    }
    return st.fixed_dictionaries({}, optional=keywords)


SCHEMAS = st.recursive(
    st.booleans() | slots(st.just({})),
    lambda inner: slots(schema_objects(inner)),
    max_leaves=6,
)
PARAMETERS = slots(
    schema_objects(SCHEMAS).map(lambda schema: {**schema, "type": "object", "properties": Slot({})} | schema)
)


def written(value: Any, as_text: Any = lambda slot: False) -> Any:
    """The value of a tree of slots, of which those that `as_text` names are JSON text."""
    if isinstance(value, Slot):
        found = written(value.value, as_text)
        return json.dumps(found) if as_text(value) else found
    if isinstance(value, dict):
        return {key: written(each, as_text) for key, each in value.items()}
    return [written(each, as_text) for each in value] if isinstance(value, list) else value


def slots_of(value: Any) -> list[Slot]:
    if isinstance(value, Slot):
        return [value, *slots_of(value.value)]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [slot for each in inner for slot in slots_of(each)]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(saved(tmp_path_factory.mktemp("loops"), byte_level(), LOOPS))


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FIELDS = ("parameters", "input_schema", "return")


@settings(max_examples=examples(20, chaos=100), suppress_health_check=[HealthCheck.too_slow])
@given(tree=PARAMETERS, data=st.data())
def test_a_schema_is_itself_and_so_is_one_written_as_json_text(chat: Chat, tree: Slot, data: Any) -> None:
    schema = written(tree)
    given = conversation(MESSAGES, tools=[in_function(parameters=schema)])
    assert json_text(given.tools) == json_text([in_function(parameters=schema)]), "nothing of it is changed"
    all_slots = slots_of(tree)
    chosen = data.draw(st.lists(st.sampled_from(range(len(all_slots))), min_size=1))
    as_text = {id(all_slots[index]) for index in chosen}  # the tree holds them all meanwhile
    changed = written(tree, lambda slot: id(slot) in as_text)
    assert conversation(MESSAGES, tools=[in_function(parameters=changed)]) == given
    assert chat(conversation(MESSAGES, tools=[in_function(parameters=changed)])) == chat(given)


NOT_JSON = ["", "city", "[", '{"a"', "['city']"]
WRONG = [*NOT_JSON, '"city"', '"[]"', "5", "null", 5, 1.5]
OF_LISTS = [("required",), ("enum",), ("anyOf",), ("oneOf",), ("allOf",), ("prefixItems",)]
OF_LISTS += [("dependentRequired", "a")]
OF_OBJECTS = [("properties",), ("patternProperties",), ("$defs",), ("definitions",), ("dependentRequired",)]
OF_SCHEMAS = [("properties", "required"), ("$defs", "enum"), ("items",), ("additionalProperties",), ("not",)]
AROUND = [(), ("properties", "city"), ("items", "properties", "items"), ("$defs", "default")]


def nested(way: tuple[str, ...], value: Any) -> Any:
    for name in reversed(way):
        value = {name: value}
    return value


@pytest.mark.parametrize("around", AROUND, ids=".".join)
@pytest.mark.parametrize("way", [*OF_LISTS, *OF_OBJECTS, *OF_SCHEMAS], ids=".".join)
def test_anything_else_in_a_schema_is_refused_with_its_place(
    way: tuple[str, ...], around: tuple[str, ...]
) -> None:
    wrong = list[Any](WRONG)
    wrong += ["{}"] if way in OF_LISTS else [True, [], "[]"] if way in OF_OBJECTS else []
    for field, value in product(FIELDS, wrong):
        schema = {"type": "object", **nested((*around, *way), value)}
        place = f"`tools[1].function.{'.'.join((field, *around, *way))}`"
        code = "record.not_json" if value in NOT_JSON else "record.chat_value_type"
        with raises(WrongChatValueError, code, place) as raised:
            conversation(MESSAGES, tools=[in_function(), in_function(**{field: schema})])
        assert raised.value.error_code == CODE


@pytest.mark.parametrize("value", ["[", '["string"', "['string']"])
def test_a_list_of_types_that_is_no_json_is_refused(value: str) -> None:
    with raises(WrongChatValueError, "record.not_json"):
        conversation(MESSAGES, tools=[in_function(parameters={"type": value})])


def test_a_schema_that_is_nested_too_deep_is_a_bad_record() -> None:
    with raises(WrongChatValueError, "record.schema_depth") as raised:
        conversation(MESSAGES, tools=[in_function(parameters=nested(("items",) * 2000, {}))])
    assert raised.value.error_code == CODE


@pytest.mark.parametrize(
    "parameters",
    [
        {"required": {"type": "bool", "default": ""}},
        {"city": {"type": "str", "description": "where"}, "items": {"type": "int"}, "enum": {"type": "x"}},
        {"city": {"type": "str", "required": True}, "type": {"type": "str"}},
        {"city": "the name of a city", "unit": "C or F"},
        {},
    ],
)
def test_parameters_by_their_names_stay_as_they_are(parameters: dict[str, Any]) -> None:
    tools = [{"name": "look", "parameters": parameters}]
    assert conversation(MESSAGES, tools=tools).tools == tools


def test_schemas_inside_parameters_by_their_names_are_parsed() -> None:
    parameters = {"city": {"type": "string", "enum": '["Oslo"]'}}
    (tool,) = conversation(MESSAGES, tools=[{"name": "look", "parameters": parameters}]).tools
    assert tool["parameters"] == {"city": {"type": "string", "enum": ["Oslo"]}}


# ------------------------------------------------------------------------------------------ letters
@pytest.mark.parametrize("value", ['["a"]', '{"a": 1}', ' ["b"]\n'])
@pytest.mark.parametrize(
    "loop",
    ["{% for x in m.answers %}{{ x }}{% endfor %}", "{{ m.answers | join(', ') }}"],
    ids=["for", "join"],
)
def test_letters_of_json_text_are_read_in_no_field(loop: str, value: str, tmp_path: Path) -> None:
    folder = saved(
        tmp_path,
        byte_level(),
        CHATML.replace(
            "{% for m in messages %}",
            "{% for m in messages %}{% if m.answers %}{{ '-' }}" + loop + "{% endif %}",
        ),
    )
    chat = Chat(folder)
    messages = [{**MESSAGES[0], "answers": value}, MESSAGES[1]]
    with raises(UnrenderableError, "chat.value_type") as raised:
        chat(conversation(messages))
    assert raised.value.error_code == CODE
    as_stored = chat(replace(conversation(messages), as_stored=True))
    assert as_stored != chat(conversation(MESSAGES)), "lists of earlier versions keep their stream"
    for allowed in ("word", "[a", json.loads(value)):
        chat(conversation([{**MESSAGES[0], "answers": allowed}, MESSAGES[1]]))


def test_a_call_of_the_older_api_as_json_text_is_the_call() -> None:
    call = {"name": "look", "arguments": '{"city": "Oslo"}'}
    for written_call in (call, json_text(call)):
        (message,) = conversation([{"role": "assistant", "function_call": written_call}]).messages
        assert message["function_call"] == call
    for wrong in ("look", "[]", 5, {"name": "look", "arguments": 5}):
        with pytest.raises(WrongChatValueError):
            conversation([{"role": "assistant", "function_call": wrong}])


# ------------------------------------------------------------------------------------------ texts of messages
PRINTED = "{% for m in messages %}{{ m.KEY or '' }}{{ m.role ~ (m.content or '') }}{% endfor %}"
KEYS = ["content", "reasoning_content", "thinking", "reasoning", "name", "tool_calls", "answers"]


def printing(key: str) -> str:
    shown = "reasoning_content" if key == "reasoning" else key
    return PRINTED.replace("KEY", shown).replace("m.role", "'<|im_start|>' ~ m.role") + CALLED


CALLED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"


@pytest.mark.quick(
    "value2-reasoning",
    "value1-answers",
    "value0-tool_calls",
    "value4-thinking",
    "value3-name",
    "value2-reasoning_content",
    "value2-content",
)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", [[{"type": "x"}], {"a": "b"}, {"a": [1, 2]}, {"a": {}}, [{"a": None}]])
def test_a_list_or_an_object_that_is_printed_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    if key == "tool_calls" and isinstance(value, dict):
        value = [value]
    chat = Chat(saved(tmp_path, byte_level(), printing(key)))
    messages = [{**MESSAGES[0], "name": "x"}, MESSAGES[1], {"role": "tool", "content": "b", key: value}]
    with raises(UnrenderableError, "chat.text_expected", f"`{key}` in message 3") as raised:
        chat(conversation(messages), "all")
    assert raised.value.error_code == CODE


@pytest.mark.quick("5-thinking", "1.5-reasoning_content", "True-reasoning", "1.5-name")
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "name"])
@pytest.mark.parametrize("value", [True, 5, 1.5])
def test_numbers_and_booleans_are_no_reasoning_and_no_name_where_they_are_printed(
    key: str, value: Any, tmp_path: Path
) -> None:
    messages = [MESSAGES[0], {**MESSAGES[1], key: value}]
    with raises(UnrenderableError, "chat.text_expected") as raised:
        Chat(saved(tmp_path / "prints", byte_level(), printing(key)))(conversation(messages), "all")
    assert raised.value.error_code == CODE
    chat = Chat(saved(tmp_path / "does_not", byte_level(), CHATML))
    assert chat(conversation(messages)) == chat(conversation(MESSAGES))


@pytest.mark.parametrize("key", KEYS[1:])
def test_what_is_printed_as_json_or_not_at_all_is_taken(key: str, tmp_path: Path) -> None:
    value = [{"function": {"a": ["b"]}}]
    messages = [MESSAGES[0], {**MESSAGES[1], key: value}]
    for number, template in enumerate(
        (TOOLS, CHATML, CHATML.replace("m['content']", f"(m.{key} or '') | tojson"))
    ):
        Chat(saved(tmp_path / str(number), byte_level(), template))(conversation(messages))
