"""A start with `model.init_from`: the plan says what the first weights are, the run keeps which they were."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

import orchestrator
from orchestrator.checkpoint.export.export_files import weights_identity
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.errors import ConfigError, RefusedError
from orchestrator.launch.api import dry_run
from orchestrator.launch.start.attempt_claim import claimed
from orchestrator.launch.start.run_preparation import prepare
from orchestrator.storage.open import open_storage
from tests.checkpoint.exports import commit, state_of, store_at
from tests.launch.runner import Runner
from tests.raising import raises
from tests.storage.servers import new_bucket, reach

SECRET = "hunter2-and-more"


@pytest.fixture
def other(tiny_config: Any, tmp_path: Path) -> Point:
    """A point of another run, in the folder `other`."""
    config = parse_config(tiny_config())
    return commit(store_at(tmp_path / "other"), config, state_of(config))


def test_the_first_weights_are_said_and_kept_and_a_resume_needs_them_no_more(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    runner = Runner(tiny_config({"train.max_steps": 1000, "model.init_from": str(where)}))
    said = (
        f"the first weights are those of resume point {where}, weights digest {other.commit.weights_digest}"
    )
    plan = dry_run(runner.config())
    assert plan.action == "start"
    assert said in plan.notes
    runner.launch()
    run = runner.store.read_run()
    assert run is not None
    assert run.first_weights == other.commit.weights_digest == weights_identity(str(where))
    shutil.rmtree(tmp_path / "other")
    plan = runner.plan()
    assert plan.action == "resume"
    assert not any("first weights" in note for note in plan.notes)
    runner.launch()
    assert [row["attempt"] for row in orchestrator.open(runner.folder).list_points()] == [1, 2]


def test_a_run_without_a_point_starts_from_the_weights_that_it_was_started_with_or_not_at_all(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    runner = Runner(tiny_config({"model.init_from": str(where)}))
    runner.begin()
    runner.begin()
    config = parse_config(tiny_config())
    shutil.rmtree(tmp_path / "other")
    again = commit(store_at(tmp_path / "other"), config, state_of(config, steps=2))
    digests = other.commit.weights_digest, again.commit.weights_digest
    with raises(RefusedError, "weights.changed", *digests):
        runner.begin()
    assert runner.store.claim_numbers() == [1, 2]


def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    tiny_config: Any, tmp_path: Path, other: Point
) -> None:
    where = tmp_path / "other" / "points" / other.name
    model = {**tiny_config()["model"]["config"], "num_hidden_layers": 1}
    job = parse_config(tiny_config({"model.config": model, "model.init_from": str(where)}))
    with raises(ConfigError, "weights.other_model", "model.layers.1.mlp.up_proj.weight [64, 32]"):
        dry_run(job)
    (where / "COMMIT").unlink()
    with raises(ConfigError, "point.damaged", "COMMIT is missing"):
        orchestrator.plan(job)
    assert list(Path(job.run.storage).iterdir()) == []


def test_a_resume_with_other_first_weights_is_refused(tiny_config: Any, other: Point, tmp_path: Path) -> None:
    mapping = tiny_config({"train.max_steps": 1000})
    runner = Runner(mapping)
    runner.launch()
    where = str(tmp_path / "other" / "points" / other.name)
    changed = Runner({**mapping, "model": {**mapping["model"], "init_from": where}})
    plan = changed.plan()
    assert plan.codes == ("resume.changed_setting",)
    assert all(value in plan.refusals[0] for value in ("model.init_from=null,", f" {where};"))


def weights_in(folder: Path) -> str:
    """A folder of weights in three stretches of two files; they are read, and never loaded."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    folder.mkdir()
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / names[0]).write_bytes(random.Random(1).randbytes((20 << 20) + 3))
    (folder / names[1]).write_bytes(b"")
    return str(folder)


def test_a_folder_of_weights_keeps_the_identity_that_earlier_versions_gave_it(tmp_path: Path) -> None:
    """A run without a point that an earlier version began is refused if the identity differs."""
    where = weights_in(tmp_path / "weights")
    entries = [
        {"path": path.name, "bytes": path.stat().st_size, "digest": blake3(path.read_bytes()).hexdigest()}
        for path in sorted(Path(where).glob("*.safetensors"))
    ]
    plain = json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()
    assert weights_identity(where) == blake3(plain).hexdigest()
    assert weights_identity(where) == "f92a42c2dfdb1620ad7cd02e2866b483c73d44cea67eb264da1a20b150d7b32d"
    (Path(where) / "model-00002-of-00002.safetensors").unlink()
    with raises(ConfigError, "weights.missing_file"):
        weights_identity(where)


def test_a_start_reports_how_far_it_has_read_the_first_weights(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = weights_in(tmp_path / "weights")
    runner = Runner(tiny_config({"model.init_from": where}))
    said: list[str] = []
    for lines in (0, 2):  # the third stretch is the last: all is read
        spec = runner.prepared()
        newest = max(runner.store.claim_numbers(), default=0)
        with claimed(runner.store, runner.config(), spec, newest, say=said.append):
            pass
        assert len([line for line in said if line.startswith("first weights: ")]) == lines
        monkeypatch.setattr("orchestrator.checkpoint.points.verify.SAY_EVERY_S", 0.0)
    run = runner.store.read_run()
    assert run is not None
    assert run.first_weights == weights_identity(where)


@pytest.fixture
def bucket(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    reach(monkeypatch, s3_server, tmp_path)
    return new_bucket(s3_server)


@pytest.mark.parametrize("in_bucket", [False, True], ids=["run in a folder", "run in a bucket"])
def test_a_run_begins_with_a_point_in_the_bucket_of_another_run(
    tiny_config: Any, bucket: str, in_bucket: bool
) -> None:
    config, store = parse_config(tiny_config()), RunStore(open_storage(f"{bucket}/team/other"))
    other = commit(store, config, state_of(config))
    where = f"{bucket}/team/other/points/{other.name}"
    changes = {"run.storage": f"{bucket}/mine"} if in_bucket else {}
    mapping = tiny_config({"train.max_steps": 1000, "model.init_from": where, **changes})
    plan = dry_run(parse_config(mapping))
    said = f"first weights are those of resume point {where}, weights digest {other.commit.weights_digest}"
    assert f"the {said}" in plan.notes
    job = parse_config(mapping)
    mine = RunStore(open_storage(job.run.run_uri))
    spec = prepare(job, mine.storage, freeze=True)
    with claimed(mine, job, spec, 0):
        pass
    run = mine.read_run()
    assert run is not None
    assert run.first_weights == other.commit.weights_digest
    store.storage.delete_folder("points")
    with raises(ConfigError, "weights.no_files", "model.init_from: s3://"):
        claimed(mine, job, spec, 1).__enter__()


@pytest.mark.parametrize("field", ["model.init_from", "model.pretrained", "data.tokenizer", "run.storage"])
@pytest.mark.parametrize(
    "uri", ["s3://me:{}@bucket/x", "s3://{}@bucket/x", "s3://bucket/x?sig={}", "s3:/me:{}@bucket/x"]
)
def test_a_uri_with_a_secret_in_it_is_refused_and_not_repeated(
    tiny_config: Any, field: str, uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mapping = tiny_config({field: uri.format(SECRET)})
    if field == "model.pretrained":
        del mapping["model"]["config"]
    for ask in (dry_run, orchestrator.train):
        with raises(ConfigError, "config.uri_with_secret", field, "s3://") as refused:
            ask(parse_config(mapping))
        assert SECRET not in str(refused.value)
    assert SECRET not in "".join(capsys.readouterr())
