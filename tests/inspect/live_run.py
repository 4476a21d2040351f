"""A run that goes on while it is read: the real claims, journal, points, retention and leftovers, without a
model, on a disk in memory; and readers that let it go on before each of their calls to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.checkpoint.commit.commit_events import DeletePoints, WriteCommit
from orchestrator.checkpoint.commit.retention import to_delete
from orchestrator.checkpoint.commit.store_actions import PointCommitter, note_committed
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import point_path
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt, note_beginning
from orchestrator.coordinator.attempt.forking import describe, found_run
from orchestrator.coordinator.attempt.launch_attempts import begin_launch, continue_launch
from orchestrator.data.spec import DataSpec
from orchestrator.faults import no_fault
from orchestrator.history.claims.claim_files import RESUME, REWIND, START
from orchestrator.history.journal.journal_writer import JournalWriter, Listener
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect import run as monitor
from orchestrator.inspect.run import Run
from orchestrator.launch.branch import rewind as rewinding
from orchestrator.launch.branch.point_query import PointQuery
from orchestrator.records.steps import StateKey
from orchestrator.storage.disk import Disk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep, record, start, write_vote
from tests.storage.crashfs import ModelDisk

ROOT = "/run"
SEGMENT_BYTES = 6000
READS = ("open", "read", "size", "list", "is_folder")
WRITES = ("create", "write", "link", "unlink", "make_folder", "remove_folder")
LIMIT_S = 60.0


class Paused:
    """A disk on which somebody is called before each of these calls, with its name and path."""

    def __init__(self, disk: Disk, calls: tuple[str, ...], before: Callable[[str, str], None]) -> None:
        self._disk, self._calls, self._before = disk, calls, before

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._disk, name)
        if name not in self._calls:
            return call

        def paused(*arguments: Any) -> Any:
            self._before(name, str(arguments[0]))
            return call(*arguments)

        return paused


@contextmanager
def reader(disk: Disk, before: Callable[[str, str], None]) -> Iterator[tuple[Run, RunStore]]:
    """A `Run` and a store that read the disk; `before` is called before each of their calls."""
    paused = Paused(disk, READS, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "open_storage", lambda root: Storage(root, paused, no_sleep))
        yield Run(ROOT), RunStore(Storage(ROOT, paused, no_sleep))


@dataclass
class Coordinator:
    """What one attempt's coordinator holds."""

    attempt: Attempt
    journal: JournalWriter
    committer: PointCommitter
    generation: int
    newest: StateKey
    points: list[str]
    unflushed: list[StateKey]


class LiveRun:
    """A run, and what is true of it: `on_lineage` (points that count, oldest first) and `orphans`."""

    def __init__(
        self,
        disk: Disk,
        job: JobConfig,
        data: DataSpec,
        keep_latest: int = 2,
        root: str = ROOT,
        fork_of: LiveRun | None = None,
    ) -> None:
        """`data` are frozen in some other folder. A fork begins with the newest point of another run."""
        self.disk = disk
        self.store = RunStore(Storage(root, disk, no_sleep))
        self.data, self.keep_latest = data, keep_latest
        self.job = job.model_copy(
            update={"resume": job.resume.model_copy(update={"keep_latest": keep_latest})}
        )
        self.launches, self.first, self.saved = 0, None, set[str]()
        self.cut_off: Coordinator | None = None
        self.live: Coordinator | None = None
        self.on_lineage: list[str] = []
        self.orphans: set[str] = set()
        self.first_step, self.rewinds = 1, False
        if fork_of is not None:
            origin = describe(fork_of.store, fork_of.on_lineage[-1])
            self.first_step = parse_point_name(origin.point).step + 1
            self.run = found_run(self.store, job.run.name, origin, "me")
            return
        self.run = self.store.create_run("run", data.identity())
        for name in ("tokenizer/tokenizer.json", "manifest/main.parquet"):
            self.store.storage.create(name, b"{}")
        frozen = Storage(str(Path(data.tokenizer_folder).parent))
        self.store.storage.create("manifest/data.json", frozen.read("manifest/data.json"))

    # ---------------------------------------------------------------- launches
    def claim(self, why: str = RESUME) -> Any:
        """A start command claims; what it does next is another matter."""
        newest = max(self.store.claim_numbers(), default=0)
        self.launches += 1
        why = why if newest else START
        return self.store.claim(newest + 1, f"launch-{self.launches}", why, "host", self.run.id)

    def launch(self, wanted: str = "latest") -> None:
        """A start command from its claim to the first generation."""
        claim = self.claim(RESUME if wanted == "latest" else REWIND)
        job = self.job.model_copy(update={"resume": self.job.resume.model_copy(update={"from_": wanted})})
        attempt, _ = begin_launch(self.store, job, claim, self.run, self.data)
        self.first = attempt
        self._begin(attempt, attempt.parent, [])

    def rewind(self, to: str) -> None:
        """`orchestrator rewind`: an attempt that goes back, and ends at once."""
        plan = rewinding.look(self.store, PointQuery(point=to))
        rewinding.carry_out(self.store, plan, max(self.store.claim_numbers()), "me")
        left = self.on_lineage[: self.on_lineage.index(to) + 1]
        self.orphans |= {*self.on_lineage, *self.saved} - {*left}
        self.on_lineage = left

    def restart(self) -> None:
        """The coordinator was killed; the next one goes on with what its members hold and bring."""
        old = self.live
        attempt = continue_launch(self.store, self.first, "host", no_fault)
        self._begin(attempt, old.newest, old.unflushed)

    def kill(self) -> None:
        """The launch is gone without a word, or cut off and still writing."""
        self.cut_off, self.live = self.live, None

    def end(self) -> None:
        """The launch ends and says so."""
        self.live.journal.close()
        attempt = self.live.attempt
        self.store.write_end(attempt.number, "stopped", "asked to", attempt.run_id)
        self.live = None

    def listener(self, attempt: Attempt) -> Listener | None:
        """Who hears what the attempt's journal is told."""
        return None

    def _begin(self, attempt: Attempt, parent: StateKey | None, brought: list[StateKey]) -> None:
        number = attempt.number
        journal = JournalWriter(
            self.store.storage,
            number,
            run="run",
            segment_bytes=SEGMENT_BYTES,
            run_id=attempt.run_id,
            listener=self.listener(attempt),
        )
        note_beginning(journal, attempt, self.job.flat())
        for key in brought:
            journal.step(record(key))
        journal.generation(start(1, parent, number))
        journal.flush()
        committer = PointCommitter(
            self.store, journal, number, self.job.flat(), {"rule": "none"}, lambda: 0.0, run_id=attempt.run_id
        )
        self.orphans |= {*self.on_lineage, *self.saved} - {*attempt.inherited}
        self.on_lineage = list(attempt.inherited)
        self.live = Coordinator(
            attempt=attempt,
            journal=journal,
            committer=committer,
            generation=1,
            newest=StateKey(attempt=number, generation=1, step=parent.step if parent else 0),
            points=self.on_lineage,
            unflushed=[],
        )

    # ---------------------------------------------------------------- what an attempt does
    def train(self, by: Coordinator, num_steps: int, flush: bool = True) -> None:
        """Some steps; they are durable if flushed."""
        for _ in range(num_steps):
            by.newest = replace(by.newest, step=by.newest.step + 1)
            by.journal.step(record(by.newest))
            by.unflushed.append(by.newest)
        if flush:
            by.journal.flush()
            by.unflushed = []

    def reform(self, by: Coordinator) -> None:
        """A member was lost: the others form the next generation."""
        by.generation += 1
        by.journal.generation(start(by.generation, by.newest, by.attempt.number))
        by.journal.flush()
        by.unflushed = []
        by.newest = replace(by.newest, generation=by.generation)

    def give_up(self, by: Coordinator) -> None:
        """One rank wrote its part of a save, the other did not."""
        self.train(by, 1)
        write_vote(self.store.storage, by.newest, 0)
        self.train(by, 1)

    def save(self, by: Coordinator) -> None:
        """Train a bit, commit, and delete what is no longer needed, unless another attempt was claimed."""
        self.train(by, 3)
        self.evaluate(by)
        votes = tuple(write_vote(self.store.storage, by.newest, rank) for rank in range(2))
        by.committer.perform(WriteCommit(key=by.newest, votes=votes, parent=by.attempt.parent, started_s=0))
        name = by.newest.point_name
        self.saved.add(name)
        if self.store.next_claim_exists(by.attempt.number):
            self.orphans.add(name)
            return
        note_committed(by.journal, by.committer.last_point)
        by.points.append(name)
        self.on_lineage = by.points
        if names := self.superfluous(by):
            self.delete(by, names)

    def evaluate(self, by: Coordinator) -> None:
        """Two parts are evaluated in the newest state."""
        for part in ("holdout", "code"):
            by.journal.event(
                EventKind.EVALUATED,
                generation=by.newest.generation,
                step=by.newest.step,
                part=part,
                loss=2.5,
                perplexity=None,
                targets=8,
                samples=4,
                per_source={},
                metrics={},
                seconds=0.0,
            )

    def superfluous(self, by: Coordinator) -> list[str]:
        """What retention deletes now."""
        pinned = by.attempt.point.name if by.attempt.point else None
        newer = by.points[by.points.index(pinned) + 1 :] if pinned in by.points else []
        return to_delete(by.points, self.keep_latest, pinned, newer)

    def delete(self, by: Coordinator, names: list[str]) -> None:
        """Retention, as the coordinator does it."""
        by.committer.perform(DeletePoints(names=tuple(names)))
        by.points[:] = [name for name in by.points if name not in names]

    def die_while_deleting(self, by: Coordinator) -> None:
        """A kill in the middle of a deletion: COMMIT is gone, the rest is not."""
        name = by.points[0]
        by.journal.event(EventKind.DELETING_POINTS, points=[name])
        by.journal.flush()
        self.store.storage.delete(point_path(name, "COMMIT"))
        by.points.remove(name)
        self.live = None

    def late(self) -> None:
        """The launch that was cut off goes on: what it writes is an orphan."""
        self.train(self.cut_off, 2)
        self.save(self.cut_off)

    # ---------------------------------------------------------------- a history
    def anything(self, random: Random) -> None:
        """One thing that may happen now."""
        if self.live is None:
            roll = random.random()
            if roll < 0.2:
                self.claim()  # and is killed before it wrote its parent file
            elif roll < 0.5 and len(self.on_lineage) > 1:
                go_back = self.rewind if self.rewinds and roll < 0.35 else self.launch
                go_back(random.choice(self.on_lineage[:-1]))
            else:
                self.launch()
            return
        by, number = self.live, self.live.attempt.number
        choices: list[tuple[int, Callable[[], None]]] = [
            (8, lambda: self.save(by)),
            (3, lambda: self.train(by, 2, flush=random.random() < 0.5)),
            (2, lambda: self.reform(by)),
            (1, lambda: self.give_up(by)),
            (2, self.restart),
            (1, self.kill),
            (1, self.end),
        ]
        if len(by.points) > 1 and by.points[0] != (by.attempt.point and by.attempt.point.name):
            choices.append((1, lambda: self.die_while_deleting(by)))
        if self.cut_off is not None and self.cut_off.attempt.number < number:
            choices.append((1, self.late))
        weights, things = zip(*choices, strict=True)
        random.choices(things, weights)[0]()


class _OverError(Exception):
    """Nobody reads any more."""


class Aside:
    """A run that goes on in a thread of its own, one call to the disk after another, and only when asked."""

    def __init__(self, history: Callable[[Disk], Iterator[None]]) -> None:
        """`history` writes to the disk; it yields between two things that happen."""
        self.disk = ModelDisk()
        self.things = 0  # that have happened
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._history, self._over, self._between = history, False, False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def on(self, num_calls: int) -> None:
        """Lets it make so many more calls."""
        for _ in range(num_calls):
            self._step()

    def finish(self) -> None:
        """Lets what is happening come to its end."""
        while not self._between:
            self._step()

    def stop(self) -> None:
        """It goes no further."""
        self._over = True
        self._asked.release()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the writer goes on although it was stopped"

    def _step(self) -> None:
        self._asked.release()
        assert self._done.acquire(timeout=LIMIT_S), "the writer hangs"
        if self._failure is not None:
            raise RuntimeError("the writer failed") from self._failure

    def _go(self) -> None:
        self._asked.acquire()
        try:
            for _ in self._history(Paused(self.disk, WRITES, self._pause)):
                self.things += 1
                self._between = True
                self._pause("", "")
                self._between = False
        except _OverError:
            return
        except Exception as error:  # noqa: BLE001  it is raised where the run is asked to go on
            self._failure = error
        self._done.release()

    def _pause(self, call: str, path: str) -> None:
        if self._over:
            raise _OverError  # what was cut off still ends its attempt, and nobody asks for that any more
        self._done.release()
        self._asked.acquire()
        if self._over:
            raise _OverError
