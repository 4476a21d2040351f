"""Points of both formats, damaged at random: none is called healthy, and nothing wrong is ever loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.checkpoint.files import part_file
from orchestrator.checkpoint.points import verify
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.storage.files import Storage
from tests.checkpoint.files.samples import STATE, bytes_of
from tests.checkpoint.samples import key
from tests.checkpoint.saves import commit_parts, read_state

Files = dict[str, bytes]
Damage = Callable[[random.Random, Files, Files], Files]
FAST, ALL = 40, 500  # damages of each point, of which there are three
GROWN = "a byte more"  # what is loaded is whole; only who verifies sees it


def one(draw: random.Random, files: Files) -> str:
    return draw.choice(sorted(files))


def flip(draw: random.Random, files: Files, other: Files) -> Files:
    name = one(draw, files)
    data = bytearray(files[name])
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return {**files, name: bytes(data)}


def flip_in_the_header(draw: random.Random, files: Files, other: Files) -> Files:
    name = one(draw, {name: data for name, data in files.items() if name.endswith(".safetensors")})
    data = bytearray(files[name])
    data[draw.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << draw.randrange(8)
    return {**files, name: bytes(data)}


def cut(draw: random.Random, files: Files, other: Files) -> Files:
    name = one(draw, files)
    return {**files, name: files[name][: draw.randrange(len(files[name]))]}


def cut_out(draw: random.Random, files: Files, other: Files) -> Files:
    """A piece from the middle, filled up at the end."""
    name = one(draw, files)
    data = files[name]
    first = draw.randrange(len(data))
    last = draw.randrange(first, len(data)) + 1
    return {**files, name: data[:first] + data[last:] + bytes(last - first)}


def zero(draw: random.Random, files: Files, other: Files) -> Files:
    name = one(draw, files)
    data = files[name]
    first = draw.randrange(len(data))
    last = draw.randrange(first, len(data)) + 1
    return {**files, name: data[:first] + bytes(last - first) + data[last:]}


def swap_inside(draw: random.Random, files: Files, other: Files) -> Files:
    """Two stretches of equal length of one file."""
    name = one(draw, files)
    data = files[name]
    length = draw.randrange(1, len(data) // 2)
    first = draw.randrange(len(data) - 2 * length + 1)
    second = draw.randrange(first + length, len(data) - length + 1)
    parts = (data[:first], data[second : second + length], data[first + length : second])
    return {**files, name: b"".join((*parts, data[first : first + length], data[second + length :]))}


def swap_files(draw: random.Random, files: Files, other: Files) -> Files:
    first, second = draw.sample(sorted(files), 2)
    return {**files, first: files[second], second: files[first]}


def header_of_another(draw: random.Random, files: Files, other: Files) -> Files:
    """A file with the header of another one, or of another step."""
    parts = [name for name in sorted(files) if name.endswith(".safetensors")]
    name, giver = draw.choice(parts), draw.choice(parts)
    mine, theirs = files[name], draw.choice((files, other))[giver]
    ends = [8 + int.from_bytes(data[:8], "little") for data in (mine, theirs)]
    return {**files, name: theirs[: ends[1]] + mine[ends[0] :]}


def of_another_step(draw: random.Random, files: Files, other: Files) -> Files:
    """One file or several; all but COMMIT, too."""
    if draw.random() < 0.2:
        return {**other, "COMMIT": files["COMMIT"]}
    names = draw.sample(sorted(files), draw.randrange(1, 4))
    return {**files, **{name: other[name] for name in names}}


def gone(draw: random.Random, files: Files, other: Files) -> Files:
    """But not COMMIT: then there is no point."""
    name = one(draw, {name: data for name, data in files.items() if name != "COMMIT"})
    return {path: data for path, data in files.items() if path != name}


def grown(draw: random.Random, files: Files, other: Files) -> Files:
    name = one(draw, files)
    return {**files, name: files[name] + draw.randbytes(draw.randrange(1, 9))}


DAMAGES: dict[str, Damage] = {
    "a bit flipped": flip,
    "a bit of a header flipped": flip_in_the_header,
    "cut": cut,
    "a piece cut out": cut_out,
    "zeros": zero,
    "swapped inside": swap_inside,
    "files swapped": swap_files,
    "a header of another": header_of_another,
    "of another step": of_another_step,
    "gone": gone,
    GROWN: grown,
}


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def with_files(folder: Path, whole: Files, damaged: Files) -> Iterator[None]:
    """The folder has the damaged files inside."""
    changed = [name for name in whole if damaged.get(name) != whole[name]]
    for name in changed:
        if name in damaged:
            (folder / name).write_bytes(damaged[name])
        else:
            (folder / name).unlink()
    try:
        yield
    finally:
        for name in changed:
            (folder / name).write_bytes(whole[name])


@pytest.mark.parametrize("number", [pytest.param(FAST), pytest.param(ALL, marks=pytest.mark.chaos)])
@pytest.mark.parametrize(
    "layout",
    [layout_of(3, 1), layout_of(3, None), layout_of(4, 2)],
    ids=["ddp", "fsdp2", "hsdp"],
)
def test_no_random_damage_is_called_healthy_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout, number: int
) -> None:
    monkeypatch.setattr(part_file, "PIECE_BYTES", 128)
    monkeypatch.setattr(verify, "STRETCH_BYTES", 300)  # several looks at each file
    store = RunStore(Storage(str(tmp_path)))
    name, older = (commit_parts(store, key(step), layout) for step in (20, 10))
    state = {(each.group, each.name): bytes_of(each, 20) for each in STATE}
    assert store.verify_point(name) == []
    assert read_state(store, name) == state
    folder = tmp_path / "points" / name
    whole, other = files_of(folder), files_of(tmp_path / "points" / older)
    draw = random.Random(11)
    tried = 0
    while tried < number:
        what, damage = draw.choice(sorted(DAMAGES.items()))
        damaged = damage(draw, whole, other)
        if damaged == whole:
            continue
        tried += 1
        with with_files(folder, whole, damaged):
            assert store.verify_point(name) != [], (what, tried)
            try:
                loaded = read_state(store, name)
            except ResumePointError:
                continue
            assert loaded == state, (what, tried)
            changed = {path for path in whole if damaged.get(path) != whole[path]}
            assert what == GROWN or changed <= {"cursor.json", "config.json", "rng.json"}, (what, changed)
    assert store.verify_point(name) == []
