"""No secret comes through, whatever it is wrapped in; and what only looks like one is left as it is."""

from __future__ import annotations

import json

import pytest

from orchestrator.config.field_rules import field_rules
from orchestrator.config.redaction import HIDDEN, command_line, redacted, redacted_override, redacted_text

CANARY = "c4n4ry-9f31"


@pytest.mark.parametrize(
    "override",
    [
        f"data.hf_token={CANARY}",
        f"data.HF_TOKEN={CANARY}",
        f"run.apiKey={CANARY}",
        f"run.aws_secret_access_key={CANARY}",
        f"monitor.password={CANARY}",
        f"monitor.password='{CANARY} and more {CANARY}'",
        f"cluster.credentials={CANARY}",
        f"run.storage=s3://user:{CANARY}@host/bucket",
        f"run.storage=s3://{CANARY}@host/bucket",
        f"run.storage=s3://bucket/run?X-Token={CANARY}&region=eu",
        f"run.storage=s3://bucket/run?X-Amz-Signature={CANARY}",
        f"run.storage=az://container/run?sv=1&sig={CANARY}",
        f"data.sources=[{{name: a, path: 'https://me:{CANARY}@host/x', format: lines}}]",
        f"data.sources=[{{name: a, token: {CANARY}, path: x}}]",
        f'model.config={{"a": 1, "auth": {{"api_key": "{CANARY}"}}}}',
        f'model.config={{"password": "with \\" {CANARY}"}}',
        f"model.config={{password: 'a&;#{CANARY}', other: 1}}",
        f"model.config={{password: a#{CANARY}, other: 1}}",
        f"monitor.note=the password=a#{CANARY}",
        "monitor.token=994731",
        f"model.config={{passwords: [{CANARY}, b{CANARY}]}}",
        f"monitor.headers=Authorization: Bearer {CANARY}",
        f"data.path=hf_{CANARY.replace('-', '')}abcdefgh",
        f"monitor.url=https://host/?sk-{CANARY}-{CANARY}",
    ],
)
def test_a_secret_in_an_override_is_hidden(override: str) -> None:
    shown = redacted_override(override)
    assert CANARY not in shown
    assert CANARY.replace("-", "") not in shown
    assert "994731" not in shown
    assert HIDDEN in shown
    assert shown.startswith(override.partition("=")[0])


@pytest.mark.parametrize(
    "override",
    [
        "data.tokenizer=gpt2",
        "data.special_tokens_in_text=text",
        "data.tokenizer=org/name",
        "train.max_tokens=1000000",
        "train.max_tokens=null",
        "train.lr=3e-4",
        "run.storage=s3://bucket/folder",
        "run.storage=/data/me@home/runs",
        "model.config.num_key_value_heads=2",
        "model.config={num_key_value_heads: 2, bos_token_id: 1, eos_token_id: [1, 2], key_dim: 64}",
        "data.sources=[{name: made, path: corpus/*.jsonl, format: jsonl}]",
        "resume.from=00000480-a0003-g0007",
    ],
)
def test_what_only_looks_like_a_secret_is_left(override: str) -> None:
    assert redacted_override(override) == override


def test_a_value_is_redacted_at_any_depth_and_its_harmless_part_stays() -> None:
    value = {
        "run": {"storage": f"s3://u:{CANARY}@h/b", "name": "mine"},
        "sources": [{"path": "a", "options": {"secret": [CANARY], "key": CANARY, "retries": 3}}],
        "credentials": {"user": CANARY},
        "pin": 12345,
        "password": 12345,
        "train": {"max_tokens": 500},
    }
    shown = redacted(value)
    assert CANARY not in json.dumps(shown)
    assert shown["run"] == {"storage": f"s3://{HIDDEN}@h/b", "name": "mine"}
    assert shown["sources"][0]["options"]["retries"] == 3
    assert (shown["pin"], shown["password"], shown["train"]) == (12345, HIDDEN, {"max_tokens": 500})


def test_no_field_of_the_configuration_is_hidden_by_its_name() -> None:
    values = {rule.path: 5 if "token" in rule.path else "text" for rule in field_rules()}
    assert redacted(values) == values


def test_a_command_line_is_what_is_typed_without_its_secrets() -> None:
    overrides = ["train.max_steps=5", f"run.storage=s3://u:{CANARY}@h/b", "run.name=a b"]
    assert command_line(["orchestrator", "train"], "my job.yaml", overrides) == (
        f"orchestrator train 'my job.yaml' train.max_steps=5 'run.storage=s3://{HIDDEN}@h/b' 'run.name=a b'"
    )


@pytest.mark.parametrize("text", ["", "no secret here", "at 12:30: done", "https://host/path"])
def test_a_text_without_secrets_is_itself(text: str) -> None:
    assert redacted_text(text) == text


def test_a_secret_inside_a_sentence_after_a_colon_is_hidden() -> None:
    said = "Failed: https://host/x?token=abcdefgh and error: key=abcdefgh"
    assert redacted_text(said) == "Failed: https://host/x?token=*** and error: key=***"
