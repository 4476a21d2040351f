"""Evaluations of a run under torchrun: with data that are frozen, the same numbers later from its points, and
after a change of the batch."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.cli.commands import main
from orchestrator.errors import DataIdentityError, OrchestratorError, RefusedError
from tests.raising import exits, raises
from tests.torchrun.ranks import Ranks

pytestmark = pytest.mark.xdist_group("forked")

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "format2"
LIMIT_S = 240.0
OTHER = 'sources: [{name: b, path: "other/*.jsonl", format: jsonl}]'
PARTS = f"eval.parts={{held: {{holdout: true}}, other: {{{OTHER}}}}}"
WORDS = [
    *("data.holdout=0.2", "resume.keep_latest=9"),
    *("eval.every_steps=4", "eval.at_end=true", "eval.max_samples=7"),
]


def train(folder: Path, world_size: int, *words: str, parts: str = PARTS) -> str:
    """Trains in `folder`; returns what the ranks said if it was refused."""
    logs = folder / f"logs-{len(list(folder.glob('logs-*')))}"
    logs.mkdir()
    ranks = Ranks(folder, logs, world_size, ["job.yaml", *WORDS, *words, parts])
    try:
        codes = ranks.end(LIMIT_S)
        return "" if codes == [0] * world_size else str(ranks.said())
    finally:
        ranks.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 6 steps, the last two with another batch."""
    folder = tmp_path_factory.mktemp("evaluated") / "copy"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("example"))
    (folder / "other").mkdir()
    shutil.copy(min((folder / "corpus").glob("*.jsonl")), folder / "other" / "b.jsonl")
    assert not train(folder, 2, "train.max_steps=4")
    assert not train(folder, 1, "train.max_steps=6", "train.global_batch_size=6")
    return folder


@pytest.fixture(autouse=True)
def in_a_copy(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def test_a_point_has_the_numbers_that_its_run_had() -> None:
    run = orchestrator.open("example")
    found = run.evals()
    # steps are counted anew with another batch
    assert [(row.attempt, row.step, row.part) for row in found.itertuples()] == [
        (*at, part) for at in ((1, 4), (2, 4), (2, 7)) for part in ("held", "other")
    ]
    for name in ("00000004-a0001-g0001", "00000004-a0002-g0001", "latest"):
        there = {each.part: each for each in run.evaluate(name)}
        key = parse_point_name(there["held"].point)
        assert key is not None
        of_point = found[(found.attempt == key.attempt) & (found.step == key.step)]
        assert len(of_point) == 2
        for row in of_point.itertuples():
            now = there[row.part]
            assert (row.loss, row.perplexity, row.targets) == (now.loss, now.perplexity, now.targets)
            assert (row.samples, row.per_source) == (7, now.per_source)


def test_evaluations_are_seen_in_status_and_in_plots(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = orchestrator.open("example")
    found = run.evals()
    newest = found[found.step == 7]
    seen = run.status(0.0)
    assert (seen.last_evaluation_step, [at.part for at in seen.last_evaluation]) == (7, ["held", "other"])
    assert [at.loss for at in seen.last_evaluation] == newest.loss.tolist()
    figure = run.plot("eval_held_loss", "eval_other_perplexity")
    assert list(figure.axes[0].lines[0].get_ydata())[-1] == newest.loss.tolist()[0]
    with exits(0):
        main(["evaluate", "example"])
    held, *_ = capsys.readouterr().out.splitlines()
    assert f"loss {newest.loss.tolist()[0]!r}  perplexity" in held
    said = "".join(path.read_text() for path in sorted(trained.glob("logs-1/*")))
    for part in ("held", "other"):
        line = rf"eval {part} at step 7: loss \d\.\d{{4}}, perplexity .*, 7 samples, "
        assert len(re.findall(line, said)) == 1


def test_the_time_of_evaluations_is_a_part_of_its_own() -> None:
    run = orchestrator.open("example")
    # the line of a last step may be written while its state is evaluated, and that time is the step's
    seconds = run.evals().seconds.sum()
    assert seconds / 2 - 0.1 < run.goodput()["parts"]["evaluating"] < seconds + 0.2


def test_other_parts_are_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    parts = 'eval.parts={mine: {sources: [{name: c, path: "corpus/*.jsonl", format: jsonl}]}}'
    with exits(0):
        main(["evaluate", "example", parts, "eval.max_samples=3", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found.keys() == {
        *("part", "point", "step", "loss", "perplexity", "targets", "samples", "per_source", "metrics")
    }
    assert (found["part"], found["step"], found["samples"]) == ("mine", 7, 3)
    assert list(found["per_source"]) == ["c"]
    with raises(RefusedError, "command.override_not_allowed"):
        orchestrator.open("example").evaluate(overrides=["train.lr=1"])


def test_a_run_without_a_hold_out_is_answered_with_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FOLDER, tmp_path / "without")
    monkeypatch.chdir(tmp_path / "without")
    with raises(RefusedError, "data.no_holdout", "data.holdout=0", tmp_path / "without") as refused:
        orchestrator.open("example").evaluate()
    told = str(refused.value).rpartition("orchestrator ")[2]
    words = shlex.split(told.replace("PATH", "corpus/*.jsonl"))
    with exits(0):
        main([*words, "eval.max_samples=3", "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["part"], found["samples"]) == ("mine", 3)


def test_an_error_about_the_source_of_a_part_names_the_part() -> None:
    missing = 'eval.parts={mine: {sources: [{name: c, path: "nowhere/*.jsonl", format: jsonl}]}}'
    with raises(OrchestratorError, "data.no_matching_file", "eval.parts.mine.sources c", "nowhere/*.jsonl"):
        orchestrator.open("example").evaluate(overrides=[missing])


def test_a_part_is_read_with_the_runs_copy_of_a_tokenizer_that_is_away() -> None:
    run, part = orchestrator.open("example"), [f"eval.parts={{mine: {{{OTHER}}}}}", "eval.max_samples=3"]
    before = run.evaluate(overrides=part)
    Path("corpus/tokenizer").rename("away")
    assert run.evaluate(overrides=part) == before


def test_data_of_a_part_that_changed_are_refused_by_name() -> None:
    with open("other/b.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    with raises(DataIdentityError, "data.eval_changed", "eval.parts.other"):
        orchestrator.open("example").evaluate()


def test_a_part_with_other_settings_is_refused_and_a_new_one_is_frozen() -> None:
    changed = PARTS.replace("format: jsonl", "format: lines")
    job: dict[str, Any] = {"overrides": [*WORDS, "train.global_batch_size=6", changed]}
    found = orchestrator.plan("job.yaml", **job)
    assert (found.action, list(found.codes)) == ("refuse", ["data.eval_changed"])
    new = PARTS.replace("other:", "lines:").replace("format: jsonl", "format: lines")
    assert not train(Path(), 1, "train.max_steps=8", "train.global_batch_size=6", parts=new)
    found = orchestrator.open("example").evals()
    assert set(found[found.attempt == 3].part) == {"held", "lines"}
    assert Path("example/eval/lines/manifest/data.json").is_file()


def test_a_fork_has_the_parts_as_they_were_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    before = orchestrator.open("example").evaluate()
    with exits(0):
        main(["fork", "example", "forked", "--at", "latest", "--yes"])
    capsys.readouterr()
    after = orchestrator.open("forked").evaluate()
    assert [replace(each, point="") for each in after] == [replace(each, point="") for each in before]
