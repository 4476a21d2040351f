"""What every start does, with Ray or without: look at folder, data and plan, watch for another launch, claim,
say what it continues.

It knows neither cluster nor group, and imports neither ray nor torch.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from orchestrator.cluster.machine import Process
from orchestrator.cluster.ray_inventory import JOB_COPIES
from orchestrator.config.schema import JobConfig, field_rules
from orchestrator.coordinator.attempt import (
    LOOKS,
    Attempt,
    begin_launch,
    choose_point,
    decide,
    deleted_now,
    has_its_steps,
    kept_point,
    moved_on,
    require_frozen,
    require_journals,
    rewind_sentence,
    survey,
)
from orchestrator.coordinator.forking import (
    fork_to_begin,
    found_run,
    is_folder,
    other_run,
    point_info,
    read_parent_point,
)
from orchestrator.coordinator.launch_machine import A_FAILURE
from orchestrator.coordinator.skipping import draw_skip, skip_here
from orchestrator.coordinator.sources import (
    SourcesHere,
    first_of,
    has_lists,
    plain_reading,
    read_as,
    sources_here,
)
from orchestrator.errors import (
    BusyError,
    ConfigError,
    OrchestratorError,
    RefusedError,
    ResumePointError,
    StorageError,
    text_of,
)
from orchestrator.faults import hook
from orchestrator.history.busy import Free
from orchestrator.history.claim_files import FORK, JOURNAL, RESUME, REWIND, START
from orchestrator.history.claims import Claim, ForkedFrom
from orchestrator.history.heartbeat import beating
from orchestrator.history.journal_reader import journal_process
from orchestrator.history.processes import AllEnded, driver_was_killed
from orchestrator.history.request_files import asker
from orchestrator.launch.nested_runs import refuse_inside
from orchestrator.planning.manifests import Reading
from orchestrator.planning.resume_plan import ResumePlan
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.skipping import Skip, SkipDecision
from orchestrator.records import Cursor, StepRecord
from orchestrator.resume.points import Point
from orchestrator.resume.run_file import RunFile
from orchestrator.resume.store import RunStore
from orchestrator.storage.files import Storage, require_local

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

BUSY_WATCH_S = 10.0
HEARTBEAT_EVERY_S = 2.0
ORPHANS_S = 90.0
_RNG = (  # what `trainer.model.seed_micro_batch` does
    "per micro-batch: torch.manual_seed(first 8 bytes, little-endian, "
    "of blake3('{train.seed}:{index of its first sample}') >> 1); no other state is kept"
)


def run_folder(job: JobConfig) -> Path:
    """The run's folder, absolute. Raises `ConfigError` for a URI, and for a folder that Ray would delete."""
    require_local(job.run.storage, f"run.storage={job.run.storage}")
    folder = Path(os.path.abspath(job.run.run_uri))
    if JOB_COPIES in folder.parts:
        raise ConfigError(
            f"run.storage={job.run.storage}: the run would lie in {folder}, a Ray job's copy of its working "
            "directory, which Ray deletes; give an absolute path that all nodes see, e.g. "
            "run.storage=$PWD/runs where you submit"
        )
    return folder


def check_writable(folder: Path) -> None:
    """Raises `StorageError` if the run's folder can neither be made nor written."""
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise StorageError(
            f"run.storage: {folder} cannot be written, because {parent} is no writable folder; "
            "correct its rights, or take another run.storage"
        )


def prepare(job: JobConfig, folder: Path, *, freeze: bool) -> DataSpec:
    """The job's data, as the run has frozen them; where it has not yet, nothing is written unless `freeze`.

    Raises as `data.preparing.prepare_data` does, and `ConfigError` for a model whose vocabulary is too small.
    """
    from orchestrator.data.preparing import prepare_data

    here = _here_before(job, folder)
    if here is None:
        spec = prepare_data(job, folder if freeze else None)
    else:
        spec = prepare_data(job, here.folder, here.reading)
    return require_vocabulary(job, spec)


def _here_before(job: JobConfig, folder: Path) -> SourcesHere | None:
    """What a start would read, before it looks at the run closely; None where nothing is frozen. It looks at
    the run's history only where which point is continued may make a difference.
    """
    from orchestrator.data.frozen import frozen_sources

    store, other = RunStore(Storage(str(folder))), None
    if frozen_sources(folder) is None:
        if not is_folder(job.resume.from_):
            return None
        other = Path(other_run(job.resume.from_)[0])  # a fork has the data of the run that it begins with
        if frozen_sources(other) is None:
            return None
    if (fork := fork_to_begin(store, job, find_run(store))) is not None:
        elsewhere, point = read_parent_point(store, fork, job.run.name, fast=True)
        return sources_here(job, other or folder, point_info(elsewhere, point))
    parents, _ = store.parents()
    if plain_reading(job, (parents[-1].sources if parents else ()) or first_of(folder)):
        return sources_here(job, folder, None)
    seen = survey(store, with_steps=False)
    newest, _ = choose_point(store, seen, kept_point(store, seen, job), fast=True)
    info = point_info(store, newest) if newest is not None else None
    return sources_here(job, folder, info, seen.parents, seen.lineage)


def require_vocabulary(job: JobConfig, spec: DataSpec) -> DataSpec:
    """`spec`; raises `ConfigError` for a model whose vocabulary is too small for it."""
    vocab = (job.model.config or {}).get("vocab_size")
    if vocab is not None and vocab < spec.vocab_size:
        raise ConfigError(
            f"model.config.vocab_size={vocab}, but the tokenizer {job.data.tokenizer} has {spec.vocab_size} "
            f"ids; set model.config.vocab_size to {spec.vocab_size} or more"
        )
    return spec


def find_run(store: RunStore) -> RunFile | None:
    """run.json; None for a new run. Raises `RefusedError` where a run's pieces lie without it: a start would
    mix two histories.
    """
    run = store.read_run()
    if run is None and (pieces := store.pieces()):
        run = store.read_run()  # another start may just have made both
        if run is None:
            raise RefusedError(missing_run(store, pieces))
    return run


def missing_run(store: RunStore, pieces: Sequence[str]) -> str:
    """What to say of pieces of a run without its run.json."""
    return (
        f"{store.storage.root} has no run.json, but {', '.join(pieces)} of a run: it was deleted while a "
        "launch wrote into it, or run.json is lost; a new run beside them would mix two histories. Restore "
        "run.json, or move the folder away, or take another run.name"
    )


def look_before_start(
    store: RunStore, job: JobConfig, spec: DataSpec, watched: Callable[[], int]
) -> ResumePlan:
    """`look_ahead` for a start: one that would train draws what is to be skipped, so that data that end in it
    are refused here, and verifies the point when it has claimed. One that has nothing left to train verifies
    it here, for nobody else would, and only when nobody is at work on the run any more, as `watched` (of
    `watching`) says: what another launch still trains has not reached its end.
    """
    plan = look_ahead(store, job, spec, draw=True)
    if not reached(plan):
        return plan
    watched()
    return look_ahead(store, job, spec, fast=False)


def look_ahead(
    store: RunStore, job: JobConfig, spec: DataSpec, *, fast: bool = True, draw: bool = False
) -> ResumePlan:
    """What a start would do now; with `fast` the newest point is trusted by sizes. A new run's first records
    are looked at (see `check_first_records`). With `draw` the samples that are to be skipped are read, as the
    start does: where they end, and whether the data hold so many, is known then.
    """
    from orchestrator.data.first_records import check_first_records

    run = _run_to_look_at(store)
    if (fork := fork_to_begin(store, job, run)) is not None:
        return _look_at_fork(store, job, spec, fork, fast=fast, draw=draw)
    if run is None:
        check_first_records(spec)
    for _ in range(LOOKS):
        seen = survey(store)
        if seen.lineage.records and spec.tokenizer_folder is None:
            # a first start may have frozen them since they were looked at
            spec = prepare(job, Path(store.storage.root), freeze=False)
        require_frozen(seen, spec)
        require_journals(store, seen)
        wanted = kept_point(store, seen, job)
        try:
            point, damages = choose_point(store, seen, wanted, fast=fast)
        except ResumePointError:
            if not deleted_now(store, seen.points):
                raise
        else:
            if not deleted_now(store, (damage.point for damage in damages)):
                break
    else:
        raise moved_on(store)
    run = run or find_run(store)
    asked = skip_here(job, point.key if point else None, seen.parents, seen.lineage)
    info = point_info(store, point) if point is not None else None
    here = sources_here(job, Path(store.storage.root), info, seen.parents, seen.lineage)
    spec = read_as(job, spec, here)
    identities = (run.identity, spec.identity()) if run else None
    found = decide(store, job, point, identities, data=spec, skip=asked, here=here)
    found = _with_drawn_skip(found, job, spec, point, asked) if draw else found
    notes = []
    if point is None and job.model.init_from is not None:
        from orchestrator.resume.init_weights import weights_sentence

        notes.append(weights_sentence(job.model.init_from))
    notes += [f"warning: {damage}; falling back to an older resume point" for damage in damages]
    if point is not None and fast:
        notes.append("sizes of the point's files are right; the start verifies their digests, too")
    # twice: they are durable before the point is, but it may have come after the journal was read
    if point is not None and not has_its_steps(seen, point) and not has_its_steps(survey(store), point):
        notes.append(
            f"warning: the journal lacks records of steps before {point.name}: the run can go on, but "
            "`orchestrator audit` cannot prove what these steps were trained on; restore journal/"
        )
    return replace(found, notes=(*found.notes, *notes), rewind=rewind_sentence(seen, job, point))


def _run_to_look_at(store: RunStore) -> RunFile | None:
    """As `find_run`; a new run's folder must not lie inside another run."""
    if (run := find_run(store)) is None:
        refuse_inside(store)
    return run


def _look_at_fork(
    store: RunStore, job: JobConfig, spec: DataSpec, fork: ForkedFrom, *, fast: bool, draw: bool
) -> ResumePlan:
    """What a start would do that begins with a point of another run."""
    other, point = read_parent_point(store, fork, job.run.name, fast)
    run = other.read_run()
    assert run is not None, "just read"
    asked = skip_here(job, point.key)
    here = sources_here(job, Path(other.storage.root), point_info(other, point))
    spec = read_as(job, spec, here)
    found = decide(other, job, point, (run.identity, spec.identity()), data=spec, skip=asked, here=here)
    found = _with_drawn_skip(found, job, spec, point, asked) if draw else found
    notes = [f"forks {fork.run} at {fork.point}: a run of its own from there on; the point is pinned there"]
    if fast:
        notes.append("sizes of the point's files are right; the start verifies their digests, too")
    return replace(found, notes=(*notes, *found.notes))


def _with_drawn_skip(
    found: ResumePlan, job: JobConfig, spec: DataSpec, point: Point | None, asked: SkipDecision
) -> ResumePlan:
    if found.skip is None or found.action == "refuse" or point is None or asked.request is None:
        return found
    began = time.monotonic()
    try:
        skip = draw_skip(job, spec.made_by(found.encoders), point, asked.request)
    except RefusedError as error:
        refusals = (*found.refusals, f"{job.run.run_uri}: {error}")
        return replace(found, action="refuse", refusals=refusals)
    seconds = time.monotonic() - began
    drawn = replace(found.skip, tokens=skip.tokens, cursor=skip.end, seconds=seconds)
    return replace(found, skip=drawn, drawn=skip)


@contextmanager
def watching(store: RunStore, say: Callable[[str], None]) -> Iterator[Callable[[], int]]:
    """`refuse_busy` in a thread, while the block looks at everything else; what is given waits for its
    result. Leaving the block ends the watch: an error and Ctrl-C wait for nobody.
    """
    over = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="busy") as watcher:
        found = watcher.submit(refuse_busy, store, say, over)
        try:
            yield found.result
        finally:
            over.set()


def refuse_busy(store: RunStore, say: Callable[[str], None], over: threading.Event | None = None) -> int:
    """Watches for another launch that works on the run, at most 10 s; `BusyError` if there is one. Returns
    the newest attempt's number (0: none): nobody is at work on it, so that `claimed` may take the next.

    What a killed driver of this machine left is no launch: its processes end by themselves, within
    `ORPHANS_S`, and are waited for; once they are known to have ended nothing is watched. What it waits for
    it says, once. `over` ends the watch from another thread: `CancelledError`, which nobody sees.
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
        found = store.watch_busy(BUSY_WATCH_S, time.monotonic, wait, ended)
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


@contextmanager
def claimed(
    store: RunStore,
    job: JobConfig,
    spec: DataSpec,
    watched: int,
    fault_plan: str = "",
    process: Process | None = None,
    command: str = "",
    drawn: Skip | None = None,
) -> Iterator[tuple[Attempt, ResumePlan]]:
    """Makes the run if it is new, and claims the attempt after `watched` (of `refuse_busy`) for a launch; see
    `coordinator.attempt.begin_launch`. Inside, this process shows other starts that the attempt is alive;
    `process` is the one in whose name it claims, itself if not given; `command` as in `Attempt`; `drawn` is
    what `look_before_start` drew.

    Raises `BusyError` if another start was quicker. What goes wrong before the attempt's journal is begun
    ends the attempt; afterwards whoever keeps the journal says its end.
    """
    run, first_weights = find_run(store), first_weights_of(store, job)
    if run is None and (fork := fork_to_begin(store, job, None)) is not None:
        run = found_run(store, job.run.name, fork, asker())
    if run is None:
        run = store.create_run(job.run.name, spec.identity(), first_weights)
    first = FORK if run.forked_from is not None else START
    why = first if not watched else RESUME if not _rewinds(job) else REWIND
    with claiming(store, run.id, watched + 1, why, process) as made:
        hook(fault_plan)("claim_made", -1, -1)
        attempt, plan = begin_launch(store, job, made, run, spec, drawn)
        yield replace(attempt, command=command), plan


def _rewinds(job: JobConfig) -> bool:
    return job.resume.from_ != "latest" and not is_folder(job.resume.from_)


@contextmanager
def claiming(
    store: RunStore, run_id: str, number: int, why: str, process: Process | None = None
) -> Iterator[Claim]:
    """Claims the attempt `number` for a launch of its own. Inside, this process shows other starts that the
    attempt is alive. What goes wrong inside before the attempt's journal is begun ends the attempt.

    Raises `BusyError` if another start was quicker.
    """
    made = store.claim(number, secrets.token_hex(8), why, socket.gethostname(), run_id, process)
    with beating(store.start_heartbeat(made.number), HEARTBEAT_EVERY_S):
        try:
            yield made
        except BaseException as error:
            _end_unbegun(store, made, error)
            raise


def first_weights_of(store: RunStore, job: JobConfig) -> str:
    """The identity of what `model.init_from` holds, for a run that has no point yet; empty otherwise. All of
    it is read. Raises `ConfigError`, and `RefusedError` if an earlier start of the run found other weights
    there.
    """
    run = store.read_run()
    is_fork = run is not None and run.forked_from is not None  # it begins with a point's weights
    if job.model.init_from is None or store.point_names() or is_fork:
        return ""
    from orchestrator.resume.init_weights import weights_identity

    found = weights_identity(job.model.init_from)
    if run is not None and run.first_weights != found:
        raise RefusedError(
            f"{job.run.run_uri} was started with the weights {run.first_weights or 'of no other folder'}, "
            "and "
            f"model.init_from={job.model.init_from} holds {found} now; it has no resume point yet, so it "
            "would "
            "start from these: put the files back, or start a new run under another run.name"
        )
    return found


def _end_unbegun(store: RunStore, made: Claim, error: BaseException) -> None:
    with suppress(OrchestratorError):  # where storage is what failed, `error` says so
        newest = store.newest_claim()
        mine = newest is not None and (newest.number, newest.launch) == (made.number, made.launch)
        if mine and not store.storage.list(f"{JOURNAL}/a{made.number:04d}"):
            by = asker() if isinstance(error, KeyboardInterrupt) else A_FAILURE
            store.write_end(made.number, "failed", text_of(error), made.run_id, by)


def freeze(job: JobConfig, folder: Path, looked_at: DataSpec, attempt: Attempt) -> DataSpec:
    """The data of a claimed attempt: those that `prepare` looked at before the claim, frozen in the run's
    folder if they are not yet (see `data.preparing.freeze_data`), by the lists that the claim says.
    """
    from orchestrator.data.frozen import TOKENIZER_FOLDER
    from orchestrator.data.preparing import freeze_data

    if looked_at.tokenizer_folder is None:
        return freeze_data(job, folder, looked_at).made_by(attempt.encoders)
    reading = reading_of(attempt)
    here = looked_at.tokenizer_folder == str(folder / TOKENIZER_FOLDER)  # else a fork's, where it began
    if not here or looked_at.unwritten or not has_lists(looked_at, reading):
        looked_at = read_frozen_data(job, folder, reading)
    return looked_at.made_by(attempt.encoders)


def reading_of(attempt: Attempt) -> Reading:
    """Which lists an attempt reads, and from where on."""
    return Reading(
        sources=attempt.sources, cursor=attempt.point.cursor if attempt.point is not None else Cursor()
    )


def read_frozen_data(job: JobConfig, folder: Path, reading: Reading) -> DataSpec:
    """The data of a claimed attempt, in another process than the one that claimed it. Raises as `prepare`."""
    from orchestrator.data.preparing import prepare_data

    return require_vocabulary(job, prepare_data(job, folder, reading))


def reached(plan: ResumePlan) -> bool:
    """Whether there is nothing left to train: the stop was reached by an earlier start."""
    if plan.action == "refuse":
        raise RefusedError("\n".join(plan.refusals))
    return plan.action == "resume" and plan.remaining_steps == 0


def why_done(job: JobConfig, budgets: Budgets, record: StepRecord | None) -> str:
    """Why a run that is done is done: its stop is reached, or the data have ended before it."""
    tokens, samples = (record.consumed_tokens, record.consumed_samples) if record else (0, 0)
    if budgets.stop_tokens is not None and tokens >= budgets.stop_tokens:
        return f"{tokens:,} tokens are trained, as many as were asked for"
    if budgets.stop_samples is not None and samples >= budgets.stop_samples:
        return f"{samples:,} samples are trained, as many as were asked for"
    return f"the data have ended (data.num_epochs={job.data.num_epochs}); raise data.num_epochs to go on"


def stop_is_reached(plan: ResumePlan) -> str:
    """What to say when there is nothing left to train."""
    undone = f". Note: {plan.restart_note}" if plan.restart_note else ""
    return (
        f"the stop is reached already: {plan.point} stands at {plan.consumed_tokens} tokens; "
        "raise train.max_steps, max_samples or max_tokens to continue (steps count at the batch size and "
        f"seq_len that they are first given with){undone}"
    )


def config_digest(job: JobConfig) -> str:
    """blake3 of everything that has an influence on what is trained: members compare it when a generation
    forms.
    """
    rules = {rule.path: rule.rule for rule in field_rules()}
    decisive = {name: value for name, value in job.flat().items() if rules.get(name) != "free"}
    return blake3(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def rng_document(job: JobConfig) -> dict[str, Any]:
    """All that a resume needs to know of random numbers; stands in every point."""
    return {"rule": _RNG, "seed": job.train.seed}


def announce(say: Callable[[str], None], job: JobConfig, attempt: Attempt, plan: ResumePlan) -> None:
    """Says what this start continues, what it found damaged, and what differs."""
    for damage in attempt.damages:
        say(f"warning: {damage}; falling back to an older resume point")
    if attempt.point is None:
        say(f"attempt {attempt.number} of {job.run.run_uri}: starts from the beginning")
    else:
        say(
            f"attempt {attempt.number} of {job.run.run_uri}: resumes from {attempt.point.name} at sample "
            f"{plan.consumed_samples}, step label {plan.step_before} -> {plan.step_after}"
        )
    if attempt.lifted and attempt.point is not None:
        say(f"note: every byte of {attempt.point.name} is right again: it is quarantined no more")
    if plan.rewind:
        say(plan.rewind)
    for file in attempt.unreadable:
        say(f"warning: {file}")
    for left in attempt.leftovers:
        say(f"warning: {left}" if left.kept else f"note: {left}")
    for difference in plan.differences:
        say(f"  {difference}")
    _announce_data(say, attempt, plan)


def _announce_data(say: Callable[[str], None], attempt: Attempt, plan: ResumePlan) -> None:
    """What this start does with sources, samples and encoders."""
    if attempt.skip is not None:
        first = attempt.skip.begin.drawn_samples
        say(
            f"skipped {attempt.skip.samples:,} samples ({attempt.skip.tokens:,} tokens) after "
            f"{attempt.point.name if attempt.point else 'the point'}, from sample {first:,} on: they are not "
            f"trained ({attempt.skip.request}); the same setting skips them once"
        )
    for change in attempt.lists:
        say(f"  {change}")
    for note in filter(None, (plan.skip_note, plan.restart_note)):
        say(f"note: {note}")
    if attempt.encoders != plan.encoders:
        newest = attempt.encoders[-1]
        for source, (epoch, block, window, record) in newest.begins.items():
            say(
                f"  {newest.encoder} encodes from the next whole document on: source {source}, "
                f"epoch {epoch}, block {block}, window {window}, record {record}"
            )


class StoppedAtOnceError(KeyboardInterrupt):
    """A second signal: nothing is saved. `exit_code` is what a shell expects of a process that it ended."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"{signal.Signals(number).name} came twice: stopped at once, and nothing was saved; the same "
            "command continues from the newest resume point"
        )
        self.exit_code = 128 + number


@contextmanager
def stop_on_signals(stop: Callable[[str], None], say: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, Ctrl-C and a closed terminal (SIGHUP) save and stop; a second one raises `StoppedAtOnceError`,
    a `KeyboardInterrupt`. `stop` is given who sent it, as far as that is known: the signal and this process's
    user and host. SIGHUP is no second one, for shells send it twice, and stays ignored where `nohup`
    had it ignored. Only a process's main thread can do this; in another nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen, who = False, asker()  # looked up now: a handler waits for nothing

    def handle(number: int, _: object) -> None:
        nonlocal seen
        if seen and number == signal.SIGHUP:
            return
        if seen:
            raise StoppedAtOnceError(number)
        seen = True
        # first: whoever sent the signal may have ended the reader of what is said, too
        stop(f"{signal.Signals(number).name} to {who}")
        if number == signal.SIGHUP:
            say("SIGHUP, the terminal was closed: saving and stopping")
        else:
            say(f"{signal.Signals(number).name}: saving and stopping; once more to stop at once")

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
