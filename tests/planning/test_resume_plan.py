"""The resume decision: what continues, what is refused, and what the plan says about it."""

import dataclasses
import json
from dataclasses import replace

import pytest

from orchestrator.cli.tables import plan_lines
from orchestrator.config.field_rules import field_rules
from orchestrator.config.loading import parse_config
from orchestrator.json_form import decode, encode
from orchestrator.planning.batches import rebase_step
from orchestrator.planning.resume.identity import differences, stream_settings
from orchestrator.planning.resume.plan_report import KnownEpochs, sources_seen
from orchestrator.planning.resume.resume_plan import DataChanges, KnownData, PointInfo, plan_resume
from orchestrator.planning.schedule import budgets_for
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import StateKey
from tests.planning.identities import BEFORE, IDENTITY
from tests.planning.jobs import job

STEP = 16 * 256
KEY = StateKey(attempt=3, generation=7, step=55)
POINT = PointInfo(
    name=KEY.point_name,
    key=KEY,
    cursor=Cursor(consumed_samples=55 * 16, consumed_tokens=55 * STEP, target_tokens=55 * STEP),
    global_batch_size=16,
    seq_len=256,
    world_size=2,
    optimizer_steps=55,
    budgets=budgets_for(BEFORE, None),
)
KEYS_OF_THE_PLAN = {
    *(
        "action",
        "point",
        "step_before",
        "step_after",
        "consumed_samples",
        "consumed_tokens",
        "cursor",
        "remaining_steps",
    ),
    *("remaining_samples", "remaining_tokens", "lr_before", "lr_after", "differences", "refusals", "notes"),
    "codes",
    *("sources", "skip", "lists", "data_tokens"),
}


RULES = {rule.path: rule.rule for rule in field_rules()}
CHANGED_SETTING = "resume.changed_setting"


HERE = {"gigatoken": "0.3.1", "tokenizers": "9"}


def decide(config, point, old_flat=None, installed=HERE, **facts):
    names = [field.name for field in dataclasses.fields(DataChanges)]
    changes = DataChanges(**{name: facts.pop(name) for name in names if name in facts})
    return plan_resume(config, RULES, point, old_flat, KnownData(installed=installed, **facts), changes)


def resumed(*overrides, point=POINT, **facts):
    return decide(job(*overrides), point, BEFORE.flat(), **facts)


def test_the_json_has_exactly_the_agreed_keys_and_is_json():
    document = resumed("train.lr=0.002").to_json()
    assert set(document) == KEYS_OF_THE_PLAN
    assert json.loads(json.dumps(document)) == document
    assert document["differences"] == [
        {"field": "train.lr", "old": 0.001, "new": 0.002, "rule": "may_change"}
    ]


def test_a_fresh_start_knows_its_length_and_its_first_learning_rate():
    plan = decide(BEFORE, None)
    assert (plan.action, plan.point, plan.step_before, plan.step_after) == ("start", None, None, 0)
    assert (plan.remaining_steps, plan.remaining_samples, plan.remaining_tokens) == (300, 4800, 300 * STEP)
    assert plan.lr_before is None
    assert plan.lr_after == pytest.approx(1e-3 / 10)


def test_an_unchanged_job_resumes_with_its_label_and_learning_rate():
    plan = resumed()
    assert (plan.action, plan.point) == ("resume", "00000055-a0003-g0007")
    assert (plan.step_before, plan.step_after, plan.remaining_steps) == (55, 55, 245)
    assert plan.lr_before == plan.lr_after
    assert (plan.differences, plan.refusals) == ((), ())
    assert plan.budgets == POINT.budgets


@pytest.mark.parametrize(("batch", "seq_len"), [(24, 256), (16, 128), (24, 128), (704, 256), (7, 33)])
def test_a_new_shape_rebases_the_label_and_keeps_budget_and_learning_rate(batch, seq_len):
    plan = resumed(f"train.global_batch_size={batch}", f"pack.seq_len={seq_len}")
    assert plan.action == "resume"
    assert plan.step_after == rebase_step(55 * STEP, batch, seq_len)
    assert plan.remaining_tokens == 245 * STEP
    assert plan.remaining_steps == -(-245 * STEP // (batch * seq_len))
    assert (plan.consumed_samples, plan.consumed_tokens) == (880, 55 * STEP)
    assert plan.lr_before == plan.lr_after


def test_a_plan_shows_the_rate_that_a_changed_batch_scales_and_a_later_plan_keeps_it():
    scaling = ("train.global_batch_size=24", "train.lr_on_batch_change=linear")
    plan = resumed(*scaling)
    assert plan.lr_after == pytest.approx(1.5 * plan.lr_before)
    assert any("train.lr=0.001" in note and "1.5" in note for note in plan.notes)
    later = replace(POINT, budgets=plan.budgets, global_batch_size=24)
    again = decide(job(*scaling), later, job(*scaling).flat())
    assert (again.lr_before, again.lr_after) == (plan.lr_after, plan.lr_after)
    assert again.budgets == plan.budgets


def test_a_point_of_a_version_without_these_settings_is_planned_as_before():
    old = {name: value for name, value in BEFORE.flat().items() if name not in ADDED}
    assert decide(job(), POINT, old) == resumed()


ADDED = ("train.decay_power", "train.lr_on_batch_change")


def test_a_label_that_is_not_the_count_of_steps_stays_where_the_shape_stays():
    # after an earlier change of shape the label need not be what this shape would have needed
    moved = replace(POINT, key=StateKey(attempt=4, generation=1, step=70))
    assert resumed(point=moved).step_after == 70


def test_a_label_that_is_counted_anew_is_explained_with_the_tokens_that_stay():
    assert resumed().label_text == "step label 55 -> 55"
    changed = resumed("train.global_batch_size=20")
    assert changed.label_text.startswith("step label 55 -> 44: labels count steps of the new size")
    assert f" {55 * STEP:,} tokens" in changed.label_text


def test_a_stop_that_is_reached_is_a_resume_with_nothing_left():
    plan = resumed("train.max_steps=40")
    assert plan.action == "resume"
    assert (plan.remaining_steps, plan.remaining_samples, plan.remaining_tokens) == (0, 0, 0)


def test_what_nobody_can_know_is_null_and_the_data_bounds_what_is_known():
    endless = ("train.max_steps=null", "train.schedule=constant")
    assert resumed(*endless).remaining_steps is None
    for left, steps in ((1000, None), (3 * STEP + 1, 4), (0, 0)):
        drawn = POINT.cursor.consumed_tokens + left
        known = KnownEpochs(attempt=2, source="stdlib", num_epochs=1, drawn=drawn)
        plan = resumed(*endless, epochs=known)
        assert (plan.data_tokens, plan.remaining_tokens) == (left, left)
        assert steps in (None, resumed(epochs=known).remaining_steps)
        assert plan.sources == ()
        twice = resumed(*endless, "data.num_epochs=2", epochs=known)
        assert twice.data_tokens == left + drawn + 1
        assert resumed("data.num_epochs=null", epochs=known).data_tokens is None
        assert any("attempt 2 reached the end of the data" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("override", "old", "new"),
    [
        ("data.seed=1", "data.seed=0", " 1;"),
        ("data.shuffle=none", "data.shuffle=block", " none;"),
        ("data.eos=false", "data.eos=true", " false;"),
        ("data.tokenizer=llama-3", "data.tokenizer=./corpus/tokenizer", " llama-3;"),
        ("train.precision=pure_bf16", "train.precision=float32", " pure_bf16;"),
        ("run.name=other", "run.name=small", " other;"),
    ],
)
def test_what_must_stay_the_same_is_refused_with_both_values_and_what_to_do(override, old, new):
    plan = resumed(override)
    assert plan.action == "refuse"
    (refusal,) = plan.refusals
    assert plan.codes == (CHANGED_SETTING,)
    assert refusal.startswith(f"{job(override).run.run_uri}: ")
    assert "00000055-a0003-g0007" in refusal
    assert refusal.count(old) == 2, "the value then, and the one to keep"
    assert new in refusal
    assert [d.rule for d in plan.differences] == ["same"]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("train.lr=0.5", "may_change"),
        ("train.micro_batch_size=3", "may_change"),
        ("data.num_epochs=4", "may_change"),
        ("cluster.num_workers=5", "free"),
        ("monitor.progress_s=1.0", "free"),
        ("run.storage=/elsewhere", "free"),
    ],
)
def test_what_may_change_and_what_is_free_is_told_and_not_refused(override, rule):
    plan = resumed(override)
    assert plan.action == "resume"
    assert [d.rule for d in plan.differences] == [rule]


def test_where_contents_are_compared_a_path_may_change_and_a_content_may_not():
    moved = job("data.tokenizer=elsewhere")
    flat = BEFORE.flat()
    assert decide(moved, POINT, flat, identities=(IDENTITY, IDENTITY)).action == "resume"
    other = replace(IDENTITY, tokenizer_digest="dd44")
    plan = decide(moved, POINT, flat, identities=(IDENTITY, other))
    assert plan.codes == ("resume.changed_tokenizer",)
    (refusal,) = plan.refusals
    assert all(value in refusal for value in (f"{moved.run.run_uri}: ", "aa11", "dd44"))


def test_sources_may_move_to_another_path_but_not_change_their_format():
    flat = BEFORE.flat()
    moved = {**flat, "data.sources": [{**flat["data.sources"][0], "path": "old/*.jsonl"}]}
    other = {**flat, "data.sources": [{**flat["data.sources"][0], "format": "lines"}]}
    same = (IDENTITY, IDENTITY)
    assert decide(BEFORE, POINT, moved, identities=same).action == "resume"
    assert decide(BEFORE, POINT, moved).action == "refuse"
    assert decide(BEFORE, POINT, other, identities=same).action == "refuse"


def test_a_setting_is_refused_once_although_configuration_and_identity_both_name_it():
    job_seed_1 = job("data.seed=1")
    new = replace(IDENTITY, settings=stream_settings(job_seed_1.flat()))
    assert len(decide(job_seed_1, POINT, BEFORE.flat(), identities=(IDENTITY, new)).refusals) == 1
    plan = decide(job_seed_1, None, None, identities=(IDENTITY, new))
    assert plan.codes == (CHANGED_SETTING,)
    (refusal,) = plan.refusals
    assert all(value in refusal for value in (f"{job_seed_1.run.run_uri}: ", "data.seed=0,", " 1;"))


def test_another_encoder_is_told_with_both_versions_and_its_name_in_place_of_auto_changes_nothing():
    here = (IDENTITY, IDENTITY)
    plan = resumed("data.encoder=tokenizers", identities=here)
    (difference,) = plan.differences
    assert (difference.field, difference.old, difference.new) == (
        "data.encoder",
        "gigatoken 0.3.1",
        "tokenizers 9",
    )
    assert (plan.action, str(plan.encoder)) == ("resume", "tokenizers 9")
    named = resumed("data.encoder=gigatoken", identities=here)
    assert (named.action, str(named.encoder)) == ("resume", "gigatoken 0.3.1")
    assert [(d.old, d.new) for d in named.differences] == [("auto", "gigatoken")]
    newer = resumed(identities=here, installed={"gigatoken": "0.4.0"})
    assert (newer.action, set(newer.codes)) == ("refuse", {"machine.packages"})
    assert all(value in newer.refusals[0] for value in ("gigatoken 0.3.1,", "gigatoken 0.4.0"))


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        (
            ("cluster.num_workers=2",),
            ("2: a step of 16 samples is cut into 4 micro-batches", "for 0%"),
        ),
        (("cluster.num_workers=6",), ("world size 6: a step", "up to 1 for a worker", "idle for 33% of it")),
        (
            ("cluster.num_workers=[2,3]",),
            (
                "size 2",
                "size 3",
                "up to 2",
                "for 33%",
                "the last bit, while train.parallel=auto is replicate",
            ),
        ),
        (("cluster.num_workers=3", "train.numerics=invariant"), ("the same, to the last bit\n",)),
        (("cluster.num_workers=3", "train.numerics=fast"), ("differ in their last bits",)),
        (("cluster.num_workers=3", "cluster.use_gpu=true"), ("differ in their last bits",)),
    ],
)
def test_the_notes_say_how_the_batch_lies_on_the_workers(overrides, texts):
    found = "".join(f"{note}\n" for note in resumed(*overrides).notes)
    assert all(text in found for text in texts), found
    assert ("saved at world size 2" in found) is (overrides != ("cluster.num_workers=2",))
    assert "the point" not in "\n".join(decide(BEFORE, None).notes)


def test_a_run_without_a_point_is_still_held_to_what_it_was_started_with():
    plan = decide(job("data.seed=1"), None, BEFORE.flat())
    assert (plan.action, plan.codes) == ("refuse", (CHANGED_SETTING,))
    assert "data.seed=0," in plan.refusals[0]


def test_a_field_that_is_newer_than_the_point_had_its_default_then():
    old = BEFORE.flat()
    del old["data.special_tokens_in_text"]
    assert decide(BEFORE, POINT, old).differences == ()
    plan = decide(job("data.special_tokens_in_text=parse"), POINT, old)
    assert [(d.old, d.new) for d in plan.differences] == [("text", "parse")]


def test_bfloat16_products_may_come_and_go_but_weights_keep_their_own_type():
    assert [d.rule for d in resumed("train.precision=bf16").differences] == ["may_change"]
    pure = job("train.precision=pure_bf16").flat()
    for override in ("train.precision=bf16", "train.precision=float32"):
        plan = decide(job(override), POINT, pure)
        assert (plan.action, [d.rule for d in plan.differences]) == ("refuse", ["same"])
        assert plan.codes == (CHANGED_SETTING,)
        values = ("train.precision=pure_bf16,", f" {override[16:]};")
        assert all(value in plan.refusals[0] for value in values)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "float32"), ("bfloat16", "pure_bf16")])
def test_a_point_of_a_version_that_had_model_dtype_continues_with_the_same_weights(dtype, precision):
    old = BEFORE.flat()
    del old["train.precision"]
    old["model.dtype"] = dtype
    plan = decide(job(f"train.precision={precision}"), POINT, old)
    assert (plan.action, plan.differences) == ("resume", ())
    other = {"float32": "pure_bf16", "pure_bf16": "float32"}[precision]
    assert decide(job(f"train.precision={other}"), POINT, old).action == "refuse"


def test_a_user_who_changes_the_learning_rate_sees_it_jump_and_only_then():
    plan = resumed("train.lr=0.002")
    assert plan.lr_after == pytest.approx(2 * plan.lr_before)


@pytest.mark.parametrize(
    ("at", "num_blocks", "said"),
    [
        ({}, 5, "0.00 epochs"),
        ({"record": 3}, 5, "in the 1st of 5 blocks of its 1st epoch"),
        ({"epoch": 1, "block": 2, "token": 7}, 5, "in the 3rd of 5 blocks of its 2nd epoch"),
        ({"epoch": 1, "block": 2}, 5, "1.40 epochs"),
        ({"epoch": 11, "piece": 1}, 1, "in its 12th epoch"),
        ({"epoch": 2, "block": 22, "packs": 1}, 49, "in the 23rd of 49 blocks of its 3rd epoch"),
        ({"epoch": 1, "block": 500, "record": 1}, 1000, "1.50 epochs"),
    ],
)
def test_a_source_is_in_a_block_of_an_epoch_not_between_two_numbers(at, num_blocks, said):
    cursor = Cursor(consumed_samples=4, consumed_tokens=64, sources={"a": SourceCursor(**at)})
    (seen,) = sources_seen(cursor, {"a": 1}, {"a": num_blocks})
    assert str(seen) == f"source a: 64 tokens in 4 samples seen, {said}"


def test_the_points_facts_survive_their_json():
    assert decode(PointInfo, encode(POINT)) == POINT


def test_weights_of_sources_may_change_and_are_told_by_source():
    def mixed(web, code, epochs=None):
        sources = [
            {"name": "web", "path": "w.jsonl", "format": "jsonl", "weight": web},
            {"name": "code", "path": "c.jsonl", "format": "jsonl", "weight": code, "max_epochs": epochs},
        ]
        return parse_config({**BEFORE.to_json(), "data": {**BEFORE.to_json()["data"], "sources": sources}})

    plan = decide(mixed(0.25, 0.75, 3), POINT, mixed(0.5, 0.5).flat())
    assert plan.action == "resume"
    assert [str(d) for d in plan.differences] == [
        "data.sources.code.max_epochs: null -> 3",
        "data.sources.code.weight: 0.5 -> 0.75",
        "data.sources.web.weight: 0.5 -> 0.25",
    ]
    assert {d.rule for d in plan.differences} == {"may_change"}


@pytest.mark.parametrize(
    ("field", "old", "new", "told"),
    [
        ("model.lora", {"rank": 4, "alpha": 8}, {"rank": 8, "alpha": 8}, ["model.lora.rank: 4 -> 8"]),
        ("train.objective_args", {}, {"gamma": 2.0}, ["train.objective_args.gamma: null -> 2.0"]),
        (
            "model.frozen",
            {"t": {"pretrained": "a", "dtype": None}, "u": {"pretrained": "u"}},
            {"t": {"pretrained": "b", "dtype": None}},
            ["model.frozen.t.pretrained: a -> b", 'model.frozen.u: {"pretrained": "u"} -> null'],
        ),
        (
            "train.param_groups",
            [{"match": "a", "lr_scale": 1.0}, {"match": "b", "lr_scale": 1.0}],
            [{"match": "a", "lr_scale": 1.0}, {"match": "b", "lr_scale": 0.5}],
            ["train.param_groups.1.lr_scale: 1.0 -> 0.5"],
        ),
        ("train.param_groups", [], [{"match": "b"}], ['train.param_groups: [] -> [{"match": "b"}]']),
        ("train.betas", [0.9, 0.95], [0.9, 0.99], ["train.betas: [0.9, 0.95] -> [0.9, 0.99]"]),
        ("model.lora", None, {"rank": 8}, ['model.lora: null -> {"rank": 8}']),
        ("x", {"a": None}, {}, ['x: {"a": null} -> {}']),
    ],
)
def test_of_a_mapping_only_what_differs_is_told(field, old, new, told):
    (whole,) = differences({field: old}, {field: new}, {field: "may_change"})
    assert [str(part) for part in whole.parts()] == told
    assert {part.rule for part in whole.parts()} == {"may_change"}
    assert (whole.field, whole.old, whole.new) == (field, old, new), "as it is stored and in JSON"
    plan = replace(resumed(), differences=(whole,))
    assert [line for line in plan_lines(plan) if line.endswith("(may change)")] == [
        f"  {text}  (may change)" for text in told
    ]


def test_a_refused_mapping_names_only_what_differs():
    shape = {**BEFORE.flat()["model.config"], "hidden_size": 99}
    plan = decide(BEFORE, POINT, {**BEFORE.flat(), "model.config": shape})
    assert plan.codes == (CHANGED_SETTING,)
    assert "made with model.config.hidden_size=99, the job asks for 64" in plan.refusals[0]
    assert "model_type" not in plan.refusals[0]


def test_the_weight_of_a_runs_only_source_is_no_difference():
    """Older versions stored 1.0 for it where none was given."""
    (source,) = BEFORE.flat()["data.sources"]
    older = {**BEFORE.flat(), "data.sources": [{**source, "weight": 1.0}]}
    assert not [d for d in decide(BEFORE, POINT, older).differences if "source" in d.field]


def test_a_plan_keeps_the_error_code_of_each_refusal():
    plan = decide(job("data.seed=1"), POINT, BEFORE.flat())
    assert (plan.action, plan.codes) == ("refuse", (CHANGED_SETTING,))
    refused = plan.refused(["one", "another"], "model.export").refused([], "unused").refused(["third"], "a.b")
    assert refused.refusals == (*plan.refusals, "one", "another", "third")
    assert refused.to_json()["codes"] == [CHANGED_SETTING, "model.export", "model.export", "a.b"]
    assert (refused.refusal.code, refused.refusal.exit_code) == (CHANGED_SETTING, 2)
    assert str(refused.refusal) == "\n".join(refused.refusals)
    assert resumed().refused([], "unused") == resumed()


def optimized(**changes):
    """The point's flat configuration with another optimizer."""
    return {**BEFORE.flat(), **{f"train.{name}": value for name, value in changes.items()}}


@pytest.mark.parametrize(
    ("old", "overrides", "values"),
    [
        ({}, ["train.optimizer=muon"], ["adamw after 55 steps", "muon"]),
        (
            {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
            ["train.optimizer=sgd"],
            ["sgd with momentum", "sgd without momentum"],
        ),
        (
            {},
            ["train.param_groups=[{match: norm, optimizer: sgd}]"],
            ["adamw after", "adamw, sgd for norm"],
        ),
    ],
)
def test_another_optimizer_needs_a_reset_and_both_are_named(old, overrides, values):
    refused = decide(job(*overrides), POINT, optimized(**old))
    assert (refused.action, refused.codes) == ("refuse", ("resume.changed_optimizer",))
    (text,) = refused.refusals
    assert all(value in text for value in [*values, "resume.optimizer=reset"]), text
    found = decide(job(*overrides, "resume.optimizer=reset"), POINT, optimized(**old))
    assert found.action == "resume"
    (note,) = [note for note in found.notes if "optimizer" in note]
    assert all(value in note for value in values), note


def test_what_keeps_the_optimizers_state_may_change_without_a_reset():
    for overrides in (
        ["train.weight_decay=0.2", "train.betas=[0.8, 0.9]"],
        ["train.param_groups=[{match: norm, lr_scale: 0.5}]"],
        ["resume.optimizer=reset"],
    ):
        found = resumed(*overrides)
        assert found.action == "resume"
        assert not [note for note in found.notes if "begins anew" in note]
    momentum = {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}}
    asked = job("train.optimizer=sgd", "train.optimizer_args={momentum: 0.8}")
    assert decide(asked, POINT, optimized(**momentum)).action == "resume"


def test_a_point_of_a_version_without_optimizers_is_one_of_adamw():
    new = ("train.optimizer", "train.optimizer_args", "train.param_groups", "resume.optimizer")
    old = {path: value for path, value in BEFORE.flat().items() if path not in new}
    assert decide(job(), POINT, old).action == "resume"
    assert decide(job("train.optimizer=lion"), POINT, old).codes == ("resume.changed_optimizer",)
