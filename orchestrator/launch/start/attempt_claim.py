"""The claim of a launch: creates a new run, takes the next attempt, and keeps a heartbeat.

Before it claims, it watches whether another launch is active on the run, and waits for the processes of a
killed driver. `history.claims.liveness` decides from the observations. The heartbeat lasts until the
attempt's journal begins. A `LaunchContext` is what the stages of one launch share, on Ray and under torchrun.
"""

from __future__ import annotations

import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.checkpoint.node_local.node_storage import NodeStorage
from orchestrator.checkpoint.points.model_folders import keep_configuration, located, places_of
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce
from orchestrator.cluster.machine import Process, ProcessLook, Silence, has_ended, look_at_process, machine_id
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.forking import fork_to_begin, found_run, is_folder
from orchestrator.coordinator.attempt.launch_attempts import begin_launch
from orchestrator.coordinator.machine.launch_actions import A_FAILURE
from orchestrator.errors import BusyError, CoordinatorSilentError, OrchestratorError, RefusedError, text_of
from orchestrator.faults import hook
from orchestrator.history.claims.claim_files import (
    FORK,
    JOURNAL,
    RESUME,
    REWIND,
    START,
    WATCH_S,
    AllEnded,
    driver_was_killed,
)
from orchestrator.history.claims.claims import Claim
from orchestrator.history.claims.liveness import Free, beating
from orchestrator.history.journal.code_record import code_of
from orchestrator.history.journal.journal_reader import journal_process
from orchestrator.history.numbered_files import asker
from orchestrator.launch.process.launch_report import announce, trained_again
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.start.run_preparation import find_run
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.state.memory import ParallelChoice

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

HEARTBEAT_EVERY_S = 2.0
KILLED_S = 5.0  # how long a killed coordinator may take to end


@contextmanager
def claimed(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    watched: int,
    fault_plan: str = "",
    process: Process | None = None,
    looked: ResumePlan | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Attempt, ResumePlan]]:
    """Creates the run if it is new, and claims the attempt after `watched` (of `refuse_busy`) for a launch.

    See `coordinator.attempt.launch_attempts`. Inside, this process keeps the attempt's heartbeat. `process`
    is the process in whose name it claims, by default this one. `looked` is the plan that `look_before_start`
    made: the skip that it drew and the damages that it found are used. `say` receives the progress of a long
    reading.

    Raises `BusyError` if another start was first. A failure before the attempt's journal begins ends the
    attempt. Afterwards the journal's writer records its end.
    """
    run, first_weights = find_run(store), first_weights_of(store, job, say)
    if run is None and (fork := fork_to_begin(store, job, None)) is not None:
        run = found_run(store, job.run.name, fork, asker())
    if run is None:
        run = store.create_run(job.run.name, spec.identity(), first_weights)
    why = why_claimed(watched, forks=run.forked_from is not None, from_=job.resume.from_)
    with claiming(store, run.id, watched + 1, why, process) as made:
        hook(fault_plan)("claim_made", -1, -1)
        each = ReadAtOnce(store.storage, say, "resume points that are marked as damaged")
        drawn, known = (looked.drawn, looked.damages) if looked is not None else (None, ())
        attempt, plan = begin_launch(store, job, made, run, spec, drawn, known, each)
        keep_configuration(store.storage, made.number, located(job.model, store))
        yield replace(attempt, code=code_of(job), places=places_of(job.model, store)), plan


@contextmanager
def claiming(
    store: RunStore, run_id: str, number: int, why: str, process: Process | None = None
) -> Iterator[Claim]:
    """Claims the attempt `number` for a new launch.

    Inside, this process keeps the attempt's heartbeat. A failure inside, before the attempt's journal begins,
    ends the attempt. Raises `BusyError` if another start was first.
    """
    made = store.claim(number, secrets.token_hex(8), why, socket.gethostname(), run_id, process)
    with beating(store.start_heartbeat(made.number), HEARTBEAT_EVERY_S):
        try:
            yield made
        except BaseException as error:
            _end_unbegun(store, made, error)
            if isinstance(error, CoordinatorSilentError):
                end_of_silent(store, made, error)
            raise


def why_claimed(watched: int, *, forks: bool, from_: str) -> str:
    """The `why` of a start's claim on the attempt after `watched` (0: it is the first).

    `forks`: the run began as a fork. `from_`: `resume.from`, which names another run only before the first
    attempt.
    """
    if not watched:
        return FORK if forks else START
    return RESUME if from_ == "latest" or is_folder(from_) else REWIND


def _end_unbegun(store: RunStore, made: Claim, error: BaseException) -> None:
    with suppress(OrchestratorError):  # a failure of storage is what `error` reports
        newest = store.newest_claim()
        mine = newest is not None and (newest.number, newest.launch) == (made.number, made.launch)
        if mine and not store.storage.list(f"{JOURNAL}/a{made.number:04d}"):
            by = asker() if isinstance(error, KeyboardInterrupt) else A_FAILURE
            store.write_end(made.number, "failed", text_of(error), made.run_id, by)


def end_of_silent(store: RunStore, made: Claim, error: CoordinatorSilentError) -> None:
    """Records the end of the launch of the claim `made`, whose silent coordinator was killed and cannot do
    it.

    Only if the process that kept the journal is known to have ended, which is waited for a while.
    """
    deadline = time.monotonic() + KILLED_S
    with suppress(OrchestratorError):  # if storage failed, the next start watches the attempt
        newest = store.newest_claim()
        if newest is None or newest.launch != made.launch:
            return
        process = journal_process(store.storage, newest.number)
        while process is not None and time.monotonic() < deadline:
            if has_ended(*process):
                store.write_end(newest.number, "failed", text_of(error), made.run_id, A_FAILURE)
                return
            time.sleep(0.1)


def first_weights_of(store: RunStore, job: JobConfig, say: Callable[[str], None] = lambda text: None) -> str:
    """The identity of the weights in `model.init_from`, for a run without a point; empty otherwise.

    All of them are read; `say` as in `weights_identity`. Raises `ConfigError`, and `RefusedError` if an
    earlier start of the run found other weights there.
    """
    run = store.read_run()
    is_fork = run is not None and run.forked_from is not None  # it begins with a point's weights
    if job.model.init_from is None or store.point_names() or is_fork:
        return ""
    from orchestrator.checkpoint.export.export_files import weights_identity

    found = weights_identity(job.model.init_from, say)
    if run is not None and run.first_weights != found:
        raise RefusedError(
            f"{job.run.run_uri} was started with the weights {run.first_weights or 'of no other folder'}, "
            f"and model.init_from={job.model.init_from} holds {found} now. The run has no resume point yet, "
            "so it would start from these; put the files back, or start a new run under another run.name",
            code="weights.changed",
        )
    return found


BUSY_WATCH_S = 10.0
ORPHANS_S = 90.0
LOOK_S = 1.0  # an observation of storage that takes longer shows nothing about the attempt


@contextmanager
def watching(store: RunStore, say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """Runs `refuse_busy` in a thread while the block prepares the start. The yielded function waits for its
    result.

    Leaving the block ends the watch, so that an error and Ctrl-C need not wait.
    """
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="busy") as watcher:
        found = watcher.submit(refuse_busy, store, say, over)
        try:
            yield found.result
        finally:
            over.set()


def refuse_busy(store: RunStore, say: Callable[[str], None], over: threading.Event | None = None) -> int:
    """Watches for at most 10 s whether another launch is active on the run; raises `BusyError` if so.

    Returns the newest attempt's number (0: none). No launch is active on it, so `claimed` may take the next
    number. Processes that a killed driver of this machine left do not count: they end by themselves, within
    `ORPHANS_S`, and are waited for. Once they are known to have ended, nothing is watched. A wait is reported
    once. `over` ends the watch from another thread, with `CancelledError`, which is not shown.
    """
    pause, told = over or threading.Event(), False

    def wait(seconds: float) -> None:
        if pause.wait(seconds):
            raise CancelledError

    newest, ended = store.newest_claim(), AllEnded(store, partial(journal_process, store.storage))
    if newest is not None and store.read_end(newest.number) is None and not ended(newest):
        say(
            f"attempt {newest.number} has no end record: checking for {BUSY_WATCH_S:.0f} s whether it still "
            "runs"
        )
    deadline = time.monotonic() + ORPHANS_S
    while True:
        found = store.watch_busy(BUSY_WATCH_S, _silence_of(store), wait, ended)
        if isinstance(found, Free):
            return found.number
        claim = store.read_claim(found.number)
        if driver_was_killed(store, claim) and time.monotonic() < deadline:
            if not told:
                say(
                    f"attempt {claim.number} still runs, but its driver was killed: waiting for its "
                    f"processes to end, at most {ORPHANS_S:.0f} s"
                )
            told = True
            continue
        raise BusyError(
            f"run {store.storage.root} is busy: attempt {claim.number} of launch {claim.launch} on host "
            f"{claim.host} is alive; wait until it has ended, stop it (`orchestrator stop "
            f"{shlex.quote(store.storage.root)}`, Ctrl-C there, or `ray job stop`), or take another run.name"
        )


def _silence_of(store: RunStore) -> Callable[[], float]:
    """A clock for the watch that stops while a process could not run.

    The processes are this one, and on this machine the one that writes the newest attempt's journal. A
    process that is late on a busy host is not dead.
    """
    newest = store.newest_claim()
    process = None if newest is None else journal_process(store.storage, newest.number)
    pid = process.pid if process is not None and process.machine == machine_id() else 0

    def look() -> ProcessLook | None:
        return look_at_process(pid, time.monotonic())

    silence = Silence(time.monotonic(), WATCH_S + LOOK_S, look())
    return lambda: silence.look(time.monotonic(), look())


# ------------------------------------------------------------------------------------------------- one launch
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchContext:
    """A launch from its plan on.

    `spec` are the data as the plan saw them; they are frozen after the claim. `parallel` is how the state is
    divided (None: not decided yet). `command` continues the run in a shell. `until_tokens` as in `TrainJob`.
    `fault_plan` is for tests.
    """

    job: JobConfig
    storage: NodeStorage
    store: RunStore
    spec: DataSpec
    plan: ResumePlan
    progress: Progress
    command: str
    parallel: ParallelChoice | None = None
    fault_plan: str = ""
    until_tokens: int | None = None

    @contextmanager
    def claimed(self, watched: int) -> Iterator[tuple[Attempt, ResumePlan]]:
        """Claims the attempt after `watched`; see `attempt_claim.claimed`."""
        say = self.progress.say
        with claimed(
            self.store, self.job, self.spec, watched, self.fault_plan, looked=self.plan, say=say
        ) as (attempt, plan):
            yield replace(attempt, command=self.command, parallel=self.parallel), plan

    def say_beginning(self, attempt: Attempt, plan: ResumePlan, spec: DataSpec, num_workers: int) -> None:
        """Shows the start of an attempt of `num_workers`; `plan` and `spec` are those of the claim."""
        total = None if plan.remaining_steps is None else plan.step_after + plan.remaining_steps
        self.progress.begin(self.storage, attempt.number, num_workers, total)
        for note in spec.notes:
            self.progress.say(f"note: {note}")
        announce(self.progress.say, self.job, attempt, plan)
        for line in trained_again(attempt):
            self.progress.say(line)
