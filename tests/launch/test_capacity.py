"""What fits into the memory of machines and GPUs, what `train.parallel: auto` does where the whole state does
not, and what a plan says of it.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.launch.capacity.capacity import (
    KnownMachines,
    Workers,
    capacity_problems,
    choice_note,
    choose_parallel,
    gpu_problems,
    machines_text,
    memory_plan,
    memory_problems,
)
from orchestrator.launch.capacity.resource_estimate import ResourceEstimate, needs_of
from orchestrator.planning.state.memory import Machine, ParallelChoice
from tests.launch.machines import GIB, LARGE, machines
from tests.planning.jobs import job

SEVEN_B = "model=" + json.dumps({"config": {"model_type": "llama", "num_attention_heads": 32, **LARGE}})
ON_GPU, NO_POINTS = "cluster.use_gpu=true", "resume.memory_every_steps=null"
NEEDS = ResourceEstimate(
    worker_bytes=3 * GIB,
    feed_bytes=2 * GIB,
    point_bytes=0,
    object_store_bytes=0,
    text="as the test says",
    gpu_bytes=10 * GIB,
    gpu_text="as it says, too",
)


# ------------------------------------------------------------------------------ what auto does
@pytest.mark.parametrize(
    ("changes", "there", "expected"),
    [
        ([], machines(4, 128), 1),  # 101 GiB of state each, and 19 for what is saved
        ([NO_POINTS], machines(4, 64), None),
        ([], machines(4, 64), 1),  # with memory points neither fits, and shards need more
        (["cluster.num_workers=8"], machines(4, 64), 1),
        ([], machines(4, 0), 1),  # a machine that does not say
        ([], [], 1),
        (["train.numerics=invariant", NO_POINTS], machines(4, 64), 1),
        (["train.parallel=replicate", NO_POINTS], machines(4, 64), 1),
        (["train.parallel=shard"], machines(4, 128), None),
        (["train.parallel={shard: 2, replicate: 2}"], machines(4, 128), 2),
        ([ON_GPU], machines(4, 64, 141), 1),
        ([ON_GPU], machines(4, 128, 80), None),
        ([ON_GPU], machines(4, 16, 80), None),  # though copies do not fit beside it
        ([ON_GPU], [*machines(4, 128, 141), *machines(1, 128, 80)], None),  # whoever gets the small one
        ([ON_GPU], machines(4, 64, 0), 1),  # a GPU whose memory is not known
        ([ON_GPU], machines(4, 64), 1),
        ([ON_GPU], machines(4, 16, 141), 1),  # what saves are made from does not fit beside it
    ],
)
def test_auto_shards_only_what_does_not_fit_otherwise(
    changes: list[str], there: list[Machine], expected: int | None
) -> None:
    found = choose_parallel(job(SEVEN_B, *changes), Workers(num_workers=4), there, "head:6379")
    assert found.num_shards == expected
    assert (found.machines, found.cluster) == (tuple(there), "head:6379"), "what it was decided by"


def test_auto_says_by_which_numbers_it_shards() -> None:
    found = choose_parallel(job(SEVEN_B, ON_GPU), Workers(num_workers=4), machines(2, 512, 80, 80))
    assert "100.7 GiB of GPU memory are needed by each of 4 workers" in found.reason
    assert "0 of 4 GPUs have so much (m0: 512.0 GiB and GPUs 2 × 80.0 GiB, m1: " in found.reason


@given(
    st.lists(st.integers(0, 200), max_size=4),
    st.integers(1, 6),
    st.integers(0, 600),
    st.booleans(),
)
def test_what_auto_chooses_is_refused_only_where_no_setting_would_fit(
    sizes: list[int], num_workers: int, memory: int, use_gpu: bool
) -> None:
    """Of `replicate` and `shard`."""
    there, workers = machines(2, memory, *sizes), Workers(num_workers=num_workers)
    asked = job(SEVEN_B, f"cluster.use_gpu={str(use_gpu).lower()}")
    chosen = choose_parallel(asked, workers, there).num_shards
    if capacity_problems(asked, chosen, workers, there):
        assert capacity_problems(asked, 1, workers, there)
        assert capacity_problems(asked, None, workers, there)


# ------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("num_workers", "there", "fits"),
    [
        (2, machines(1, 8), True),
        (2, machines(1, 8 - 1 / 1024), False),
        (2, machines(2, 4), True),
        (1, machines(3, 2), False),
        (100, machines(1, 0), True),
        (100, [*machines(1, 8), *machines(1, 0)], True),
        (100, [], True),
    ],
)
def test_only_what_cannot_be_there_is_refused_with_both_values(
    num_workers: int, there: list[Machine], *, fits: bool
) -> None:
    problems = memory_problems(NEEDS, num_workers, there)
    assert len(problems) == (0 if fits else 1)
    if not fits:
        assert f"{3 * num_workers + 2}.0 GiB of memory are needed" in problems[0]
        assert "as the test says" in problems[0]
        assert "m0: " in problems[0]
        assert ("; lower the number of workers" in problems[0]) is (num_workers > 1)


def test_without_a_feed_of_its_own_only_the_workers_count() -> None:
    assert memory_problems(NEEDS, 2, machines(1, 6), with_feed=False) == []
    assert memory_problems(NEEDS, 2, machines(1, 5.9), with_feed=False)


@pytest.mark.parametrize(
    ("num_workers", "there", "fits"),
    [
        (2, machines(1, 1, 10, 10), True),
        (2, machines(1, 1, 10, 9), False),
        (1, machines(1, 1, 10, 9), True),  # it may get the one that is large enough
        (2, machines(1, 1, 10, 0), True),
        (3, machines(1, 1, 10, 10), True),  # GPUs are missing, which is another sentence
        (2, machines(1, 1), True),
    ],
)
def test_a_gpu_that_cannot_hold_a_worker_is_refused_with_both_values(
    num_workers: int, there: list[Machine], *, fits: bool
) -> None:
    problems = gpu_problems(NEEDS, num_workers, there)
    assert len(problems) == (0 if fits else 1)
    if not fits:
        assert "10.0 GiB of GPU memory are needed by each of 2 workers (as it says, too)" in problems[0]
        assert "1 of 2 GPUs have so much (m0: 1.0 GiB and GPUs 1 × 10.0 GiB, 1 × 9.0 GiB)" in problems[0]


def test_a_refusal_names_the_fewest_workers_that_would_do() -> None:
    small = job(SEVEN_B, ON_GPU, "train.parallel=replicate")
    (problem,) = capacity_problems(small, 1, Workers(num_workers=2), machines(1, 512, 40, 40))
    assert "with train.parallel=shard 3 workers fit, of 37.2 GiB of a GPU each" in problem
    assert "activations grow with train.micro_batch_size=4: lower it" in problem
    (none,) = capacity_problems(small, 1, Workers(num_workers=2), machines(1, 512, 1, 1))
    assert "workers fit" not in none, "the gathered blocks alone are larger"
    assert "no number of workers has room on these machines as it is" in none


def test_a_refusal_names_the_workers_that_have_room_as_it_is() -> None:
    replicas = job(SEVEN_B, "train.parallel=replicate", NO_POINTS)
    of_one = needs_of(replicas, 1, 1)
    room = (2 * of_one.worker_bytes + of_one.feed_bytes) / GIB + 1
    (problem,) = capacity_problems(replicas, 1, Workers(num_workers=4), machines(1, room))
    assert "; 2 workers would fit as it is" in problem
    assert capacity_problems(replicas, 1, Workers(num_workers=2), machines(1, room)) == []
    of_several = Workers(num_workers=4, world_size=8, with_feed=False)
    (problem,) = capacity_problems(replicas, 1, of_several, machines(1, 16))
    assert "has room" not in problem, "the others' machines are not known"
    assert "would fit" not in problem
    (problem,) = capacity_problems(replicas, 1, Workers(num_workers=1), machines(1, 16))
    assert "needed for 1 worker and the feed" in problem
    assert "lower the number of workers" not in problem


def test_shards_that_fit_without_memory_points_alone_are_named_so() -> None:
    (problem,) = capacity_problems(job(SEVEN_B), 1, Workers(num_workers=4), machines(4, 64))
    assert (
        "with train.parallel=shard and resume.memory_every_steps=null 3 workers fit, of 63.0 GiB each"
        in problem
    )


def test_the_fewest_workers_are_indeed_the_fewest() -> None:
    there, changed = machines(1, 512, 40, 40), job(SEVEN_B, ON_GPU)
    assert needs_of(changed, None, 3).gpu_bytes <= 40 * GIB < needs_of(changed, None, 2).gpu_bytes
    assert capacity_problems(changed, None, Workers(num_workers=2), there)


def test_where_replicas_do_not_fit_the_workers_that_are_there_may_do_with_a_shard_each() -> None:
    there, workers = machines(8, 64), Workers(num_workers=8)
    replicas = job(SEVEN_B, "train.parallel={shard: 2, replicate: 4}", NO_POINTS)
    fewest = next(n for n in range(2, 9) if needs_of(replicas, None, n).worker_bytes <= 64 * GIB)
    assert fewest < 8
    (problem,) = capacity_problems(replicas, 2, workers, there)
    assert f"with train.parallel=shard {fewest} workers fit" in problem
    assert capacity_problems(replicas, None, workers, there) == []


def test_a_sharded_job_that_does_not_fit_hears_what_else_would_help() -> None:
    (problem,) = capacity_problems(job(SEVEN_B), None, Workers(num_workers=2), machines(1, 16))
    assert "/ 2 shards" in problem
    assert "train.precision=bf16 halves what gathered blocks take" in problem
    assert "resume.memory_every_steps=null" in problem
    assert "train.activation_checkpointing=blocks" in problem
    invariant = job(SEVEN_B, ON_GPU, "train.numerics=invariant")
    (problem,) = capacity_problems(invariant, 1, Workers(num_workers=2), machines(1, 512, 40, 40))
    assert "train.parallel=shard and train.numerics=fast 3 workers fit" in problem


def test_many_machines_are_named_by_the_first_ones() -> None:
    assert machines_text(machines(10_000, 1)).endswith("m3: 1.0 GiB, 9,996 more")
    assert machines_text(machines(1, 0, 0)) == "m0: memory not known and GPUs 1 × not known"


# ------------------------------------------------------------------------------ what a plan says
def test_a_plan_refuses_by_the_machines_it_knows_and_says_by_which() -> None:
    known = KnownMachines(machines=tuple(machines(1, 64, 40)), source="the machines that attempt 3 found")
    notes, problems = memory_plan(job(SEVEN_B, "cluster.num_workers=2", ON_GPU, NO_POINTS), known)
    assert "judged by the machines that attempt 3 found: m0: 64.0 GiB and GPUs 1 × 40.0 GiB" in notes
    assert any(note.startswith("train.parallel=auto is shard: 100.7 GiB of GPU") for note in notes)
    problem, _ = problems
    assert problem.endswith("(judged by the machines that attempt 3 found)")


def test_a_plan_that_knows_no_machine_refuses_nothing_and_says_so() -> None:
    notes, problems = memory_plan(job(SEVEN_B), KnownMachines())
    assert problems == []
    assert (
        "the machines' memory is not known here, nothing is refused by it: the start looks at them" in notes
    )
    known = KnownMachines(machines=tuple(machines(1, 256)), source="this machine")
    notes, problems = memory_plan(job(SEVEN_B, ON_GPU), known)
    assert problems == []
    assert "judged by this machine: m0: 256.0 GiB; the memory of GPUs is not known here" in notes


@pytest.mark.parametrize("model", ["model={factory: 'a:b'}", "model={config: {model_type: deepseek_v3}}"])
def test_a_plan_says_that_nobody_knows_how_large_the_model_is(model: str) -> None:
    known = KnownMachines(machines=tuple(machines(1, 64)), source="here")
    notes, problems = memory_plan(job(model), known)
    assert problems == []
    assert notes[0].startswith("the size of the model is not known before it is built")
    (of_auto,) = [note for note in notes if note.startswith("train.parallel=auto")]
    assert "is replicate: the size of the model is not known" in of_auto
    assert "set train.parallel=shard" in of_auto
    notes, _ = memory_plan(job(model, "train.parallel=shard"), known)
    assert notes[0].startswith("the size of the model is not known before it is built")


@pytest.mark.parametrize(
    ("shards", "said"), [("{shard: 2, replicate: 4}", False), ("{shard: 2, replicate: 2}", True)]
)
def test_a_plan_says_how_often_the_state_is_held_where_that_is_not_what_was_asked_for(
    shards: str, *, said: bool
) -> None:
    notes, _ = memory_plan(job(SEVEN_B, f"train.parallel={shards}", "cluster.num_workers=8"), KnownMachines())
    text = "which is for 4 workers; of the 8 of cluster.num_workers: 4 times the state in 2 parts"
    assert any(text in note for note in notes) == said
    notes, _ = memory_plan(job(SEVEN_B, "train.parallel=shard", "cluster.num_workers=8"), KnownMachines())
    assert not any("asks for" in note for note in notes)


def test_a_plan_warns_of_so_few_workers_left_that_none_could_hold_its_part() -> None:
    known = KnownMachines(machines=tuple(machines(8, 64)), source="here")
    asked = job(SEVEN_B, "train.parallel=shard", "cluster.num_workers=8", NO_POINTS)
    notes, problems = memory_plan(asked, known)
    assert problems == []
    (note,) = [note for note in notes if note.startswith("warning: if only")]
    few = next(n for n in range(7, 0, -1) if needs_of(asked, None, n).worker_bytes > 64 * GIB)
    assert 1 <= few < 7
    assert f"if only {few} of 8 workers are left" in note
    assert f"cluster.num_workers=[{few + 1}, 8]" in note
    waits = job(SEVEN_B, "train.parallel=shard", f"cluster.num_workers=[{few + 1}, 8]", NO_POINTS)
    for other, there in ((waits, known), (asked, KnownMachines())):
        notes, _ = memory_plan(other, there)
        assert not any(note.startswith("warning: if only") for note in notes)


@pytest.mark.parametrize(("number", "said"), [(1, True), (2, False)])
def test_a_plan_says_that_on_one_machine_memory_points_do_not_outlive_it(number: int, *, said: bool) -> None:
    known = KnownMachines(machines=tuple(machines(number, 512)), source="here")
    changes = {"train.parallel": "shard", "cluster.num_workers": "2"}
    notes, _ = memory_plan(job(SEVEN_B, *(f"{k}={v}" for k, v in changes.items())), known)
    assert any("do not outlive" in note for note in notes) == said
    (on_nodes, _), text = (
        memory_plan(
            job(
                SEVEN_B,
                "resume.node_folder=/nvme/points",
                *(f"{k}={v}" for k, v in changes.items()),
            ),
            known,
        ),
        "whose disk has the only copy of each part: resume points do not outlive it",
    )
    assert any(text in note for note in on_nodes) == said
    assert not any("; resume points do" in note and "not outlive" in note for note in on_nodes)
    for key, value in (
        ("resume.memory_every_steps", "null"),
        ("cluster.num_workers", "1"),
        ("train.parallel", "replicate"),
    ):
        other = {**changes, key: value}
        notes, _ = memory_plan(job(SEVEN_B, *(f"{k}={v}" for k, v in other.items())), known)
        assert not any("do not outlive" in note for note in notes)


@pytest.mark.parametrize(
    ("setting", "before", "now", "said"),
    [
        ("auto", None, 1, ""),
        ("auto", 1, 1, ""),
        ("auto", 1, None, "is shard now, it was replicate in attempt 3"),
        ("auto", None, None, ""),
        ("auto", 2, 1, "is replicate now, it was {shard: 2} in attempt 3"),
        ("shard", 1, None, ""),  # the difference of the configuration says it
    ],
)
def test_a_resume_says_when_auto_chooses_otherwise_than_before(
    setting: str, before: int | None, now: int | None, said: str
) -> None:
    earlier = (3, ParallelChoice(num_shards=before, reason=""))
    found = choice_note(job(f"train.parallel={setting}"), earlier if said or before == now else None, now)
    assert bool(found) == bool(said)
    assert said in found
    if said:
        assert "any layout continues a resume point of any other" in found
