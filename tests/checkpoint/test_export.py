"""An exported point is what transformers would have saved: nothing missing, the same logits, whole or not
there.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import orchestrator
from orchestrator.checkpoint.export import export as exporting
from orchestrator.checkpoint.export.export import export_point
from orchestrator.checkpoint.export.export_files import MARKER, read_marker
from orchestrator.cli.commands import main
from orchestrator.errors import RefusedError, ResumePointError, StorageError
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.checkpoint.exports import FACTORY, LLAMA, SMALL, commit, job, logits, state_of, store_at
from tests.checkpoint.files.samples import byte_of
from tests.raising import exits, raises

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2" / "example"
NEWEST = "00000010-a0003-g0001"
MODELS: dict[str, dict[str, Any]] = {
    "a head of its own": LLAMA,
    "a tied head": {**LLAMA, "tie_word_embeddings": True},
    "a tied head of another architecture": {
        "model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
    },
    "no sdpa": {"model_type": "gemma2", **SMALL},
    "experts that transformers saves one by one": {
        "model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def opened(folder: Path, **options: Any) -> Any:
    """The model that transformers opens, with nothing missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_an_export_whole_and_says_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    config, store = job({"config": MODELS[name]}), store_at(tmp_path / "run")
    state = state_of(config)
    point = commit(store, config, state, world_size=3)
    exported = export_point(store, point.name, tmp_path / "out")
    attention = state.model.config._attn_implementation
    # kept keys lie elsewhere in memory, and some CPUs then add in another order
    model = opened(tmp_path / "out", attn_implementation=attention, use_cache=False)
    assert torch.equal(logits(model), logits(state.model))
    state.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("out", "theirs"))
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert (exported.point, exported.weights_digest) == (point.name, point.commit.weights_digest)


def test_numbers_are_rounded_as_torch_rounds_them_and_only_if_asked_for(tmp_path: Path) -> None:
    for model in ({"config": LLAMA}, FACTORY):
        config, store = job(model), store_at(tmp_path / "run" / str("factory" in model))
        state = state_of(config)
        point, out = commit(store, config, state), tmp_path / "out" / str("factory" in model)
        export_point(store, point.name, out / "bfloat16", "bfloat16")
        export_point(store, point.name, out / "float16", "float16")
        for dtype in (torch.bfloat16, torch.float16):
            found = load_file(out / str(dtype).removeprefix("torch.") / "model.safetensors")
            assert all(torch.equal(t, state.model.state_dict()[n].to(dtype)) for n, t in found.items())
        with raises(RefusedError, "export.unknown_dtype", "--dtype=int8", "float32", "bfloat16", "float16"):
            export_point(store, point.name, out / "int8", "int8")
    assert opened(tmp_path / "out" / "False" / "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["float32", "pure_bf16"])
def test_averaged_weights_are_exported_if_asked_for_and_there(tmp_path: Path, precision: str) -> None:
    for number, model in enumerate(({"config": {**LLAMA, "tie_word_embeddings": True}}, FACTORY)):
        folder = tmp_path / str(number)
        config, store = job(model, ema=0.5, precision=precision), store_at(folder / "run")
        state = state_of(config, steps=3)
        point = commit(store, config, state)
        exported = export_point(store, point.name, folder / "out", averaged=True)
        assert exported.averaged
        averages = {item.name: item.tensor for item in state.items() if item.group == "ema"}
        found = load_file(folder / "out" / "model.safetensors")
        assert found.keys() == averages.keys()
        assert all(torch.equal(found[name], average) for name, average in averages.items())
        assert not export_point(store, point.name, folder / "weights").averaged
        weights = load_file(folder / "weights" / "model.safetensors")
        assert not all(torch.equal(weights[name].float(), average) for name, average in averages.items())
    assert opened(tmp_path / "0" / "out").dtype == torch.float32
    config, store = job({"config": LLAMA}), store_at(tmp_path / "without")
    name = commit(store, config, state_of(config)).name
    with raises(RefusedError, "export.no_averages", name, "train.ema", "--ema"):
        export_point(store, name, tmp_path / "out", averaged=True)


def test_weights_that_were_trained_in_bfloat16_stay_so(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}, precision="pure_bf16"), store_at(tmp_path / "run")
    state = state_of(config)
    export_point(store, commit(store, config, state).name, tmp_path / "out")
    model = opened(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(model), logits(state.model))


def test_a_large_model_is_cut_into_shards_that_transformers_puts_together(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    state = state_of(config)
    point = commit(store, config, state)
    export_point(store, point.name, tmp_path / "out", shard_bytes=8000)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*-of-*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 8000 + 2000, "the tensors, and the header that lists them"
    assert torch.equal(logits(opened(tmp_path / "out")), logits(state.model))


def test_a_factorys_model_is_exported_as_plain_safetensors_and_the_runs_configuration(tmp_path: Path) -> None:
    config, store = job(FACTORY), store_at(tmp_path / "run")
    state = state_of(config)
    export_point(store, commit(store, config, state).name, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.model.state_dict().items())
    written = json.loads((tmp_path / "out" / "run_config.json").read_text())
    assert written == config.to_json()
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_damaged_tensor_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    config, store = job({"config": LLAMA}), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    path = tmp_path / "run" / "points" / point.name / "state" / "00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[byte_of(path)] ^= 1
    path.write_bytes(data)
    with raises(ResumePointError, "point.damaged", point.name, "00001-of-00002.safetensors"):
        export_point(store, point.name, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_taken_and_one_of_the_run_are_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    config, store = job(FACTORY), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    for where, code in {
        "taken": "export.not_empty",
        "taken/mine.txt": "export.not_empty",
        "run/out": "export.inside_run",
    }.items():
        with raises(RefusedError, code, tmp_path / where):
            export_point(store, point.name, tmp_path / where)
    (tmp_path / "empty").mkdir()
    export_point(store, point.name, tmp_path / "empty")
    assert read_marker(Storage(str(tmp_path / "empty")), "") is not None


def test_an_export_that_is_cut_off_anywhere_has_no_marker_and_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, store = job(FACTORY), store_at(tmp_path / "run")
    point = commit(store, config, state_of(config))
    calls = 0

    class Cut(LocalStore):
        """The `at`-th write fails for good."""

        def _try(self, what: str, full: str, action: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise StorageError("cut off", code="test.cut_off")
            return super()._try(what, full, action)

    monkeypatch.setattr(exporting, "Storage", lambda root: Storage.on(Cut(root)))
    at = 0
    export_point(store, point.name, tmp_path / "whole")
    assert calls
    for at in range(1, calls + 1):  # noqa: B007  the class reads it
        calls = 0
        with raises(StorageError, "test.cut_off"):
            export_point(store, point.name, tmp_path / "out")
        assert sorted(each.name for each in tmp_path.iterdir()) in (["run", "whole"], ["out", "run", "whole"])
        if (tmp_path / "out").exists():  # only the name was not known to be durable
            assert (tmp_path / "out" / MARKER).exists()
            shutil.rmtree(tmp_path / "out")


def test_the_command_exports_the_newest_point_or_a_named_one_with_the_runs_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["export", str(EXAMPLE), str(tmp_path / "new"), "--json"])
    assert ended.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["point"], document["out"]) == (NEWEST, str(tmp_path / "new"))
    rows = {row["name"]: row for row in orchestrator.open(EXAMPLE).list_points()}
    assert document["weights_digest"] == rows[NEWEST]["weights_digest"]
    model = opened(tmp_path / "new")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    text = "def export(run): return 'é'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(SystemExit) as ended:
        main(["export", str(EXAMPLE), "00000006-a0002-g0001", str(tmp_path / "old")])
    assert ended.value.code == 0
    assert "the weights of 00000006-a0002-g0001, numbers as trained" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["export", str(EXAMPLE), "00000099-a0009-g0001", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "has no resume point 00000099-a0009-g0001; it has 00000006" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[NEWEST], ["out", NEWEST], ["a", "b", "c"]])
def test_the_folder_comes_last_and_a_points_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with exits(2):
        main(["export", str(EXAMPLE), *words])
    assert "RUN POINT OUT" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
