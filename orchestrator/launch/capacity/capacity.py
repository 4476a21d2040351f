"""Checks whether the memory of machines and GPUs is enough for a job, and chooses how its state is divided.

Pure: machines are passed in as values. Needs are lower bounds, so a job that is refused cannot work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from orchestrator.history.sentences import count
from orchestrator.launch.capacity.resource_estimate import (
    ResourceEstimate,
    gib,
    memory_notes,
    model_size,
    needs_of,
)
from orchestrator.planning.state.memory import (
    Machine,
    ParallelChoice,
    choice_text,
    layout_text,
    memory_every_steps,
)
from orchestrator.planning.state.state_layout import layout_of

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

_MOST_WORKERS = 4096  # tried in the search for a number that fits
_SHOWN = 4  # machines listed by name
_SIZE_NOT_KNOWN = (
    "the size of the model is not known before it is built (docs/howto/shards.md says when): what a worker "
    "holds of it is not counted, and refuses nothing"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownMachines:
    """The machines that a plan assumes; none: not known.

    `source` is where they are known from. `before` is the choice of an earlier attempt, with its number.
    """

    machines: tuple[Machine, ...] = ()
    source: str = ""
    before: tuple[int, ParallelChoice] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Workers:
    """The workers that need memory.

    `num_workers` workers run on the given machines, of `world_size` in all (0: all of them), with or without
    the feed beside them.
    """

    num_workers: int
    world_size: int = 0
    with_feed: bool = True


def choose_parallel(
    job: JobConfig, workers: Workers, machines: Sequence[Machine], cluster: str = ""
) -> ParallelChoice:
    """The choice for `train.parallel` on these machines.

    `auto`: replicate, unless memory or some GPU cannot hold the whole state for each worker; then a shard for
    each worker. If neither fits, the one that needs less. A model of unknown size is never cut, nor one that
    cannot be.
    """
    num_shards: int | None = 1
    size = model_size(job.model.config or {})
    if job.train.parallel != "auto":
        num_shards, reason = job.train.num_shards, "train.parallel says so"
    elif job.train.numerics == "invariant":
        reason = "numerics: invariant needs the whole state on each worker"
    elif not size.parameters:
        reason = (
            "the size of the model is not known before it is built; set train.parallel=shard if one worker "
            "cannot hold its state"
        )
    elif size.scalar:
        reason = f"the model's parameter {size.scalar} has the shape (), and no rows that could be divided"
    elif not (problems := _problems(job, 1, workers, machines, every_gpu=True)):
        reason = (
            "no machine that is known is too small for the whole state"
            if machines
            else "which machines there are is not known here; the start looks, and decides"
        )
    else:
        num_shards, reason = _smaller(job, workers, machines), problems[0].partition("; ")[0]
        reason += ", and a shard for each worker does not fit better" if num_shards == 1 else ""
    return ParallelChoice(
        num_shards=num_shards, reason=reason, machines=tuple(machines), cluster=cluster, size=size
    )


def _smaller(job: JobConfig, workers: Workers, machines: Sequence[Machine]) -> int | None:
    """Chooses shards if they fit, else the whole state if it fits on the larger GPUs, else the one that needs
    less.

    Copies for memory points make shards need more machine memory than the whole state if there are few
    workers.
    """
    for fitting in (None, 1):
        if not _problems(job, fitting, workers, machines):
            return fitting
    whole, cut = (_needs(job, n, workers, machines) for n in (1, None))
    if gpu_problems(whole, workers.num_workers, machines, every_gpu=True):
        return None
    return None if cut.worker_bytes < whole.worker_bytes else 1


def without_memory_points(job: JobConfig) -> JobConfig:
    """The job without memory points.

    It is for torchrun, whose group makes none, because all its ranks are restarted when one is lost.
    """
    return job.model_copy(update={"resume": job.resume.model_copy(update={"memory_every_steps": None})})


def capacity_problems(
    job: JobConfig, num_shards: int | None, workers: Workers, machines: Sequence[Machine]
) -> list[str]:
    """Why the job, its state cut into `num_shards`, does not fit into the memory of these machines.

    Each problem has what is needed, what is available, and a remedy. Empty if it fits, or if the memory is
    not known.
    """
    found = _problems(job, num_shards, workers, machines)
    ways = _ways(job, num_shards, workers, machines) if found else []
    return [f"{problem}; {'; '.join(ways)}" if ways else problem for problem in found]


def memory_problems(
    needs: ResourceEstimate, num_workers: int, machines: Sequence[Machine], with_feed: bool = True
) -> list[str]:
    """Why `num_workers` workers (and the feed) do not fit into the memory of these machines.

    Empty if they do, or if a machine's memory is not known.
    """
    if not machines or not all(machine.memory_bytes for machine in machines):
        return []
    sizes = [machine.memory_bytes for machine in machines]
    needed = num_workers * needs.worker_bytes + (needs.feed_bytes if with_feed else 0)
    if needed <= sum(sizes) and needs.worker_bytes <= max(sizes):
        return []
    return [
        f"{gib(needed)} of memory are needed for {count(num_workers, 'worker')}"
        f"{' and the feed' if with_feed else ''} ({needs.text}), {gib(sum(sizes))} are there "
        f"({machines_text(machines, gpus=False)}), and no worker may be larger than its machine; "
        f"{'lower' if num_workers == 1 else 'lower the number of workers,'} data.num_tokenizers or "
        "data.replay_bytes, take a smaller model, or add memory"
    ]


def gpu_problems(
    needs: ResourceEstimate, num_workers: int, machines: Sequence[Machine], every_gpu: bool = False
) -> list[str]:
    """Why too few of these GPUs have the memory for `num_workers` workers; empty if enough do, or if one is
    not known.

    `every_gpu`: not even one may be too small, because any of them may be assigned.
    """
    sizes = [size for machine in machines for size in machine.gpu_bytes]
    large = sum(size >= needs.gpu_bytes for size in sizes)
    if not all(sizes) or large == len(sizes) or (large >= num_workers and not every_gpu):
        return []
    return [
        f"{gib(needs.gpu_bytes)} of GPU memory are needed by each of {num_workers} workers "
        f"({needs.gpu_text}), and {large} of {len(sizes)} GPUs have so much ({machines_text(machines)}); "
        "take GPUs with more memory, or a smaller model"
    ]


def machines_text(machines: Sequence[Machine], gpus: bool = True) -> str:
    """Machines with their memory, the first ones by name."""
    texts = []
    for machine in machines[:_SHOWN]:
        text = gib(machine.memory_bytes) if machine.memory_bytes else "memory not known"
        runs = [(size, len([*same])) for size, same in groupby(machine.gpu_bytes)] if gpus else []
        of_gpus = (f"{num} × {gib(size) if size else 'not known'}" for size, num in runs)
        texts.append(f"{machine.host}: {text}" + (f" and GPUs {', '.join(of_gpus)}" if runs else ""))
    more = len(machines) - _SHOWN
    return ", ".join([*texts, *([f"{more:,} more"] if more > 0 else [])])


def memory_plan(job: JobConfig, known: KnownMachines) -> tuple[list[str], list[str]]:
    """A plan's notes on the workers' memory, and its reasons to refuse. Without known machines nothing is
    refused.
    """
    workers = Workers(num_workers=job.cluster.start_workers)
    choice = choose_parallel(job, workers, known.machines)
    one_machine = _is_one(workers, known.machines)
    said = memory_notes(job, choice.num_shards, one_machine)
    notes = [*(said or [_SIZE_NOT_KNOWN]), _known_text(job, known)]
    if job.train.parallel == "auto":
        notes.append(f"train.parallel=auto is {choice_text(choice.num_shards)}: {choice.reason}")
    notes += [
        note for note in (choice_note(job, known.before, choice.num_shards), _replicas_note(job)) if note
    ]
    notes += _too_few_note(job, choice.num_shards, known.machines)
    every = memory_every_steps(job.resume.memory_every_steps, sharded=choice.num_shards != 1)
    if every is not None and job.cluster.max_workers > 1 and one_machine:
        notes.append(
            "all workers are on one machine: a memory point, and the neighbour's copy of it, do not outlive "
            "that machine" + ("" if job.resume.node_folder else "; resume points do")
        )
    if job.resume.node_folder and one_machine:
        notes.append(
            "resume.node_folder: all workers are on one machine, whose disk has the only copy of each part: "
            "resume points do not outlive it"
        )
    problems = capacity_problems(job, choice.num_shards, workers, known.machines)
    return notes, [f"{problem} (judged by {known.source})" for problem in problems]


def choice_note(job: JobConfig, before: tuple[int, ParallelChoice] | None, now: int | None) -> str:
    """The note if `auto` chooses another number of shards than an earlier attempt; else empty."""
    if job.train.parallel != "auto" or before is None or before[1].num_shards == now:
        return ""
    return (
        f"note: train.parallel=auto is {choice_text(now)} now, it was {choice_text(before[1].num_shards)} in "
        f"attempt {before[0]}: any layout continues a resume point of any other, only the last bits of later "
        "steps may differ; set train.parallel to keep one"
    )


def _replicas_note(job: JobConfig) -> str:
    """The note if `{shard: n, replicate: m}` is for another number of workers than the target."""
    asked, aim = job.train.parallel, job.cluster.max_workers
    if isinstance(asked, str) or asked.shard * asked.replicate == aim:
        return ""
    return (
        f"note: train.parallel asks for {asked.replicate} times the state in {asked.shard} parts, which is "
        f"for {asked.shard * asked.replicate} workers; of the {aim} of cluster.num_workers: "
        f"{layout_text(layout_of(aim, asked.shard))}"
    )


def _too_few_note(job: JobConfig, num_shards: int | None, machines: Sequence[Machine]) -> list[str]:
    """The warning that from some number of workers down no machine can hold a worker's part.

    If the group became so small, its workers would be killed for lack of memory, one after the other.
    """
    cluster, one_machine = job.cluster, len(machines) == 1

    def fit(num: int) -> bool:
        return _is_room_for_one(needs_of(job, num_shards, num, one_machine), machines)

    few = next((num for num in _fewer(cluster.min_workers, cluster.start_workers) if not fit(num)), None)
    if few is None or not fit(cluster.start_workers):  # then the job is refused
        return []
    needs = needs_of(job, num_shards, few, one_machine)
    each = f"{gib(needs.worker_bytes)} of memory" + (
        f" and {gib(needs.gpu_bytes)} of a GPU" if needs.gpu_bytes else ""
    )
    return [
        f"warning: if only {few} of {cluster.start_workers} workers are left, each needs {each}, which no "
        f"machine has, and they are killed; cluster.num_workers=[{few + 1}, {cluster.max_workers}] makes "
        "them wait for others instead"
    ]


def _fewer(least: int, start: int) -> Iterator[int]:
    """The numbers of workers below `start`, the largest first.

    Of very many only those near both ends, because a worker's needs differ little between them.
    """
    near = range(start - 1, max(least, start - _MOST_WORKERS) - 1, -1)
    yield from near
    yield from range(min(near.stop, _MOST_WORKERS), least - 1, -1)


def _known_text(job: JobConfig, known: KnownMachines) -> str:
    """The machines that a plan assumes, as text."""
    if not known.machines:
        return "the machines' memory is not known here, nothing is refused by it: the start looks at them"
    text = f"judged by {known.source}: {machines_text(known.machines, job.cluster.use_gpu)}"
    sizes = [size for machine in known.machines for size in machine.gpu_bytes]
    if job.cluster.use_gpu and not (sizes and all(sizes)):
        text += "; the memory of GPUs is not known here"
    return text


def _needs(
    job: JobConfig, num_shards: int | None, workers: Workers, machines: Sequence[Machine]
) -> ResourceEstimate:
    world_size = workers.world_size or workers.num_workers
    return needs_of(job, num_shards, world_size, one_machine=_is_one(workers, machines))


def _is_one(workers: Workers, machines: Sequence[Machine]) -> bool:
    """Whether all workers are on one machine, as far as is known."""
    return len(machines) == 1 and workers.world_size in (0, workers.num_workers)


def _problems(
    job: JobConfig,
    num_shards: int | None,
    workers: Workers,
    machines: Sequence[Machine],
    every_gpu: bool = False,
) -> list[str]:
    needs = _needs(job, num_shards, workers, machines)
    return [
        *gpu_problems(needs, workers.num_workers, machines, every_gpu),
        *memory_problems(needs, workers.num_workers, machines, workers.with_feed),
    ]


def _ways(job: JobConfig, num_shards: int | None, workers: Workers, machines: Sequence[Machine]) -> list[str]:
    """Possible remedies, besides those that each problem names."""
    train, ways = job.train, _enough_workers(job, num_shards, workers, machines)
    if workers.world_size in (0, workers.num_workers):  # else some machines are not known here
        ways += _fewer_workers(job, num_shards, workers, machines)
        ways = ways or ["no number of workers has room on these machines as it is"]
    if num_shards != 1 and train.precision == "float32":
        ways.append("train.precision=bf16 halves what gathered blocks take")
    if num_shards != 1 and memory_every_steps(job.resume.memory_every_steps, sharded=True) is not None:
        ways.append("resume.memory_every_steps=null needs no memory for memory points")
    ways.append(f"activations grow with train.micro_batch_size={train.micro_batch_size}: lower it")
    if train.activation_checkpointing == "none":
        ways.append("train.activation_checkpointing=blocks keeps fewer of them")
    return ways


def _enough_workers(
    job: JobConfig, num_shards: int | None, workers: Workers, machines: Sequence[Machine]
) -> list[str]:
    """The fewest workers that fit with a shard each, with memory points or else without; empty if there are
    none.
    """
    first = (workers.world_size or workers.num_workers) + 1 if num_shards is None else 2
    settings = ["train.parallel=shard"]
    settings += ["train.numerics=fast"] if job.train.numerics == "invariant" else []
    for with_points in (True, False):
        found = _fewest(job, first, workers, machines, with_points)
        if found is not None:
            num, needs = found
            settings += [] if with_points else ["resume.memory_every_steps=null"]
            each = f"{gib(needs.gpu_bytes)} of a GPU" if needs.gpu_bytes else gib(needs.worker_bytes)
            return [f"with {' and '.join(settings)} {num} workers fit, of {each} each"]
    return []


def _fewer_workers(
    job: JobConfig, num_shards: int | None, workers: Workers, machines: Sequence[Machine]
) -> list[str]:
    """The most workers below the wanted number that fit; empty if there are none."""
    wanted = min(workers.num_workers, _MOST_WORKERS)
    for num in range(wanted - 1, 0, -1):
        if not _problems(job, num_shards, replace(workers, num_workers=num, world_size=0), machines):
            return [f"{count(num, 'worker')} would fit as it is"]
    return []


def _fewest(
    job: JobConfig, first: int, workers: Workers, machines: Sequence[Machine], with_points: bool
) -> tuple[int, ResourceEstimate] | None:
    """The fewest workers from `first` on that fit, and their needs.

    They are on the same machines; with GPUs, as many GPUs as needed, of the size of the largest.
    """

    def of_one(num: int) -> ResourceEstimate:
        needs = needs_of(job, None, num, one_machine=_is_one(workers, machines))
        points = 0 if with_points else needs.memory_point_bytes
        return replace(needs, worker_bytes=needs.worker_bytes - points)

    counts = range(first, _MOST_WORKERS)
    # with more workers each takes less, and all together take more
    at = bisect_left(counts, True, key=lambda num: _is_room_for_one(of_one(num), machines))
    if at == len(counts):
        return None
    needs = of_one(counts[at])
    here = min(counts[at], workers.num_workers) if needs.gpu_bytes else counts[at]
    return None if memory_problems(needs, here, machines, workers.with_feed) else (counts[at], needs)


def _is_room_for_one(needs: ResourceEstimate, machines: Sequence[Machine]) -> bool:
    gpus = [size for machine in machines for size in machine.gpu_bytes]
    memory = [machine.memory_bytes for machine in machines]
    of_gpu, in_memory = max(gpus, default=0), max(memory, default=0)
    return (not needs.gpu_bytes or needs.gpu_bytes <= of_gpu) and (
        not all(memory) or needs.worker_bytes <= in_memory
    )
