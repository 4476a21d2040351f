"""A rank's part of one attempt: its requirements, its connection to the coordinator, the training loop, and
how it ended.

Each machine's ranks check what their machine must have. Rank 0 checks what all ranks must agree on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.checkpoint.node_local.node_folder import NoCopyTransport, PartsOnNode, expanded, make_node
from orchestrator.checkpoint.points.run_file import folder_on_nodes
from orchestrator.checkpoint.points.store import CommittedFiles, RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.errors import (
    CoordinatorSilentError,
    ElasticError,
    OrchestratorError,
    RefusedError,
    ResourceError,
    code_of,
    text_of,
)
from orchestrator.faults import hook
from orchestrator.history.metrics.loggers import require_loggers
from orchestrator.launch.capacity.capacity import without_memory_points
from orchestrator.launch.member.coordinator_calls import UnansweredError
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.preview import is_damaged_load
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.source_lists import SourceReading
from orchestrator.planning.schedule import Budgets
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.files import Storage
from orchestrator.torchrun.coordinator_process import SocketCalls
from orchestrator.trainer.interfaces.loop_interface import LEFT, Outcome, TrainJob

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec
    from orchestrator.planning.state.memory import ParallelChoice
    from orchestrator.torchrun.store_rendezvous import StoreRendezvous

_GIVE_UP_S = 2.0  # how long an interrupted rank 0 waits for the end to be noted
_ANSWER_S = 30.0  # a live coordinator answers sooner
_STATUS_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStart:
    """What rank 0 publishes: the claimed launch, where its coordinator is, and what the ranks train.

    `key` is hexadecimal.
    """

    launch: str
    port: int
    key: str
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    reading: SourceReading
    num_shards: int | None
    weights_by_name: bool


class Member:
    """One rank in the group of an attempt."""

    def __init__(
        self, rank: int, calls: SocketCalls, name: str, job: JobConfig, start: GroupStart, fault_plan: str
    ) -> None:
        """`calls` are those of the member `name`, connected."""
        self.calls = calls
        self._rank, self._name, self._job = rank, name, job
        self._start, self._fault_plan = start, fault_plan

    @classmethod
    @contextmanager
    def connected(
        cls, rendezvous: StoreRendezvous, job: JobConfig, start: GroupStart, fault_plan: str
    ) -> Iterator[Member]:
        """A rank that is connected to the coordinator; the connection ends with the context.

        Rank 0 is on the machine of MASTER_ADDR. Raises `ElasticError` if the coordinator is not reached.
        """
        # the ranks of the first generation are in the order of the names
        name = f"rank{rendezvous.rank:06d}-{secrets.token_hex(4)}"
        calls = SocketCalls(os.environ["MASTER_ADDR"], start.port, bytes.fromhex(start.key), name)
        calls.connect()
        try:
            yield cls(rendezvous.rank, calls, name, job, start, fault_plan)
        finally:
            calls.close()

    def train(self, spec: DataSpec, storage: Storage) -> Outcome | RunStatus:
        """Trains until the run has ended for this rank. A status: the point is damaged, see
        `is_damaged_load`.

        An error of this rank is reported to the coordinator, and raised. Raises `ElasticError` if the group
        has ended for another reason.
        """
        from orchestrator.data.dataset import eval_specs
        from orchestrator.data.feed.local_feed import InProcessFeed
        from orchestrator.launch.member.eval_feeds import open_parts

        with paused_gc():
            from orchestrator.launch.member.remote_membership import (
                MemberAddress,
                RemoteMembership,
                keep_in_storage,
            )
            from orchestrator.trainer.loop import train

        files = _files(storage, self._job.resume.node_folder)
        membership = RemoteMembership(
            self.calls,
            self._start.launch,
            MemberAddress(actor_id="", node_id=socket.gethostname(), host=_own_host(self.calls)),
            keep_vote=partial(keep_in_storage, storage),
            is_orphaned=lambda: self.calls.has_ended,
            member=self._name,
        )
        feed = InProcessFeed(spec, self._job.data.replay_bytes)
        parts = open_parts(eval_specs(self._job, spec))
        try:
            faults = hook(self._fault_plan)
            sources = {each.number: each.name for each in spec.sources}
            outcome = train(self._task(storage, sources), membership, feed, files, faults, parts)
        except Exception as error:
            with suppress(OrchestratorError):
                membership.failed(error)
                if is_damaged_load(status := self._end()):
                    return status
            raise
        except BaseException as interrupt:
            if self._rank == 0:
                with suppress(UnansweredError):
                    arguments = ("failed", text_of(interrupt), code_of(interrupt))
                    self.calls.call("end", arguments, _GIVE_UP_S)
            raise
        finally:
            feed.close()
        if outcome.reason != LEFT:
            return outcome
        status = self._end()
        if is_damaged_load(status):
            return status
        self.require_ended(status)
        return outcome

    def require_ended(self, status: RunStatus) -> RunStatus:
        """Returns the status of a run that has ended. Raises `ElasticError` if it has failed."""
        if status.ended == "failed":
            raise ElasticError(status.reason, code=status.code)
        return status

    def settle(self, limit_s: float) -> bool | None:
        """Waits until older points are verified and deleted; False if that takes longer than `limit_s`.

        None if the coordinator does not answer.
        """
        try:
            return bool(self.calls.call("settle", (limit_s,), limit_s + _ANSWER_S))
        except UnansweredError:
            return None

    # ---- inside
    def _end(self) -> RunStatus:
        """Returns the last status of a run that has ended, once its end is written as far as possible.

        Raises `CoordinatorSilentError` if the coordinator does not answer.
        """
        seen = (-1, -1)
        while True:
            try:
                status: RunStatus = self.calls.call("status", (seen, _STATUS_S), _ANSWER_S)
            except UnansweredError as error:
                raise CoordinatorSilentError(
                    f"the run has ended, and its coordinator did not report how ({error}); start the same "
                    "command again: it continues from the newest resume point"
                ) from error
            if status.ended is not None:
                return status
            seen = (status.attempt, status.version)

    def _task(self, storage: Storage, sources: Mapping[int, str]) -> TrainJob:
        job = self._job
        return TrainJob(
            model=starting.reading_job(job, RunStore(storage)).model,
            train=job.train,
            eval=job.eval,
            resume=without_memory_points(job).resume,  # all ranks are restarted when one is lost
            seq_len=job.sample_len,
            rows_per_sample=job.data.rows_per_sample,
            document_attention=job.pack.attends_by_document,
            budgets=self._start.budgets,
            config_digest=starting.config_digest(job),
            device="cuda" if job.cluster.use_gpu else "cpu",  # the loop takes the GPU of LOCAL_RANK
            digest_every_steps=job.monitor.digest_every_steps,
            num_shards=self._start.num_shards,
            weights_by_name=self._start.weights_by_name,
            run_uri=storage.root,
            sources=sources,
            document_losses=job.monitor.document_losses or 0,
        )


def _own_host(calls: SocketCalls) -> str:
    """Returns the address under which the other ranks reach this machine.

    That of rank 0's machine is MASTER_ADDR. Another machine's is the one from which it has reached that.
    """
    on_first_machine = os.environ.get("GROUP_RANK", "0") == "0"
    return os.environ["MASTER_ADDR"] if on_first_machine else calls.own_address


def _files(storage: Storage, folder: str | None) -> CommittedFiles:
    if folder is None:
        return CommittedFiles(storage)
    say = logging.getLogger(__name__).warning
    return CommittedFiles(storage, PartsOnNode(folder, folder_on_nodes(storage), "", NoCopyTransport(), say))


# ----------------------------------------------------------------------------------------------- requirements
def require_gpus() -> None:
    """Raises `ResourceError` if this machine has fewer GPUs than ranks."""
    import torch

    needed, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if needed > there:
        raise ResourceError(
            f"cluster.use_gpu=true with {needed} ranks on this machine, but torch sees {there} GPUs; "
            f"start at most {there} ranks here (--nproc-per-node), or set cluster.use_gpu=false",
            code="machine.too_few_gpus",
        )


def require_memory(job: JobConfig) -> ParallelChoice:
    """Returns how the state is divided, if the ranks on this machine have memory for it. Raises
    `ResourceError`.

    Each rank reads the data itself, which is not counted.
    """
    from orchestrator.launch.capacity.capacity import (
        Workers,
        capacity_problems,
        choose_parallel,
        without_memory_points,
    )
    from orchestrator.launch.capacity.placement_check import machines_here, measured, with_known_shape

    # one rank of a machine measures for all of it
    judges = os.environ.get("LOCAL_RANK", "0") == "0"
    job = without_memory_points(measured(job, None, None)[0] if judges else with_known_shape(job))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    world_size = int(os.environ.get("WORLD_SIZE", str(num_ranks)))
    workers = Workers(num_workers=num_ranks, world_size=world_size, with_feed=False)
    here = machines_here(job.cluster.use_gpu)
    choice = choose_parallel(job, workers, here)
    if problems := capacity_problems(job, choice.num_shards, workers, here):
        raise ResourceError("\n".join(problems), code="cluster.too_small")
    return choice


def say_disk(rendezvous: StoreRendezvous, folder: str | None) -> None:
    """Publishes which disk this rank sees, for `require_group`. Every rank calls it."""
    if folder is not None:
        try:
            said = [make_node(expanded(folder), "").id, ""]
        except OrchestratorError as error:
            said = ["", text_of(error)]
        rendezvous.store.set(f"disk/{rendezvous.rank}", json.dumps(said))


def require_group(
    rendezvous: StoreRendezvous, job: JobConfig, store: RunStore, say: Callable[[str], None]
) -> None:
    """Rank 0: raises what refuses the start before the run is read."""
    if lacks := starting.check_writable(store.storage):
        say(f"note: {lacks}")
    _require_one_disk(rendezvous, job.resume.node_folder)
    require_loggers(job.monitor.loggers)


def _require_one_disk(rendezvous: StoreRendezvous, folder: str | None) -> None:
    """Rank 0: raises `RefusedError` if ranks have different node folders, because no rank could reach them
    all.
    """
    if folder is None:
        return
    found = [json.loads(rendezvous.store.get(f"disk/{rank}")) for rank in range(rendezvous.world_size)]
    if wrong := [text for _, text in found if text]:
        raise ResourceError(
            f"resume.node_folder={folder} cannot be used: {'; '.join(dict.fromkeys(wrong))}",
            code="storage.node_folder_unusable",
        )
    if (num_disks := len({node for node, _ in found})) > 1:
        raise RefusedError(
            f"resume.node_folder={folder}: the {rendezvous.world_size} ranks of this group see {num_disks} "
            "disks there, and under torchrun a rank cannot read another machine's disk; start the run with "
            "`orchestrator train` on Ray, on one machine, or without the key",
            code="storage.several_node_disks",
        )
