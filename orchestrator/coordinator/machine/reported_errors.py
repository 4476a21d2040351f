"""Decides what the errors that workers report mean: trouble of one machine, or the end of the run.

A part of the launch machine, pure. An error ends the run only if the group as a whole meets it: every
remaining member of the newest generation has reported an `OrchestratorError`, and no other worker has joined
to try. It also ends the run if because of such errors a start cannot have as many workers as it needs.
Any other error costs only the worker that reported it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.errors import ElasticError, FencedError
from orchestrator.records.run_status import MemberInfo

# They concern the worker's own connection to the run. Another worker need not meet them.
OWN = (ElasticError.__name__, FencedError.__name__)
OPEN_S = 60.0  # how long a newcomer's error waits for the other workers of a start


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorReport:
    """An error that ended a worker.

    `reason`: the text that the end of a run shows. `repeats`: another try on the same machine would meet it
    again. `place`: where the worker ran, if known. `code`: the error's.
    """

    member: str
    kind: str
    text: str
    reason: str
    repeats: bool
    place: MemberInfo | None
    since: float
    code: str | None = None

    @property
    def host(self) -> str:
        """Its machine, as named for people."""
        return (self.place.host or self.place.node_id) if self.place else "(not known)"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsError:
    """The run ends with this reason, and the code of the first error in it."""

    reason: str
    code: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersError:
    """The error ends only this worker, and counts as a failure of the run."""

    report: ErrorReport


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRefused:
    """The error ends only this newcomer, which the run does not need. Its machine is tried again in
    `retry_s`.

    `is_new`: the machine has not been refused for this reason before.
    """

    report: ErrorReport
    retry_s: float
    is_new: bool


Verdict = RunsError | WorkersError | MachineRefused


class ReportedErrors:
    """The reports of one attempt. All times are seconds of one monotonic clock."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._reports: dict[str, ErrorReport] = {}
        self._open: dict[str, ErrorReport] = {}  # without a verdict so far
        self._retry_at: dict[str, float] = {}  # of refused workers
        self._refused: dict[str, ErrorReport] = {}  # node -> report, if no worker has joined from there since

    def knows(self, member: str) -> bool:
        """Whether this worker has reported an error."""
        return member in self._reports

    def noted(self, report: ErrorReport) -> None:
        """Records an error without consequences for others."""
        self._reports[report.member] = report

    def came(self, report: ErrorReport) -> None:
        """Records an error that `judge` decides, now or later."""
        self._reports[report.member] = self._open[report.member] = report

    def joined(self, node: str) -> None:
        """A worker of this node has joined: the node can work."""
        self._refused.pop(node, None)

    def may_end(self, member: str, now: float) -> bool:
        """Whether the process of this worker may end now, so that another one takes its place."""
        return member not in self._open and self._retry_at.get(member, now) <= now

    def refusals(self, reason: str) -> list[str]:
        """Returns the refused machines and the reasons, one line each.

        They are for the end of a run with this `reason`.
        """
        return [
            f"refused machine {report.host}: {report.reason}"
            for report in self._refused.values()
            if report.reason not in reason
        ]

    def judge(self, members: Sequence[str], now: float) -> list[Verdict]:
        """Returns the verdicts that can be given now. `members` are those of the newest generation."""
        inside = [report for report in self._open.values() if report.member in members]
        outside = [report for report in self._open.values() if report.member not in members]
        verdicts = [*self._of_members(inside, members, now), *self._of_newcomers(outside, now)]
        self._retry_at = {member: at for member, at in self._retry_at.items() if at > now}
        self._rendezvous.num_refused = len(self._retry_at)
        return verdicts

    def refuse(self, report: ErrorReport, now: float) -> MachineRefused:
        """Refuses this newcomer, which the run does not need."""
        self._open.pop(report.member, None)
        node = report.place.node_id if report.place else ""
        retry_s = self._rendezvous.blame(node or report.member, now)
        self._retry_at[report.member] = now + retry_s
        before = self._refused.get(node)
        self._refused[node] = report
        is_new = before is None or (before.kind, before.text) != (report.kind, report.text)
        return MachineRefused(report=report, retry_s=retry_s, is_new=is_new)

    # ---- inside
    def _of_members(
        self, reports: Sequence[ErrorReport], members: Sequence[str], now: float
    ) -> list[Verdict]:
        """Decides once every other member has joined, ended or reported an error, too.

        Waiting newcomers are other machines, on which the same step is tried.
        """
        others = [member for member in members if member not in self._reports]
        come = [member for member in others if self._rendezvous.waits(member)]
        if not reports or any(m not in come and not self._rendezvous.is_gone(m) for m in others):
            return []
        if not self._rendezvous.num_live and all(
            self._reports[m].repeats for m in members if m in self._reports
        ):
            return [self._end_of_run(self._reports[m] for m in members if m in self._reports)]
        return [self._of_one(report, now) for report in reports]

    def _of_one(self, report: ErrorReport, now: float) -> Verdict:
        if self._rendezvous.can_spare(report.member):
            return self.refuse(report, now)
        del self._open[report.member]
        return WorkersError(report=report)

    def _of_newcomers(self, reports: Sequence[ErrorReport], now: float) -> list[Verdict]:
        """Decides about workers that were never in a group.

        If no member holds a state, and all started workers have joined or failed, too few are left to begin.
        """
        num_there, verdicts = self._rendezvous.num_live, list[Verdict]()
        for report in reports:
            trained = self._rendezvous.has_trained and num_there > 0
            complete = num_there + len(reports) >= self._rendezvous.expected
            late = now - report.since >= OPEN_S
            if self._rendezvous.can_spare(report.member) or late or (complete and trained):
                verdicts.append(self.refuse(report, now))
            elif complete:
                return [*verdicts, self._end_of_run(reports, named=num_there > 0)]
        return verdicts

    def _end_of_run(self, reports: Iterable[ErrorReport], named: bool = False) -> RunsError:
        """`named`: other machines could work, so the text names those that cannot."""
        ends = {f"the worker on {r.host} failed: {r.reason}" if named else r.reason: r.code for r in reports}
        self._open.clear()
        return RunsError(reason="\n".join(ends), code=next(filter(None, ends.values()), None))
