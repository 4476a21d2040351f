"""Any step of a run once more: on the example run, which changed its batch size and was rewound.

Another CPU may add in another order: what must come out to the bit is asked of the same run trained here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import orchestrator
from orchestrator.cli.commands import main
from orchestrator.errors import ConfigError, RefusedError, ResumePointError
from orchestrator.history.journal.journal_reader import read_journal
from orchestrator.history.journal.line_format import FIRST, EventKind, line_bytes, parse_line
from orchestrator.launch.replay import step_replay
from orchestrator.storage.files import Storage
from tests.folders import contents
from tests.raising import exits, raises
from tests.torchrun.ranks import Ranks
from tests.trainer.losses import loss_sum

pytestmark = pytest.mark.xdist_group("forked")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "format2"
LIMIT_S = 240.0
SAVED = ["00000006-a0002-g0001", "00000008-a0003-g0001", "00000010-a0003-g0001"]


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with the run trained by this machine, in as many attempts."""
    folder = tmp_path_factory.mktemp("made") / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("example"))
    larger = "train.global_batch_size=6"
    for number, words in enumerate(
        (
            ["train.max_steps=6"],
            [larger, "train.max_steps=8", "resume.keep_latest=2"],
            [larger, "train.max_steps=10", "resume.keep_latest=4", f"resume.from={SAVED[0]}"],
        )
    ):
        logs = folder.parent / f"attempt-{number}"
        logs.mkdir()
        rank = Ranks(folder, logs, 1, ["job.yaml", *words])
        try:
            assert rank.end(LIMIT_S) == [0], rank.said()
        finally:
            rank.kill()
    return folder


@pytest.fixture
def trained_here(made_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, in the current folder."""
    shutil.copytree(made_here, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy" / "example"


def damage(run: Path, point: str) -> None:
    """A byte of its weights is another one."""
    file = next((run / "points" / point).glob("*/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def digests(run: Path) -> dict[str, str]:
    return {row["name"]: row["weights_digest"] for row in orchestrator.open(run).list_points()}


@pytest.mark.chaos
def test_a_step_between_points_is_trained_again_and_its_record_comes_out_to_the_bit(
    trained_here: Path,
) -> None:
    before, threads = contents(trained_here), torch.get_num_threads()
    found = orchestrator.open(trained_here).replay(9)
    assert (found.from_point, found.steps_compared, found.first_difference) == (SAVED[1], 1, None)
    assert (found.expected_digest, found.equal) == (None, None), "the run recorded none there"
    assert contents(trained_here) == before
    assert torch.get_num_threads() == threads


@pytest.mark.chaos
def test_three_attempts_with_another_batch_size_are_gone_through_from_the_first_weights(
    trained_here: Path,
) -> None:
    recorded = digests(trained_here)
    for point in SAVED:
        damage(trained_here, point)
    found = orchestrator.open(trained_here).replay(10)
    assert found.from_point is None
    assert (found.steps_compared, found.first_difference) == (12, None)
    assert found.expected_digest == found.weights_digest == recorded[SAVED[2]]
    assert found.equal is True
    # the label 6 occurs twice
    with raises(RefusedError, "command.ambiguous_step", "step 6", "2 times", "a1:6 or a2:6"):
        orchestrator.open(trained_here).replay(6)
    first = orchestrator.open(trained_here).replay("a1:6")
    assert (first.step, first.name, first.from_point, first.steps_compared) == (6, "a1:6", None, 6)
    assert (first.first_difference, first.weights_digest == recorded[SAVED[0]]) == (None, False)
    found = orchestrator.open(trained_here).replay(tokens=576)
    assert (found.step, found.weights_digest, found.equal) == (6, recorded[SAVED[0]], True)


def test_a_record_that_does_not_come_out_again_is_the_first_difference(
    trained_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = (trained_here / "journal" / "a0003").iterdir()
    last, data = FIRST, b""
    for text in segment.read_bytes().splitlines():
        fields = parse_line(text).fields
        if fields["kind"] == "step" and fields["step"] == 9:
            fields["loss"] += 1e-9
        line, last = line_bytes(fields, last)
        data += line
    segment.write_bytes(data)
    damage(trained_here, SAVED[2])
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(trained_here), "--step", "10", "--json"])
    assert ended.value.code == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["steps_compared"], document["from_point"]) == (True, 2, SAVED[1])
    assert document["first_difference"]["step"] == 9
    assert document["first_difference"]["reason"].startswith("loss was ")


def test_what_cannot_be_replayed_is_refused_with_the_reason(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with exits(2):
        main(["replay", str(example)])
    assert "give exactly one of --step, --tokens; none is given" in capsys.readouterr().err
    run = orchestrator.open(example)
    with raises(RefusedError, "command.beyond_history", "step 11", "step 10 "):
        run.replay(11)
    with raises(RefusedError, "command.not_exactly_one"):
        run.replay()
    (segment,) = (example / "journal" / "a0003").iterdir()
    segment.write_text(segment.read_text().replace('"kind":"attempt"', '"kind":"of another version"'))
    with raises(ResumePointError, "history.attempt_incomplete", "attempt 3"):
        run.replay(9)


@pytest.mark.parametrize(("every_s", "told"), [(0.0, True), (3600.0, False)])
def test_a_replay_says_how_far_it_is_and_not_at_every_step(
    example: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, told: bool
) -> None:
    monkeypatch.setattr(step_replay, "SAY_EVERY_S", every_s)
    said: list[str] = []
    found = orchestrator.open(example).replay(10, say=said.append)
    assert found.steps_compared == 0, "a point stands there"
    shutil.rmtree(example / "points" / SAVED[2])
    said.clear()
    orchestrator.open(example).replay(10, say=said.append)
    begin = f"training 2 steps again, from {SAVED[1]} to step 10"
    assert said == [begin, *["step 9 of 10, 1 step trained again so far"] * told]


def test_a_label_that_occurs_twice_is_named_with_its_attempt_by_every_command(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place, new = orchestrator.open(example), str(example), str(example.parent / "new")
    for words in (["replay", place], ["rewind", place], ["fork", place, new]):
        with exits(2):
            main([*words, "--step", "6"])
        assert "a1:6 or a2:6" in capsys.readouterr().err, words
    with exits(0):
        main(["replay", place, "--step", "a2:6"])
    (first, *_) = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step a2:6: {SAVED[0]} is that state")
    found = run.replay("a2:6")
    assert (found.step, found.name, found.from_point, found.equal) == (6, "a2:6", SAVED[0], True)
    assert run.replay("10").name == "10", "no other step has this label"
    assert run.at("a2:6").cursor.consumed_tokens == 576
    plan = run.rewind(step="a2:6", agree=lambda plan: False)
    assert (plan.point, plan.steps_before, plan.wanted) == (SAVED[0], 0, "step a2:6")
    with raises(RefusedError, "point.none_before", "step a1:6", SAVED[0]):
        run.fork(new, step="a1:6")
    with raises(RefusedError, "command.beyond_history", "step a3:6"):
        run.replay("a3:6")


def test_a_step_that_is_no_whole_number_is_refused(example: Path) -> None:
    run: Any = orchestrator.open(example)
    for wrong in (9.0, True):
        with raises(RefusedError, "command.not_whole_number", f"step is {wrong!r}"):
            run.at(step=wrong)
    for text in ("x", "", "a2:", "a2:6:8", "-1"):
        with raises(RefusedError, "command.step_form", repr(text)):
            run.at(step=text)
    with raises(RefusedError, "command.not_whole_number", "tokens is '9'"):
        run.rewind(tokens="9")


def test_the_state_after_a_step_can_be_looked_into_with_the_batch_that_follows(example: Path) -> None:
    run = orchestrator.open(example)
    state = run.at(step=8)
    assert (state.from_point, state.weights_digest) == (SAVED[1], digests(example)[SAVED[1]])
    assert state.cursor.consumed_tokens == 768
    tensors = len(state.model.state_dict()) + 2 * len(state.optimizer_state["exp_avg"])
    assert repr(state) == (
        f"StateAt(step=8, tokens=768, weights_digest={state.weights_digest!r}, from_point={SAVED[1]!r}, "
        f"{tensors} tensors)"
    )
    assert state.optimizer_state["steps"] == 10
    assert state.optimizer_state["exp_avg"].keys() == dict(state.model.named_parameters()).keys()
    record = next(record for record in run.records() if record.step == 9)
    batch = state.batch
    assert batch is not None
    assert batch.input_ids.shape == (6, 16)
    assert batch.cursor.consumed_tokens == record.consumed_tokens
    ids, labels = (torch.from_numpy(a.astype(np.int64)) for a in (batch.input_ids, batch.labels))
    loss = float(loss_sum(state.model, ids, labels, "float32").detach()) / batch.step_targets
    assert loss == pytest.approx(record.loss, rel=1e-5)
    assert run.at(step=10).batch is None, "the run is over"
    first: Any = run.at(step=0)
    assert (first.cursor.consumed_tokens, first.optimizer_state["steps"]) == (0, 0)
    assert first.batch.cursor.consumed_tokens == 64
    events = read_journal(Storage(str(example))).events
    assert not any(event.kind == EventKind.STATE_DIGEST for event in events), (
        "the example is older than these"
    )


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("train.lr=0.1", ["train.lr"]),
        ("run.name=other", ["run.name"]),
        ("data.seed=1", ["data.seed"]),
        ("cluster.use_gpu=true", ["cluster.use_gpu", "GPUs", "CPUs"]),
    ],
)
def test_an_override_that_may_change_what_is_trained_is_refused_by_name(
    example: Path, override: str, values: list[str]
) -> None:
    before = contents(example.parent)
    with raises(RefusedError, "command.override_not_allowed", *values):
        orchestrator.open(example).replay(9, overrides=["cluster.num_workers=2", override])
    assert contents(example.parent) == before


def test_what_only_shows_stays_in_this_process(example: Path) -> None:
    before = contents(example.parent)
    found = orchestrator.open(example).replay(9, overrides=["monitor.progress_s=1"])
    assert (found.steps_compared, found.point, found.fork) == (1, None, None)
    with raises(ConfigError, "config.unknown_key", "monitor.progres "):
        orchestrator.open(example).replay(9, overrides=["monitor.progres=1"])
    assert contents(example.parent) == before


def test_a_launch_that_cannot_begin_leaves_neither_a_pin_nor_a_folder(example: Path) -> None:
    before = contents(example.parent)
    with raises(RefusedError, "cluster.too_small", "memory", "20,000 workers"):
        orchestrator.open(example).replay(9, overrides=["cluster.num_workers=20000"])
    assert contents(example.parent) == before
    run = orchestrator.open(example)
    run.pin(SAVED[1], "mine")
    with raises(RefusedError, "cluster.too_small"):
        run.replay(9, overrides=["cluster.num_workers=20000"])
    assert {row["name"] for row in run.list_points() if row["pin"]} == {SAVED[1]}, "it was not the replay's"


def test_a_folder_with_another_run_is_not_replayed_into(example: Path) -> None:
    before = contents(example.parent)
    with raises(RefusedError, "run.exists", f"fork of {example}"):
        orchestrator.open(example).replay(9, to_point=example)
    for point in SAVED:
        damage(example, point)
    with raises(RefusedError, "run.exists", example, "step 2"):
        orchestrator.open(example).replay(2, to_point=example)
    for point in SAVED:
        damage(example, point)
    assert contents(example.parent) == before
