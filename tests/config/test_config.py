"""The configuration: what is read, what is refused and in which words, what a resume may do with a field."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.field_rules import field_rules, nested, resume_table
from orchestrator.config.loading import as_job, load_config, parse_config
from orchestrator.config.problems import OTHER_NAMES
from orchestrator.errors import ConfigError
from tests.raising import check_error, raises
from tests.small_configs import JOBS

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
MINIMAL: dict[str, Any] = {
    "run": {"name": "r"},
    "data": {"sources": [{"name": "s", "path": "x/*.jsonl", "format": "jsonl"}], "tokenizer": "t"},
    "pack": {"seq_len": 8},
    "model": {"config": {"model_type": "llama"}},
    "train": {"global_batch_size": 4, "micro_batch_size": 2, "lr": 0.1},
}


UNKNOWN, MISSING, OVERRIDE = "config.unknown_key", "config.missing_key", "config.invalid_override"
VALUE, TYPE, RANGE = "config.invalid_value", "config.wrong_type", "config.out_of_range"
CONFLICT, DUPLICATE, NO_STOP = "config.conflict", "config.duplicate_entry", "config.no_stop"
NOT_YAML, TOO_LARGE, SEVERAL = "config.not_yaml", "config.too_large", "config.invalid"


def lines_of(error: ConfigError) -> list[str]:
    """The problems that the error lists, one line each."""
    return [line.strip() for line in str(error).splitlines()[1:]]


def refusal(*overrides: str) -> list[str]:
    """The problems of the quickstart's configuration under these overrides, one line each."""
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    return lines_of(caught.value)


def refusal_of_text(text: str, tmp_path: Path) -> ConfigError:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "job.yaml")
    return caught.value


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_config_of_the_repository_is_valid_and_survives_json_and_pickle(path: Path) -> None:
    config = load_config(path)
    assert parse_config(json.loads(json.dumps(config.to_json()))) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_quickstart_reads_as_it_is_written() -> None:
    config = load_config(QUICKSTART)
    assert (config.run.run_uri, config.pack.seq_len, config.train.lr) == ("./runs/quickstart", 256, 2e-3)
    assert (config.resume.from_, config.resume.every_minutes, config.resume.every_steps) == (
        "latest",
        None,
        50,
    )
    assert config.data.sources[0].path == "corpus/*.jsonl"


def test_paths_stay_as_written_wherever_the_file_lies(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(QUICKSTART.read_text(encoding="utf-8"), encoding="utf-8")
    assert load_config(tmp_path / "job.yaml") == load_config(QUICKSTART)


def test_every_default_may_be_given_by_hand() -> None:
    config = parse_config(MINIMAL)
    assert parse_config(nested(config.flat())) == config
    assert parse_config(config.to_json()) == config


def test_the_minimal_job_gets_the_documented_defaults() -> None:
    flat = parse_config(MINIMAL).flat()
    rules = {rule.path: rule for rule in field_rules()}
    assert list(flat) == list(rules)
    given_paths = {f"{section}.{name}" for section, fields in MINIMAL.items() for name in fields}
    assert {p: v for p, v in flat.items() if p not in given_paths} == {
        p: rule.default for p, rule in rules.items() if p not in given_paths
    }
    assert {p for p, rule in rules.items() if rule.required} == given_paths - {"model.config"}


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("train.lr=3e-4", "train.lr", 0.0003),
        ("train.lr=1", "train.lr", 1.0),
        ("train.betas=[0.8, .9]", "train.betas", [0.8, 0.9]),
        ("train.max_steps=null", "train.max_steps", None),
        ("run.name=no", "run.name", "no"),
        ("run.name=on", "run.name", "on"),
        ("run.name='010'", "run.name", "010"),
        ("run.name=010", "run.name", "010"),
        ("run.name=2024-01-01", "run.name", "2024-01-01"),
        ("data.bos=true", "data.bos", True),
        ("data.bos=auto", "data.bos", "auto"),
        ("cluster.num_workers=[1,3]", "cluster.num_workers", [1, 3]),
        ("cluster.address=10.0.0.1:6379", "cluster.address", "10.0.0.1:6379"),
        ("cluster.address='[::1]:6379'", "cluster.address", "[::1]:6379"),
        ("resume.from=00000480-a0003-g0007", "resume.from", "00000480-a0003-g0007"),
        ("run.storage=s3://bucket/a=b", "run.storage", "s3://bucket/a=b"),
    ],
)
def test_an_override_is_read_by_the_rules_of_the_file(override: str, path: str, expected: object) -> None:
    more = ["train.schedule=constant"] if "max_steps" in override else []
    value = load_config(QUICKSTART, [override, *more]).flat()[path]
    assert value == expected
    assert type(value) is type(expected)


def test_an_override_reaches_into_mappings_and_lists() -> None:
    config = load_config(QUICKSTART, ["model.config.hidden_size=64", "data.sources.0.path=y.jsonl"])
    assert config.model.config is not None
    assert (config.model.config["hidden_size"], config.model.config["model_type"]) == (64, "llama")
    assert config.data.sources[0].path == "y.jsonl"


def test_workers_are_a_number_or_a_range() -> None:
    one = load_config(QUICKSTART, ["cluster.num_workers=3"]).cluster
    assert (one.min_workers, one.max_workers) == (1, 3)
    two = load_config(QUICKSTART, ["cluster.num_workers=[1,3]"]).cluster
    assert (two.min_workers, two.max_workers) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "on_cpu", "on_gpu"),
    [
        ({}, False, True),
        ({"parallel": "replicate"}, False, True),
        ({"parallel": "shard"}, True, True),
        ({"numerics": "fast"}, True, True),
        ({"numerics": "invariant"}, False, False),
    ],
)
def test_last_bits_depend_on_the_workers_under_fast_numerics_on_gpus_and_in_shards(
    changes: dict[str, str], on_cpu: bool, on_gpu: bool
) -> None:
    train = parse_config({**MINIMAL, "train": {**MINIMAL["train"], **changes}}).train
    assert (train.is_fast(use_gpu=False), train.is_fast(use_gpu=True)) == (on_cpu, on_gpu)


@pytest.mark.parametrize(
    ("override", "num_shards"),
    [
        ("train.parallel=auto", 1),
        ("train.parallel=replicate", 1),
        ("train.parallel=shard", None),
        ("train.parallel={shard: 4, replicate: 2}", 4),
    ],
)
def test_the_state_is_cut_into_as_many_parts_as_parallel_says(override: str, num_shards: int | None) -> None:
    config = load_config(QUICKSTART, ["train.numerics=fast", override])
    assert config.train.num_shards == num_shards
    assert parse_config(config.to_json()) == config


@pytest.mark.parametrize(
    ("override", "code", "values"),
    [
        ("train.lrr=1", UNKNOWN, ["train.lrr", "train.lr?"]),
        ("train.seq_len=1", UNKNOWN, ["pack.seq_len?"]),
        ("lr=1", UNKNOWN, ["train.lr?"]),
        ("monitr.progress_s=1", UNKNOWN, ["monitr", "monitor?"]),
        ("batch=16", UNKNOWN, ["train.global_batch_size or train.micro_batch_size"]),
        ("train.batch=16", UNKNOWN, ["train.global_batch_size or train.micro_batch_size"]),
        ("train.batch_size=16", UNKNOWN, ["train.global_batch_size or train.micro_batch_size"]),
        ("learning_rate=1e-3", UNKNOWN, ["learning_rate", "train.lr?"]),
        ("train.learning_rate=1e-3", UNKNOWN, ["train.lr?"]),
        ("workers=2", UNKNOWN, ["cluster.num_workers?"]),
        ("epochs=2", UNKNOWN, ["data.num_epochs?"]),
        ("tokenizer=x", UNKNOWN, ["data.tokenizer?"]),
        ("text_field=x", UNKNOWN, ["data.sources.0.text_field?"]),
        ("data.sources[0].text_field=x", OVERRIDE, ["data.sources.0.text_field?"]),
        ("data.sources.text_field=x", OVERRIDE, ["data.sources.0.text_field?"]),
        ("resume.from_=latest", UNKNOWN, ["resume.from?"]),
        ("data.shuffle=Blok", VALUE, ["'Blok'", "block or none", "block?"]),
        ("train.schedule=cosin", VALUE, ["cosine?"]),
        ("data.eos=yes", VALUE, ["'yes'", "true or false, or a token such as <|endoftext|>; write true"]),
        ("data.bos=off", VALUE, ["auto, true or false, or a token such as <|endoftext|>; write false"]),
        ("data.seed=true", TYPE, ["data.seed is true", "a whole number"]),
        ("data.seed=-1", RANGE, ["-1", "a whole number >= 0"]),
        ("data.seed=9223372036854775808", RANGE, ["9223372036854775808", "2^63-1"]),
        ("cluster.num_workers=true", TYPE, ["true", "a whole number >= 1, or [min, max]"]),
        ("cluster.num_workers=0", RANGE, ["is 0"]),
        ("cluster.num_workers=[2,1]", VALUE, ["[2, 1]", "[1, 2]"]),
        ("cluster.use_gpu=1", TYPE, ["is 1", "true or false"]),
        ("train.lr=true", TYPE, ["is true", "a number > 0"]),
        ("train.lr='3e-4'", TYPE, ["'3e-4'", "a number > 0, e.g. 3e-4", "without quotes"]),
        ("train.lr=1e999", VALUE, ["1e999", "finite numbers"]),
        ("train.lr=.nan", TYPE, ["'.nan'", "a number > 0"]),
        ("train.max_steps=1e3", TYPE, ["1000.0", "a whole number >= 1, or null; write 1000"]),
        ("train.max_steps=1_000", TYPE, ["'1_000'", "a whole number"]),
        ("train.max_steps=0", RANGE, ["is 0", "a whole number >= 1"]),
        ("train.betas=[0.9]", VALUE, ["[0.9];", "two numbers"]),
        ("train.betas=[0.9,1]", RANGE, ["[0.9, 1]", "two numbers"]),
        ("run.name=../evil", VALUE, ["run.name", "'../evil'", "letters"]),
        ("run.name=.hidden", VALUE, ["run.name", "'.hidden'"]),
        ("run.name=a/b", VALUE, ["run.name", "'a/b'"]),
        ('run.name="a\\n"', VALUE, ["run.name", "'a\\n'"]),
        ("cluster.address=somewhere", VALUE, ["null, auto, or host:port"]),
        ("resume.from=480", TYPE, ["480", "latest, or a point's name"]),
        ("resume.data=skip", MISSING, ["resume.data", "resume.skip_steps or resume.skip_samples"]),
        ("resume={data: restart, skip_steps: 2}", CONFLICT, ["resume.data", "restart", "skip"]),
        ("resume={restart_sources: [x]}", "config.unknown_source", ['["x"]', '["stdlib"]']),
        ("resume={restart_sources: [stdlib, stdlib]}", DUPLICATE, ["resume.restart_sources", '["stdlib"]']),
        ("resume={restart_sources: [stdlib], data: restart}", CONFLICT, ["resume.data=restart"]),
        ("resume={restart_sources: [stdlib], skip_samples: 2}", CONFLICT, ["resume.restart_sources", "skip"]),
        ("resume.skip_steps=0", RANGE, ["resume.skip_steps is 0", "a whole number >= 1"]),
        ("resume={skip_steps: 2, skip_samples: 7}", CONFLICT, ["skip_steps is 2", "resume.skip_samples=7"]),
        ("model.pretrained=p", CONFLICT, ["model.config and model.pretrained"]),
        ("model.dtype=bfloat16", UNKNOWN, ["model.dtype", "float32"]),
        ("train.parallel=fsdp", VALUE, ["'fsdp'", "auto, replicate, shard or {shard: n, replicate: m}"]),
        ("train.parallel={shard: 1, replicate: 2}", RANGE, ["auto, replicate, shard or {shard: n, replicat"]),
        ("train.parallel={shard: 4}", VALUE, ["auto, replicate, shard or {shard: n, replicate: m}"]),
        ("model.attn_implementation=flash", VALUE, ["'flash'", "auto, eager, sdpa or flex_attention"]),
        ("model={factory: 'a:b', attn_implementation: sdpa}", CONFLICT, ["is sdpa", "model.factory"]),
        ("train.kernels=liger", CONFLICT, ["cluster.use_gpu=false", "train.compile=auto"]),
        ("model.attn_implementation=flex_attention", CONFLICT, ["a GPU and fast", "use_gpu=false"]),
        ("model.dtype=float32", UNKNOWN, ["train.precision=bf16", "train.precision=pure_bf16"]),
        ("model.torch_dtype=bf16", UNKNOWN, ["train.precision?"]),
        ("train.precision=bfloat16", VALUE, ["float32, bf16 or pure_bf16", "float32?"]),
        (
            "model.lora={rnk: 4, alpha: 8}",
            UNKNOWN,
            ["model.lora has the key rnk, which is not known; did you mean rank?"],
        ),
        (
            "model.frozen={t: {pretraned: x}}",
            UNKNOWN,
            ["model.frozen has the key t.pretraned, which is not known; did you mean pretrained?"],
        ),
        ("eval.parts={a: {holdot: true}}", UNKNOWN, ["has the key a.holdot", "did you mean holdout?"]),
        ("model.config=null", MISSING, ["model.config, model.pretrained, model.factory"]),
        ("model.config.model_type=null", MISSING, ["model.config", "model_type=null", "llama"]),
        ("model.factory_args={a: 1}", CONFLICT, ['{"a": 1}', "model.factory"]),
        ("pack.seq_len=2048", CONFLICT, ["2048", "model.config.max_position_embeddings=1024"]),
        ("train.max_steps=null", NO_STOP, ["train.schedule", "cosine", "train.schedule=constant"]),
        ("train.schedule=wsd", MISSING, ["train.schedule is wsd", "train.decay_steps"]),
        ("train.decay_steps=5", CONFLICT, ["train.schedule is cosine", "train.decay_steps=5", "wsd"]),
        ("train.optimizer=adam", VALUE, ["'adam'", "adamw, muon, lion, adafactor, sgd", "adamw?"]),
        ("train.optimizer_args={momentum: 0.9}", UNKNOWN, ["'momentum'", "adamw takes none", "train.betas"]),
        ("train.param_groups=[{match: 'a('}]", VALUE, ["'a('", "a regular expression"]),
        ("train.param_groups=[{match: a, lr_scale: 0}]", RANGE, ["0", "a number > 0"]),
        ("train.param_groups=[{match: a, optimizer: 'a:b'}]", CONFLICT, ["a:b", "train.optimizer=adamw"]),
        ("resume.optimizer=new", VALUE, ["'new'", "keep or reset"]),
        ("train.schedule=power", MISSING, ["train.schedule is power", "train.decay_power"]),
        ("train.decay_power=2", CONFLICT, ["train.schedule is cosine", "train.decay_power=2", "power"]),
        ("train.schedule=[]", VALUE, ["train.schedule is []", "a list of [tokens, factor of lr]"]),
        ("train.schedule=[[0, 1, 2]]", VALUE, ["[[0, 1, 2]]", "a list of [tokens, factor of lr]"]),
        ("train.schedule=[[0, -1]]", RANGE, ["[[0, -1]]", "a list of [tokens, factor of lr]"]),
        ("train.schedule=[[0, 1]]", CONFLICT, ["[[0, 1]]", "train.warmup_steps=10"]),
        ("train.lr_on_batch_change=square", VALUE, ["'square'", "keep, linear or sqrt", "sqrt?"]),
        ("data.window_bytes=5", CONFLICT, ["is 5", "data.fragment_bytes=2097152"]),
        ("eval.every_steps=5", "config.nothing_held_out", ["data.holdout=0", "eval.parts"]),
        ("eval.parts={a: {}}", CONFLICT, ["part a", "neither of holdout and sources"]),
        ("resume.keep_best_by=eval.a.loss", "config.unknown_part", ["eval.a.loss", "holdout"]),
        ("resume.keep_best_by=eval.holdout.loss", MISSING, ["eval.every_steps"]),
        ("resume.keep_best_by=accuracy", VALUE, ["'accuracy'", "eval.PART.loss"]),
        ("data.sources=[]", VALUE, ["data.sources", "[];", "a list of"]),
        ("data.sources.0.format=json", VALUE, ["sources.0.format", "'json'", "jsonl, lines, text, parquet,"]),
        ("data=null", TYPE, ["data is null", "a section"]),
        ("train", OVERRIDE, ["section.field=value"]),
        ("train..lr=1", OVERRIDE, ["section.field=value"]),
        ("train.lr=", OVERRIDE, ["train.lr=null"]),
        ("train.lr=[1", NOT_YAML, ["'train.lr=[1'"]),
        ("train.lr.x=1", OVERRIDE, ["train.lr is 0.002"]),
        ("data.sources.7.path=x", OVERRIDE, ["data.sources.7"]),
        ('run.storage="\\ud800"', VALUE, ["UTF-8"]),
        ("train.lr=!!python/object:os.system x", VALUE, ["'os.system'"]),
    ],
)
def test_a_refusal_has_a_code_the_values_and_what_to_do(override: str, code: str, values: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, [override])
    assert caught.value.code == code
    (line,) = lines_of(caught.value)
    text = line.removesuffix(f" (override {override!r})")
    assert [value for value in values if value not in text] == [], text


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (("parallel=shard", "numerics=invariant"), ["is 'shard'", "numerics=invariant", "numerics=fast"]),
    ],
)
def test_a_refusal_of_fields_that_do_not_go_together_names_both(
    overrides: tuple[str, ...], values: list[str]
) -> None:
    with raises(ConfigError, CONFLICT, *values):
        load_config(QUICKSTART, [f"train.{override}" for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (("optimizer=lion", "betas=[0.9, 0.99]"), CONFLICT, ["train.betas is [0.9, 0.99]", "optimizer=lion"]),
        (("optimizer=sgd", "eps=1e-6"), CONFLICT, ["train.eps is 1e-06", "train.optimizer=sgd"]),
        (("optimizer=a.b:C", "eps=1e-6"), CONFLICT, ["train.eps is 1e-06", "train.optimizer=a.b:C"]),
        (("optimizer=sgd", "optimizer_args={momentum: 1.5}"), VALUE, ["momentum=1.5", "a number >= 0"]),
        (("optimizer=sgd", "optimizer_args={nesterov: true}"), CONFLICT, ["nesterov=true", "momentum=0"]),
        (("optimizer=muon", "optimizer_args={ns_steps: 0}"), VALUE, ["ns_steps=0", "from 1 to 99"]),
        (("optimizer=muon", "optimizer_args={adjust_lr_fn: x}"), VALUE, ["'x'", "match_rms_adamw or"]),
        (("optimizer=adafactor", "optimizer_args={eps: 1}"), VALUE, ["eps=1", "two numbers"]),
        (("optimizer=lion", "optimizer_args={betas: [1, 2]}"), VALUE, ["betas=[1, 2]", "< 1"]),
        (("optimizer=lion", "optimizer_args={beta: 1}"), UNKNOWN, ["'beta'", "lion takes betas"]),
    ],
)
def test_arguments_that_an_optimizer_does_not_have_are_refused_by_name(
    overrides: tuple[str, ...], code: str, values: list[str]
) -> None:
    with raises(ConfigError, code, *values):
        load_config(QUICKSTART, [f"train.{override}" for override in overrides])


def test_arguments_of_optimizers_are_taken() -> None:
    for overrides in (
        ("optimizer=muon", "betas=[0.8, 0.9]", "eps=1e-6", "optimizer_args={momentum: 0.9, ns_steps: 6}"),
        ("optimizer=adafactor", "optimizer_args={eps: [null, 1e-3], d: 2, beta2_decay: -0.5}"),
        ("optimizer=sgd", "optimizer_args={momentum: 0.9, nesterov: true}"),
        ("optimizer=lion", "betas=[0.8, 0.9]", "param_groups=[{match: norm, optimizer: adamw}]"),
        ("optimizer=a.b:C", "optimizer_args={anything: [1]}", "param_groups=[{match: x, optimizer: a.b:C}]"),
    ):
        config = load_config(QUICKSTART, [f"train.{override}" for override in overrides])
        assert parse_config(config.to_json()) == config


def test_what_other_trainers_call_our_fields_leads_to_fields_that_exist_and_hides_none() -> None:
    paths = {rule.path for rule in field_rules()}
    assert set(OTHER_NAMES.values()) <= paths
    assert not set(OTHER_NAMES) & {path.rpartition(".")[2] for path in paths}


def sources_of(*more: str) -> str:
    """Two sources with these further fields."""
    listed = [f"{{name: {'ab'[i]}, path: x, format: lines{each}}}" for i, each in enumerate(more)]
    return f"data.sources=[{', '.join(listed)}]"


def test_sources_of_a_mixture_have_names_of_their_own_and_all_of_them_weights_or_none() -> None:
    assert load_config(QUICKSTART, [sources_of("", "")]).data.on_end is None
    assert load_config(QUICKSTART, [sources_of(", weight: 0.9", ", weight: 0.1")])
    with raises(ConfigError, CONFLICT, "data.sources", "weight", "none to b"):
        load_config(QUICKSTART, [sources_of(", weight: 2", "")])
    twice = "data.sources=[{name: a, path: x, format: lines}, {name: a, path: y, format: lines}]"
    with raises(ConfigError, DUPLICATE, "data.sources has a "):
        load_config(QUICKSTART, [twice])


def test_sources_that_repeat_without_end_need_a_stop() -> None:
    stopless = [sources_of("", ""), "data.on_end=repeat", "train.max_steps=null", "train.schedule=constant"]
    with raises(ConfigError, NO_STOP, "data.on_end is repeat", "train.max_steps"):
        load_config(QUICKSTART, stopless)
    assert load_config(QUICKSTART, [*stopless[:2], "train.max_steps=7"]).data.on_end == "repeat"


def test_fused_attention_on_a_gpu_is_refused_under_invariant_numerics_and_taken_under_fast_ones() -> None:
    sdpa = ["model.attn_implementation=sdpa", "cluster.use_gpu=true"]
    with raises(ConfigError, CONFLICT, "model.attn_implementation is sdpa", "train.numerics=fast"):
        load_config(QUICKSTART, sdpa)
    assert load_config(QUICKSTART, [*sdpa, "train.numerics=fast"]).model.attn_implementation == "sdpa"
    flex = ["model.attn_implementation=flex_attention", "cluster.use_gpu=true", "train.numerics=fast"]
    with raises(ConfigError, CONFLICT, "pack.document_attention=true"):
        load_config(QUICKSTART, [*flex, "pack.mode=concat"])
    load_config(QUICKSTART, [*flex, "pack.mode=bestfit"])


def test_endless_epochs_need_a_stop() -> None:
    stopless = ["data.num_epochs=null", "train.max_steps=null", "train.schedule=constant"]
    with raises(ConfigError, NO_STOP, "data.num_epochs is null", "train.max_steps"):
        load_config(QUICKSTART, stopless)
    assert load_config(QUICKSTART, [*stopless[:1], "train.max_steps=7"]).data.num_epochs is None


def test_the_same_override_twice_is_refused() -> None:
    with raises(ConfigError, "config.duplicate_key", "'train.lr=1'", "'train.lr=2'"):
        load_config(QUICKSTART, ["train.lr=1", "train.lr=2"])


def test_an_override_that_cannot_be_read_is_named_once_and_nothing_else_is_blamed_for_it() -> None:
    with raises(ConfigError, OVERRIDE, "override 'train.lr=' ", "train.lr=null", "train.lr=''") as caught:
        load_config(QUICKSTART, ["train.lr="])
    (line,) = lines_of(caught.value)
    assert line in refusal("train=5", "train.lr=")
    with raises(ConfigError, NOT_YAML, "override 'train.lr=[1' ") as caught:
        load_config(QUICKSTART, ["train.lr=[1"])
    (line,) = lines_of(caught.value)
    assert "(override" not in line


@pytest.mark.parametrize(
    ("overrides", "code", "values"),
    [
        (["train.schedule=power", "train.decay_power=0"], RANGE, ["train.decay_power is 0"]),
        (["train.schedule=[[5, 1], [4, 1]]"], VALUE, ["4 tokens", "5"]),
        (["train.schedule=[[5, 1], [5, 2], [5, 1]]"], DUPLICATE, ["3 points", "5 tokens"]),
        (["train.schedule=[[0, 1]]", "train.decay_steps=3"], CONFLICT, ["[[0, 1]]", "train.decay_steps=3"]),
    ],
)
def test_a_schedule_that_contradicts_itself_is_refused(
    overrides: list[str], code: str, values: list[str]
) -> None:
    with raises(ConfigError, code, *values):
        load_config(QUICKSTART, ["train.warmup_steps=0", *overrides])


def test_all_problems_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    refused = refusal_of_text(
        "run: {name: .x}\n"
        "data: {sources: [{name: a, path: p, format: json}], tokenizer: t, num_epochs: null}\n"
        "pack:\n  seq_len: yes\n  seq_len: 3\n"
        "model: {}\n"
        "train: {lr: 3e-4, global_batch_size: 16, schedule: cosine, lrr: 1}\n"
        "cluster: {num_workers: [3, 2]}\n",
        tmp_path,
    )
    lines = lines_of(refused)
    for values in (
        ("run.name is '.x'",),
        ("data.sources.0.format is 'json'",),
        ("pack.seq_len ", "line 4", "line 5"),
        ("train.micro_batch_size is missing",),
        ("train.lrr ", "train.lr?", "(line 7)"),
        ("data.num_epochs is null",),
        ("model.config is missing",),
        ("train.schedule is cosine",),
        ("cluster.num_workers is [3, 2]",),
    ):
        assert any(all(value in line for value in values) for line in lines), values
    assert (refused.code, len(lines)) == (SEVERAL, 9)
    assert str(refused).splitlines()[0].endswith("9 problems")


@pytest.mark.parametrize(
    ("text", "code", "values"),
    [
        ("", SEVERAL, ["run is missing"]),
        ("- a\n- b\n", TYPE, ["`run:`", "a list"]),
        ("run: {name: a\n", NOT_YAML, ["line 2"]),
        ("run: {}\n---\nrun: {}\n", NOT_YAML, ["expected a single document"]),
        ("run: &r {name: *r}\n", SEVERAL, ["run.name is an alias"]),
        ("run: {? [a] : b}\n", SEVERAL, ["run has a list as a key at line 1"]),
        ("run: {<<: {name: a}}\n", SEVERAL, ["run.<< is not a known field"]),
    ],
)
def test_what_is_no_configuration_at_all_is_refused_by_line_and_reason(
    text: str, code: str, values: list[str], tmp_path: Path
) -> None:
    check_error(refusal_of_text(text, tmp_path), code, *values)


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.config.a=&r [*r]", "config.recursive_alias"),
        ("model.config.a={? [a] : b}", "config.invalid_key"),
        ("model.config.a={b: 1, b: 2}", "config.duplicate_key"),
    ],
)
def test_what_json_cannot_hold_has_a_code_of_its_own(override: str, code: str) -> None:
    with raises(ConfigError, code, "model.config.a"):
        load_config(QUICKSTART, [override])


def test_a_key_of_a_mapping_from_python_that_is_no_text_is_refused() -> None:
    mapping = copy.deepcopy(MINIMAL)
    mapping["model"]["config"][3] = "three"
    with raises(ConfigError, "config.invalid_key", "model.config", "key 3"):
        parse_config(mapping)


@pytest.mark.parametrize(
    "text", ["run: {name: a\n", "run:\n\tname: a\n", "- a\n- b\n", "run: {}\n---\nrun: {}\n"]
)
def test_what_cannot_be_read_at_all_is_not_said_to_lack_sections(text: str, tmp_path: Path) -> None:
    refused = refusal_of_text(text, tmp_path)
    assert refused.code in (NOT_YAML, TYPE)
    assert str(refused).splitlines()[0].endswith("1 problem")
    assert len(lines_of(refused)) == 1


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (BOMB, "100,000 values"),
        ("run: " + "[" * 5000 + "]" * 5000, "64 levels"),
        ("run: {name: " + "a" * (1 << 20) + "}", "1,048,576 characters"),
    ],
    ids=["aliases", "depth", "size"],
)
def test_a_text_that_would_fill_the_memory_is_refused_at_once(text: str, limit: str, tmp_path: Path) -> None:
    refused = refusal_of_text(text, tmp_path)
    check_error(refused, TOO_LARGE, limit)
    assert len(lines_of(refused)) == 1
    with raises(ConfigError, TOO_LARGE, limit):
        load_config(QUICKSTART, [f"run.name={text}"])


def test_a_missing_or_binary_file_is_a_config_error(tmp_path: Path) -> None:
    with raises(ConfigError, "config.unreadable_file", tmp_path / "none.yaml"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with raises(ConfigError, "config.not_utf8", tmp_path / "bin.yaml"):
        load_config(tmp_path / "bin.yaml")


def test_a_mapping_from_python_may_hold_paths_but_nothing_that_json_cannot(tmp_path: Path) -> None:
    mapping = copy.deepcopy(MINIMAL)
    mapping["run"]["storage"] = tmp_path
    assert parse_config(mapping).run.storage == str(tmp_path)
    mapping["train"]["lr"] = float("nan")
    with raises(ConfigError, VALUE, "train.lr is nan"):
        parse_config(mapping)


def test_parsing_leaves_the_given_mapping_alone() -> None:
    mapping = copy.deepcopy(MINIMAL)
    parse_config(mapping, ["train.lr=0.5", "model.config.x=1"])
    assert mapping == MINIMAL


def test_a_config_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(pydantic.ValidationError) as refused:
        config.train.lr = 1.0  # type: ignore[misc]
    assert [each["type"] for each in refused.value.errors()] == ["frozen_instance"]


def test_what_shapes_the_stream_stays_and_what_shapes_batches_may_change() -> None:
    rules = {rule.path: rule.rule for rule in field_rules()}
    kept = {path for path, rule in rules.items() if rule == "same"}
    assert {"data.sources", "data.tokenizer", "data.seed", "data.eos", "model.config", "run.name"} <= kept
    assert {rules[p] for p in ("pack.seq_len", "train.global_batch_size", "train.lr")} == {"may_change"}
    of_train = {path: rule for path, rule in rules.items() if path.startswith("train.")}
    free = {path for path, rule in of_train.items() if rule == "free"}
    assert free == {"train.callbacks", "train.on_callback_error"}
    assert set(of_train.values()) == {"free", "may_change"}
    decisive = (
        *("resume.from", "resume.data", "resume.skip_steps", "resume.skip_samples"),
        *("resume.restart_sources", "resume.accept_changed", "data.max_bad_share"),
        "resume.optimizer",
    )
    assert {rules[p] for p in decisive} == {"may_change"}, "they decide what is trained, or whether"
    loose = ("cluster.", "monitor.", "resume.")
    assert {rule for path, rule in rules.items() if path.startswith(loose) and path not in decisive} == {
        "free"
    }
    assert {rules[p] for p in ("data.num_tokenizers", "data.replay_bytes", "run.storage")} == {"free"}


def test_the_table_for_the_readme_is_made_from_the_declarations() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "orchestrator.config.field_rules"], capture_output=True, text=True, check=True
    ).stdout
    assert printed == resume_table() + "\n"
    rows = printed.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [rule.path for rule in field_rules()]
    assert all(rule.doc.endswith(".") for rule in field_rules())


def test_reading_a_config_imports_neither_ray_nor_torch() -> None:
    code = (
        f"import sys, orchestrator.config.loading as c; c.load_config({str(QUICKSTART)!r}); "
        "sys.exit(any(m in sys.modules for m in ('ray', 'torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(path=st.sampled_from([rule.path for rule in field_rules()]), value=JSON)
def test_any_value_in_any_field_is_taken_unchanged_or_refused(path: str, value: object) -> None:
    mapping = copy.deepcopy(MINIMAL)
    section, name = path.split(".")
    mapping.setdefault(section, {})[name] = value
    try:
        config = parse_config(mapping)
    except ConfigError:
        return
    if path != "data.sources":
        assert config.flat()[path] == value


@given(text=st.text(alphabet="{}[]:,&*!-?'\"|> \nabr1.e~", max_size=40))
def test_any_text_is_read_or_refused_but_nothing_else(text: str, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(file)


def test_a_mapping_or_an_override_that_goes_too_deep_is_refused_like_a_text(tiny_config: Any) -> None:
    ring, deep = dict[str, Any](), dict[str, Any]()
    ring["a"] = ring
    for _ in range(3000):
        deep = {"a": deep}
    for inside in (ring, deep):
        with raises(ConfigError, TOO_LARGE, "64 levels", "contains itself"):
            parse_config({**tiny_config(), "model": {"config": inside}})
    with raises(ConfigError, TOO_LARGE, "50,002 parts", "64"):
        parse_config(tiny_config(), ["model." + "a." * 50_000 + "b=1"])
    with raises(ConfigError, OVERRIDE, "data.sources."):
        parse_config(tiny_config(), ["data.sources." + "9" * 5000 + ".path=x"])


@pytest.mark.parametrize(
    "read", [lambda text: load_config(QUICKSTART, text), lambda text: parse_config(MINIMAL, text)]
)
def test_overrides_given_as_one_text_are_one_mistake(read: Callable[[str], Any]) -> None:
    with raises(ConfigError, "command.overrides_type", "'train.lr=3'", '["train.lr=3e-4"]') as caught:
        read("train.lr=3")
    assert "\n" not in str(caught.value)


def test_what_is_no_job_and_no_list_of_overrides_is_refused_by_its_value() -> None:
    with raises(ConfigError, "command.not_a_job", "JobConfig", 42):
        as_job(42)  # type: ignore[arg-type]
    with raises(ConfigError, "command.overrides_type", 52):
        as_job(QUICKSTART, 52)  # type: ignore[arg-type]
    assert as_job(as_job(QUICKSTART), ["train.lr=1e-5"]).train.lr == 1e-5
