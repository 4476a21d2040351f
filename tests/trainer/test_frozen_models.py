"""Frozen models: distillation from a teacher, plug-ins with a reference, the identity of their weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from orchestrator.checkpoint.points.store import CommittedFiles
from orchestrator.config.schema import JobConfig
from orchestrator.config.sections import ModelConfig
from orchestrator.errors import ConfigError, ResumePointError
from orchestrator.records.cursor import Cursor
from orchestrator.storage.files import Storage
from orchestrator.trainer.dry_run.model_dry_run import try_model
from orchestrator.trainer.gradient.parallel import state_and_gradient
from orchestrator.trainer.interfaces.loop_interface import TrainJob, next_range
from orchestrator.trainer.model.build_model import build_model
from orchestrator.trainer.objective.logit_loss import LossTerms, find_head, logits_of
from orchestrator.trainer.objective.objective import causal_lm_terms
from orchestrator.trainer.state.frozen_weights import FrozenModels
from orchestrator.trainer.weights.state_tensors import Continues, load
from tests.checkpoint.exports import job as made_job
from tests.raising import raises
from tests.trainer.feed import VOCABULARY, FormulaFeed
from tests.trainer.heads import Largest, Plain
from tests.trainer.launch import Launch, trained_steps
from tests.trainer.member import Plan, members, run_to_end, tiny_job

CPU = torch.device("cpu")
STUDENT = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TEACHER = {**STUDENT, "hidden_size": 24, "num_hidden_layers": 1, "tie_word_embeddings": True}
DISTILLED = {"teacher": "teacher", "teacher_weight": 0.25, "temperature": 2.0}


def folder_of(folder: Path, shape: dict[str, Any], seed: int = 5) -> str:
    """A folder of transformers with random weights that are large enough to matter."""
    model: Any = build_model(ModelConfig(config=shape), "float32", seed, CPU, True)
    for parameter in model.parameters():
        parameter.data.mul_(5)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("teacher"), TEACHER)


def distilled(teacher: str, **changes: Any) -> TrainJob:
    return tiny_job(
        model__frozen={"teacher": {"pretrained": teacher}},
        **{"train__objective_args": DISTILLED, "train__max_steps": 4, **changes},
    )


def parts_of(launch: Launch) -> Any:
    """The list of the tensors of its last point."""
    return json.loads(launch.storage.read(f"points/{launch.last_point().key.point_name}/parts.json"))


def losses(launch: Launch) -> list[float]:
    return [row[1] for row in trained_steps(launch)]


# ----------------------------------------------------------------------------------------------- distillation
def own_loop(student: Any, teacher: Any, job: TrainJob) -> list[float]:
    """Distillation in plain PyTorch: whole batches, one optimizer, no code of the trainer."""
    of, found, cursor, feed = job.train, list[float](), Cursor(), FormulaFeed()
    decayed = [p for p in student.parameters() if p.ndim >= 2]
    others = [p for p in student.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": of.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=of.lr, betas=of.betas, eps=of.eps)
    for step in range(of.max_steps or 0):
        wanted = next_range(job, cursor)
        assert wanted is not None
        batch = feed.get(wanted, 0, 1, wanted.num_samples, cursor)
        ids, labels = (torch.from_numpy(each).long() for each in (batch.input_ids, batch.labels))
        logits = student(ids).logits
        with torch.no_grad():
            wise = teacher(ids).logits
        entropy = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        soft = [(each / 2.0).log_softmax(-1).flatten(0, 1) for each in (logits, wise)]
        divergence = nn.functional.kl_div(*soft, reduction="batchmean", log_target=True)
        loss = 0.75 * entropy + 0.25 * 4.0 * divergence
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), of.max_grad_norm or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = of.lr * min(1.0, (step + 1) / 2)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        cursor = batch.cursor
    return found


def test_distillation_is_that_of_a_plain_loop(tmp_path: Path, teacher: str) -> None:
    start = folder_of(tmp_path / "student", STUDENT, seed=7)
    job = distilled(teacher, model__pretrained=start, train__max_steps=6)
    launch = run_to_end(tmp_path / "run", 2, job=job)
    student, wise = (AutoModelForCausalLM.from_pretrained(each) for each in (start, teacher))
    assert losses(launch) == pytest.approx(own_loop(student.train(), wise, job), rel=1e-6)
    state, _ = state_and_gradient(job, CPU)
    load(state.items(), launch.last_point().key.point_name, CommittedFiles(launch.storage))
    trained = dict(student.named_parameters())
    for name, mine in state.model.named_parameters():
        torch.testing.assert_close(mine, trained[name], rtol=1e-4, atol=1e-6)
    for record in launch.journal().records:
        of_step = record.metrics or {}
        assert list(of_step) == ["cross_entropy", "distillation"]
        mixed = 0.75 * float(of_step["cross_entropy"] or 0) + 0.25 * float(of_step["distillation"] or 0)
        assert record.loss == pytest.approx(mixed, rel=1e-5)


def test_bits_are_the_same_on_any_number_of_members_and_a_point_has_only_the_model(
    tmp_path: Path, teacher: str
) -> None:
    alone, group = (run_to_end(tmp_path / str(size), size, job=distilled(teacher)) for size in (1, 3))
    without = run_to_end(tmp_path / "without", 1, job=tiny_job(train__max_steps=4))
    assert group.last_point().state_digest == alone.last_point().state_digest
    assert trained_steps(group) == trained_steps(alone)
    assert losses(alone) != losses(without)
    mine, theirs, plain = map(parts_of, (alone, group, without))
    assert mine["items"] == theirs["items"] == plain["items"]
    assert list(mine["fixed"]) == ["model.frozen.teacher"]
    assert mine["fixed"] == theirs["fixed"]
    assert "fixed" not in plain


@pytest.mark.parametrize(
    ("size", "parallel"),
    [(2, "replicate"), (3, "shard"), (4, {"shard": 2, "replicate": 2})],
    ids=["ddp", "fsdp2", "hsdp"],
)
@pytest.mark.quick("3-hsdp")
@pytest.mark.parametrize("chunk", [None, 3])
def test_ddp_fsdp2_and_hsdp_distil_as_one_process_does(
    tmp_path: Path, teacher: str, size: int, parallel: object, chunk: int | None
) -> None:
    job = distilled(teacher, train__parallel=parallel, train__numerics="fast")
    plans = {f"m{rank}": Plan(chunk=chunk) for rank in range(size)}
    group = run_to_end(tmp_path / "group", size, job=job, plans=plans)
    alone = run_to_end(tmp_path / "alone", 1, job=distilled(teacher))
    assert losses(group) == pytest.approx(losses(alone), rel=1e-4)
    assert parts_of(group)["fixed"] == parts_of(alone)["fixed"]


def test_the_teachers_logits_exist_for_one_chunk_only(small_chunks: int) -> None:
    model, wise = Plain(lambda outputs: outputs), Plain(lambda outputs: outputs * 2.0)
    ids, of = torch.arange(60).view(1, 60), LossTerms()
    heads = [find_head(each, 60, by_document=False) for each in (model, wise)]

    def loss(chunked: bool) -> tuple[Tensor, int]:
        with Largest() as seen:
            with torch.no_grad():
                theirs = logits_of(wise, heads[1] if chunked else None, lambda: wise(ids))
            terms = causal_lm_terms(
                model, ids, ids, "float32", of=of, head=heads[0] if chunked else None, teacher=theirs
            )
            gradients = torch.autograd.grad(terms.loss_sum, list(model.parameters()))
        return torch.cat([terms.loss_sum.detach().view(1), *(g.flatten() for g in gradients)]), seen.found

    (mine, most), (whole, all_of_it) = loss(True), loss(False)
    torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-6)
    assert (most, all_of_it) == (96 * 8, 60 * 96)


# --------------------------------------------------------------------------------------------------- identity
def changed(source: str, folder: Path) -> str:
    """A copy of a folder in which each row of one weight differs."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def digest_and_name(launch: Launch) -> tuple[str, str]:
    return parts_of(launch)["fixed"]["model.frozen.teacher"], launch.last_point().key.point_name


def test_other_weights_under_the_same_name_are_refused_and_another_place_is_not(
    tmp_path: Path, teacher: str
) -> None:
    launch = run_to_end(tmp_path / "run", 1, job=distilled(teacher))
    digest, name = digest_and_name(launch)
    moved = shutil.copytree(teacher, tmp_path / "moved")
    files = CommittedFiles(Storage(launch.storage.root))
    for place, is_same in ((str(moved), True), (changed(teacher, tmp_path / "other"), False)):
        job = distilled(place)
        state, _ = state_and_gradient(job, CPU)
        fixed = state.frozen.digests()
        assert (fixed["model.frozen.teacher"] == digest) is is_same
        if is_same:
            load(state.items(), name, files, Continues(fixed=fixed))
        else:
            with raises(ResumePointError, "weights.changed", name, digest, *fixed.values()):
                load(state.items(), name, files, Continues(fixed=fixed))


@pytest.mark.quick("replicate")
@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_a_resume_with_other_weights_ends_on_every_rank(tmp_path: Path, teacher: str, parallel: str) -> None:
    first = run_to_end(tmp_path, 2, job=distilled(teacher, train__parallel=parallel, train__max_steps=2))
    digest, name = digest_and_name(first)
    job = distilled(changed(teacher, tmp_path / "other"), train__parallel=parallel)
    with members(tmp_path, ["a", "b"], attempt=2, point=name, job=job) as group:
        group.join_all()
        assert sorted(group.launch.errors) == ["a", "b"]
        for text in group.launch.errors.values():
            assert digest in text, text


@pytest.mark.quick("hsdp")
@pytest.mark.parametrize("parallel", ["replicate", {"shard": 2, "replicate": 2}], ids=["replicate", "hsdp"])
def test_replicas_that_read_other_files_do_not_train(tmp_path: Path, teacher: str, parallel: object) -> None:
    job, names = distilled(teacher, train__parallel=parallel), ["a", "b", "c", "d"]
    odd = distilled(changed(teacher, tmp_path / "other"), train__parallel=parallel)
    with members(tmp_path, names, job=job, jobs={"d": odd}) as group:
        group.join_all()
        assert sorted(group.launch.errors) == names
        assert all("model.frozen.teacher" in text for text in group.launch.errors.values())


@pytest.mark.parametrize("parallel", ["replicate", "shard"])
def test_damage_of_a_teacher_that_is_a_point_is_not_that_of_the_run(tmp_path: Path, parallel: str) -> None:
    other = run_to_end(tmp_path / "other", 1, job=tiny_job(train__max_steps=2))
    point = f"points/{other.last_point().key.point_name}"
    (part,) = Path(other.storage.root, point, "state").iterdir()
    data = bytearray(part.read_bytes())
    for at in range(len(data) // 4, len(data), 64):  # behind the header, in every tensor of some size
        data[at] ^= 1
    part.write_bytes(data)
    teacher = {"config": tiny_job().model.config, "init_from": f"{other.storage.root}/{point}"}
    job = tiny_job(
        model__frozen={"teacher": teacher}, train__objective_args=DISTILLED, train__parallel=parallel
    )
    with members(tmp_path / "run", ["a"], job=job) as group:
        group.join_all()
        said = group.launch.errors.get("a") or group.launch.outcomes
        assert str(said).startswith("ResumePointError: model.frozen.teacher.init_from="), said


# ------------------------------------------------------------------------------------------------- plug-ins
def with_reference(teacher: str, name: str, **changes: Any) -> TrainJob:
    return tiny_job(
        model__frozen={"reference": {"pretrained": teacher}},
        train__objective=f"tests.trainer.objectives:{name}",
        **{"train__max_steps": 3, **changes},
    )


@pytest.mark.chaos
def test_a_plug_in_calls_frozen_models(tmp_path: Path, teacher: str) -> None:
    job = with_reference(teacher, "nearer_to_reference")
    alone, three = (run_to_end(tmp_path / str(size), size, job=job) for size in (1, 3))
    shards = {"train__parallel": "shard", "train__numerics": "fast"}
    sharded = run_to_end(tmp_path / "shard", 2, job=with_reference(teacher, "nearer_to_reference", **shards))
    assert three.last_point().state_digest == alone.last_point().state_digest
    assert losses(sharded) == pytest.approx(losses(alone), rel=1e-4)
    found = [dict(record.metrics or {}) for record in alone.journal().records]
    assert all(of_step["reference"] for of_step in found)


def test_a_plug_in_that_changes_a_frozen_model_is_refused(teacher: str) -> None:
    with raises(ConfigError, "objective.impure", "frozen['reference']"):
        state_and_gradient(with_reference(teacher, "changes_reference"), CPU)


# -------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("frozen", "code"),
    [
        ({"t": {}}, "config.missing_key"),
        ({"t": {"config": STUDENT}}, "config.missing_key"),
        ({"t": {"config": STUDENT, "pretrained": "p"}}, "config.conflict"),
        ({"t": {"pretrained": "p", "factory_args": {"a": 1}}}, "config.conflict"),
        ({"t": {"pretrained": "p", "rows": 1}}, "config.unknown_key"),
        ({"1 t": {"pretrained": "p"}}, "config.invalid_value"),
    ],
)
def test_a_frozen_model_that_is_not_given_once_is_refused(frozen: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code, "model.frozen"):
        tiny_job(model__frozen=frozen)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"teacher": "other"}, "config.conflict"),
        ({"temperature": 2.0}, "config.missing_key"),
        ({"teacher": "teacher", "temperature": 0}, "config.invalid_value"),
        ({"teacher": "teacher", "teacher_weight": 1.5}, "config.invalid_value"),
    ],
)
def test_arguments_of_a_teacher_are_checked(teacher: str, arguments: dict[str, Any], code: str) -> None:
    with raises(ConfigError, code, "train.objective_args"):
        distilled(teacher, train__objective_args=arguments)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    large = folder_of(tmp_path, {**TEACHER, "vocab_size": 80})
    with raises(ConfigError, "objective.teacher_vocabulary", "model.frozen.teacher", 80, VOCABULARY):
        state_and_gradient(distilled(large), CPU)


def begun(asked: JobConfig) -> FrozenModels:
    return FrozenModels(asked.model, asked.train, CPU, invariant=True)


@pytest.mark.parametrize("refuse", [begun, try_model])
def test_an_unreadable_teacher_is_named_by_its_own_field(
    tmp_path: Path, refuse: Callable[[JobConfig], object]
) -> None:
    field, gone, empty, adapters = "model.frozen.t", tmp_path / "gone", tmp_path / "none", tmp_path / "lora"
    empty.mkdir()
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text('{"base_model_name_or_path": "/the/base"}')
    refused: list[tuple[str, dict[str, Any], list[str]]] = [
        ("model.not_built", {"pretrained": str(empty)}, [f"{field}.pretrained={empty}"]),
        ("weights.no_folder", {"pretrained": str(gone)}, [f"{field}.pretrained={gone}"]),
        ("weights.no_files", {"config": STUDENT, "init_from": str(empty)}, [f"{field}.init_from"]),
        ("weights.adapters_alone", {"pretrained": str(adapters)}, [f"{field}.pretrained", "/the/base"]),
        ("model.factory_not_callable", {"factory": "torch.nn:Linaer"}, [f"{field}.factory=", "nn:Linear"]),
    ]
    if refuse is try_model:
        wrong = {"config": {**STUDENT, "hidden_sise": 4}, "init_from": str(empty)}
        refused.append(("model.config_keys", wrong, [f"{field}.config.hidden_sise"]))
    for code, model, values in refused:
        with raises(ConfigError, code, *values) as error:
            refuse(made_job({"config": STUDENT, "frozen": {"t": model}}))
        text = str(error.value)
        assert text.startswith(field)
        assert not re.search(r"(?<!\.)\bmodel\.(pretrained|config|factory|init_from)\b", text), text


def test_its_type_is_the_models_or_what_is_asked_for(teacher: str) -> None:
    jobs = [
        tiny_job(model__frozen={"t": {"pretrained": teacher, **more}}, train__precision=precision)
        for precision, more in (("bf16", {}), ("float32", {"dtype": "bfloat16"}), ("pure_bf16", {}))
    ]
    found = [FrozenModels(job.model, job.train, CPU, True).models["t"] for job in jobs]
    types = [{p.dtype for p in model.parameters()} for model in found]
    assert types == [{torch.float32}, {torch.bfloat16}, {torch.bfloat16}]
    assert not any(p.requires_grad or model.training for model in found for p in model.parameters())
