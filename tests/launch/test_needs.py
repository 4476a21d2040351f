"""The least that a job needs of memory, and what is said where that is not there."""

from __future__ import annotations

import json

import pytest

from orchestrator.launch.capacity.resource_estimate import (
    count_parameters,
    gib,
    memory_in,
    memory_notes,
    needs_of,
)
from orchestrator.planning.state.state_layout import layout_of
from tests.planning.jobs import job

GIB = 1 << 30
# hidden 64, 8 heads of 8 of which 2 are shared, 100 words, 3 layers
SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "tie_word_embeddings": True,
}


SHORT = ["pack.seq_len=1", "train.micro_batch_size=1"]  # so that activations are small


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 100 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96)),
        ({"tie_word_embeddings": False}, 2 * 100 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96)),
        ({"num_key_value_heads": 8}, 100 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 96)),
        ({"head_dim": 16}, 100 * 64 + 3 * (2 * 64 * 128 + 2 * 64 * 32 + 3 * 64 * 96)),
        ({"intermediate_size": None}, 100 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 16)),
        ({"hidden_size": "many"}, 0),
        ({"model_type": "deepseek_v3"}, 0),
    ],
)
def test_parameters_are_counted_where_the_configuration_says_them_and_never_too_high(
    change: dict[str, object], expected: int
) -> None:
    assert count_parameters({**SMALL, **change}) == expected


def test_a_worker_holds_weights_gradients_and_two_moments_unless_a_gpu_does() -> None:
    count = count_parameters(SMALL)
    model = "model=" + json.dumps({"config": SMALL})
    without = needs_of(job("model={factory: 'a:b'}")).worker_bytes
    on_gpu = needs_of(job(model, *SHORT, "cluster.use_gpu=true"))
    base = on_gpu.worker_bytes
    assert base - without == 12 * count, "what a save is written from lies in the machine's memory"
    assert on_gpu.gpu_bytes == (256 << 20) + 16 * count
    assert needs_of(job(model, *SHORT)).worker_bytes - base == 16 * count
    assert needs_of(job(model, *SHORT, "train.precision=bf16")).worker_bytes - base == 16 * count
    needs = needs_of(job(model, *SHORT, "train.precision=pure_bf16"))
    assert (needs.worker_bytes - without, needs.point_bytes) == ((8 + 6) * count, 6 * count)
    assert f"{count:,} parameters × 2 bytes × 4" in needs.text


def test_the_loss_of_a_micro_batch_needs_its_logits_twice_and_what_goes_into_each_block() -> None:
    model = "model=" + json.dumps({"config": SMALL})
    batch = ["pack.seq_len=2048", "train.micro_batch_size=8", "train.global_batch_size=8"]
    count, num_tokens = count_parameters(SMALL), 8 * 2048
    for precision, compute_bytes in (("float32", 4), ("bf16", 2)):
        needs = needs_of(job(model, *batch, "cluster.use_gpu=true", f"train.precision={precision}"))
        activations = num_tokens * (3 * 64 * compute_bytes + 100 * 2 * 4)
        assert needs.gpu_bytes == (256 << 20) + 12 * count + activations, "before there are gradients"
    (note,) = memory_notes(job(model, *batch, "cluster.num_workers=1"), 1)
    assert f"activations of a micro-batch {num_tokens * (3 * 64 * 4 + 800) / 2**20:.1f} MiB" in note


def test_a_shard_is_a_part_of_the_state_and_whole_blocks_for_a_moment() -> None:
    count, table = count_parameters(SMALL), 100 * 64
    block = (count - table) // 3
    model = "model=" + json.dumps({"config": SMALL})
    base = needs_of(job(model, *SHORT, "cluster.use_gpu=true"), None, 4).worker_bytes
    for precision, compute_bytes in (("float32", 4), ("bf16", 2)):
        needs = needs_of(job(model, *SHORT, f"train.precision={precision}"), None, 4)
        assert needs.worker_bytes - base == 4 * count + 2 * (table + block) * compute_bytes
        assert needs.point_bytes == 12 * count, "a point holds all parts"
    assert "× 4 for weights, gradients and AdamW / 4 shards + " in needs.text
    without = needs_of(job("model={factory: 'a:b'}")).worker_bytes
    saved = 12 * count // 4
    assert base - without == saved + 4 * saved, "and four copies for memory points"
    beside = needs_of(job(model, *SHORT, "cluster.use_gpu=true"), None, 4, one_machine=True).worker_bytes
    assert beside - without == saved + 2 * saved, "two, where a neighbour lends what is kept for it"
    assert needs_of(job(model), 2, 3) == needs_of(job(model), None, 3), (
        "two shards do not divide three workers: each has a third"
    )


def test_the_state_of_each_optimizer_counts_in_memory_and_points() -> None:
    count, table = count_parameters(SMALL), 100 * 64
    model = "model=" + json.dumps({"config": SMALL})
    elements = {
        "train.optimizer=adamw": 2 * count,
        "train.optimizer=lion": count,
        "train.optimizer=sgd": 0,
        "train.optimizer_args={momentum: 0.9}": count,
        "train.optimizer=muon": count + table,
        "train.optimizer=adafactor": 0,
        "train.optimizer=a.b:C": 0,
        "train.ema=0.9": 3 * count,
    }
    without = needs_of(job("model={factory: 'a:b'}")).worker_bytes
    for override, state in elements.items():
        more = ["train.optimizer=sgd"] if "momentum" in override else []
        needs = needs_of(job(model, *SHORT, override, *more))
        assert needs.point_bytes == 4 * (count + state), override
        assert needs.worker_bytes - without == 4 * (2 * count + state) + 4 * (count + state), override
    in_half = needs_of(job(model, *SHORT, "train.ema=0.9", "train.precision=pure_bf16"))
    assert in_half.point_bytes == 2 * 3 * count + 4 * count, "averages are float32"
    (note,) = memory_notes(job(model, *SHORT, "train.optimizer=a.b:C", "cluster.num_workers=1"), 1)
    assert note.count("a.b:C") == 1
    assert "beside the state of a.b:C, which is not in this sum" in note


def test_a_step_of_whole_matrices_needs_their_new_values_in_shards() -> None:
    model = "model=" + json.dumps({"config": SMALL})
    asked = job(model, *SHORT, "train.optimizer=muon", "cluster.num_workers=4")
    matrices = count_parameters(SMALL) - 100 * 64
    assert memory_in(asked, layout_of(4, None)).updates == matrices // 4 * 4
    assert memory_in(asked, layout_of(4, 1)).updates == 0
    (note,) = memory_notes(asked, None)
    assert "a step that is not applied yet" in note


LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
SEVEN_B = "model=" + json.dumps({"config": {"model_type": "llama", "num_attention_heads": 32, **LARGE}})


def test_plan_says_why_a_group_is_cut_otherwise_than_was_asked_for() -> None:
    (note,) = memory_notes(job(SEVEN_B, "cluster.num_workers=3"), 2)
    assert "of 3 (shard: the state in 3 parts, for 2 shards do not divide 3 workers: one shard each)" in note


def test_little_is_said_in_small_units() -> None:
    assert [gib(n) for n in (0, 40_000, 12 << 20, 300 << 20, 5 << 30)] == [
        "0.0 KiB",
        "39.1 KiB",
        "12.0 MiB",
        "0.3 GiB",
        "5.0 GiB",
    ]


def test_plan_says_what_a_worker_holds() -> None:
    (alone,) = memory_notes(job(SEVEN_B, "cluster.num_workers=1"), 1)
    assert "of 1 (replicate: each holds the whole state)" in alone
    assert "AdamW 50.2 GiB" in alone
    assert "come or go" not in alone
    some, most = memory_notes(job(SEVEN_B, "cluster.num_workers=[4, 8]"), 4)
    assert "of 4 (shard: the state in 4 parts)" in some
    assert "of 8 (2 times the state in 4 parts)" in most
    assert "gathered blocks" in most
    assert "while workers come or go; a save is staged in 9.4 GiB, memory points in 75.3 GiB of" in most
    *_, beside = memory_notes(job(SEVEN_B, "cluster.num_workers=[4, 8]"), 4, one_machine=True)
    assert "memory points in 37.7 GiB of" in beside
    (_, without) = memory_notes(
        job(SEVEN_B, "cluster.num_workers=[4, 8]", "resume.memory_every_steps=null"), 4
    )
    assert "a save is staged in 9.4 GiB of the machine's memory: one save at a time, so" in without
    assert "memory points" not in alone
    assert memory_notes(job("model={factory: 'a:b'}"), None) == []


def test_plan_says_where_a_memory_interval_is_more_than_the_feeder_keeps() -> None:
    changes = ["train.global_batch_size=1000", "pack.seq_len=1023", "cluster.num_workers=4"]
    assert len(memory_notes(job(SEVEN_B, *changes), None)) == 1
    _, note = memory_notes(job(SEVEN_B, *changes, "resume.memory_every_steps=100"), None)
    assert "resume.memory_every_steps=100 take 0.4 GiB" in note
    assert "data.replay_bytes=268435456" in note
    assert len(memory_notes(job(SEVEN_B, *changes), 1)) == 1, "replicate makes no memory points"


def test_the_feed_grows_with_tokenizers_windows_and_what_it_keeps() -> None:
    one = needs_of(job("data.num_tokenizers=1"))
    assert needs_of(job("data.num_tokenizers=1", f"data.replay_bytes={GIB}")).feed_bytes - one.feed_bytes == (
        GIB - (256 << 20)
    )
    per_tokenizer = needs_of(job("data.num_tokenizers=4")).feed_bytes - one.feed_bytes
    assert per_tokenizer == 3 * ((700 << 20) + (16 << 20))
