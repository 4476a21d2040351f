"""Folders of weights that a run reads: found from another current folder, at a new place, and not needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.checkpoint.export.export import export_point
from orchestrator.checkpoint.points.model_folders import (
    configuration_digest,
    keep_configuration,
    kept_configuration,
    located,
    without_folder,
)
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.errors import LaterFormatError, RefusedError, ResumePointError
from orchestrator.history.journal.journal_reader import beginning_of
from orchestrator.inspect.run import Run
from orchestrator.json_form import seal
from orchestrator.launch.api import plan
from orchestrator.launch.start import run_preparation as starting
from orchestrator.trainer.state.train_state import TrainState
from tests.checkpoint.exports import CPU, LLAMA, commit, job, logits, state_of, store_at
from tests.launch.runner import Runner
from tests.raising import raises
from tests.trainer.weight_folders import TIED, saved

LORA = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in `base`."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.fixture
def shape(tiny_config: Any) -> dict[str, Any]:
    config: dict[str, Any] = tiny_config()["model"]["config"]
    return config


def runner_of(tiny_config: Any, **model: Any) -> Runner:
    changes = {f"model.{name}": value for name, value in {"config": None, **model}.items()}
    return Runner(tiny_config({"train.max_steps": 1000, **changes}))


def read_by(runner: Runner) -> JobConfig:
    return starting.reading_job(runner.config(), runner.store)


def other_settings(base: Path, **changes: Any) -> None:
    """Another config.json beside the same weights."""
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- another current folder
def test_relative_paths_are_found_from_another_folder_and_recorded_nowhere_but_in_the_journal(
    tiny_config: Any, shape: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, teacher = saved(folder / "base", shape), saved(folder / "teacher", shape)
    runner = runner_of(
        tiny_config, pretrained="base", lora=LORA, frozen={"teacher": {"pretrained": "./teacher"}}
    )
    digest = starting.config_digest(runner.config())
    runner.launch()
    point = runner.store.read_point(runner.store.point_names()[-1])
    assert point.config["model.pretrained"] == "base"
    assert str(folder) not in (runner.folder / "run.json").read_text()
    places = {"base": base, "./teacher": teacher}
    assert (beginning_of(runner.store.storage, 1) or {})["places"] == places
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    found = read_by(runner).model
    assert (found.pretrained, found.frozen["teacher"].pretrained) == (base, teacher)
    assert plan(runner.config()).action == "resume"
    assert starting.config_digest(runner.config()) == digest
    runner.launch()
    assert (beginning_of(runner.store.storage, 2) or {})["places"] == places
    fork = tmp_path / "fork"
    Run(runner.folder).fork(fork, "latest")
    assert located(runner.config().model, store_at(fork)).pretrained == base
    saved(elsewhere / "base", shape)
    assert read_by(runner).model.pretrained == "base", "a start looks in the current folder first"
    assert located(runner.config().model, runner.store, recorded_first=True).pretrained == base
    shutil.rmtree(base)
    assert located(runner.config().model, runner.store, recorded_first=True).pretrained == "base"


# ---- a new place
@pytest.mark.parametrize("lora", [None, LORA])
def test_another_place_of_the_same_model_is_accepted_and_of_another_is_refused_with_both_digests(
    lora: dict[str, Any] | None, tiny_config: Any, shape: dict[str, Any], folder: Path
) -> None:
    saved(folder / "base", shape)
    runner = runner_of(tiny_config, pretrained="base", lora=lora)
    runner.launch()
    (folder / "base").rename(folder / "moved")
    moved = parse_config({**runner.mapping, "model": {**runner.mapping["model"], "pretrained": "moved"}})
    assert plan(moved).action == "resume"
    other_settings(folder / "moved", transformers_version="0.0")
    assert plan(moved).action == "resume"
    kept = kept_configuration(runner.store.storage, 1)
    assert kept is not None
    other_settings(folder / "moved", rms_norm_eps=0.5)
    now = (folder / "moved" / "config.json").read_text()
    refused = plan(moved)
    assert (refused.action, refused.codes) == ("refuse", ("resume.changed_setting",))
    values = ["moved", configuration_digest(kept["config.json"]), configuration_digest(now)]
    assert all(value in refused.refusals[0] for value in values)


def test_a_run_that_has_kept_nothing_compares_with_the_old_folder(
    tiny_config: Any, shape: dict[str, Any], folder: Path
) -> None:
    saved(folder / "base", shape)
    runner = runner_of(tiny_config, pretrained="base")
    runner.launch()
    shutil.rmtree(runner.folder / "model")
    shutil.copytree(folder / "base", folder / "copy")
    copy = parse_config({**runner.mapping, "model": {**runner.mapping["model"], "pretrained": "copy"}})
    assert plan(copy).action == "resume"
    shutil.rmtree(folder / "base")
    assert "has kept no config.json" in plan(copy).refusals[0]


def test_an_export_reads_the_base_at_its_new_place_and_no_other_weights(tmp_path: Path) -> None:
    base, store = Path(saved(tmp_path / "base", LLAMA)), store_at(tmp_path / "run")
    config = job({"pretrained": str(base), "lora": LORA})
    state = state_of(config, steps=2)
    state.fixed = state.fixed_digests()
    point = commit(store, config, state)
    keep_configuration(store.storage, 1, config.model)
    base.rename(tmp_path / "moved")
    moved = [f"model.pretrained={tmp_path / 'moved'}"]
    export_point(store, point.name, tmp_path / "out", merged=True, overrides=moved)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(merged), logits(state.model))
    with raises(RefusedError, "command.override_not_allowed", "train.lr=1"):
        export_point(store, point.name, tmp_path / "never", overrides=["train.lr=1"])
    other_settings(tmp_path / "moved", rms_norm_eps=0.5)
    with raises(RefusedError, "weights.changed", tmp_path / "moved"):
        export_point(store, point.name, tmp_path / "never", merged=True, overrides=moved)


# ---- the kept configuration
@pytest.mark.parametrize("shape", [LLAMA, TIED])
def test_an_export_needs_no_folder_and_writes_what_it_wrote_with_it(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    base, store = saved(tmp_path / "base", shape), store_at(tmp_path / "run")
    config = job({"pretrained": base})
    state = state_of(config, steps=2)
    point = commit(store, config, state, attempt=2)
    expected = export_point(store, point.name, tmp_path / "before")
    keep_configuration(store.storage, 1, config.model)
    shutil.rmtree(base)
    assert export_point(store, point.name, tmp_path / "after").files == expected.files
    model = without_folder(config.model, store.storage, 2)
    again = state_of(config.model_copy(update={"model": model}), steps=0)
    assert {item.name for item in again.items()} == {item.name for item in state.items()}
    again.model.load_state_dict(state.model.state_dict())
    assert torch.equal(logits(again.model), logits(state.model))


def test_a_resume_from_a_point_needs_no_folder(
    tiny_config: Any, shape: dict[str, Any], folder: Path
) -> None:
    saved(folder / "base", shape)
    runner = runner_of(tiny_config, pretrained="base")
    runner.launch()
    shutil.rmtree(folder / "base")
    assert plan(runner.config()).action == "resume"
    assert read_by(runner).model.pretrained is None
    fork = folder / "fork"
    Run(runner.folder).fork(fork, "latest")
    assert kept_configuration(store_at(fork).storage, 0) == kept_configuration(runner.store.storage, 1)
    shutil.rmtree(runner.folder / "model")
    assert plan(runner.config()).codes == ("weights.no_folder",)


def test_a_resume_from_a_point_does_not_need_what_its_first_weights_came_from(tmp_path: Path) -> None:
    store, first = store_at(tmp_path / "run"), store_at(tmp_path / "first")
    plain = job({"config": TIED})
    where = tmp_path / "first" / "points" / commit(first, plain, state_of(plain)).name
    config = job({"config": TIED, "init_from": str(where)})
    commit(store, config, state_of(config))
    shutil.rmtree(tmp_path / "first")
    model = starting.reading_job(config, store).model
    assert TrainState(model, config.train, CPU, invariant=True).items()


def test_another_configuration_is_kept_for_later_points_alone(tmp_path: Path) -> None:
    base, store = Path(saved(tmp_path / "base", LLAMA)), store_at(tmp_path / "run")
    model = job({"pretrained": str(base)}).model
    first = (base / "config.json").read_text()
    assert kept_configuration(store.storage, 9) is None
    for attempt in (1, 2):
        keep_configuration(store.storage, attempt, model)
    other_settings(base, rms_norm_eps=0.5)
    keep_configuration(store.storage, 3, model)
    assert store.storage.list("model") == ["0001.json", "0003.json"]
    kept = [(kept_configuration(store.storage, attempt) or {})["config.json"] for attempt in (1, 2, 3)]
    assert kept == [first, first, (base / "config.json").read_text()]


def test_a_damaged_configuration_is_named(tmp_path: Path) -> None:
    base, store = Path(saved(tmp_path / "base", LLAMA)), store_at(tmp_path / "run")
    keep_configuration(store.storage, 1, job({"pretrained": str(base)}).model)
    path = tmp_path / "run" / "model" / "0001.json"
    path.write_bytes(path.read_bytes().replace(b"llama", b"LLAMA", 1))
    with raises(ResumePointError, "run.damaged_model_file", path):
        kept_configuration(store.storage, 1)
    path.write_bytes(seal({"format": 2, "files": {}}))
    with raises(LaterFormatError, "storage.later_format", path):
        kept_configuration(store.storage, 1)
