"""What a plan says of the objective, evaluations and callbacks."""

import pytest

from orchestrator.planning.resume.plan_report import KnownEpochs, training_notes
from tests.planning.jobs import job

HELD_OUT = "data.holdout=0.005"
OTHER = 'eval.parts={code: {sources: [{name: c, path: "c.jsonl", format: jsonl}]}, held: {holdout: true}}'


def notes(*overrides: str, epochs: KnownEpochs | None = None) -> list[str]:
    return list(training_notes(job(*overrides), epochs))


def test_settings_that_are_left_at_their_defaults_have_no_note() -> None:
    assert notes() == notes(HELD_OUT) == []


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (["train.objective=a.b:focal"], ["a.b:focal,", "objective_units=targets"]),
        (
            ["train.objective=a.b:dpo", "train.objective_args={beta: 0.1}", "train.objective_units=samples"],
            ["a.b:dpo with {\"beta\": 0.1}", "objective_units=samples"],
        ),
        (["train.objective_units=a.b:count"], ["causal_lm,", "objective_units=a.b:count"]),
    ],
)
def test_the_objective_is_named_with_its_arguments_and_units(
    overrides: list[str], values: list[str]
) -> None:
    (note,) = notes(*overrides)
    assert note.startswith("train.objective: ")
    assert all(value in note for value in values), note


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["eval.every_steps=50", "eval.at_end=true", "eval.max_samples=70"],
            "eval: holdout (0.5% of the records) every 50 steps and at the end, the first 70 samples in up "
            "to 5 batches of 16",
        ),
        (
            ["eval.every_tokens=1000000"],
            "eval: holdout (0.5% of the records) every 1,000,000 tokens, all samples in batches of 16",
        ),
        (
            ["eval.every_steps=1", "eval.max_samples=16", OTHER],
            "eval: code, held (0.5% of the records) after each step, the first 16 samples of each part in "
            "one batch",
        ),
    ],
)
def test_an_evaluation_is_described_by_its_parts_its_times_and_its_size(
    overrides: list[str], said: str
) -> None:
    assert notes(HELD_OUT, *overrides) == [said]


def test_the_size_of_the_hold_out_is_known_once_the_data_have_ended() -> None:
    trained = 995 * 16 * 256  # of 1,000 batches five are held out
    known = KnownEpochs(attempt=1, source="stdlib", num_epochs=1, drawn=trained - 1)
    (note,) = notes(HELD_OUT, "eval.at_end=true", epochs=known)
    assert note.endswith("at the end, all samples in batches of 16, about 5 each time")


def test_callbacks_are_named_with_what_their_errors_do() -> None:
    assert notes("train.callbacks=[a.b:C, d:E]", "train.on_callback_error=stop") == [
        "train.callbacks: a.b:C, d:E (train.on_callback_error=stop)"
    ]
