"""What a notebook does to a run: requests to its launch, and plans that can be executed.

A request is a file in the run's storage; the launch answers in its journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import RefusedError
from orchestrator.history.journal.journal_lines import JournalLines, Line
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import RequestFiles
from orchestrator.planning.resume.resume_plan import ResumePlan

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.launch.api import RunResult

LOOK_EVERY_S = 0.5
QUIET_S = 10.0  # after this long without an answer, checks whether the run is alive


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The result of a request.

    `outcome` is done, refused, failed, or open (not waited for). `text` is for display. `point` is the resume
    point that meets a request to save, "" for none.
    """

    request: int
    what: str
    outcome: str
    text: str
    point: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def unheard(text: str) -> None:
    """Ignores the message."""


def still_waits(what: str, point: str, reason: str) -> str:
    """The message to a caller that waits for `what`: the save of `point` was given up for this `reason`, and
    what follows.
    """
    return (
        f"{what}: not yet, the save of {point} was given up: {reason}. The run tries again, and this waits "
        "until a save succeeds or the run ends; who stops waiting takes nothing back, the request stands"
    )


class SentRequest:
    """One request to the launch that is active on a run now."""

    def __init__(self, store: RunStore, what: str) -> None:
        """Writes the request. Raises `RefusedError` if no launch is active on the run, as far as its claims
        show; `StorageError`.
        """
        self._store, self._what = store, what
        claim, root = store.newest_claim(), store.storage.root
        if claim is None:
            raise RefusedError(
                f"{root}: no attempt of this run has begun, so nothing answers a request",
                code="run.not_begun",
            )
        self._refuse_if_over(claim.number)
        self._launch, self._attempt = claim.launch, claim.number
        self._journal, self._unread = JournalLines(store.storage, first=claim.number), list[Line]()
        self._new_lines()  # what came before the request is no answer
        run = store.read_run()
        self.request = RequestFiles(store.storage, claim.launch, run.id if run else "").ask(what)

    def answer(self, is_alive: Callable[[], bool], tell: Callable[[str], None] = unheard) -> Reply:
        """Waits for the answer.

        `is_alive` checks whether the run shows signs of life. `tell` receives, once, the message about a save
        that was given up, which explains the longer wait. Raises `RefusedError` if the run has ended, was
        taken over, or shows no sign of life: then the request will not be answered.
        """
        asked_at = time.monotonic()
        told = False
        while True:
            # checked before the journal is read: the answer is written there before the end is
            over = self._why_over()
            lines = self._new_lines()
            for fields in lines:
                if fields["kind"] != EventKind.REQUEST_ANSWERED:
                    continue
                if fields["request"] == self.request.number:
                    return Reply(**{name: fields[name] for name in Reply.__slots__})
            given_up = [fields for fields in lines if fields["kind"] == EventKind.SAVE_GIVEN_UP]
            if given_up and not told:
                tell(still_waits(self._what, given_up[-1]["point"], given_up[-1]["reason"]))
                told = True
            if over is not None:
                raise over
            if time.monotonic() - asked_at > QUIET_S:
                if not is_alive():
                    raise RefusedError(
                        f"{self._store.storage.root}: no answer and no sign of life; the request "
                        f"({self._what}) is void, also when the run is started again; `orchestrator status` "
                        "shows the state of the run",
                        code="run.no_sign_of_life",
                    )
                asked_at = time.monotonic()
            time.sleep(LOOK_EVERY_S)

    def _new_lines(self) -> list[Line]:
        """The journal's lines since the last call that returned. Raises `StorageError`."""
        for chunk in self._journal.new():
            self._unread += [line for _, line in chunk.lines]
        lines, self._unread = self._unread, []
        return lines

    def _refuse_if_over(self, number: int) -> None:
        if end := self._store.read_end(number):
            raise RefusedError(
                f"{self._store.storage.root} is not running: attempt {number} has ended ({end.outcome}: "
                f"{end.reason})",
                code="run.not_running",
            )

    def _why_over(self) -> RefusedError | None:
        """Why the request will not be answered; None while it may be."""
        claim, root = self._store.newest_claim(), self._store.storage.root
        void = f"the request ({self._what}) is void"
        if claim is None:
            return RefusedError(f"{root}: the run's claims are gone; {void}", code="history.missing_claims")
        if claim.launch != self._launch:
            return RefusedError(
                f"{root}: another launch has taken the run over (attempt {claim.number}, {claim.host}); "
                f"{void}, make it again",
                code="run.taken_over",
            )
        end = self._store.read_end(claim.number)
        if end is None:
            return None
        text = f"{root}: the run has ended ({end.outcome}: {end.reason}); {void}"
        return RefusedError(text, code="run.not_running")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStart:
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
