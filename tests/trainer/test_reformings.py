"""A sharded member that goes through many generations keeps nothing of those that are over."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from orchestrator.trainer.comm.group import GenerationEnded
from orchestrator.trainer.state.sharded_state import ShardedState
from tests.trainer.member import tiny_job
from tests.trainer.sharded import CPU, Trained, alone, formed, on_ranks, trained_in_group, view_of

pytestmark = pytest.mark.xdist_group("forked")


def reform_often(rank: int, store: TCPStore, times: int) -> list[tuple[int, int, int]]:
    """After each generation: groups of it that live, file descriptors, objects of torch.distributed."""
    job = tiny_job(train__numerics="fast", train__max_steps=2)
    state = ShardedState(job.model, job.train, CPU, 2)
    found = []
    for generation in range(1, times + 1):
        with formed(store, view_of(rank, 4, generation)) as group:
            groups = [weakref.ref(each) for each in dist.distributed_c10d._world.pg_map]
            trained_in_group(job, state, group, 1)
            groups += [weakref.ref(each) for each in dist.distributed_c10d._world.pg_map]
        del group
        alive = sum(each() is not None for each in groups)
        gc.collect()
        kept = sum(str(type(each).__module__).startswith("torch.distributed") for each in gc.get_objects())
        found.append((alive, len(os.listdir("/proc/self/fd")), kept))
    return found


@pytest.mark.chaos
def test_nothing_of_a_generation_is_left_when_it_is_over():
    for found in on_ranks(4, reform_often, 8):
        alive = [each[0] for each in found]
        assert alive[1:] == [0] * (len(found) - 1), "torch itself keeps the first group of a process"
        assert [each[1:] for each in found[2:]] == [found[2][1:]] * (len(found) - 2), "nothing grows"


JOB = tiny_job(train__numerics="fast")


def lose_one(rank: int, store: TCPStore, num_shards: int | None) -> tuple[str, Trained] | None:
    """Rank 3 is killed in the backward pass of a step; the others form a group of three."""
    state = ShardedState(JOB.model, JOB.train, CPU, num_shards)
    why = ""
    try:
        with formed(store, view_of(rank, 4)) as group, state.within():
            state.form(group)
            if rank == 3:
                state.model.get_input_embeddings().register_full_backward_hook(
                    lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                )
            trained_in_group(JOB, state, group, 1, form=False)
    except GenerationEnded as ended:
        why = str(ended)
    with formed(store, view_of(rank, 3, 2)) as group:
        return why, trained_in_group(JOB, state, group, 2)


@pytest.mark.parametrize("num_shards", [None, 2])
@pytest.mark.quick("2")
def test_a_lost_rank_ends_the_generation_for_all_others_who_train_on_without_it(num_shards):
    expected = alone(JOB, 2)
    for why, found in on_ranks(4, lose_one, num_shards, killed={3}):
        assert why.startswith("gathering weights, or summing the gradient")
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
