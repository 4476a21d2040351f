"""Saving in shares and loading again: whole for every world size, and nothing damaged is ever used."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.errors import ResumePointError, StorageError
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.records.steps import StateKey
from orchestrator.storage.files import Storage
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import digest_of, load
from tests.raising import raises
from tests.trainer.member import tiny_job
from tests.trainer.saved_states import CPU, commit_state, new_state, write_share
from tests.trainer.states import begun_state

KEY = StateKey(attempt=1, generation=1, step=1)
POINT = KEY.point_name


def save(state: TrainState, folder: Path, world_size: int, key: StateKey = KEY) -> str:
    """Commits a point of the state, saved by so many ranks; the digest of its weights."""
    store, layout, items = RunStore(Storage(str(folder))), layout_of(world_size, 1), state.items()
    return commit_state(
        store, key, layout, [items] * world_size, optimizer_steps=key.step
    ).commit.weights_digest


def files_of(folder: Path) -> CommittedFiles:
    return CommittedFiles(Storage(str(folder)))


def loaded(folder: Path) -> TrainState:
    state = new_state()
    load(state.items(), POINT, files_of(folder))
    state.filled()
    return state


@pytest.mark.parametrize("world_size", [1, 2, 3, 70])
def test_what_any_number_of_ranks_saved_is_loaded_whole(tmp_path, world_size):
    state = new_state(steps=3)
    digest = save(state, tmp_path, world_size)
    again = loaded(tmp_path)
    assert again.digest() == state.digest()
    assert again.optimizer_steps == 3
    assert digest == save(state, tmp_path / "alone", 1) == digest_of(state.items())


def test_a_loaded_state_takes_the_same_next_step(tmp_path):
    state = new_state(steps=2)
    save(state, tmp_path, 2)
    again = loaded(tmp_path)
    for each in (state, again):
        for parameter in each.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        each.apply(0.02, num_units=1)
    assert again.digest() == state.digest()


def test_tied_weights_are_saved_once_and_the_safetensors_library_reads_the_file(tmp_path):
    state = new_state()
    save(state, tmp_path, 1)
    with safe_open(tmp_path / f"points/{POINT}/state/00000-of-00001.safetensors", "pt") as file:
        names = {name.removeprefix("model/") for name in file.keys() if name.startswith("model/")}  # noqa: SIM118
        assert file.metadata()["format"] == "pt"
        for name, parameter in state.model.named_parameters():
            assert torch.equal(file.get_tensor(f"model/{name}"), parameter)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert names == {name for name, _ in state.model.named_parameters()}


def test_a_file_is_never_written_twice(tmp_path):
    state = new_state()
    save(state, tmp_path, 2)
    with pytest.raises(StorageError):
        write_share(state.items(), POINT, layout_of(2, 1), 0, Storage(str(tmp_path)))


def flip_a_bit(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "a bit of the header flipped": lambda path: flip_a_bit(path, 0.01),
    "a bit in the middle flipped": lambda path: flip_a_bit(path, 0.6),
    "the last bit flipped": lambda path: flip_a_bit(path, 1.0),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "the last byte gone": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a pickle": lambda path: path.write_bytes(pickle.dumps(Hostile(path.with_suffix(".was-run")))),
}


class Hostile:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.quick(
    "state/00001-of-00002-empty",
    "state/00000-of-00002-gone",
    "state/00001-of-00002-a bit of the header flipped",
    "state/00001-of-00002-the last bit flipped",
    "state/00000-of-00002-the last byte gone",
    "state/00001-of-00002-cut in half",
    "state/00001-of-00002-a bit in the middle flipped",
    "state/00000-of-00002-a pickle",
)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["state/00000-of-00002", "state/00001-of-00002"])
def test_a_damaged_file_is_named_and_not_used(tmp_path, damage, file):
    save(new_state(steps=1), tmp_path, 2)
    DAMAGES[damage](tmp_path / f"points/{POINT}/{file}.safetensors")
    with raises(ResumePointError, "point.damaged", file):
        loaded(tmp_path)
    assert not list(tmp_path.rglob("*.was-run"))


def test_a_file_of_another_step_is_found_out(tmp_path):
    save(new_state(steps=1), tmp_path, 2)
    save(new_state(steps=2), tmp_path, 2, dataclasses.replace(KEY, step=2))
    file = "state/00000-of-00002.safetensors"
    other = (tmp_path / "points/00000002-a0001-g0001" / file).read_bytes()
    (tmp_path / "points" / POINT / file).write_bytes(other)
    with raises(ResumePointError, "point.damaged", file, "digest"):
        loaded(tmp_path)


def test_a_list_of_tensors_that_cannot_be_read_is_damage(tmp_path):
    save(new_state(), tmp_path, 1)
    parts = tmp_path / f"points/{POINT}/parts.json"
    parts.write_bytes(parts.read_bytes()[:-10])
    with raises(ResumePointError, "point.damaged", "parts.json"):
        loaded(tmp_path)


def test_a_point_of_another_model_is_refused_with_both_shapes(tmp_path):
    save(new_state(), tmp_path, 1)
    shape = dict(tiny_job().model.config or {}, intermediate_size=48)
    job = tiny_job(model__config=shape)
    other = begun_state(job.model, job.train, CPU, invariant=True)
    with raises(ResumePointError, "point.other_model", "(32, 16)", "(48, 16)"):
        load(other.items(), POINT, files_of(tmp_path))


def commit(state: TrainState, folder: Path, step: int) -> str:
    """The name of a committed point of the state, saved by two ranks."""
    key = dataclasses.replace(KEY, step=step)
    save(state, folder, 2, key)
    return key.point_name


@pytest.mark.parametrize("swapped", [("state",), ("COMMIT",)])
def test_parts_and_tensors_of_another_step_are_not_loaded(tmp_path, swapped):
    first, second = (commit(new_state(steps), tmp_path, steps) for steps in (1, 2))
    files = CommittedFiles(Storage(str(tmp_path)))
    state = new_state()
    load(state.items(), second, files)
    state.filled()
    assert state.digest() == new_state(2).digest()
    for name in swapped:
        old, new = (tmp_path / "points" / point / name for point in (first, second))
        if new.is_dir():
            shutil.rmtree(new)
            shutil.copytree(old, new)
        else:
            shutil.copyfile(old, new)
    with raises(ResumePointError, "point.damaged", f"{second}: {swapped[0]}"):
        load(new_state().items(), second, files)


def test_a_point_without_commit_is_not_loaded(tmp_path):
    name = commit(new_state(1), tmp_path, 1)
    (tmp_path / "points" / name / "COMMIT").unlink()
    with raises(ResumePointError, "point.damaged", name, "COMMIT"):
        load(new_state().items(), name, CommittedFiles(Storage(str(tmp_path))))
