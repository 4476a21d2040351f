"""Readers beside a run that trains, saves, deletes and rewinds between their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.data.spec import DataSpec
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.inspect.run import Run
from orchestrator.launch.start import preview
from orchestrator.storage.disk import Disk
from tests.inspect.live_run import Aside, LiveRun, reader
from tests.storage.nfs_client import NfsClient


class WrongError(AssertionError):
    """A reader said what is not so."""


class Beside:
    """One history and its readers."""

    def __init__(
        self, job: JobConfig, data: DataSpec, seed: int, branches: bool = False, on_nfs: bool = False
    ) -> None:
        """`branches`: some of the histories begin as forks, and are rewound by the command."""
        self.random, self.job, self.data = Random(seed), job, data
        self.is_fork, self.branches = branches and seed % 3 == 0, branches
        self.keep_latest = self.random.choice([1, 2, 3])
        self.moved_on = self.left = 0  # `left`: how many calls the run may go on during this reading
        self.newest: list[str] = []  # the newest point that counts, after each thing that happened
        self.writer = Aside(self.history)
        self.disk: Disk = NfsClient(self.writer.disk) if on_nfs else self.writer.disk
        while not self.newest:
            self.writer.on(1)

    def history(self, disk: Disk) -> Iterator[None]:
        other = None
        if self.is_fork:
            other = LiveRun(disk, self.job, self.data, root="/other")
            other.launch()
            other.save(other.live)
        self.live = LiveRun(disk, self.job, self.data, self.keep_latest, fork_of=other)
        self.live.rewinds = self.branches
        random = Random(self.random.random())
        self.live.launch()
        self.live.save(self.live.live)
        while True:
            self.newest.append(self.live.on_lineage[-1])
            yield
            self.live.anything(random)

    def goes_on(self, call: str, path: str) -> None:
        if self.left > 0 and self.random.random() < self.often:
            num_calls = min(self.left, self.random.choice([1, 1, 2, 5, 40, 100]))
            self.left -= num_calls
            self.writer.on(num_calls)

    def read(self, read: Callable[[Run, RunStore], Any]) -> tuple[Any, set[str]]:
        """What the reader says, and the points that were the newest meanwhile; it must not complain."""
        self.writer.finish()
        self.left, self.often = self.random.choice([20, 100, 250]), self.random.choice([0.02, 0.1, 0.5])
        since = len(self.newest) - 1
        try:
            with reader(self.disk, self.goes_on) as (run, store):
                found = read(run, store)
        except StorageError as error:
            if error.code != "run.changed_while_read":
                raise WrongError(f"the reader fails: {error}") from error
            self.moved_on += 1
            found = None
        except OrchestratorError as error:
            raise WrongError(f"the reader fails: {error}") from error
        self.writer.finish()
        return found, set(self.newest[since:])

    def look(self) -> None:
        """One reading of any kind."""
        self.random.choice([self.points, self.verify, self.steps, self.plan, self.status])()

    def points(self) -> None:
        found, _ = self.read(lambda run, _: run.list_points())
        for row in found or ():
            if row["healthy"] is False:
                raise WrongError(f"false damage of {row['name']}: {row['reason']}")
            if not row["on_lineage"] and row["name"] not in self.live.orphans:
                raise WrongError(f"{row['name']} is no orphan")
        if found == []:
            raise WrongError("no points are shown")

    def verify(self) -> None:
        found, _ = self.read(lambda run, _: run.verify())
        for row in found or ():
            if not row["healthy"]:
                raise WrongError(f"false damage of {row['name']}: {row['damaged']}")
        if found == []:
            raise WrongError("no points are shown")

    def steps(self) -> None:
        found, _ = self.read(lambda run, _: run.records())
        labels = [step.step for step in found or ()]
        first = self.live.first_step
        if labels != list(range(first, first + len(labels))):
            raise WrongError(f"steps with gaps: {labels}")

    def plan(self) -> None:
        job = self.live.job
        found, newest = self.read(lambda _, store: preview.look_ahead(store, job, self.data))
        if found is not None and (found.action != "resume" or found.point not in newest):
            raise WrongError(f"plan: {found.action} {found.point}, the newest was {newest}")
        if found is not None and any("warning" in note for note in found.notes):
            raise WrongError(f"false damage: {found.notes}")

    def status(self) -> None:
        found, newest = self.read(lambda run, _: run.status(0))
        if found.newest_point is None or not found.num_points:
            raise WrongError(
                f"status: {found.num_points} points, newest {found.newest_point}, it was {newest}"
            )
        if found.state not in ("open", "stopped"):
            raise WrongError(f"status: {found.verdict}")
        if found.missing:
            raise WrongError(f"false damage: {found.verdict}")
