"""Which files a path means: each real file once, links followed but not for ever, what is no file refused."""

from __future__ import annotations

import errno
import glob
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.config.loading import parse_config
from orchestrator.data.dataset import prepare_data
from orchestrator.data.sources.access.matches import look_at
from orchestrator.data.sources.lists.listing import list_files
from orchestrator.data.sources.lists.manifest import freeze
from orchestrator.errors import ConfigError, DataIdentityError
from orchestrator.storage.files import Storage
from tests.data.making import job, some_texts, write_corpus
from tests.raising import raises

Make = Callable[..., dict[str, Any]]
TREE = [
    "a.jsonl",
    "b.txt",
    "x/a.jsonl",
    "x/y/a.jsonl",
    "x/y/z/b.jsonl",
    "x/.h/a.jsonl",
    ".g.jsonl",
    "[1].jsonl",
]
PATTERNS = ["*", "*.jsonl", "**/*.jsonl", "**/**/*.jsonl", "x/**/*.jsonl", "**", "x/**", "*/*.jsonl", "*/y/*"]
PATTERNS += ["**/y/**/*.jsonl", "[ab].*", "**/.h/*.jsonl", ".*", "*/y/z/b.jsonl", "?.jsonl", "**l"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(f'{{"text": "{name}"}}\n')
    return tmp_path / "d"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_finds_what_the_standard_library_finds(pattern: str, tree: Path, tmp_path: Path) -> None:
    (tmp_path / "outside" / "y").mkdir(parents=True)
    (tmp_path / "outside" / "y" / "o.jsonl").write_text("{}")
    (tree / "linked").symlink_to("../outside")
    found = set(glob.glob(str(tree / pattern), recursive=True))
    listing = list_files("s", str(tree / pattern), "jsonl")
    assert {os.path.join(listing.base, n) for n in listing.names} == {n for n in found if os.path.isfile(n)}
    assert not listing.others


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl", "**/**/*.jsonl"])
def test_a_file_that_is_reached_by_many_paths_is_one_file(pattern: str, tree: Path) -> None:
    alone = list_files("s", str(tree / pattern), "jsonl")
    (tree / "self").symlink_to(".")
    (tree / "again").symlink_to(".")  # two of them have 2 ** 40 paths
    (tree / "x" / "up").symlink_to("../..")
    (tree / "0.jsonl").symlink_to("a.jsonl")
    (tree / "x" / "hard.jsonl").hardlink_to(tree / "x" / "a.jsonl")
    (tree / "0").symlink_to("x")
    listing = list_files("s", str(tree / pattern), "jsonl")
    assert listing.names == alone.names, "and by the same paths as without the links"
    assert listing.others["0.jsonl"] == "a.jsonl"
    assert listing.others["x/hard.jsonl"] == "x/a.jsonl"
    assert listing.others["0/y/a.jsonl"] == "x/y/a.jsonl"


def test_a_file_that_only_links_lead_to_keeps_its_first_path(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "far.jsonl").write_text("{}")
    for name in ("l2.jsonl", "l1.jsonl"):
        (tree / name).symlink_to(tmp_path / "far.jsonl")
    listing = list_files("s", str(tree), "jsonl")
    assert {n for n in listing.names if n.startswith("l")} == {"l1.jsonl"}
    assert listing.others == {"l2.jsonl": "l1.jsonl"}
    (tmp_path / "other name").symlink_to(tree)
    assert list_files("s", str(tmp_path / "other name"), "jsonl").names == listing.names


def test_facts_of_files_are_those_that_stat_gives_also_where_numbers_are_unsigned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(150):
        (tmp_path / f"{i:03d}").write_bytes(b"x" * i)
    (tmp_path / "070").unlink()
    (tmp_path / "071").unlink()
    (tmp_path / "071").mkdir()
    names = [f"{i:03d}" for i in range(150)]
    found = look_at(str(tmp_path), names)
    assert {i: type(error) for i, error in found.errors.items()} == {70: FileNotFoundError}
    for i, name in enumerate(names):
        if i != 70:
            status = (tmp_path / name).stat()
            facts = (found.modes[i], found.devices[i], found.numbers[i], found.sizes[i], found.mtimes_ns[i])
            assert facts == (
                status.st_mode,
                status.st_dev,
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
            )
    assert np.flatnonzero(~found.regular).tolist() == [70, 71]
    real = os.stat

    def unsigned(path: str) -> Any:
        status = real(path)
        facts = {name: getattr(status, name) for name in ("st_mode", "st_dev", "st_size", "st_mtime_ns")}
        return SimpleNamespace(st_ino=(1 << 64) - 1 - status.st_size, **facts)

    monkeypatch.setattr(os, "stat", unsigned)
    whole = look_at(str(tmp_path), names)
    assert whole.numbers[:3].tolist() == [(1 << 63) - 1 - i for i in range(3)]
    assert list(whole.errors) == [70]


def test_a_file_taken_once_of_several_paths_is_told(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "d", some_texts(9), "jsonl")
    (tmp_path / "d" / "self").symlink_to(".")
    (tmp_path / "d" / "link.jsonl").symlink_to("part-0.jsonl")
    frozen = Storage(str(tmp_path / "run"))
    for storage in (None, frozen, frozen):
        spec = prepare_data(job(tiny_config, tmp_path / "d", encoder="tokenizers"), storage)
        assert [row.path for row in spec.plans[0].manifest.files] == [f"part-{i}.jsonl" for i in range(3)]
        assert spec.notes == (
            "source made: 1 of 4 paths lead to files that other paths lead to, e.g. link.jsonl to "
            "part-0.jsonl; each file is read once",
        )


def test_broken_links_and_what_is_no_regular_file_are_refused_by_name(tree: Path) -> None:
    (tree / "gone.jsonl").symlink_to("nowhere")
    (tree / "ring.jsonl").symlink_to("ring.jsonl")
    os.mkfifo(tree / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as end:
        here = os.getcwd()
        os.chdir(tree)  # a socket's path is short
        try:
            end.bind("s.jsonl")
        finally:
            os.chdir(here)
        values = (
            "data.sources s: 4 ",
            f"{tree}/gone.jsonl is a link to 'nowhere'",
            f"{tree}/pipe.jsonl is a pipe",
            f"{tree}/ring.jsonl is a link to 'ring.jsonl'",
            f"{tree}/s.jsonl is a socket",
        )
        with raises(ConfigError, "data.irregular_file", *values):
            freeze("s", str(tree / "*.jsonl"), "jsonl", "text")
    with raises(ConfigError, "data.irregular_file", "gone.jsonl", "'nowhere'"):
        freeze("s", str(tree / "gone.jsonl"), "jsonl", "text")


def test_a_folder_that_cannot_be_listed_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(folder: str, listed: Callable[[str], Any] = os.scandir) -> Any:
        if folder == str(tree / "x" / "y"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)  # root, as whom tests may run, may list every folder
    listing = list_files("s", str(tree), "jsonl")
    assert listing.names == ("[1].jsonl", "a.jsonl", "x/a.jsonl")
    note, _ = listing.notes("s")
    assert note == f"source s: folder {tree}/x/y cannot be listed (Permission denied); nothing in it is read"


def test_folders_that_link_to_each_other_are_each_walked_once_by_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, looked_in = 12, list[str]()  # 12 folders have 1.3 billion paths
    for i in range(num):
        (tmp_path / "d" / str(i)).mkdir(parents=True)
        (tmp_path / "d" / str(i) / "a.jsonl").write_text("{}")
        for other in range(num):
            if other != i:
                (tmp_path / "d" / str(i) / f"to{other}").symlink_to(f"../{other}")

    def scandir(folder: str, listed: Callable[[str], Any] = os.scandir) -> Any:
        looked_in.append(folder)
        assert len(looked_in) < 20 * num, "it follows every order of the links"
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    for path in ("d", "d/**/*.jsonl", "d/**/**/*.jsonl"):
        looked_in.clear()
        listing = list_files("s", str(tmp_path / path), "jsonl")
        assert listing.names == tuple(sorted(f"{i}/a.jsonl" for i in range(num)))
        assert set(listing.others.values()) <= set(listing.names)


def test_of_several_links_to_a_folder_the_least_path_is_kept(tmp_path: Path) -> None:
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "far" / "in" / "x.jsonl").write_text("{}")
    for name in ("a/z", "a.b", "b/c/d", "c"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).symlink_to(tmp_path / "far")
    listing = list_files("s", str(tmp_path / "d"), "jsonl")
    assert listing.names == ("a.b/in/x.jsonl",)


def stat_result(found: os.stat_result, st_ino: int | None = None, st_size: int | None = None) -> Any:
    """What was found, but for these."""
    values = list(found)
    values[1] = found.st_ino if st_ino is None else st_ino
    values[6] = found.st_size if st_size is None else st_size
    return os.stat_result(values, {"st_mtime_ns": found.st_mtime_ns})


def test_where_the_file_system_numbers_no_file_each_is_its_own(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list_files("s", str(tree), "jsonl").names
    (tree / "0.jsonl").symlink_to("a.jsonl")
    (tree / "x" / "up").symlink_to("..")

    def stat(path: Any, real: Callable[[Any], os.stat_result] = os.stat, **named: Any) -> os.stat_result:
        return stat_result(real(path, **named), st_ino=0)

    monkeypatch.setattr(os, "stat", stat)
    listing = list_files("s", str(tree), "jsonl")
    assert listing.names == found
    assert listing.others == {"0.jsonl": "a.jsonl"}


def test_files_of_one_number_that_differ_in_size_or_time_are_two(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b.jsonl", "c.jsonl"):
        (tree / name).hardlink_to(tree / "a.jsonl")
    assert list_files("s", str(tree), "jsonl").others == {"b.jsonl": "a.jsonl", "c.jsonl": "a.jsonl"}

    def stat(path: Any, real: Callable[[Any], os.stat_result] = os.stat, **named: Any) -> os.stat_result:
        found = real(path, **named)
        return stat_result(found, st_size=found.st_size + str(path).endswith("c.jsonl"))

    monkeypatch.setattr(os, "stat", stat)
    assert list_files("s", str(tree), "jsonl").others == {"b.jsonl": "a.jsonl"}


def test_a_link_whose_name_is_not_utf8_is_told_in_utf8(tree: Path) -> None:
    os.symlink("a.jsonl", os.fsencode(tree) + b"/\xff.jsonl")
    listing = list_files("s", str(tree), "jsonl")
    note, _ = listing.notes("s")
    assert "e.g. \\udcff.jsonl to a.jsonl" in note
    assert note.encode()


# ------------------------------------------------------------------------------ several paths
def test_several_paths_are_one_list_below_their_common_folder(tree: Path) -> None:
    paths = [str(tree / part) for part in ("x/y", "*.jsonl", "x/**/a.jsonl", "x/y/a.jsonl")]
    for order in (paths, paths[::-1], tuple(paths)):
        listing = list_files("s", order, "jsonl")
        assert listing.base == str(tree)
        assert listing.names == ("[1].jsonl", "a.jsonl", "x/a.jsonl", "x/y/a.jsonl", "x/y/z/b.jsonl")
        assert listing.patterns == ("*.jsonl", "x/**/a.jsonl", "x/y", "x/y/a.jsonl")
        assert not listing.others
    alone, listed = list_files("s", str(tree), "jsonl"), list_files("s", [str(tree)], "jsonl")
    assert alone == listed


def test_files_of_a_folder_that_are_not_called_as_the_formats_are_counted_and_one_is_named(
    tmp_path: Path,
) -> None:
    for name in ("a.jsonl", "README.md", "Z.JSONL", "inner/b.jsonl.gz", "inner/A.txt", ".hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (note,) = list_files("s", str(tmp_path), "jsonl").notes("s")
    assert note == (
        f"source s: 3 files in {tmp_path} are not read, e.g. Z.JSONL, because their names do not end with "
        ".jsonl, .jsonl.gz, …; to have a file read, rename it or name it in data.sources[].path"
    )
    both = list_files("s", [str(tmp_path), f"{tmp_path}/*.JSONL"], "jsonl")
    assert "Z.JSONL" in both
    assert both.notes("s")[0].startswith("source s: 2 files in")
    assert list_files("s", f"{tmp_path}/*.jsonl", "jsonl").notes("s") == ()  # a glob means what it says
    assert list_files("s", str(tmp_path), "text").notes("s") == ()


def test_a_file_that_two_paths_lead_to_is_read_once(tree: Path) -> None:
    (tree / "again").symlink_to("x")
    listing = list_files("s", [str(tree / "again"), str(tree / "x")], "jsonl")
    assert set(listing.names) == {"x/a.jsonl", "x/y/a.jsonl", "x/y/z/b.jsonl"}
    assert listing.others == {f"again{name[1:]}": name for name in listing.names}


def test_each_of_several_paths_must_mean_a_file(tree: Path) -> None:
    values = f"'{tree}/nothing*'", f"nothing* in {tree}"
    with raises(ConfigError, "data.no_matching_file", *values):
        list_files("s", [str(tree), str(tree / "nothing*")], "jsonl")
    (tree / "empty").mkdir()
    with raises(ConfigError, "data.no_matching_file", f"'{tree}/empty'"):
        list_files("s", [str(tree), str(tree / "empty")], "jsonl")


def test_a_resume_with_several_paths_is_judged_as_one_with_a_path(tmp_path: Path, tiny_config: Make) -> None:
    write_corpus(tmp_path / "d" / "a", some_texts(9), "jsonl")
    write_corpus(tmp_path / "d" / "b", some_texts(9), "jsonl")

    def paths(*names: str, base: str = "d") -> Any:
        made = job(tiny_config, tmp_path / "d").to_json()
        made["data"]["sources"][0]["path"] = [str(tmp_path / base / name) for name in names]
        return parse_config(made)

    run = tmp_path / "run"
    first = prepare_data(paths("a", "b/*.jsonl"), Storage(str(run)))
    assert prepare_data(paths("b/*.jsonl", "a"), Storage(str(run))).plans == first.plans
    assert prepare_data(job(tiny_config, tmp_path / "d"), Storage(str(run))).plans == first.plans, (
        "the same files"
    )
    asked = [f"{tmp_path}/d/a, {tmp_path}/d/{inner}" for inner in ("b/*.jsonl", "b/part-0.jsonl")]
    with raises(DataIdentityError, "data.other_path", *asked):
        prepare_data(paths("a", "b/part-0.jsonl"), Storage(str(run)))
    (tmp_path / "d" / "b" / "later.jsonl").write_text('{"text": "later"}\n')
    (note,) = prepare_data(paths("a", "b/*.jsonl"), Storage(str(run))).notes
    assert "1 file of source made came after its list was made" in note
    with raises(DataIdentityError, "data.other_path", "1 file ", "b/later.jsonl"):
        prepare_data(paths("a", "b"), Storage(str(run)))
    os.rename(tmp_path / "d", tmp_path / "moved")
    moved = prepare_data(paths("a", "b/*.jsonl", base="moved"), Storage(str(run)))
    assert moved.identity().manifests == first.identity().manifests
