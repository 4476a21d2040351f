"""Saving in shares and loading again: whole for every world size, and nothing damaged is ever used."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from orchestrator.errors import ResumePointError, StorageError
from orchestrator.json_form import encode
from orchestrator.planning.weights_digest import weights_digest
from orchestrator.records import Cursor, StateKey, Vote
from orchestrator.resume.committed import CommittedFiles
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage
from orchestrator.trainer.state import TrainState
from orchestrator.trainer.weights import load, share_of, write_share
from tests.trainer.member import tiny_job

POINT = "00000001-a0001-g0001"
CPU = torch.device("cpu")


def new_state(steps: int = 0) -> TrainState:
    job = tiny_job()
    state = TrainState(job.model, job.train, CPU, invariant=True)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.apply(0.01)
    return state


def save(state: TrainState, folder: Path, world_size: int, point: str = POINT) -> str:
    storage = Storage(str(folder))
    written = [write_share(state.items(), point, rank, world_size, storage) for rank in range(world_size)]
    tensors = [tensor for _, of_rank in written for tensor in of_rank]
    document = json.dumps({"format": 1, "tensors": encode(tensors)}).encode()
    storage.write(f"points/{point}/parts.json", document)
    return weights_digest(tensors)


def loaded(folder: Path) -> TrainState:
    state = new_state()
    load(state.items(), POINT, Storage(str(folder)))
    state.filled()
    return state


@pytest.mark.parametrize("world_size", [1, 2, 3, 70])
def test_what_any_number_of_ranks_saved_is_loaded_whole(tmp_path, world_size):
    state = new_state(steps=3)
    digest = save(state, tmp_path, world_size)
    again = loaded(tmp_path)
    assert again.digest() == state.digest()
    assert again.optimizer_steps == 3
    assert digest == save(state, tmp_path / "alone", 1)


def test_a_loaded_state_takes_the_same_next_step(tmp_path):
    state = new_state(steps=2)
    save(state, tmp_path, 2)
    again = loaded(tmp_path)
    for each in (state, again):
        for parameter in each.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)
        each.apply(0.02)
    assert again.digest() == state.digest()


def test_the_shares_are_disjoint_complete_and_about_equal(tmp_path):
    items = new_state().items()
    shares = [share_of(items, rank, 3) for rank in range(3)]
    names = sorted((item.group, item.name) for share in shares for item in share)
    assert names == sorted((item.group, item.name) for item in items)
    sizes = [sum(item.tensor.nbytes for item in share) for share in shares]
    assert max(sizes) - min(sizes) <= 2 * max(item.tensor.nbytes for item in items)


def test_tied_weights_are_saved_once_and_transformers_can_read_the_files(tmp_path):
    state = new_state()
    save(state, tmp_path, 1)
    with safe_open(tmp_path / f"points/{POINT}/model/00000-of-00001.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.metadata() == {"format": "pt"}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert names == {name for name, _ in state.model.named_parameters()}


def test_a_file_is_never_written_twice(tmp_path):
    state = new_state()
    save(state, tmp_path, 2)
    with pytest.raises(StorageError):
        write_share(state.items(), POINT, 0, 2, Storage(str(tmp_path)))


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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["model/00000-of-00002", "model/00001-of-00002", "optimizer/00001-of-00002"])
def test_a_damaged_file_is_named_and_not_used(tmp_path, damage, file):
    save(new_state(steps=1), tmp_path, 2)
    DAMAGES[damage](tmp_path / f"points/{POINT}/{file}.safetensors")
    with pytest.raises(ResumePointError, match=file):
        loaded(tmp_path)
    assert not list(tmp_path.rglob("*.was-run"))


def test_a_file_of_another_step_is_found_out(tmp_path):
    save(new_state(steps=1), tmp_path, 2)
    save(new_state(steps=2), tmp_path, 2, point="00000002-a0001-g0001")
    file = "model/00000-of-00002.safetensors"
    other = (tmp_path / "points/00000002-a0001-g0001" / file).read_bytes()
    (tmp_path / "points" / POINT / file).write_bytes(other)
    with pytest.raises(ResumePointError, match=r"00000-of-00002\.safetensors holds .* with digest"):
        loaded(tmp_path)


def test_a_list_of_tensors_that_cannot_be_read_is_damage(tmp_path):
    save(new_state(), tmp_path, 1)
    parts = tmp_path / f"points/{POINT}/parts.json"
    parts.write_bytes(parts.read_bytes()[:-10])
    with pytest.raises(ResumePointError, match=r"parts\.json"):
        loaded(tmp_path)


def test_a_point_of_another_model_is_refused_with_both_shapes(tmp_path):
    save(new_state(), tmp_path, 1)
    shape = dict(tiny_job().model.config or {}, intermediate_size=48)
    job = tiny_job(model__config=shape)
    other = TrainState(job.model, job.train, CPU, invariant=True)
    with pytest.raises(ResumePointError, match=r"\(32, 16\).*\(48, 16\)"):
        load(other.items(), POINT, Storage(str(tmp_path)))


def commit(state: TrainState, folder: Path, step: int) -> str:
    """The name of a committed point of the state, saved by two ranks."""
    store, key = RunStore(Storage(str(folder))), StateKey(attempt=1, generation=1, step=step)
    votes = []
    for rank in range(2):
        files, tensors = write_share(state.items(), key.point_name, rank, 2, store.storage)
        vote = Vote(
            key=key, rank=rank, world_size=2, cursor=Cursor(), optimizer_steps=step, files=files,
            tensors=tensors, save_blocked_s=0.0, records=(),
        )  # fmt: skip
        votes.append(vote)
    return store.commit_point(votes, {}, {}, None).name


@pytest.mark.parametrize("swapped", [("parts.json", "model", "optimizer"), ("parts.json",), ("COMMIT",)])
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
    with pytest.raises(ResumePointError, match=f"resume point {second}: {swapped[0]} "):
        load(new_state().items(), second, files)


def test_a_point_without_commit_is_not_loaded(tmp_path):
    name = commit(new_state(1), tmp_path, 1)
    (tmp_path / "points" / name / "COMMIT").unlink()
    with pytest.raises(ResumePointError, match="COMMIT is missing"):
        load(new_state().items(), name, CommittedFiles(Storage(str(tmp_path))))
