"""A run under plain `torchrun`, without Ray: the stages of `launch.api.train`, for a fixed group.

The loop, the points and the journal are those of every run, so a run may alternate between Ray and torchrun.
The first failure ends the group, and the same command continues.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import load_config
from orchestrator.config.redaction import command_line
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.forking import code_changes
from orchestrator.elastic.formation import GroupSize
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.json_form import decode, encode
from orchestrator.launch.on_ray.exports import exporting
from orchestrator.launch.process import launch_report, stop_signals
from orchestrator.launch.process.progress import Progress, dashboard_beside
from orchestrator.launch.process.safe_output import Screen, let_go, output_never_waits, show_faults_as_data
from orchestrator.launch.process.stop_signals import stop_on_signals
from orchestrator.launch.start import attempt_claim, preview
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.attempt_claim import LaunchContext
from orchestrator.launch.start.preview import plan_older_point
from orchestrator.planning.loss_policy import REWIND
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.run_status import RunStatus
from orchestrator.storage.files import Storage
from orchestrator.torchrun.coordinator_process import HostedCoordinator, LaunchWatch
from orchestrator.torchrun.member import (
    GroupStart,
    Member,
    require_gpus,
    require_group,
    require_memory,
    say_disk,
)
from orchestrator.trainer.dry_run.model_dry_run import require_model
from orchestrator.trainer.interfaces.loop_interface import Outcome

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec
    from orchestrator.planning.state.memory import ParallelChoice
    from orchestrator.torchrun.store_rendezvous import StoreRendezvous

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
    parallel = require_memory(starting.reading_job(job, RunStore(storage)))
    if "RANK" not in os.environ:
        raise ConfigError(
            f"RANK is not set, so torchrun did not start this process; {_USAGE}", code="command.not_torchrun"
        )
    from orchestrator.torchrun.store_rendezvous import meet

    _require_no_rewind(job)
    rendezvous = meet()
    say_disk(rendezvous, job.resume.node_folder)
    if rendezvous.rank != 0:
        return _follow(rendezvous, job, storage, fault_plan)
    with Progress.shown(job.monitor.progress_s) as progress:
        command = _command(config, overrides)
        return _lead(rendezvous, job, progress, command, parallel, fault_plan)


def _require_no_rewind(job: JobConfig) -> None:
    """Raises `ConfigError` for policies that need another launch, which torchrun's processes cannot make."""
    spike = job.train.on_spike
    actions = {
        "train.on_nonfinite": job.train.nonfinite.action,
        "train.on_spike": spike.action if spike is not None else "",
    }
    for field, action in actions.items():
        if action == REWIND:
            raise ConfigError(
                f"{field} has the action {action}, and under torchrun a launch cannot go back to a resume "
                "point by itself; take skip_step or stop, or start the run with `orchestrator train`",
                code="config.conflict",
            )


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
    except SystemExit as error:  # the user's code; with its own code an unfinished run would pass as done
        _say(
            f"rank {os.environ.get('RANK', '?')}: the job's code called sys.exit({error.code!r}); raise an "
            "exception instead"
        )
        code = 1
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
    progress: Progress,
    command: str,
    parallel: ParallelChoice,
    fault_plan: str,
) -> Outcome | None:
    """Rank 0: decides whether and how the run continues, claims it, and hosts its coordinator.

    If the ranks find the point damaged, it claims again and continues an older one.
    """
    storage, group = starting.run_storage(job), rendezvous
    store = RunStore(storage)
    with rendezvous.reporting_failure("decision"):
        require_group(rendezvous, job, store, progress.say)
        spec, plan, watched = _look(store, job, storage, progress.say)
        if preview.reached(plan):
            rendezvous.publish("decision", None)
            launch_report.say_done_before(progress.say, job, preview.stop_is_reached(job, plan))
            return None
    context = LaunchContext(
        job=job,
        storage=storage,
        store=store,
        spec=spec,
        plan=plan,
        progress=progress,
        command=command,
        parallel=parallel,
        fault_plan=fault_plan,
    )
    for number in itertools.count(1):
        found = _attempt(group, context, watched)
        if isinstance(found, Outcome):
            return found
        group = rendezvous.round(number)
        with group.reporting_failure("decision"):
            watched, known = found.attempt, context.plan.damages
            plan = plan_older_point(store, job, spec, found.damages, known, watched, progress.say)
        context = replace(context, plan=plan)
    raise AssertionError("the loop has no end of its own")


def _attempt(rendezvous: StoreRendezvous, context: LaunchContext, watched: int) -> Outcome | RunStatus:
    """Runs rank 0's part of one attempt, which it claims after `watched`, with the coordinator beside it.

    Returns the status of an attempt whose point was damaged.
    """
    job, storage, progress = context.job, context.storage, context.progress
    with ExitStack() as ends:
        with rendezvous.reporting_failure("decision"):
            attempt, begun = ends.enter_context(context.claimed(watched))
            spec = starting.freeze(job, storage, context.spec, attempt)
            size = rendezvous.world_size
            start = starting.coordinator_start(
                job, attempt, storage.root, GroupSize.fixed(size), context.fault_plan, fixed=True
            )
            host = ends.enter_context(closing(HostedCoordinator(start)))
            group = GroupStart(
                launch=attempt.launch,
                port=host.port,
                key=host.key.hex(),
                budgets=attempt.budgets,
                encoders=attempt.encoders,
                reading=starting.reading_of(attempt),
                num_shards=starting.num_shards(attempt),
                weights_by_name=attempt.weights_by_name,
            )
            member = ends.enter_context(Member.connected(rendezvous, job, group, context.fault_plan))
            rendezvous.publish("decision", encode(group))
        context.say_beginning(attempt, begun, spec, size)
        with (
            dashboard_beside(job, storage.root, progress),
            exporting(context.store, attempt.number, job.resume.export_every, progress.say),
            LaunchWatch(member.calls, progress) as watch,
            stop_on_signals(watch.ask_stop, watch.ask_save, progress.say, relayed_s=_RELAYED_S),
        ):
            found = member.train(spec, storage)
            if isinstance(found, RunStatus):
                return found
            status = member.require_ended(watch.end())
            launch_report.wait_for_points(member.settle, progress.say)
        if status.ended == "done":
            why = launch_report.why_done(job, attempt.budgets, status.last_step)
            status = replace(status, reason=f"{status.reason}: {why}")
        launch_report.say_end(progress, job, status, context.store, attempt.run_id)
        return found


def _follow(rendezvous: StoreRendezvous, job: JobConfig, storage: Storage, fault_plan: str) -> Outcome | None:
    """Runs the other ranks: they receive what rank 0 has decided. The data are frozen by then."""
    group = rendezvous
    for number in itertools.count(1):
        decision = group.receive("decision")
        if decision is None:
            return None
        start = decode(GroupStart, decision)
        spec = starting.read_frozen_data(job, storage, start.reading).made_by(start.encoders)
        with (
            Member.connected(group, job, start, fault_plan) as member,
            stop_on_signals(_ignore, _ignore, _ignore, relayed_s=_RELAYED_S),
        ):
            found = member.train(spec, storage)
        if isinstance(found, Outcome):
            return found
        group = rendezvous.round(number)
    raise AssertionError("the loop has no end of its own")


def _ignore(text: str) -> None:
    """Rank 0 alone passes on what signals request, and reports it."""


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
            *require_model(starting.reading_job(job, store, plan.point), plan, spec.vocab_size),
            *code_changes(store, job, plan.point),
        ):
            say(note)
        return spec, plan, watched()


def _say(text: str) -> None:
    Screen(sys.stderr).say(text)
