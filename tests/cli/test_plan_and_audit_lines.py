"""What `plan` and `audit` print for people, from the documents that `--json` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.inspect import replay_lines
from orchestrator.cli.tables import audit_lines, plan_lines
from orchestrator.launch.api import plan
from orchestrator.launch.replay.replay import Replayed
from orchestrator.planning.resume.identity import Difference


def report(final: int | None, all_final: bool = False) -> dict[str, Any]:
    return {
        "exactly_once": True, "samples": 560, "tokens": 71_680, "steps": 70, "attempts": 1,
        "first_step": "1", "last_step": "70", "final_up_to_step": final, "all_final": all_final,
        "first_difference": None,
        "not_shown": [], "repeated_files": 0, "skipped_documents": None, "reference": None,
        "left_out_documents": None,
    }  # fmt: skip


def test_the_audit_speaks_of_later_steps_only_where_there_are_some() -> None:
    assert audit_lines(report(70, all_final=True))[1] == "final up to step 70"
    assert audit_lines(report(50))[1] == "final up to step 50; later ones may still be replaced"
    assert audit_lines(report(None))[1] == "nothing is final yet"


def test_one_of_something_is_not_said_as_several(tiny_config: Any) -> None:
    one = report(1) | {"first_step": "7", "last_step": "7", "repeated_files": 1}
    amounts = dict.fromkeys(("samples", "tokens", "steps"), 1)
    (said, *_) = audit_lines({**one, **amounts})
    assert said == (
        "step 7: 1 sample, 1 token, 1 step, 1 attempt, each token of its stream exactly once, but 1 file "
        "stands in that more than once"
    )
    left = replace(plan(tiny_config({})), remaining_steps=1, remaining_samples=1, remaining_tokens=32)
    assert "  remaining 1 step, 1 sample, 32 tokens" in plan_lines(left)
    found = Replayed(
        run="r",
        step=7,
        name="7",
        from_point="p",
        point=None,
        weights_digest="d",
        expected_digest=None,
        equal=None,
        steps_compared=1,
        first_difference=None,
        notes=(),
    )
    assert replay_lines(found)[0] == "step 7: trained again from p, 1 step"


def test_the_differences_of_a_plan_are_written_as_in_json(tiny_config: Any) -> None:
    found = plan(tiny_config({}))
    values: list[tuple[Any, Any, str]] = [(None, 10, "null -> 10"), (True, "a", "true -> a")]
    for old, new, text in values:
        different = Difference(field="resume.x", old=old, new=new, rule="free")
        assert f"  resume.x: {text}  (no influence on what is trained)" in plan_lines(
            replace(found, differences=(different,))
        )


def test_a_plan_says_that_the_storage_cannot_be_written(tiny_config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = plan(tiny_config({"run.storage": str(tmp_path / "file" / "runs")}))
    assert found.action == "start"
    (line,) = [line for line in plan_lines(found) if "warning" in line]
    assert line.startswith("  warning: a start would fail: run.storage: ")
    assert f"because {tmp_path}/file is not a writable folder" in line


def test_a_refusal_stands_first(tiny_config: Any) -> None:
    found = plan(tiny_config({})).refused(["one reason", "another"], "config.invalid")
    assert plan_lines(found)[:3] == [
        "refused: one reason",
        "refused: another",
        "would be refused: the run has no resume point",
    ]


def test_a_plan_names_the_machine_where_this_one_lacks_the_gpus(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    needs_them = {"cluster.use_gpu": True, "cluster.num_workers": 2}
    found = plan(tiny_config(needs_them))
    assert found.action == "start"
    assert "2 GPUs" in found.where
    assert plan_lines(found)[0].startswith(f"would start from the beginning, {found.where}")
    assert found.where in found._repr_html_()
    assert any(found.where in note for note in found.to_json()["notes"])
    assert "where" not in found.to_json()
    elsewhere = plan(tiny_config({**needs_them, "cluster.address": "10.0.0.1:6379"}))
    assert elsewhere.where == plan(tiny_config({})).where == ""


def test_a_plan_refuses_a_model_that_cannot_take_its_samples(tiny_config: Any) -> None:
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 1000,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 5,
    }
    found = plan(tiny_config({"model.config": gpt2}))
    assert found.action == "refuse"
    (refusal,) = found.refusals
    assert "takes samples of at most 5 tokens" in refusal
