"""The example notebook, executed cell by cell in a real kernel, on the tests' Ray cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

from tests.small_configs import write_small_configs

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.chaos
def test_the_example_notebook_runs(
    cluster: Any, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "corpus").symlink_to(corpus)
    write_small_configs(tmp_path / "configs")
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "docs/notebook.ipynb", as_version=4)
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells), "kept without what it printed"
    client = nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = ["".join(map(html_of, cell.get("outputs", []))) for cell in notebook.cells]
    text = "\n".join(shown)
    for part in (
        "done at step 30",  # watch, in place
        "would resume from 00000030-a0001-g0001",
        "train.global_batch_size",
        "(True, ",  # the audit
        "image/png",
    ):
        assert part in text, f"{part!r} is in no output"
    assert len(re.findall(r"00000030-a0001-g0001", text)) >= 2


def html_of(output: Any) -> str:
    """What a browser would show, and the kinds of it."""
    data = output.get("data", {})
    return "\n".join([*data, data.get("text/html", ""), data.get("text/plain", ""), output.get("text", "")])
