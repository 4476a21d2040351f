"""The fields of a source: what a job may write, and that one stored before a field was there goes on."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.field_rules import field_rules, in_todays_fields
from orchestrator.config.loading import parse_config
from orchestrator.errors import ConfigError
from orchestrator.planning.resume.identity import differences, stream_settings
from tests.raising import raises

RULES = {rule.path: rule.rule for rule in field_rules()}


def test_a_source_stored_before_it_had_a_content_is_the_same_source(tiny_config: Any) -> None:
    flat = parse_config(tiny_config()).flat()
    old = [
        {k: s[k] for k in ("name", "path", "format", "text_field", "weight")} for s in flat["data.sources"]
    ]
    assert differences(in_todays_fields({**flat, "data.sources": old}), flat, RULES) == ()
    other = [{**source, "content": "chat"} for source in old]
    assert [d.field for d in differences(in_todays_fields({**flat, "data.sources": other}), flat, RULES)] == [
        "data.sources.stdlib.content"
    ]


def test_a_source_of_text_has_the_identity_that_it_always_had(tiny_config: Any) -> None:
    settings = stream_settings(parse_config(tiny_config()).flat())
    assert [name.rpartition(".")[2] for name in settings if name.startswith("data.sources.")] == [
        "format",
        "text_field",
    ]


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("data.sources.0.messages_field=turns", "messages_field"),
        ("data.sources.0.prompt_field=q", "prompt_field"),
        ("data.sources.0.completion_field=a", "completion_field"),
    ],
)
def test_the_fields_that_hold_the_content_belong_to_the_streams_identity(
    override: str, field: str, tiny_config: Any
) -> None:
    content = f"data.sources.0.content={'chat' if field == 'messages_field' else 'prompt'}"
    one = stream_settings(parse_config(tiny_config(), [content]).flat())
    other = stream_settings(parse_config(tiny_config(), [content, override]).flat())
    assert [name.rpartition(".")[2] for name in one if one[name] != other[name]] == [field]


def test_a_path_may_be_a_list(tiny_config: Any) -> None:
    config = parse_config(tiny_config(), ["data.sources.0.path=[a.jsonl, 'b/*.jsonl']"])
    assert config.data.sources[0].path == ("a.jsonl", "b/*.jsonl")
    with raises(ConfigError, "config.invalid_value", "data.sources.0.path", "a path or glob, or a list"):
        parse_config(tiny_config(), ["data.sources.0.path=[]"])
