"""What the stages of one launch share, on Ray and under torchrun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.checkpoint.node_local.node_storage import NodeStorage
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.launch.process.launch_report import announce, trained_again
from orchestrator.launch.process.progress import Progress
from orchestrator.launch.start.attempt_claim import claimed
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.planning.state.memory import ParallelChoice

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec


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
