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

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.field_rules import field_rules, resume_table
from orchestrator.config.loading import as_job, load_config, parse_config
from orchestrator.config.problems import OTHER_NAMES
from orchestrator.config.stored import nested
from orchestrator.errors import ConfigError
from tests.test_deployments import JOBS

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
MINIMAL: dict[str, Any] = {
    "run": {"name": "r"},
    "data": {"sources": [{"name": "s", "path": "x/*.jsonl", "format": "jsonl"}], "tokenizer": "t"},
    "pack": {"seq_len": 8},
    "model": {"config": {"model_type": "llama"}},
    "train": {"global_batch_size": 4, "micro_batch_size": 2, "lr": 0.1},
}


def refusal(*overrides: str) -> list[str]:
    """The problems of the quickstart's configuration under these overrides, one line each."""
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def refusal_of_text(text: str, tmp_path: Path) -> str:
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "job.yaml")
    return str(caught.value)


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
    ("override", "said"),
    [
        ("train.lrr=1", "train.lrr is not a known field; did you mean train.lr?"),
        ("train.seq_len=1", "did you mean pack.seq_len?"),
        ("lr=1", "did you mean train.lr?"),
        ("monitr.progress_s=1", "monitr is not a known field; did you mean monitor?"),
        ("batch=16", "did you mean train.global_batch_size or train.micro_batch_size?"),
        ("train.batch=16", "did you mean train.global_batch_size or train.micro_batch_size?"),
        ("train.batch_size=16", "did you mean train.global_batch_size or train.micro_batch_size?"),
        ("learning_rate=1e-3", "learning_rate is not a known field; did you mean train.lr?"),
        ("train.learning_rate=1e-3", "did you mean train.lr?"),
        ("workers=2", "did you mean cluster.num_workers?"),
        ("epochs=2", "did you mean data.num_epochs?"),
        ("tokenizer=x", "did you mean data.tokenizer?"),
        ("text_field=x", "did you mean data.sources.0.text_field?"),
        ("data.sources[0].text_field=x", "has brackets in its key; did you mean data.sources.0.text_field?"),
        ("data.sources.text_field=x", "did you mean data.sources.0.text_field?"),
        ("resume.from_=latest", "did you mean resume.from?"),
        ("data.shuffle=Blok", "is 'Blok'; expected block or none; did you mean block?"),
        ("train.schedule=cosin", "did you mean cosine?"),
        ("data.eos=yes", "is 'yes'; expected true or false, or a token such as <|endoftext|>; write true"),
        ("data.bos=off", "expected auto, true or false, or a token such as <|endoftext|>; write false"),
        ("data.seed=true", "is true; expected a whole number"),
        ("data.seed=-1", "is -1; expected a whole number >= 0"),
        ("data.seed=9223372036854775808", "is 9223372036854775808; whole numbers lie between"),
        ("cluster.num_workers=true", "is true; expected a whole number >= 1, or [min, max]"),
        ("cluster.num_workers=0", "is 0; expected"),
        ("cluster.num_workers=[2,1]", "is [2, 1], the minimum above the maximum; write [1, 2]"),
        ("cluster.use_gpu=1", "is 1; expected true or false"),
        ("train.lr=true", "is true; expected a number > 0"),
        ("train.lr='3e-4'", "is '3e-4'; expected a number > 0, e.g. 3e-4; write it without quotes"),
        ("train.lr=1e999", "only texts, finite numbers"),
        ("train.lr=.nan", "is '.nan'; expected a number > 0"),
        ("train.max_steps=1e3", "is 1000.0; expected a whole number >= 1, or null; write 1000"),
        ("train.max_steps=1_000", "is '1_000'; expected a whole number"),
        ("train.max_steps=0", "is 0; expected a whole number >= 1"),
        ("train.betas=[0.9]", "is [0.9]; expected two numbers"),
        ("train.betas=[0.9,1]", "is [0.9, 1]; expected two numbers"),
        ("run.name=../evil", "run.name is '../evil'; expected letters"),
        ("run.name=.hidden", "run.name is '.hidden'"),
        ("run.name=a/b", "run.name is 'a/b'"),
        ('run.name="a\\n"', "run.name is 'a\\n'"),
        ("cluster.address=somewhere", "expected null, auto, or host:port"),
        ("resume.from=480", "is 480; expected latest, or a point's name"),
        ("resume.data=skip", "is skip; say how much: set resume.skip_steps or resume.skip_samples"),
        ("resume={data: restart, skip_steps: 2}", "is restart, and a skip is given, too; do one after the"),
        ("resume={restart_sources: [x]}", 'names ["x"], the sources are ["stdlib"]; name these'),
        ("resume={restart_sources: [stdlib, stdlib]}", '["stdlib"] more than once; name each source once'),
        ("resume={restart_sources: [stdlib], data: restart}", "which restarts all sources; leave"),
        ("resume={restart_sources: [stdlib], skip_samples: 2}", "is given, and a skip; do one after the"),
        ("resume.skip_steps=0", "resume.skip_steps is 0; expected a whole number >= 1"),
        (
            "resume={skip_steps: 2, skip_samples: 7}",
            "resume.skip_steps is 2 and resume.skip_samples=7; give one of them",
        ),
        ("model.pretrained=p", "model.config and model.pretrained are set; keep one"),
        (
            "model.dtype=bfloat16",
            "model.dtype is a field no longer: weights are float32, so leave it out; for",
        ),
        ("train.parallel=fsdp", "is 'fsdp'; expected auto, replicate, shard or {shard: n, replicate: m}"),
        ("train.parallel={shard: 1, replicate: 2}", "expected auto, replicate, shard or {shard: n, replicat"),
        ("train.parallel={shard: 4}", "expected auto, replicate, shard or {shard: n, replicate: m}"),
        ("model.attn_implementation=flash", "is 'flash'; expected auto, eager or sdpa"),
        ("model={factory: 'a:b', attn_implementation: sdpa}", "is sdpa, but model.factory makes the model"),
        ("model.dtype=float32", "leave it out; for bfloat16 products set train.precision=bf16, and only"),
        ("model.torch_dtype=bf16", "did you mean train.precision?"),
        ("train.precision=bfloat16", "expected float32, bf16 or pure_bf16; did you mean"),
        ("model.config=null", "set exactly one of model.config, model.pretrained, model.factory"),
        ("model.config.model_type=null", "model_type=null; set it to a name that transformers knows"),
        ("model.factory_args={a: 1}", "but model.factory is null"),
        ("pack.seq_len=2048", "is 2048, more than model.config.max_position_embeddings=1024"),
        ("train.max_steps=null", "train.schedule is cosine, which decays, but there is no end"),
        ("train.schedule=wsd", "is wsd, but train.decay_steps is null"),
        ("train.decay_steps=5", "is cosine, but train.decay_steps=5 is for wsd only"),
        ("data.window_bytes=5", "less than data.fragment_bytes=2097152"),
        ("data.sources=[]", "data.sources is []; expected a list of"),
        (
            "data.sources.0.format=json",
            "data.sources.0.format is 'json'; expected jsonl, lines, text, parquet,",
        ),
        ("data=null", "data is null; expected a section with fields"),
        ("train", "is not of the form section.field=value"),
        ("train..lr=1", "is not of the form section.field=value"),
        ("train.lr=", "has no value; write train.lr=null"),
        ("train.lr=[1", "is not YAML"),
        ("train.lr.x=1", "train.lr is 0.002, not a section"),
        ("data.sources.7.path=x", "cannot be set"),
        ('run.storage="\\ud800"', "half a character"),
        ("train.lr=!!python/object:os.system x", "tagged 'os.system'"),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_to_do(override: str, said: str) -> None:
    lines = refusal(override)
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("parallel=shard", "numerics=invariant"), "needs the whole gradient on every worker; set train.num"),
        (("parallel=auto", "compile=blocks"), "is blocks, which is for sharded models, and train.paral"),
        (
            ("parallel=replicate", "activation_checkpointing=blocks"),
            "set it to none, or train.parallel=shard",
        ),
    ],
)
def test_a_refusal_of_fields_that_do_not_go_together_names_both(
    overrides: tuple[str, ...], said: str
) -> None:
    lines = refusal(*(f"train.{override}" for override in overrides))
    assert len(lines) == 1
    assert said in lines[0]


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
    said = refusal(sources_of(", weight: 2", ""))[0]
    assert said.startswith("data.sources gives a weight to some sources and none to b; give every source one")
    twice = "data.sources=[{name: a, path: x, format: lines}, {name: a, path: y, format: lines}]"
    (said,) = refusal(twice)
    assert said.startswith("data.sources has a twice; give each source a name of its own")


def test_sources_that_repeat_without_end_need_a_stop() -> None:
    stopless = [sources_of("", ""), "data.on_end=repeat", "train.max_steps=null", "train.schedule=constant"]
    assert "data.on_end is repeat, which has no end, and there is no stop" in refusal(*stopless)[0]
    assert load_config(QUICKSTART, [*stopless[:2], "train.max_steps=7"]).data.on_end == "repeat"


def test_fused_attention_on_a_gpu_is_refused_under_invariant_numerics_and_taken_under_fast_ones() -> None:
    sdpa = ["model.attn_implementation=sdpa", "cluster.use_gpu=true"]
    assert "is sdpa, which adds up gradients in any order on a GPU" in refusal(*sdpa)[0]
    assert load_config(QUICKSTART, [*sdpa, "train.numerics=fast"]).model.attn_implementation == "sdpa"


def test_endless_epochs_need_a_stop() -> None:
    stopless = ["data.num_epochs=null", "train.max_steps=null", "train.schedule=constant"]
    assert "data.num_epochs is null (endless) and there is no stop" in refusal(*stopless)[0]
    assert load_config(QUICKSTART, [*stopless[:1], "train.max_steps=7"]).data.num_epochs is None


def test_the_same_override_twice_is_refused() -> None:
    lines = refusal("train.lr=1", "train.lr=2")
    assert lines[0].startswith("train.lr is given twice, 'train.lr=1' and 'train.lr=2'; keep one")


def test_an_override_that_cannot_be_read_is_named_once_and_nothing_else_is_blamed_for_it() -> None:
    said = "override 'train.lr=' has no value; write train.lr=null or train.lr='' if that is meant"
    assert refusal("train.lr=") == [said]
    assert said in refusal("train=5", "train.lr=")
    (line,) = refusal("train.lr=[1")
    assert line.startswith("override 'train.lr=[1' is not YAML: ")
    assert "(override" not in line


def test_all_problems_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    text = refusal_of_text(
        "run: {name: .x}\n"
        "data: {sources: [{name: a, path: p, format: json}], tokenizer: t, num_epochs: null}\n"
        "pack:\n  seq_len: yes\n  seq_len: 3\n"
        "model: {}\n"
        "train: {lr: 3e-4, global_batch_size: 16, schedule: cosine, lrr: 1}\n"
        "cluster: {num_workers: [3, 2]}\n",
        tmp_path,
    )
    for said in (
        "run.name is '.x'",
        "data.sources.0.format is 'json'",
        "pack.seq_len is given twice, at line 4 and line 5",
        "train.micro_batch_size is missing",
        "train.lrr is not a known field; did you mean train.lr? (line 7)",
        "data.num_epochs is null (endless)",
        "model.config is missing",
        "train.schedule is cosine, which decays",
        "cluster.num_workers is [3, 2]",
    ):
        assert said in text
    assert text.splitlines()[0].endswith("9 problems")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "run is missing"),
        ("- a\n- b\n", "expected sections such as `run:` and `data:`, found a list"),
        ("run: {name: a\n", "this is not YAML"),
        ("run: {}\n---\nrun: {}\n", "expected a single document"),
        ("run: &r {name: *r}\n", "run.name is an alias of something that contains it"),
        ("run: {? [a] : b}\n", "has a list as a key"),
        ("run: {<<: {name: a}}\n", "run.<< is not a known field"),
    ],
)
def test_what_is_no_configuration_at_all_is_refused_by_line_and_reason(
    text: str, said: str, tmp_path: Path
) -> None:
    assert said in refusal_of_text(text, tmp_path)


@pytest.mark.parametrize(
    "text", ["run: {name: a\n", "run:\n\tname: a\n", "- a\n- b\n", "run: {}\n---\nrun: {}\n"]
)
def test_what_cannot_be_read_at_all_is_not_said_to_lack_sections(text: str, tmp_path: Path) -> None:
    lines = refusal_of_text(text, tmp_path).splitlines()
    assert lines[0].endswith("1 problem")
    assert "is missing" not in lines[1]


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "more than 100,000 values (aliases are written out)"),
        ("run: " + "[" * 5000 + "]" * 5000, "more than 64 levels deep"),
        ("run: {name: " + "a" * (1 << 20) + "}", "more than 1,048,576 characters"),
    ],
    ids=["aliases", "depth", "size"],
)
def test_a_text_that_would_fill_the_memory_is_refused_at_once(text: str, said: str, tmp_path: Path) -> None:
    lines = refusal_of_text(text, tmp_path).splitlines()
    assert len(lines) == 2
    assert said in lines[1]
    assert said in refusal(f"run.name={text}")[0]


def test_a_missing_or_binary_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        load_config(tmp_path / "bin.yaml")


def test_a_mapping_from_python_may_hold_paths_but_nothing_that_json_cannot(tmp_path: Path) -> None:
    mapping = copy.deepcopy(MINIMAL)
    mapping["run"]["storage"] = tmp_path
    assert parse_config(mapping).run.storage == str(tmp_path)
    mapping["train"]["lr"] = float("nan")
    with pytest.raises(ConfigError, match=r"train\.lr is nan"):
        parse_config(mapping)


def test_parsing_leaves_the_given_mapping_alone() -> None:
    mapping = copy.deepcopy(MINIMAL)
    parse_config(mapping, ["train.lr=0.5", "model.config.x=1"])
    assert mapping == MINIMAL


def test_a_config_is_frozen() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


def test_what_shapes_the_stream_stays_and_what_shapes_batches_may_change() -> None:
    rules = {rule.path: rule.rule for rule in field_rules()}
    kept = {path for path, rule in rules.items() if rule == "same"}
    assert {"data.sources", "data.tokenizer", "data.seed", "data.eos", "model.config", "run.name"} <= kept
    assert {rules[p] for p in ("pack.seq_len", "train.global_batch_size", "train.lr")} == {"may_change"}
    assert {rule for path, rule in rules.items() if path.startswith("train.")} == {"may_change"}
    decisive = (
        *("resume.from", "resume.data", "resume.skip_steps", "resume.skip_samples"),
        *("resume.restart_sources", "resume.accept_changed", "data.max_bad_share"),
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
        with pytest.raises(ConfigError, match="more than 64 levels deep, or contains itself"):
            parse_config({**tiny_config(), "model": {"config": inside}})
    with pytest.raises(ConfigError, match="its key has 50,002 parts of 64"):
        parse_config(tiny_config(), ["model." + "a." * 50_000 + "b=1"])
    with pytest.raises(ConfigError, match="cannot be set by"):
        parse_config(tiny_config(), ["data.sources." + "9" * 5000 + ".path=x"])


@pytest.mark.parametrize(
    "read", [lambda text: load_config(QUICKSTART, text), lambda text: parse_config(MINIMAL, text)]
)
def test_overrides_given_as_one_text_are_one_mistake(read: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        read("train.lr=3")
    assert str(caught.value) == (
        'overrides is the text \'train.lr=3\'; give a list of "key=value", e.g. ["train.lr=3e-4"]'
    )


def test_what_is_no_job_and_no_list_of_overrides_is_refused_by_its_value() -> None:
    with pytest.raises(ConfigError, match="a mapping or a JobConfig, not as 42"):
        as_job(42)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="overrides is 52; give a list"):
        as_job(QUICKSTART, 52)  # type: ignore[arg-type]
    assert as_job(as_job(QUICKSTART), ["train.lr=1e-5"]).train.lr == 1e-5
