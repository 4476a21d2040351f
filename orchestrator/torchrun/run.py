"""A run under plain `torchrun`, without Ray: runs the stages as `run` does, for a fixed group.

The loop, the points and the journal are those of every run, so a run may alternate between Ray and torchrun.
The first failure ends the group, and the same command continues.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.rank_files import CommittedFiles, NoCopies, PartsOnNode
from orchestrator.checkpoint.points.run_file import folder_on_nodes
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.cluster.machine import process_state
from orchestrator.config.loading import load_config
from orchestrator.config.redaction import command_line
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.trained_code import code_changes
from orchestrator.coordinator.machine.outcome import end_text
from orchestrator.elastic.supervision.stall_detector import StallWatch
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.faults import hook
from orchestrator.history import sentences
from orchestrator.json_form import decode, encode
from orchestrator.launch.on_ray.exports import exporting
from orchestrator.launch.process import launch_report, stop_signals
from orchestrator.launch.process.dashboard_beside import dashboard_beside
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.process.safe_output import Screen, let_go, output_never_waits, show_faults_as_data
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.preview import plan_older_point
from orchestrator.paused_gc import paused_gc
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.resume.source_lists import Reading
from orchestrator.planning.schedule import Budgets
from orchestrator.records.points import Damage, DamagedPointError, damaged_point
from orchestrator.records.run_status import GroupMember, Held, RunStatus, Stall
from orchestrator.storage.files import Storage
from orchestrator.torchrun.recorder import RankZeroRecorder
from orchestrator.torchrun.requirements import require_gpus, require_group, require_memory, say_disk
from orchestrator.trainer.dry_run.model_dry_run import require_model

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec
    from orchestrator.planning.state.memory import ParallelChoice
    from orchestrator.torchrun.store_rendezvous import StoreRendezvous
    from orchestrator.trainer.interfaces.job import Outcome

# torchrun relays SIGTERM and SIGINT to its ranks; a system that ends a whole job also sends them to the ranks
_RELAYED_S = 10.0
_USAGE = "usage: torchrun --nproc-per-node N jobs/torchrun_train.py CONFIG [key=value ...]"


def train(config: str | Path, overrides: Sequence[str] = (), *, fault_plan: str = "") -> Outcome | None:
    """Runs this rank's part of the run that torchrun started.

    It begins the run, or continues it at exactly the next unread token. Returns None if the stop was reached
    before.

    `cluster.num_workers` has no effect here: the world is torchrun's. With `cluster.use_gpu` a rank uses the
    GPU of its LOCAL_RANK. SIGTERM and Ctrl-C save and stop. Raises what refuses the start (on other ranks
    than 0: `ElasticError` with its text), and what ended the group. `fault_plan` is for tests.
    """
    job = load_config(config, overrides)
    storage = starting.run_storage(job)
    # the tokenizer's own threads would compete with the ranks for the cores
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if job.cluster.use_gpu:
        require_gpus()
    parallel = require_memory(job)
    if "RANK" not in os.environ:
        raise ConfigError(
            f"RANK is not set, so torchrun did not start this process; {_USAGE}", code="command.not_torchrun"
        )
    from orchestrator.torchrun.store_rendezvous import meet

    rendezvous = meet()
    _tell_place(rendezvous)
    say_disk(rendezvous, job.resume.node_folder)
    if rendezvous.rank != 0:
        return _follow(rendezvous, job, storage, fault_plan)
    with Progress.shown(job.monitor.progress_s) as progress:
        command = _command(config, overrides)
        return _lead(rendezvous, job, storage, fault_plan, progress, command, parallel)


def main(arguments: Sequence[str], *, fault_plan: str = "") -> None:
    """The entry point of a rank; ends the process with an exit code.

    0: done or stopped; 1: failure; 2: bad configuration or refusal; 130: interrupted. torchrun itself ends
    with 1 whenever a rank did not end with 0.
    """
    code = 0
    show_faults_as_data()
    try:
        if not arguments:
            _say(_USAGE)
            code = 2
        else:
            with output_never_waits():
                train(arguments[0], arguments[1:], fault_plan=fault_plan)
    except OrchestratorError as error:
        _say(f"rank {os.environ.get('RANK', '?')}: {error}")
        code = error.exit_code
    except KeyboardInterrupt as last:
        interrupt = stop_signals.told(last)
        _say(str(interrupt) or "interrupted")
        code = getattr(interrupt, "exit_code", 130)
    let_go(sys.stderr)
    if code:
        # at once, even if a thread is still busy
        os._exit(code)


def _command(config: str | Path, overrides: Sequence[str]) -> str:
    """Returns the shell command that continues the run.

    It is complete as far as torchrun passes its own arguments to its ranks.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    nodes = ["--nnodes", str(num_nodes)] if num_nodes > 1 else []
    return command_line(
        ["torchrun", *nodes, "--nproc-per-node", str(per_node), sys.argv[0]], config, overrides
    )


def _lead(
    rendezvous: StoreRendezvous,
    job: JobConfig,
    storage: Storage,
    fault_plan: str,
    progress: Progress,
    command: str,
    parallel: ParallelChoice,
) -> Outcome | None:
    """Rank 0: decides whether and how the run continues, claims it, and records it.

    If the ranks find the point damaged, it claims again and continues an older one.
    """
    store, group = RunStore(storage), rendezvous
    with rendezvous.reporting_failure("decision"):
        require_group(rendezvous, job, store, progress.say)
        spec, plan, watched = _look(store, job, storage, progress.say)
        if preview.reached(plan):
            rendezvous.publish("decision", None)
            progress.say(f"done: {preview.stop_is_reached(job, plan)}")
            return None
    for number in itertools.count(1):
        found = _attempt(group, job, spec, plan, watched, fault_plan, progress, command, parallel)
        if not isinstance(found, _NotLoaded):
            return found
        group = rendezvous.round(number)
        _tell_place(group)
        with group.reporting_failure("decision"):
            if found.stopping:
                raise damaged_point(found.damages)
            watched = found.attempt
            plan = plan_older_point(store, job, spec, found.damages, plan.damages, watched, progress.say)
    raise AssertionError("the loop has no end of its own")


@dataclass(frozen=True, kw_only=True, slots=True)
class _NotLoaded:
    """The ranks found the point of an attempt damaged. `stopping`: a stop was requested meanwhile."""

    attempt: int
    damages: tuple[Damage, ...]
    stopping: bool


def _attempt(
    rendezvous: StoreRendezvous,
    job: JobConfig,
    spec: DataSpec,
    plan: ResumePlan,
    watched: int,
    fault_plan: str,
    progress: Progress,
    command: str,
    parallel: ParallelChoice,
) -> Outcome | _NotLoaded:
    """Runs rank 0's part of one attempt, which it claims after `watched`."""
    storage = starting.run_storage(job)
    store = RunStore(storage)
    with (
        rendezvous.reporting_failure("decision"),
        attempt_claim.claimed(
            store,
            job,
            spec,
            watched,
            fault_plan,
            command=command,
            drawn=plan.drawn,
            parallel=parallel,
            known=plan.damages,
            say=progress.say,
        ) as (attempt, begun),
    ):
        recorder = RankZeroRecorder(store, attempt, job, progress.say, fault_plan)
    total = None if begun.remaining_steps is None else begun.step_after + begun.remaining_steps
    progress.begin(storage, attempt.number, rendezvous.world_size, total)
    with _ending(recorder), rendezvous.reporting_failure("decision"):
        spec = starting.freeze(job, storage, spec, attempt)
        spans = [encode(span) for span in attempt.encoders]
        reading = encode(starting.reading_of(attempt))
        rendezvous.publish("decision", [encode(attempt.budgets), spans, reading, parallel.num_shards])
    for note in spec.notes:
        progress.say(f"note: {note}")
    launch_report.announce(progress.say, job, attempt, begun)
    recorder.members = _members(rendezvous)
    with (
        dashboard_beside(job, storage.root, progress),
        exporting(store, attempt.number, job.resume.export_every, progress.say),
        _shown(progress, recorder, job.monitor.progress_s),
    ):
        outcome = _train(
            rendezvous,
            job,
            spec,
            storage,
            attempt.budgets,
            recorder,
            progress.say,
            fault_plan,
            parallel.num_shards,
        )
    if isinstance(outcome, _NotLoaded):
        return replace(outcome, attempt=attempt.number)
    _say_end(job, attempt.budgets, outcome, recorder.status(), progress.say)
    return outcome


def _tell_place(rendezvous: StoreRendezvous) -> None:
    """Publishes where this rank runs, for `_members`."""
    rendezvous.store.set(f"place/{rendezvous.rank}", json.dumps([socket.gethostname(), os.getpid()]))


def _members(rendezvous: StoreRendezvous) -> list[GroupMember]:
    """Returns where each rank runs, as published."""
    places = [json.loads(rendezvous.store.get(f"place/{rank}")) for rank in range(rendezvous.world_size)]
    return [GroupMember(rank=rank, host=host, pid=pid) for rank, (host, pid) in enumerate(places)]


def _say_end(
    job: JobConfig, budgets: Budgets, outcome: Outcome, status: RunStatus, say: Callable[[str], None]
) -> None:
    why = ""
    if outcome.reason == "done":
        why = f": {launch_report.why_done(job, budgets, status.last_step)}"
    step, trained = outcome.key.step if outcome.key else 0, status.last_step is not None
    say(f"{end_text(outcome.reason, step, trained=trained)}{why}")
    say(f"newest resume point: {job.run.run_uri}/points/{status.newest_point}")


def _follow(rendezvous: StoreRendezvous, job: JobConfig, storage: Storage, fault_plan: str) -> Outcome | None:
    """Runs the other ranks: they receive budgets, encoders, lists and shards; the data are frozen by then."""
    group = rendezvous
    for number in itertools.count(1):
        decision = group.receive("decision")
        if decision is None:
            return None
        budgets, encoders, reading, num_shards = decision
        spec = starting.read_frozen_data(job, storage, decode(Reading, reading))
        spec = spec.made_by(tuple(decode(EncoderSpan, span) for span in encoders))
        outcome = _train(
            group,
            job,
            spec,
            storage,
            decode(Budgets, budgets),
            None,
            lambda text: None,
            fault_plan,
            num_shards,
        )
        if not isinstance(outcome, _NotLoaded):
            return outcome
        group = rendezvous.round(number)
        _tell_place(group)
    raise AssertionError("the loop has no end of its own")


def _look(
    store: RunStore, job: JobConfig, storage: Storage, say: Callable[[str], None]
) -> tuple[DataSpec, ResumePlan, int]:
    """Returns the data, the plan of a start, and the newest attempt, which no process works on any more.

    Raises `RefusedError`, also if the run is busy.
    """
    with attempt_claim.watching(store, say) as watched:
        spec = starting.prepare(job, storage, freeze=False)
        plan = preview.look_before_start(store, job, spec, watched, say)
        if preview.reached(plan):
            return spec, plan, 0
        for note in (
            *require_model(job, plan, spec.vocab_size),
            *code_changes(store, job, plan.point),
        ):
            say(note)
        return spec, plan, watched()


def _train(
    rendezvous: StoreRendezvous,
    job: JobConfig,
    spec: DataSpec,
    storage: Storage,
    budgets: Budgets,
    recorder: RankZeroRecorder | None,
    say: Callable[[str], None],
    fault_plan: str,
    num_shards: int | None,
) -> Outcome | _NotLoaded:
    """Runs this rank's part of an attempt."""
    from orchestrator.data.feed.local_feed import InProcessFeed
    from orchestrator.trainer.interfaces.job import TrainJob

    with paused_gc():
        from orchestrator.torchrun.membership import StaticMembership
        from orchestrator.trainer.loop import train as run_loop

    task = TrainJob(
        model=job.model,
        train=job.train,
        resume=job.resume,
        seq_len=job.pack.seq_len,
        document_attention=job.pack.attends_by_document,
        budgets=budgets,
        config_digest=starting.config_digest(job),
        device="cuda" if job.cluster.use_gpu else "cpu",  # the loop takes the GPU of LOCAL_RANK
        digest_every_steps=job.monitor.digest_every_steps,
        num_shards=num_shards,
    )
    membership = StaticMembership(rendezvous, recorder)
    feed = InProcessFeed(spec, job.data.replay_bytes)
    try:
        # torchrun sends SIGTERM when another rank has failed; the end must be written nevertheless
        signals = stop_signals.stop_on_signals(
            membership.ask_stop, membership.ask_save, say, relayed_s=_RELAYED_S
        )
        with signals, _ending(recorder):
            files = _files(storage, job.resume.node_folder)
            return run_loop(task, membership, feed, files, faults=hook(fault_plan))
    except DamagedPointError as error:
        return _NotLoaded(attempt=0, damages=error.damages, stopping=membership.is_stopping)
    finally:
        feed.close()


def _files(storage: Storage, folder: str | None) -> CommittedFiles:
    if folder is None:
        return CommittedFiles(storage)
    say = logging.getLogger(__name__).warning
    return CommittedFiles(storage, PartsOnNode(folder, folder_on_nodes(storage), "", NoCopies(), say))


@contextmanager
def _ending(recorder: RankZeroRecorder | None) -> Iterator[None]:
    """Ends the attempt after any error inside the block."""
    try:
        yield
    except BaseException as error:
        if recorder is not None:
            recorder.failed(error)
        raise


@contextmanager
def _shown(progress: Progress, recorder: RankZeroRecorder, every_s: float) -> Iterator[None]:
    """Shows the status periodically from a thread, and on a stall the states of this machine's ranks."""
    over, stall_watch = threading.Event(), StallWatch()

    def show() -> None:
        while not over.wait(min(every_s, 1.0)):
            status = recorder.status()
            if not status.world_size:
                continue
            progress.show(status)
            stall_watch.saw(status, time.monotonic())
            quiet_s = stall_watch.due(time.monotonic())
            if quiet_s is not None:
                here, members = socket.gethostname(), recorder.members
                states = [process_state(each.pid) if each.host == here else "?" for each in members]
                held = tuple(Held(worker=each, state=s) for each, s in zip(members, states, strict=True))
                stall = Stall(quiet_s=quiet_s, median_s=stall_watch.median_s, held=held)
                for line in sentences.stall(stall):
                    progress.say(line)

    shower = threading.Thread(target=show, name="progress", daemon=True)
    shower.start()
    try:
        yield
    finally:
        over.set()
        shower.join()


def _say(text: str) -> None:
    Screen(sys.stderr).say(text)
