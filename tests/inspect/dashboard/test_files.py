"""The page's own files: unchanged libraries with their licences, light, and nothing that a policy forbids."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

import pytest

from orchestrator.inspect.dashboard.app import page_files

PAGE = resources.files("orchestrator.inspect.dashboard") / "page"
OWN = sorted(path for path in page_files() if "vendor" not in path and path.endswith((".js", ".html")))


def test_vendored_files_are_those_whose_sums_are_written_down() -> None:
    sums = (PAGE / "vendor" / "SHA256SUMS").read_text().splitlines()
    listed = {name.removeprefix("vendor/"): digest for digest, name in map(str.split, sums)}
    there = {entry.name for entry in (PAGE / "vendor").iterdir()}
    assert there == {*listed, "SHA256SUMS", "README.md", "LICENSE-alpine.txt", "LICENSE-uPlot.txt"}
    for name, digest in listed.items():
        assert hashlib.sha256((PAGE / "vendor" / name).read_bytes()).hexdigest() == digest, name
    for name in ("LICENSE-alpine.txt", "LICENSE-uPlot.txt"):
        assert "Permission is hereby granted, free of charge" in (PAGE / "vendor" / name).read_text()


def test_the_whole_page_weighs_less_than_111_kb_as_it_is_sent() -> None:
    files = {path: file for path, file in page_files().items() if path != "/" and not path.endswith(".txt")}
    assert sum(len(file.packed) for file in files.values()) < 111_000


@pytest.mark.parametrize("path", OWN)
def test_no_text_becomes_markup_or_code(path: str) -> None:
    text = page_files()[path].plain.decode()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|x-html|srcdoc"
    assert not re.search(forbidden, text), path
    assert not re.search(r"https?://(?!www\.w3\.org)", text), f"{path} names another host"
    if path.endswith(".html"):
        assert not re.search(r"<[^>]* style=", text), "style attributes are forbidden by the policy"
        assert not re.search(r"<script(?![^>]*\bsrc=)", text)
        assert not re.search(r"<[^>]* on\w+=", text)


def test_every_file_that_the_page_names_is_there() -> None:
    files = page_files()
    named = set(re.findall(r'(?:src|href)="([\w./-]+\.(?:js|css))"', files["/"].plain.decode()))
    for path in OWN:
        named |= set(re.findall(r"""(?:from|import\()\s*'\./([\w.-]+)'""", files[path].plain.decode()))
    assert len(named) > 8
    assert {f"/{name}" for name in named} <= set(files)
