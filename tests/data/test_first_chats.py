"""The first chats are rendered before a start: what fails on all of them, needs a clock or teaches nothing is
known before a cluster is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.first_records import NUM_RENDERED, check_first_records
from orchestrator.errors import ConfigError
from orchestrator.launch.api import plan
from tests.data.chats import CHATML, CHATML_TAGGED, byte_level, saved

Make = Callable[..., dict[str, Any]]
GOOD = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
VALUE, UNUSABLE, NOTHING = "data.chat_value_type", "data.chat_template_unusable", "data.nothing_learnt"
CLOCK = "{{ strftime_now('%Y') }}" + CHATML
FALLS_BACK = "{{ strftime_now('%Y') if strftime_now is defined else '2024' }}" + CHATML
TAKES_YEAR = "{{ year if year is defined else strftime_now('%Y') }}" + CHATML
ALWAYS_ASKS = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")


def mapping(make: Make, folder: Path, records: list[Any], template: str, **source: Any) -> dict[str, Any]:
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    where = {"name": "chats", "path": str(folder / "chats.jsonl"), "format": "jsonl", "content": "chat"}
    return make(
        {
            "data.sources": [{**where, **source}],
            "data.tokenizer": saved(folder / "tokenizer", byte_level(), template),
        }
    )


def refusal(make: Make, folder: Path, records: list[Any], template: str, **source: Any) -> ConfigError | None:
    spec = prepare_data(parse_config(mapping(make, folder, records, template, **source)))
    try:
        check_first_records(spec)
    except ConfigError as error:
        return error
    return None


def of_roles(*roles: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": "x", **more} for role in roles]}


@pytest.mark.parametrize(
    ("records", "template", "source", "code"),
    [
        ([{"messages": GOOD}], CHATML, {}, None),
        ([{"messages": GOOD}], "{{ raise_exception('no') }}", {}, UNUSABLE),
        ([{"messages": GOOD}], "{{ missing.field.of }}", {}, UNUSABLE),
        ([{"messages": GOOD}], CLOCK, {}, UNUSABLE),
        ([{"messages": GOOD}], FALLS_BACK, {}, None),
        ([{"messages": GOOD}], TAKES_YEAR, {}, UNUSABLE),
        ([{"messages": GOOD, "chat_template_kwargs": {"year": "2024"}}], TAKES_YEAR, {}, None),
        ([{"messages": GOOD}], ALWAYS_ASKS, {}, UNUSABLE),
        ([{"messages": GOOD}], ALWAYS_ASKS, {"loss": "all"}, None),
        ([of_roles("human", "gpt")], CHATML, {}, NOTHING),
        ([of_roles("human", "gpt")], CHATML, {"loss": "all"}, None),
        ([of_roles("user", "user")], CHATML_TAGGED, {}, NOTHING),
        ([of_roles("user", "assistant", weight=0)], CHATML, {}, NOTHING),
        ([of_roles("user"), of_roles("user", "assistant")], CHATML, {}, None),
        ([{"messages": [{"role": "user", "content": 5}]}], CHATML, {}, VALUE),
        ([{"messages": GOOD, "tools": "look"}], CHATML, {}, VALUE),
        ([{"messages": [{**GOOD[0], "content": [{"type": "text", "text": "a"}]}]}], CHATML, {}, VALUE),
        ([{"messages": GOOD, "tools": "look"}, {"messages": GOOD}], CHATML, {}, None),
    ],
)
def test_what_the_first_chats_show_is_known_before_the_start(
    records: list[Any],
    template: str,
    source: dict[str, Any],
    code: str | None,
    tmp_path: Path,
    tiny_config: Make,
) -> None:
    error = refusal(tiny_config, tmp_path, records, template, **source)
    assert (error and error.code) == code
    if error is not None:
        assert error.exit_code == 2
        assert "data.sources chats" in str(error)


def test_columns_are_rendered_too(tmp_path: Path, tiny_config: Make) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"messages": ["Hello", "[]"]}), tmp_path / "a.parquet")
    source = {"path": str(tmp_path / "a.parquet"), "format": "parquet"}
    error = refusal(tiny_config, tmp_path, [], CHATML, **source)
    assert error is not None
    assert error.code == VALUE


def test_what_follows_the_first_chats_is_the_streams_business(tmp_path: Path, tiny_config: Make) -> None:
    records = [{"messages": GOOD}] * NUM_RENDERED + [of_roles("human")] * 3
    assert refusal(tiny_config, tmp_path, records, CHATML) is None


def test_a_plan_of_a_new_run_renders_them(tmp_path: Path, tiny_config: Make) -> None:
    for records, code in (([of_roles("human", "gpt")], NOTHING), ([{"messages": GOOD, "tools": 5}], VALUE)):
        with pytest.raises(ConfigError) as raised:
            plan(mapping(tiny_config, tmp_path, records, CHATML))
        assert raised.value.code == code


def test_chats_are_rendered_as_their_transforms_make_them(
    tmp_path: Path, tiny_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roles_of_openai.py").write_text(
        "NAMES = {'human': 'user', 'gpt': 'assistant'}\n"
        "def rename(document, seed):\n"
        "    messages = [{**m, 'role': NAMES[m['role']]} for m in document['messages']]\n"
        "    return {**document, 'messages': messages}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"transforms": ["roles_of_openai:rename"]}
    assert refusal(tiny_config, tmp_path, [of_roles("human", "gpt")], CHATML, **given) is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"text": "one", "score": NaN}\n', "NaN"),
        (b'{"text": "one", "score": [-Infinity]}\n', "-Infinity"),
        ('{"text": "one"}\n'.encode("utf-16"), "UTF-8"),
        ('{"text": "one"}\n'.encode("utf-16-be"), "UTF-8"),
        ('{"text": "one"}\n'.encode("utf-32"), "UTF-8"),
        (b'[\n {"text": "one"},\n {"text": "two"}\n]\n', "JSON array"),
        (b'[{"text": "one"}, {"text": "two"}]', "JSON array"),
        (b'{\n "text": "one"\n}\n', "several lines"),
    ],
)
def test_the_commonest_wrong_files_of_json_are_named(
    data: bytes, said: str, tmp_path: Path, tiny_config: Make
) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    source = {"name": "s", "path": str(tmp_path / "a.jsonl"), "format": "jsonl"}
    spec = prepare_data(parse_config(tiny_config({"data.sources": [source], "data.encoder": "tokenizers"})))
    with pytest.raises(ConfigError) as raised:
        check_first_records(spec)
    assert said in str(raised.value)
