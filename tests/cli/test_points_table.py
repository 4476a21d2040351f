"""`orchestrator points` for people: names, states and numbers stay readable, whatever is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.cli.tables import points_lines
from tests.launch.runner import Runner

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "format2"
REWOUND_TO, ORPHAN, THIRD, NEWEST = (
    f"{name}-g0001" for name in ("00000006-a0002", "00000008-a0002", "00000008-a0003", "00000010-a0003")
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run with four points, seen from a narrow terminal."""
    shutil.copytree(EXAMPLE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("COLUMNS", "80")
    return Path("example")


def shown(
    run: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """(name of the point → column → what stands there, the lines below the table)."""
    with pytest.raises(SystemExit) as ended:
        main(["points", str(run), *words])
    head, *lines = capsys.readouterr().out.splitlines()
    columns = head.replace("save s", "save_s").split()
    rows = [line.split() for line in lines[:4]]
    damaged = any("damaged" in row for row in rows)
    assert ended.value.code == (1 if damaged else 0), "as `verify` ends"
    assert all(len(row) == len(columns) for row in rows), lines
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}, lines[4:]


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_healthy_run_has_nothing_below_its_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, state in (([], "unverified"), (["--verify"], "healthy")):
        rows, below = shown(run, capsys, *words)
        assert {name: row["state"] for name, row in rows.items()} == {
            REWOUND_TO: state,
            ORPHAN: "orphan",
            THIRD: state,
            NEWEST: state,
        }
    assert [row["tokens"] for row in rows.values()] == ["576", "768", "768", "960"]
    assert {row["layout"] for row in rows.values()} == {"replicate"}
    assert below == []


def test_points_of_shards_say_how_the_state_lay_on_the_group(
    tiny_config: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = Runner(tiny_config({"train.max_steps": 1000}))
    for _ in range(4):
        runner.launch()
    rows, _ = shown(runner.folder, capsys)
    assert {row["layout"] for row in rows.values()} == {"shard:2"}
    found = orchestrator.open(runner.folder).list_points()[0]
    assert (found["num_shards"], found["num_replicas"]) == (2, 1)
    assert "  shard:2x3  " in points_lines([{**found, "num_replicas": 3}])[1]


def test_a_flipped_byte_leaves_the_table_readable_and_its_reason_stands_below(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = shown(run, capsys, "--verify")
    (file,) = (run / "points" / NEWEST / "state").glob("*.safetensors")
    flip_a_byte(file)
    assert shown(run, capsys)[0][NEWEST]["state"] == "unverified", "sizes do not show it"
    rows, below = shown(run, capsys, "--verify")
    assert {name: row for name, row in rows.items() if name != NEWEST} == {
        name: row for name, row in before.items() if name != NEWEST
    }
    assert (rows[NEWEST]["state"], rows[NEWEST]["step"]) == ("damaged", "10")
    (line,) = below
    assert line.startswith(f"{NEWEST}: damaged: state/{file.name} ")


def test_of_a_lost_point_the_journal_is_shown_and_what_is_not_known_is_a_dash(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = shown(run, capsys)
    (run / "points" / THIRD / "COMMIT").unlink()
    shutil.rmtree(run / "points" / NEWEST)
    rows, below = shown(run, capsys)
    written = ("samples", "tokens", "world", "batch", "seq_len", "MiB", "save_s")
    for name in (THIRD, NEWEST):
        assert [rows[name][column] for column in written] == [before[name][column] for column in written]
        assert rows[name]["weights"] == "-"
        assert rows[name]["state"] == "damaged"
    assert below == [
        f"{THIRD}: damaged: COMMIT is missing",
        f"{NEWEST}: damaged: COMMIT is missing, with the point's whole folder",
    ]


def test_a_flipped_byte_of_commit_is_told_in_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = run / "points" / NEWEST / "COMMIT"
    commit.write_text(commit.read_text().replace('"world_size": ', '"world_size": 1', 1))
    _, (line,) = shown(run, capsys)
    assert line.startswith(f"{NEWEST}: damaged: COMMIT has content of digest ")
