"""The least that a job needs of memory, and what is said where that is not there."""

from __future__ import annotations

import json

import pytest

from orchestrator.launch.needs import (
    Needs,
    choose_shards,
    count_parameters,
    memory_notes,
    memory_problems,
    needs_of,
)
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
NEEDS = Needs(
    worker_bytes=3 * GIB, feed_bytes=2 * GIB, point_bytes=0, object_store_bytes=0, text="as the test says"
)


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
    model = json.dumps({"config": SMALL})
    base = needs_of(job("model=" + model, "cluster.use_gpu=true")).worker_bytes
    assert needs_of(job("model=" + model)).worker_bytes - base == 16 * count
    assert needs_of(job("model=" + model, "train.precision=bf16")).worker_bytes - base == 16 * count
    needs = needs_of(job("model=" + model, "train.precision=pure_bf16"))
    assert (needs.worker_bytes - base, needs.point_bytes) == (8 * count, 6 * count)
    assert f"{count:,} parameters × 2 bytes × 4" in needs.text


def test_a_shard_is_a_part_of_the_state_and_whole_blocks_for_a_moment() -> None:
    count, table = count_parameters(SMALL), 100 * 64
    block = (count - table) // 3
    model = json.dumps({"config": SMALL})
    base = needs_of(job("model=" + model, "cluster.use_gpu=true")).worker_bytes
    for precision, compute_bytes in (("float32", 4), ("bf16", 2)):
        needs = needs_of(job("model=" + model, f"train.precision={precision}"), None, 4)
        assert needs.worker_bytes - base == 4 * count + 2 * (table + block) * compute_bytes
        assert needs.point_bytes == 12 * count, "a point holds all parts"
    assert "× 4 for weights, gradients and AdamW / 4 shards + " in needs.text
    assert needs_of(job("model=" + model), 2, 3) == needs_of(job("model=" + model), None, 3), (
        "two shards do not divide three workers: each has a third"
    )


LARGE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
SEVEN_B = "model=" + json.dumps({"config": {"model_type": "llama", "num_attention_heads": 32, **LARGE}})


@pytest.mark.parametrize(
    ("changes", "gib_each", "expected"),
    [
        ([], 128, 1),  # 101 GiB of state each
        ([], 64, None),
        ([], 0, 1),  # a machine that does not say
        (["train.numerics=invariant"], 64, 1),
        (["train.parallel=replicate"], 64, 1),
        (["train.parallel=shard"], 128, None),
        (["train.parallel={shard: 2, replicate: 2}"], 128, 2),
        (["cluster.use_gpu=true"], 64, 1),  # nobody looks at the memory of GPUs
    ],
)
def test_auto_shards_only_what_does_not_fit_otherwise(
    changes: list[str], gib_each: int, expected: int | None
) -> None:
    machines = [(f"m{number}", gib_each * GIB) for number in range(4)]
    found = choose_shards(job(SEVEN_B, *changes), 4, machines)
    assert found == expected
    assert choose_shards(job(SEVEN_B, *changes), 4, ()) == (expected if "parallel" in str(changes) else 1)


def test_what_fits_in_shards_alone_is_refused_where_it_does_not_fit_even_so() -> None:
    machines = [("a", 16 * GIB)]
    needs = needs_of(job(SEVEN_B), choose_shards(job(SEVEN_B), 2, machines), 2)
    (problem,) = memory_problems(needs, 2, machines)
    assert "/ 2 shards" in problem


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
    (_, without) = memory_notes(
        job(SEVEN_B, "cluster.num_workers=[4, 8]", "resume.memory_every_steps=null"), 4
    )
    assert "a save is staged in 9.4 GiB of the machine's memory" in without
    assert "memory points" not in alone
    assert memory_notes(job("model={factory: 'a:b'}"), None) == []


def test_the_feed_grows_with_tokenizers_windows_and_what_it_keeps() -> None:
    one = needs_of(job("data.num_tokenizers=1"))
    assert needs_of(job("data.num_tokenizers=1", f"data.replay_bytes={GIB}")).feed_bytes - one.feed_bytes == (
        GIB - (256 << 20)
    )
    per_tokenizer = needs_of(job("data.num_tokenizers=4")).feed_bytes - one.feed_bytes
    assert per_tokenizer == 3 * ((700 << 20) + (16 << 20))


@pytest.mark.parametrize(
    ("num_workers", "machines", "fits"),
    [
        (2, [("a", 8 * GIB)], True),
        (2, [("a", 8 * GIB - 1)], False),
        (2, [("a", 4 * GIB), ("b", 4 * GIB)], True),
        (1, [("a", 2 * GIB), ("b", 2 * GIB), ("c", 2 * GIB)], False),
        (100, [("a", 0)], True),
        (100, [("a", 8 * GIB), ("b", 0)], True),
        (100, [], True),
    ],
)
def test_only_what_cannot_be_there_is_refused_with_both_values(
    num_workers: int, machines: list[tuple[str, int]], *, fits: bool
) -> None:
    problems = memory_problems(NEEDS, num_workers, machines)
    assert len(problems) == (0 if fits else 1)
    if not fits:
        assert f"{3 * num_workers + 2}.0 GiB of memory are needed" in problems[0]
        assert "as the test says" in problems[0]
        assert "a: " in problems[0]
        assert "; lower the number of workers" in problems[0]


def test_without_a_feed_of_its_own_only_the_workers_count() -> None:
    assert memory_problems(NEEDS, 2, [("a", 6 * GIB)], with_feed=False) == []
    assert memory_problems(NEEDS, 2, [("a", 6 * GIB - 1)], with_feed=False)
