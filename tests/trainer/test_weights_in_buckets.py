"""Weights and models that lie in a bucket are, to the bit, those of the same files in a folder; what is wrong
with a URI is said before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from orchestrator.checkpoint.export.export import export_point
from orchestrator.checkpoint.export.export_files import weights_identity, weights_sentence
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError, OrchestratorError, ResumePointError, StorageError
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.weights.saved_form import SavedForm
from orchestrator.trainer.weights.state_tensors import MODEL, own_tensors
from orchestrator.trainer.weights.transformers_model import SETTINGS
from tests.checkpoint.exports import CPU, FACTORY, LLAMA, SMALL, commit, job, state_of, store_at
from tests.checkpoint.files.samples import byte_of
from tests.raising import raises
from tests.storage.servers import Proxy, moto, new_bucket, no_fault, proxy_before, reach
from tests.trainer.states import begun_state
from tests.trainer.weight_folders import GPT2, MIXTRAL, TIED, assert_first_weights, renamed, saved

SINGLE = "model.safetensors"

pytestmark = pytest.mark.usefixtures("begun_warm")  # models are tried


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with moto() as url, proxy_before(url) as proxy:
        yield proxy


@pytest.fixture
def bucket(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    server.rule = no_fault
    reach(monkeypatch, server.url, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield new_bucket(server.url)
    server.rule = no_fault


def uploaded(folder: Path, uri: str) -> str:
    """All files of a folder, below a URI."""
    storage, mine = open_storage(uri), Storage(str(folder))
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = str(path.relative_to(folder))
        storage.write(name, mine.read(name))
    return uri


def changed(uri: str, name: str, data: bytes | None) -> None:
    storage = open_storage(uri)
    storage.delete(name)
    if data is not None:
        storage.write(name, data)


def first_of(config: JobConfig) -> dict[str, torch.Tensor]:
    """The weights with which a member begins a run."""
    state = begun_state(config.model, config.train, CPU, invariant=True)
    state.initialise()
    return {item.name: item.tensor for item in state.items() if item.group == MODEL}


def assert_same(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert all(torch.equal(some[name], others[name]) for name in others)


@pytest.mark.quick("experts")
@pytest.mark.parametrize(
    "model", [{"config": TIED}, {"config": MIXTRAL}, FACTORY], ids=["tied", "experts", "factory"]
)
def test_a_run_starts_from_a_point_or_an_export_in_a_bucket_to_the_bit(
    model: dict[str, Any], bucket: str, tmp_path: Path
) -> None:
    config, store = job(model), RunStore(open_storage(f"{bucket}/team/other"))
    trained = state_of(config)
    point = commit(store, config, trained, world_size=3)
    export_point(store, point.name, tmp_path / "out")
    exported = uploaded(tmp_path / "out", f"{bucket}/weights/out")
    expected = {item.name: item.tensor for item in trained.items() if item.group == MODEL}
    at = f"{bucket}/team/other/points/{point.name}"
    for where in (at, f"{at}/", exported):
        new = job({**model, "init_from": where}, seed=5)
        try_model(new)
        assert_same(first_of(new), expected)
        assert point.commit.weights_digest in weights_sentence(where)
    assert_first_weights(job({**model, "init_from": at}).model, "float32")  # by shards
    assert weights_identity(at) == point.commit.weights_digest
    assert weights_identity(exported) == weights_identity(str(tmp_path / "out")), "wherever it lies"


@pytest.mark.chaos
@pytest.mark.parametrize("kind", ["llama", "shards", "experts", "renamed"])
def test_a_pretrained_model_of_a_bucket_is_that_of_the_same_folder(
    kind: str, bucket: str, tmp_path: Path
) -> None:
    shape = {"experts": MIXTRAL, "renamed": GPT2}.get(kind, LLAMA)
    folder = saved(
        tmp_path / "model", shape, torch.bfloat16, max_shard_size=8000 if kind == "shards" else "1GB"
    )
    if kind == "renamed":
        renamed(tmp_path / "model" / SINGLE)
    uri = uploaded(tmp_path / "model", f"{bucket}/hub/model")
    try_model(job({"pretrained": uri}))
    there = job({"pretrained": uri})
    assert_same(first_of(there), first_of(job({"pretrained": folder})))
    assert_first_weights(there.model, "float32", streamed=kind in ("llama", "shards"))
    model = build_model(there.model, "float32", 0, CPU, True)
    tensors = {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in own_tensors(model.state_dict(keep_vars=True))
    }
    mine, theirs = (SavedForm(ModelConfig(pretrained=where), tensors, None).files for where in (folder, uri))
    assert mine == theirs, "what an export writes beside the weights"


def test_a_factory_reads_weights_of_a_bucket_by_its_own_names(bucket: str, tmp_path: Path) -> None:
    whole = state_of(job(FACTORY)).model.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in whole.items()}, tmp_path / SINGLE)
    open_storage(f"{bucket}/w").write(SINGLE, (tmp_path / SINGLE).read_bytes())
    assert_same(first_of(job({**FACTORY, "init_from": f"{bucket}/w"})), whole)


def test_the_settings_are_kept_once_by_content_and_damage_of_them_is_mended(
    bucket: str, tmp_path: Path
) -> None:
    saved(tmp_path / "model", LLAMA)
    for name in ("one", "two"):
        uploaded(tmp_path / "model", f"{bucket}/{name}")
        try_model(job({"pretrained": f"{bucket}/{name}"}))
    (kept,) = (tmp_path / "cache" / "orchestrator" / "files").iterdir()
    assert sorted(path.name for path in kept.iterdir()) == [SETTINGS, "generation_config.json"]
    (kept / SETTINGS).write_text("{}")
    try_model(job({"pretrained": f"{bucket}/one"}))
    assert (kept / SETTINGS).read_bytes() == (tmp_path / "model" / SETTINGS).read_bytes()


def test_what_is_missing_or_damaged_is_named(bucket: str, tmp_path: Path) -> None:
    saved(tmp_path / "model", LLAMA)
    uri, nowhere = uploaded(tmp_path / "model", f"{bucket}/model"), f"{bucket}/nowhere"
    with raises(ConfigError, "model.not_built", f"model.pretrained={nowhere}", "no config.json"):
        try_model(job({"pretrained": nowhere}))
    with raises(ConfigError, "weights.no_files", f"model.init_from: {nowhere}"):
        weights_sentence(nowhere)
    for refuse in (weights_sentence, weights_identity):
        with raises(StorageError, "storage.not_found", "model.init_from", "s3://no-such-bucket"):
            refuse("s3://no-such-bucket/model")
    with raises(StorageError, "storage.not_found", "s3://no-such-bucket"):
        try_model(job({"pretrained": "s3://no-such-bucket/model"}))
    data = (tmp_path / "model" / SINGLE).read_bytes()
    changed(uri, SINGLE, data[:-8])
    for asked in (job({"pretrained": uri}), job({"config": LLAMA, "init_from": uri})):
        sizes = (f" {len(data) - 8} bytes", f" {len(data)};")
        with raises(ConfigError, "weights.file_size", f"{uri}/{SINGLE}", *sizes):
            first_of(asked)
    tensors = load_file(tmp_path / "model" / SINGLE)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    changed(uri, SINGLE, (tmp_path / SINGLE).read_bytes())
    with raises(ConfigError, "weights.missing_tensors", " 1 of", " model.norm.weight;"):
        first_of(job({"pretrained": uri}))
    changed(uri, SINGLE, None)
    with raises(ConfigError, "weights.no_files", uri):
        try_model(job({"pretrained": uri}))


def test_a_damaged_point_of_a_bucket_is_refused(bucket: str, tmp_path: Path) -> None:
    config, store = job(FACTORY), RunStore(open_storage(f"{bucket}/other"))
    point = commit(store, config, state_of(config))
    at = f"{bucket}/other/points/{point.name}"
    part = "state/00000-of-00002.safetensors"
    data = bytearray(store.storage.read(f"points/{point.name}/{part}"))
    (tmp_path / "part").write_bytes(data)
    data[byte_of(tmp_path / "part")] ^= 1
    changed(at, part, bytes(data))
    with raises(ResumePointError, "point.damaged", part):
        first_of(job({**FACTORY, "init_from": at}))
    changed(at, "COMMIT", None)
    with raises(ConfigError, "point.damaged", "model.init_from", point.name, "COMMIT"):
        weights_sentence(at)
    moved = f"{bucket}/points-moved/{point.name}"
    open_storage(moved).write("parts.json", b"{}")
    with raises(ConfigError, "point.bad_location", f"model.init_from: {moved} "):
        weights_sentence(moved)


def test_a_bucket_that_refuses_is_said_with_what_to_do_and_no_secret(
    bucket: str, server: Proxy, tmp_path: Path
) -> None:
    server.rule = lambda method, path: "403"
    for refuse in (
        lambda: weights_sentence(f"{bucket}/model"),
        lambda: try_model(job({"pretrained": f"{bucket}/model"})),
        lambda: try_model(job({"config": LLAMA, "init_from": f"{bucket}/model"})),
    ):
        with raises(OrchestratorError, "storage.denied", f"{bucket}/model"):
            refuse()


def test_a_point_of_a_folder_and_of_a_bucket_have_one_identity(bucket: str, tmp_path: Path) -> None:
    config, store = job({"config": {"model_type": "llama", **SMALL}}), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    uploaded(tmp_path / "run", f"{bucket}/copied")
    here, there = (f"{run}/points/{point.name}" for run in (tmp_path / "run", f"{bucket}/copied"))
    assert weights_identity(str(here)) == weights_identity(there)
