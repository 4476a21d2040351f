"""`plan` and `train --dry-run`: what a start would refuse is refused without a cluster or a trace."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli.commands import main
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.errors import ConfigError, OrchestratorError, ResourceError, StorageError
from orchestrator.launch.api import dry_run
from orchestrator.launch.start import run_preparation as starting
from orchestrator.storage.files import Storage
from tests.data.making import some_texts, write_corpus
from tests.launch.runner import Runner
from tests.raising import raises
from tests.trainer.architectures import GEMMA2

MakeJob = Callable[..., JobConfig]


@pytest.fixture
def make(tiny_config: Any) -> MakeJob:
    """`make(model__config=…)`: the tiny job with dotted fields changed."""
    return lambda **changes: parse_config(tiny_config({k.replace("__", "."): v for k, v in changes.items()}))


def source(job: JobConfig, **changes: Any) -> list[dict[str, Any]]:
    return [{**job.to_json()["data"]["sources"][0], **changes}]


# `orchestrator`, which tries the model with the Python that the first word says
PROGRAM = """
import sys
from orchestrator.cli.commands import main

sys.executable = sys.argv.pop(1)
main()
"""


def test_a_dry_run_says_what_plan_says_ends_with_0_and_writes_nothing(
    make: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: str
) -> None:
    job = make()
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job.to_json()))
    words = ["train", "--dry-run", str(path), "--json"]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, warm, *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended
    with pytest.raises(SystemExit) as planned:
        main(["plan", str(path), "--json"])
    assert planned.value.code == 0
    dry, plan = json.loads(ended.stdout), json.loads(capsys.readouterr().out)
    assert dry == plan
    assert dry["action"] == "start"
    assert list(Path(job.run.storage).iterdir()) == []


REFUSED: dict[str, tuple[dict[str, Any], type[OrchestratorError], str, tuple[str, ...]]] = {
    "a model that does not exist": (
        {"model.config": {"model_type": "no-such-model"}},
        ConfigError,
        "model.unknown_type",
        ("no-such-model",),
    ),
    "an impossible model": (
        {"model.config": {**GEMMA2, "vocab_size": 1000, "hidden_size": "wide"}},
        ConfigError,
        "model.not_built",
        ("hidden_size",),
    ),
    "a key that no model would read": (
        {"model.config": {**GEMMA2, "vocab_size": 1000, "hidden_sise": 64}},
        ConfigError,
        "model.config_keys",
        ("model.config.hidden_sise", "model.config.hidden_size"),
    ),
    "attention that the model has not": (
        {"model.config": {**GEMMA2, "vocab_size": 1000}, "model.attn_implementation": "sdpa"},
        ConfigError,
        "model.not_built",
        ("scaled_dot_product_attention",),
    ),
    "a folder without a model": (
        {"model.config": None, "model.pretrained": "/nowhere"},
        ConfigError,
        "weights.no_folder",
        ("model.pretrained=/nowhere",),
    ),
    "a vocabulary that is too small by default": (
        {"model.config": {"model_type": "llama4_text", "vocab_size": 999}},
        ConfigError,
        "model.vocabulary",
        ("vocab_size=999", "1000"),
    ),
    "a model that no memory holds": (
        {
            "model.config": {
                "model_type": "llama",
                "vocab_size": 1000,
                "hidden_size": 65536,
                "intermediate_size": 262144,
                "num_hidden_layers": 8,
            }
        },
        ResourceError,
        "cluster.too_small",
        ("GiB",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_start_can_do_is_refused_with_2_and_leaves_nothing_behind(
    case: str, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    changes, kind, code, values = REFUSED[case]
    job = parse_config(tiny_config(changes))
    for start in (dry_run, orchestrator.train):
        with raises(kind, code, *values) as caught:
            start(job)
        assert caught.value.exit_code == 2
        assert not Path(job.run.run_uri).exists()


CODES = {
    "model.factory_output": {
        "model.config": None,
        "model.factory": "tests.trainer.test_factory_output:Small",
    },
    "model.not_causal": {"model.config": {"model_type": "bert", "is_decoder": False}},
}


@pytest.mark.quick("model.factory_output")
@pytest.mark.parametrize("code", CODES)
def test_plan_keeps_the_error_code_of_each_refusal(
    code: str, tiny_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text(json.dumps(tiny_config(CODES[code])))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "job.json"), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code, document["action"], document["codes"]) == (2, "refuse", [code])
    assert len(document["refusals"]) == 1


def test_a_pretrained_model_with_fewer_ids_than_the_tokenizer_is_refused_with_both_numbers(
    make: MakeJob, tmp_path: Path
) -> None:
    import torch

    from orchestrator.config.sections import ModelConfig
    from orchestrator.trainer.model.build_model import build_model

    small = build_model(ModelConfig(config=GEMMA2), "float32", 0, torch.device("cpu"), True)
    small.save_pretrained(tmp_path)
    job = make(model__config=None, model__pretrained=str(tmp_path))
    values = f"model.pretrained={tmp_path}", f" {GEMMA2['vocab_size']} ", "1000"
    with raises(ConfigError, "model.vocabulary", *values):
        dry_run(job)


def test_plan_names_the_fields_of_the_first_record_where_text_field_is_none_of_them(make: MakeJob) -> None:
    job = make()
    wrong = make(data__sources=source(job, text_field="content"))
    for look in (orchestrator.plan, dry_run, orchestrator.train):
        with raises(ConfigError, "data.missing_field", "`content`", "text, path", "text_field"):
            look(wrong)
    assert not Path(wrong.run.run_uri).exists()


def test_a_folder_that_cannot_be_made_is_named(make: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with raises(StorageError, "storage.not_writable", f"{tmp_path / 'file'} "):
        dry_run(make(run__storage=str(tmp_path / "file" / "runs")))


def test_a_cluster_is_not_looked_at_and_this_is_said(make: MakeJob) -> None:
    job = make(cluster__address="127.0.0.1:9")
    assert "what the cluster has is not looked at: memory, CPUs, GPUs, object store" in dry_run(job).notes


@pytest.mark.quick("words0-another seed", "words1-a narrower path", "words0-a file that is gone")
@pytest.mark.parametrize("change", ["a narrower path", "a file that is gone", "another seed"])
@pytest.mark.parametrize("words", [["plan"], ["train", "--dry-run"]])
def test_whatever_is_refused_of_the_data_is_a_refusal_in_json(
    change: str, words: list[str], tmp_path: Path, tiny_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "d", some_texts(30), "jsonl")
    made = {"name": "made", "path": str(tmp_path / "d"), "format": "jsonl"}
    mapping = tiny_config({"data.sources": [made]})
    job = parse_config(mapping)
    folder = Path(starting.run_storage(job).root)
    spec = starting.prepare(job, Storage(str(folder)), freeze=True)
    RunStore(Storage(str(folder))).create_run(job.run.name, spec.identity())
    if change == "a narrower path":
        mapping["data"]["sources"][0]["path"] = str(tmp_path / "d" / "part-0.jsonl")
    elif change == "another seed":
        mapping["data"]["seed"] = 99
    else:
        (tmp_path / "d" / "part-1.jsonl").unlink()
    (tmp_path / "job.json").write_text(json.dumps(mapping))
    for extra in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, str(tmp_path / "job.json"), *extra])
        assert ended.value.code == 2
        printed = capsys.readouterr()
        if extra:
            document = json.loads(printed.out)
            assert (document["action"], document["point"], len(document["refusals"])) == ("refuse", None, 1)
            said = {"a narrower path": "leaves out 2 of these 3 files", "another seed": "seed"}
            assert said.get(change, "is gone") in document["refusals"][0]
            assert change != "another seed" or document["codes"] == ["resume.changed_setting"]
        else:
            assert printed.out.startswith("refused: ")
            assert "None" not in printed.out.partition("learning rate")[0]


LORA = {"rank": 2, "alpha": 4.0, "target_modules": "all-linear"}
NEEDED: dict[str, tuple[dict[str, Any], str]] = {
    "an objective": ({"train.objective": "gone_code:objective"}, "objective.not_callable"),
    "units": (
        {
            "train.objective": "tests.trainer.objectives:cross_entropy",
            "train.objective_units": "gone_code:units",
        },
        "objective.not_callable",
    ),
    "an optimizer": ({"train.optimizer": "gone_code:make"}, "optimizer.not_callable"),
    "a callback": ({"train.callbacks": ["gone_code:Callback"]}, "callback.not_callable"),
    "a factory": ({"model.config": None, "model.factory": "gone_code:build"}, "model.factory_not_callable"),
    "the factory of a frozen model": (
        {"model.frozen": {"teacher": {"factory": "gone_code:build"}}},
        "model.factory_not_callable",
    ),
    "a frozen model": ({"model.frozen": {"teacher": {"pretrained": "/nowhere"}}}, "weights.no_folder"),
    "the weights of a frozen model": (
        {"model.frozen": {"teacher": {"config": GEMMA2, "init_from": "/nowhere"}}},
        "weights.no_files",
    ),
    "the base of adapters": (
        {"model.config": None, "model.pretrained": "/nowhere", "model.lora": LORA},
        "weights.no_folder",
    ),
    "what says which model it is": (
        {"model.config": None, "model.pretrained": "/nowhere"},
        "weights.no_folder",
    ),
}


@pytest.mark.parametrize("case", NEEDED)
@pytest.mark.quick("an objective", "the base of adapters")
def test_a_resume_that_lacks_what_its_workers_need_is_refused_as_a_new_run_is(
    case: str, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    changes, code = NEEDED[case]
    runner = Runner(tiny_config({"train.max_steps": 1000, **changes}))
    with pytest.raises(ConfigError) as new:
        dry_run(runner.config())
    assert new.value.code == code
    runner.launch()
    with raises(ConfigError, code) as caught:
        orchestrator.train(runner.config())
    assert (str(caught.value), caught.value.exit_code) == (str(new.value), 2)
    plan = orchestrator.plan(runner.config())
    assert (plan.action, plan.codes) == ("refuse", (code,))
    assert runner.store.claim_numbers() == [1], "nothing was begun"


def test_a_resume_that_has_nothing_left_to_train_needs_nothing(tiny_config: Any) -> None:
    lacks = {"train.callbacks": ["gone_code:Callback"], "train.max_steps": 10}
    runner = Runner(tiny_config(lacks))
    runner.launch()
    plan = orchestrator.plan(runner.config())
    assert (plan.action, plan.remaining_steps) == ("resume", 0)
    assert orchestrator.train(runner.config()).outcome == "done"


def test_of_a_cluster_elsewhere_missing_weights_are_a_warning(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.255.255.1:6379")
    changes = {"model.config": None, "model.pretrained": "/nowhere", "model.lora": LORA}
    runner = Runner(tiny_config({"train.max_steps": 1000, **changes}))
    runner.launch()
    plan = orchestrator.plan(runner.config())
    assert plan.action == "resume"
    assert any(note.startswith("warning: from here model.pretrained=/nowhere") for note in plan.notes)
