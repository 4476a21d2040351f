"""What commands say of points whose parts lie on disks that this machine does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.checkpoint.node_local.node_storage import run_storage
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cli.commands import main
from orchestrator.inspect.status.integrity import wrong_sizes
from tests.checkpoint.files.node_disks import Disks
from tests.checkpoint.samples import key
from tests.planning.identities import IDENTITY


@pytest.fixture
def points(tmp_path: Path) -> tuple[Disks, str, str]:
    """Two points of one rank each, on the nodes a and b, and their names."""
    disks = Disks(tmp_path, ("a", "b"))
    run = disks.store("a").create_run("tiny", IDENTITY)
    first = disks.commit(key(4), ("a",), run.id)
    disks.mount_elsewhere()  # and no node has workers then, so that none keeps copies
    second = disks.commit(key(8), ("b",), run.id)
    disks.mount_elsewhere()
    return disks, first, second


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return capsys.readouterr().out, int(ended.value.code or 0)


def test_what_is_away_is_named_and_called_neither_healthy_nor_damaged(
    points: tuple[Disks, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    disks, *names = points
    run = str(disks.folder / "run")
    text, code = output(["verify", run], capsys)
    assert code == 1, "not every byte was read"
    assert text.count(": away\n") == 2
    assert "damaged" not in text.replace("out of reach, not damaged", "")
    assert "needs node" in text
    assert "Give the command on such a node" in text
    assert "bring the node back" not in text, "it may be well: nobody asked it from here"
    rows, code = output(["points", run, "--json"], capsys)
    assert code == 0, "nothing is known to be wrong"
    for row, name in zip(json.loads(rows), names, strict=True):
        assert (row["name"], row["healthy"], row["quarantined"]) == (name, None, False)
        assert row["away"].startswith(f"resume point {name} needs node")
        assert row["reason"] == row["away"]
        assert len(row["nodes"]) == 1
        assert row["bytes"] > 0, "the documents are here"
    table, _ = output(["points", run], capsys)
    assert [line.split()[1].rstrip(",") for line in table.splitlines()[1:3]] == ["away", "away"]


def test_a_status_needs_no_disk_of_a_node(points: tuple[Disks, str, str]) -> None:
    disks, first, second = points
    store = RunStore(run_storage(str(disks.folder / "run")))
    assert [wrong_sizes(store, name) for name in (first, second)] == [[], []]
    cursor = disks.folder / "run" / "points" / second / "cursor.json"
    cursor.write_bytes(cursor.read_bytes() + b" ")
    assert wrong_sizes(store, second) == ["cursor.json"], "documents lie in the run's folder"
