"""A plan of a run under other settings, and its execution: `Run.plan(overrides).execute()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.errors import RefusedError
from orchestrator.planning.resume.resume_plan import ResumePlan

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.launch.api import RunResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and its configuration: that of the run's newest attempt with the overrides."""

    plan: ResumePlan
    config: JobConfig

    @property
    def action(self) -> str:
        """What a start would do: start, resume or refuse."""
        return self.plan.action

    def to_json(self) -> dict[str, Any]:
        """The document of `orchestrator plan --json`."""
        return self.plan.to_json()

    def execute(self) -> RunResult:
        """Trains by this plan, in this process, and returns when training has ended; see
        `orchestrator.train`.

        Raises `RefusedError` if the plan is a refusal, or if the run has changed since so that another plan
        would apply.
        """
        from orchestrator.launch import api

        if self.plan.action == "refuse":
            raise self.plan.refusal
        now = api.plan(self.config)
        if (now.action, now.point) != (self.plan.action, self.plan.point):
            raise RefusedError(
                f"{self.config.run.run_uri} has changed since this plan: it would {self.plan.action} from "
                f"{self.plan.point or 'the beginning'}, and would now {now.action} from "
                f"{now.point or 'the beginning'}; nothing was started, plan again",
                code="run.changed_since_plan",
            )
        return api.train(self.config)

    def __repr__(self) -> str:
        return f"Planned({self.plan.action} from {self.plan.point or 'the beginning'})"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()
