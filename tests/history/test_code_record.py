"""A run knows the code of its user's functions, without importing it, and says where it changed."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import JobConfig
from orchestrator.history.journal.code_record import Code, changes, code_of, files_of, newest_record
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.storage.files import Storage
from tests.planning.jobs import job

BOMB = "raise SystemExit('this module was imported')\n"
FILES = {
    "ours/__init__.py": BOMB,
    "ours/models/__init__.py": BOMB + "from .small import build\n",
    "ours/models/small.py": BOMB
    + "import torch, json\nfrom ..layers import norm as n\nfrom ours import data\n",
    "ours/layers/norm.py": BOMB,
    "ours/data.py": BOMB + "def late():\n    import helper\n",
    "ours/unused.py": BOMB,
    "helper.py": BOMB + "import ours.models.small\n",
    "other.py": BOMB,
    "broken.py": "def (\n",
    "spaced/inner/deep.py": BOMB + "import spaced.inner.beside\n",
    "spaced/inner/beside.py": BOMB,
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


OURS = {
    "helper.py",
    "ours/__init__.py",
    "ours/data.py",
    "ours/layers/norm.py",
    "ours/models/__init__.py",
    "ours/models/small.py",
}


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("ours.models.small:build", OURS),
        ("ours.models:build", OURS),
        ("ours.unused:build", {"ours/unused.py"}),
        ("other:build", {"other.py"}),
        ("broken:build", {"broken.py"}),
        ("spaced.inner.deep:build", {"spaced/inner/deep.py", "spaced/inner/beside.py"}),
        ("json:loads", {"json/__init__.py"}),
        ("math:sqrt", set()),
        ("no_such_module.there:build", set()),
        ("other.inside:build", set()),
    ],
)
def test_the_files_of_a_function_are_its_module_and_what_that_imports_beside_it(
    name: str, files: set[str]
) -> None:
    before = set(sys.modules)
    assert set(files_of(name)) == files
    assert not {m.partition(".")[0] for m in set(sys.modules) - before} & {
        "ours",
        "helper",
        "other",
        "spaced",
    }


def test_a_module_of_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lying_here.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place and place != os.getcwd()])
    assert list(files_of("lying_here:build")) == ["lying_here.py"]


def with_factory(name: str = "ours.models.small:build") -> JobConfig:
    return job("model={factory: '" + name + "'}")


def note(storage: Storage, attempt: int, code: dict[str, Code]) -> None:
    """What an attempt writes when it begins."""
    fields: dict[str, Any] = dict.fromkeys(EventKind.ATTEMPT.fields - {"attempt"})
    fields["code"] = {field: encode(each) for field, each in code.items()} or None
    journal = JournalWriter(storage, attempt=attempt, run="tiny", run_id="r")
    journal.event(EventKind.ATTEMPT, **fields)
    journal.close()


def test_a_change_is_named_with_its_files_and_the_attempt_that_trained_before(
    root: Path, tmp_path: Path
) -> None:
    storage, asked = Storage(str(tmp_path / "run")), with_factory()
    assert changes(newest_record(storage, []), asked) == []
    note(storage, 1, code_of(asked))
    note(storage, 2, {})  # a restarted coordinator; 3 has not begun
    assert changes(newest_record(storage, [1, 2, 3]), asked) == []
    (root / "ours/unused.py").write_text("")
    assert changes(newest_record(storage, [1, 2, 3]), asked) == []
    (root / "helper.py").write_text("import other\n")
    (line,) = changes(newest_record(storage, [1, 2, 3]), asked)
    assert "attempt 1" in line
    assert "helper.py (changed), other.py (new)" in line
    (root / "ours/data.py").unlink()
    (line,) = changes(newest_record(storage, [1, 2, 3]), asked)
    assert "helper.py (gone)" in line
    assert "ours/data.py (gone)" in line
    note(storage, 4, code_of(asked))
    assert changes(newest_record(storage, [1, 2, 3, 4]), asked) == []


@pytest.mark.usefixtures("root")
def test_another_function_or_none_is_no_change_of_code(tmp_path: Path) -> None:
    storage, asked = Storage(str(tmp_path / "run")), with_factory()
    code = code_of(asked)["model.factory"]
    note(storage, 1, {"model.factory": replace(code, name="ours.models:build", files={})})
    assert changes(newest_record(storage, [1]), asked) == []
    assert changes(newest_record(storage, [1]), job()) == []
    assert code_of(job()) == {}
