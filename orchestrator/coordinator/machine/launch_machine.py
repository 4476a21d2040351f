"""The life of one launch as a pure machine.

It decides who joins and how members are answered, which are lost, how requests are handled, and when and how
the run ends. It connects the rendezvous (which members train next) to the failure budget and to the commits
(which votes will never arrive). The coordinator reports events, with the time in seconds, and carries out the
returned actions in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.checkpoint.points.points import ReplicasDiffer
from orchestrator.coordinator.machine.launch_actions import (
    Action,
    Answer,
    End,
    Fenced,
    Kill,
    Leave,
    Note,
    Say,
    Warn,
    end_text,
    ended_by,
    is_last,
)
from orchestrator.coordinator.machine.launch_history import (
    EarlierCoordinator,
    Failures,
    RankHistory,
    RecentSteps,
)
from orchestrator.coordinator.machine.reported_errors import (
    OWN,
    ErrorReport,
    MachineRefused,
    ReportedErrors,
    RunsError,
    WorkersError,
)
from orchestrator.coordinator.machine.requests import Leaving, RequestAnswer, Requests, heard_sentence
from orchestrator.elastic.failure import Failure, FailureBudget, StorageOutage
from orchestrator.elastic.formation import Form, Formation, Ignored, LeaveOut, Refused, StopRun, Waiting
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.errors import ElasticError, FencedError, UnsavedError
from orchestrator.history import sentences
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.planning.schedule import Budgets
from orchestrator.records.membership import ControlRequests, GenerationView, JoinRequest, Refusal, RunOver
from orchestrator.records.run_status import GroupMember, MemberInfo
from orchestrator.records.steps import StateKey, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchTerms:
    """What holds for a launch from its start to its end.

    `budgets`: when its training is done.
    `stop_by`: the origin of a request to stop before that.
    `sharded`: no member holds the whole state.
    `fixed`: no member can be replaced, so the first one that is lost ends the run (torchrun).
    `plug_ins`: the settings that name code of the user which computes with the state.
    """

    budgets: Budgets = Budgets()
    stop_by: str = ""
    sharded: bool = False
    fixed: bool = False
    plug_ins: tuple[str, ...] = ()


class LaunchMachine:
    """One coordinator process's part of a launch.

    `earlier`: what a restarted coordinator takes over. `saved`: the newest resume point.

    Guarantees:
    - All members that wait in `join` are answered when the run ends.
    - The run ends once some member of the newest generation has finished and each of the others has finished,
      is gone, or has joined again, regardless of other waiting members.
    - For each way in which a member is lost there is one `VoterGone` for its newest generation, and one for
      an older one from which it owes a vote.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        budget: FailureBudget,
        trouble: StorageOutage,
        terms: LaunchTerms = LaunchTerms(),  # noqa: B008  frozen
        earlier: EarlierCoordinator = EarlierCoordinator(),  # noqa: B008  frozen
        saved: StateKey | None = None,
    ) -> None:
        self.rendezvous, self._failures, self._trouble = rendezvous, Failures(budget), trouble
        self.infos = {info.member: info for info in earlier.members}
        self.waiting: set[str] = set()  # members whose `join` is unanswered
        previous = earlier.previous
        self.members = previous.members if previous else ()  # of the newest answered generation, by rank
        self._steps = RecentSteps()
        self.ended = earlier.ended
        self.code: str | None = None  # of the error with which the run has failed in this process
        self.stopping = False
        self._stop_by, self._budgets, self._plug_ins = terms.stop_by, terms.budgets, terms.plug_ins
        self._short: tuple[int, int] | None = None  # (needed, there) as noted, while too few are there
        self._saved, self._requests = saved, Requests(earlier.answered)
        self._leaving, self._is_fixed = Leaving(rendezvous, terms.sharded), terms.fixed
        self._places = RankHistory(rendezvous.attempt)
        self._finished = {member: (reason, step) for member, reason, step in earlier.finished}
        self._left_out: set[str] = set()  # left out, and not known to be dead
        self._dead: set[str] = set()
        self._errors = ReportedErrors(rendezvous)
        self._reported = frozenset(earlier.reported)
        self._now = float("-inf")  # time of the newest event that had one
        self._save = ""
        self._num_saves = 0
        self._given_up = ""  # the text about the newest save that was given up
        self._to_hold: StateKey | None = None  # the newest state when a save was last requested
        self._decided: StateKey | None = None  # the newest save that was committed or given up
        if earlier.last_step is not None:
            self.recorded(earlier.last_step, float("-inf"))

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures of this launch."""
        return self._failures.all

    @property
    def last_step(self) -> StepRecord | None:
        """The newest recorded step; None before the first."""
        return self._steps.newest

    # ---- members
    def join(self, request: JoinRequest, now: float) -> list[Action]:
        """A member asks for the next generation. It is answered now, or by a later action."""
        member, self._now = request.member, now
        if self.ended is not None:
            return [Answer(member=member, answer=RunOver(reason=self.ended[1]))]
        if member in self._dead:
            return [Answer(member=member, answer=Refusal(reason=f"member {member} is dead"))]
        try:
            found = self.rendezvous.join(request, now)
        except FencedError as error:
            return [*self.fence(str(error)), Answer(member=member, answer=Refusal(reason=str(error)))]
        if isinstance(found, Refused):
            return [Answer(member=member, answer=Refusal(reason=found.reason))]
        if isinstance(found, GenerationView):
            return [Answer(member=member, answer=found)]
        if isinstance(found, Ignored):
            waits = member in self.waiting
            return [] if waits else [Answer(member=member, answer=Refusal(reason=found.reason))]
        self.infos[member] = MemberInfo(
            member=member,
            actor_id=request.actor_id,
            node_id=request.node_id,
            pid=request.pid,
            host=request.host,
        )
        self._left_out.discard(member)
        self.waiting.add(member)
        self._errors.joined(request.node_id)
        return [*self._places.joined(member, request.saving), *self._over()]

    def dead(self, member: str, why: str, now: float) -> list[Action]:
        """The process of `member` is gone, or Ray has given up its node.

        If it still lives, its next call is refused, and it ends. A newcomer that the run can spare is no
        failure of the run.
        """
        self._now, name = now, self._name(member)
        spare = self.rendezvous.can_spare(member)
        if spare and member in self.infos and not self._errors.knows(member):
            self.rendezvous.blame(self.infos[member].node_id, now, first_is_free=True)
        self._dead.add(member)
        self._left_out.discard(member)
        self.waiting.discard(member)
        self.rendezvous.dead(member, now, spare=spare)
        self.infos.pop(member, None)
        actions: list[Action] = [Note(kind=EventKind.MEMBER_DEAD, fields={"member": member, "reason": why})]
        if member not in self._finished and not spare and not self._errors.knows(member):
            # members of one generation die of one cause; before the first one each death counts
            actions += self._failure(f"member {member} died", self._is_early(member))
            actions += self._group_lost(f"{name}: {why}")
        return [*actions, *self._places.lost(member, writing=False), *self._over()]

    def finished(self, member: str, key: StateKey, reason: str, now: float) -> list[Action]:
        """A member's part is over (`done` or `stopped`): `key` is committed, its votes are answered.

        It may end when the note is durable, because a later coordinator must know.
        """
        known = member in self._finished
        self._finished[member] = (reason, key.step)
        self.waiting.discard(member)
        self.rendezvous.left(member, key, now)
        note = Note(
            kind=EventKind.MEMBER_FINISHED, fields={"member": member, "reason": reason, "step": key.step}
        )
        # Its votes are answered, and it has reported what it failed to write: nothing more is concluded here.
        return [*(() if known else (note,)), *self._places.lost(member, writing=True), *self._over()]

    def failed(
        self,
        member: str,
        kind: str,
        text: str,
        fatal: bool,
        place: MemberInfo | None = None,
        now: float | None = None,
        code: str | None = None,
    ) -> list[Action]:
        """A worker was ended by an error. It may never have joined.

        `fatal`: an `OrchestratorError`, which another try on the same machine would only repeat. `place`:
        where the worker ran. `code`: the error's. For the consequences see `ReportedErrors`.
        """
        self._now = self._now if now is None else now
        if self.ended is not None or self._errors.knows(member):
            return []
        note = Note(kind=EventKind.MEMBER_FAILED, fields={"member": member, "error": kind, "text": text})
        reason = text if fatal else f"{kind}: {text}"
        if kind == UnsavedError.__name__ and self._given_up:
            reason = f"{text}. Why: {self._given_up}"  # a member knows only its own part
        report = ErrorReport(
            member=member,
            kind=kind,
            text=text,
            reason=reason,
            repeats=fatal and kind not in OWN,
            place=self.infos.get(member, place),
            since=self._now,
            code=code,
        )
        inside = member in self.members and not self.rendezvous.is_gone(member)
        own = kind in OWN and not inside
        if own or member in self._dead or member in self._left_out or member in self._finished:
            self._errors.noted(report)  # no group depends on it, unless it is fixed
            return [note, *(self._group_lost(reason, code) if own else ())]
        spare = self.rendezvous.can_spare(member)
        actions: list[Action] = [note, *self._ends(member)]
        if report.repeats or inside:
            self._errors.came(report)
        elif member in self._reported:
            self._errors.noted(report)
        elif spare:
            actions += self._refused(self._errors.refuse(report, self._now))
        else:
            self._errors.noted(report)
            again = self._is_early(member) and self._failures.is_next_round(self.rendezvous.expected)
            actions += [*self._failure(reason, again), *self._group_lost(reason, code)]
        return [*actions, *self._over(), *self._judge_errors()]

    def may_end(self, member: str, now: float) -> bool:
        """Whether the process of a worker that has reported an error may end now.

        When it ends, another one takes its place. The process of a refused newcomer therefore waits before it
        ends.
        """
        return self.ended is not None or self._errors.may_end(member, now)

    def group_failed(self, node: str, reason: str) -> list[Action]:
        """The group of a node ended unexpectedly."""
        again = self._failures.is_again(self.rendezvous.generation, node)
        if self.rendezvous.can_spare(*(m for m, info in self.infos.items() if info.node_id == node)):
            if again:
                self.rendezvous.blame(node, self._now)
            return []
        return self._failure(reason, again)

    def busy(self, member: str, until: float) -> None:
        """`member` is in a phase with its own limit (rule 23)."""
        self.rendezvous.extend_deadline(member, until)

    def starved(self, member: str, seconds: float) -> None:
        """The process of `member` could not run for `seconds`, because its machine is busy (rule 17)."""
        self.rendezvous.excuse(member, seconds)

    def judge_was_late(self, seconds: float) -> None:
        """This process could not run for `seconds`. No member's silence counts meanwhile (rule 17)."""
        self.rendezvous.judge_was_late(seconds)

    def recorded(self, record: StepRecord, now: float) -> None:
        """Takes a step record, possibly a copy."""
        if self._steps.recorded(record, now):
            self._failures.applied(record.step)
            self.rendezvous.median_step(self._steps.median_s)

    def to_ask(self, committing: bool, now: float) -> list[MemberInfo]:
        """Returns the members whose liveness matters now.

        These are the members that form a group, wait, or are waited for, and those that were left out. During
        training a peer's death shows in the collectives. Members are then checked only if there was no record
        for a while, because all may be gone at once.
        """
        trains = self._steps.is_training(self.rendezvous.attempt, self.rendezvous.generation, now)
        quiet = trains and not (self.waiting or committing or self._finished)
        return [
            info
            for member, info in self.infos.items()
            if info.actor_id
            and (
                member in self._left_out
                or (not quiet and (member in self.waiting or not self.rendezvous.is_gone(member)))
            )
        ]

    def draining(self, node: str, host: str, grace_s: float, now: float) -> list[Action]:
        """A node is about to be removed, in `grace_s` seconds (inf: when it is idle)."""
        return [] if self.ended is not None else self._leaving.noticed(node, host, grace_s, now)

    def leavers(self, formation: Formation) -> list[str]:
        """Returns members of the previous generation that `formation` lacks because of a drain.

        Their nodes are about to go.
        """
        return [m for m in self.rendezvous.drained if m in self.members and m not in formation.members]

    # ---- what is asked of the run
    @property
    def next_request(self) -> int:
        """The number of the next request from outside."""
        return self._requests.next_number

    def asked(self, request: Request) -> list[Action]:
        """Handles a request from outside. It is answered now or by a later action."""
        if self.ended is not None:
            return []
        trained = self.last_step.key if self.last_step else None
        answer = self._requests.heard(request, trained, self._saved)
        actions: list[Action] = [
            Note(
                kind=EventKind.CONTROL_REQUEST,
                fields={"what": request.what, "by": request.by, "request": request.number},
            ),
            Say(text=heard_sentence(request, answer)),
        ]
        if request.what == STOP:
            self.request_stop(request.by)
        if request.what == STOP_NOW:
            behind = f"what was trained after {self._saved.point_name}" if self._saved else "all"
            reason = f"stopped at once, as {request.by} asked: {behind} is trained again"
            actions += self.end("stopped", reason, request.by)
        if answer is not None:
            actions.append(_note(answer))
        return actions

    def request_stop(self, by: str = "") -> None:
        """Requests a save and stop at the next step boundary. `by` is the origin; the first one counts."""
        self.stopping, self._stop_by = True, self._stop_by or by
        self.rendezvous.request_stop()

    def request_save(self, by: str) -> list[Action]:
        """Requests a save of what is trained by now, for `by`, which waits for no answer."""
        if self.ended is not None:
            return []
        trained = self.last_step.key if self.last_step else None
        note = Note(kind=EventKind.CONTROL_REQUEST, fields={"what": SAVE, "by": by, "request": 0})
        if trained is None or (self._saved is not None and self._saved >= trained):
            since = f" since resume point {self._saved.point_name}" if self._saved else ""
            return [note, Say(text=f"nothing was trained{since}, so there is nothing to save")]
        self.save_again()
        return [note]

    def stop_within(self, by: str, grace_s: float) -> list[Action]:
        """The stop that `by` requested ends with a kill in `grace_s` seconds (inf: unknown)."""
        return self._leaving.stop(by, grace_s, self._steps.median_s)

    def voted(self, key: StateKey) -> None:
        """A vote for the save of `key` arrived, or a report of a part that could not be saved.

        If that save is undecided and began no earlier than the last request, it is the requested one.
        """
        if self._decided is None or key > self._decided:
            self._save_begun(key)

    def save_again(self) -> None:
        """Requests a save as soon as members can begin one, until one has begun or is committed."""
        self._num_saves += 1
        self._save = f"save-{self._num_saves}"
        self._to_hold = self.last_step.key if self.last_step else None
        self.rendezvous.request_save(self._save)

    def control_requests(self, attempt: int, generation: int, acknowledged_step: int) -> ControlRequests:
        """Returns what is requested of a generation; see `Rendezvous.control_requests`."""
        found = self.rendezvous.control_requests(attempt, generation, acknowledged_step)
        if self.ended is None:
            return found
        return ControlRequests(
            ended=True, save=False, stop=False, reform=False, acknowledged_step=acknowledged_step
        )

    def end(self, outcome: str, reason: str, by: str = "", code: str | None = None) -> list[Action]:
        """Ends the run. No member is waited for; the first reason is kept.

        `by`: the cause, if it was a person. `code`: that of the error with which the run failed.
        """
        if self.ended is not None:
            return []
        if outcome == "failed":
            reason = "\n".join([reason, *self._errors.refusals(reason)])
        self.ended, self.code = (outcome, reason), code
        answers = [_note(answer) for answer in self._requests.ended(outcome, reason)]
        over: list[Action] = [Answer(member=m, answer=RunOver(reason=reason)) for m in sorted(self.waiting)]
        self.waiting.clear()
        by = by or ended_by(outcome, self._stop_by, self._budgets, self.last_step)
        return [*answers, End(outcome=outcome, reason=reason, by=by), *over]

    def fence(self, reason: str) -> list[Action]:
        """A newer attempt exists. This one is over, and does not write its end."""
        if self.ended is not None:
            return []
        self.ended, self.code = ("failed", reason), FencedError.code
        refusal = Refusal(reason=reason)
        refused: list[Action] = [Answer(member=m, answer=refusal) for m in sorted(self.waiting)]
        self.waiting.clear()
        return [Fenced(reason=reason), *refused]

    # ---- storage
    def storage_failed(self, reason: str, since: float) -> list[Action]:
        """An attempt to make the journal durable, begun at `since`, failed. It will be retried."""
        text = self._trouble.failed(reason, since)
        return [Warn(text=text)] if text else []

    def storage_worked(self) -> list[Action]:
        """The journal is durable."""
        text = self._trouble.worked()
        return [Warn(text=text)] if text else []

    def save_given_up(self, key: StateKey, text: str, now: float) -> list[Action]:
        """The save of `key` was given up; `text` has the reason.

        The run continues however many saves are given up: a stop could not save the trained state either, and
        the next attempt may succeed.
        """
        self._given_up = text
        self._requests.save_given_up(now)
        self._save_decided(key)
        return self._leaving.save_given_up(now)

    def replicas_differ(self, key: StateKey, differ: ReplicasDiffer, now: float) -> list[Action]:
        """The save of `key` was given up because ranks hold different states.

        The group goes back to the newest resume point (rule 27). This counts as a failure at that point,
        whatever was trained after it. A faulty machine thus ends the run after `cluster.max_failures` of them
        without a new resume point.
        """
        reason = differ.given_up(key, self._worker, self._plug_ins)
        back = f"resume point {self._saved.point_name}" if self._saved else "the first step"
        self._given_up = reason
        self._requests.save_given_up(now)
        self._save_decided(key)
        self.rendezvous.distrust(key, now)
        self._failures.applied(self._saved.step if self._saved else 0)
        text = f"{reason}. All workers go back to {back}"
        return [Warn(text=text), *self._leaving.save_given_up(now), *self._failure(reason, again=True)]

    def is_last(self, key: StateKey) -> bool:
        """Whether no step follows the state `key`, as far as is known."""
        return is_last(key, self.last_step, self._budgets, self.stopping)

    def committed(self, key: StateKey, took_s: float | None = None) -> list[Action]:
        """A save was committed, `took_s` after it was begun (None: unknown)."""
        self._save_decided(key)
        if took_s is not None:
            self._leaving.times.took(took_s)
        self._save_begun(key)
        self._saved = max(self._saved or key, key)
        return [_note(answer) for answer in self._requests.committed(key)]

    # ---- time
    def tick(self, now: float) -> list[Action]:
        """Returns what must be done now. To be called after every event and at least every 0.1 s."""
        self._now = now
        if self.ended is not None:
            return []
        if reason := self._trouble.verdict(now):
            return self.end("failed", reason, code="storage.outage")
        actions = [*self._over(), *self._judge_errors()]
        if self.ended is not None:
            return actions
        if self._requests.wants_save(now):
            self.save_again()
        left, wants_save = self._leaving.tick(self.infos, self._steps.median_s, now)
        actions += left
        if wants_save:
            self.save_again()
        for action in self.rendezvous.tick(now):
            match action:
                case LeaveOut():
                    actions += self._leave_out(action)
                case StopRun():
                    last = f". The last failure: {self.failures[-1].reason}" if self.failures else ""
                    actions += self.end(action.outcome, f"{action.reason}{last}", code=action.code)
                case Waiting():
                    actions += self._waits(action)
                case Form() if self.ended is None:
                    actions.append(action)
        # last: members that may go are kept while the others still meet
        for member in self.rendezvous.may_go:
            actions += self._left(member, now)
        return actions

    def formed(self, formation: Formation, now: float) -> list[Action]:
        """The formation is durable in the journal: its members are answered.

        If one of them died or joined again meanwhile, none is answered, and the next tick forms another
        generation.
        """
        self.rendezvous.formed(formation.generation, now)
        found = {member: self.rendezvous.view_for(member) for member in formation.members}
        views = {member: view for member, view in found.items() if view is not None}
        if len(views) < len(found):
            return []
        answers: list[Action] = []
        for member, view in views.items():
            answers.append(Answer(member=member, answer=view))
            self._places.answered(member, view.generation, view.rank)
        self.members, self._short = formation.members, None
        self.waiting.difference_update(formation.members)
        return answers

    # ---- inside
    def _name(self, member: str) -> str:
        """Returns the worker of this member, with its machine if known."""
        return self._worker(self.members.index(member)) if member in self.members else f"member {member}"

    def _group_lost(self, why: str, code: str | None = None) -> list[Action]:
        """A member is lost. That ends the run of a fixed group, unless a member has finished its part.

        `code`: that of the member's error.
        """
        if not self._is_fixed or any(member in self._finished for member in self.members):
            return []
        error = ElasticError(
            f"the group of {self.rendezvous.min_workers} ranks ended ({why}), and under torchrun its "
            "processes form no other one; start the same command again",
            code="training.group_ended",
        )
        return self.end("failed", str(error), code=code or error.code)

    def _worker(self, rank: int) -> str:
        """Returns the worker of this rank of the newest generation, with its machine if known."""
        info = self.infos.get(self.members[rank]) if rank < len(self.members) else None
        return f"rank {rank} (pid {info.pid} on {info.host})" if info else f"rank {rank}"

    def _ends(self, member: str) -> list[Action]:
        """It has reported an error, and its process will end. Until then it may be writing its part."""
        self.waiting.discard(member)
        self.rendezvous.dead(member, self._now, spare=self.rendezvous.can_spare(member))
        if member in self.infos:
            self._left_out.add(member)
        return list(self._places.lost(member, writing=True))

    def _judge_errors(self) -> list[Action]:
        actions = list[Action]()
        if self.ended is not None:
            return actions
        for verdict in self._errors.judge(self.members, self._now):
            match verdict:
                case RunsError():
                    actions += self.end("failed", verdict.reason, code=verdict.code)
                case WorkersError():
                    actions += self._failure(verdict.report.reason)
                    actions += self._group_lost(verdict.report.reason, verdict.report.code)
                case MachineRefused():
                    actions += self._refused(verdict)
                    actions += self._group_lost(verdict.report.reason, verdict.report.code)
        return actions

    def _refused(self, verdict: MachineRefused) -> list[Action]:
        report, place = verdict.report, verdict.report.place
        note = Note(
            kind=EventKind.MACHINE_REFUSED,
            fields={
                "node": place.node_id if place else "",
                "host": place.host if place else "",
                "pid": place.pid if place else 0,
                "member": report.member,
                "error": report.kind,
                "text": report.text,
                "retry_s": verdict.retry_s,
            },
        )
        named = GroupMember(rank=None, host=place.host if place else "", pid=place.pid if place else 0)
        text = sentences.machine_refused(named, report.kind, report.text, verdict.retry_s)
        return [note, Warn(text=text)] if verdict.is_new else [note]

    def _save_begun(self, key: StateKey) -> None:
        if self._to_hold is None or key >= self._to_hold:
            self.rendezvous.save_answered(self._save)

    def _save_decided(self, key: StateKey) -> None:
        self._decided = max(self._decided or key, key)
        self.rendezvous.save_decided(key)

    def _left(self, member: str, now: float) -> list[Action]:
        """Its votes are answered and the others hold what it holds. Its process ends by itself."""
        info = self.infos.pop(member, None)
        self.waiting.discard(member)
        self.rendezvous.left(member, None, now)
        note = Note(kind=EventKind.MEMBER_LEFT, fields={"member": member, "reason": sentences.DRAINED})
        known: list[Action] = [note] if info is not None else []
        return [*known, Leave(member=member), *self._places.lost(member, writing=False), *self._over()]

    def _waits(self, action: Waiting) -> list[Action]:
        """Notes the waiting when it begins, and when the number of members changes. The next generation ends
        it.
        """
        short = (action.needed, action.there)
        if not action.needed or short == self._short:
            return []
        self._short = short
        note = Note(
            kind=EventKind.WAITING,
            fields={"needed": action.needed, "there": action.there, "reason": action.reason},
        )
        return [note]

    def _leave_out(self, action: LeaveOut) -> list[Action]:
        member = action.member
        actions: list[Action] = [
            Note(kind=EventKind.LEFT_OUT, fields={"member": member, "reason": action.reason})
        ]
        if member in self.infos:
            self._left_out.add(member)
            actions.append(Kill(member=self.infos[member], reason=action.reason))
        actions += self._group_lost(f"{self._name(member)}: {action.reason}")
        return [*actions, *self._places.lost(member, writing=True), *self._over()]

    def _is_early(self, member: str) -> bool:
        return member not in self.members and self.rendezvous.generation == 0

    def _failure(self, reason: str, again: bool = False) -> list[Action]:
        """Counts a failure (`Failures.count`). Too many failures end the run."""
        over = self.ended is not None
        failure = self._failures.count(self.rendezvous.generation, reason, again=again, over=over)
        if failure is None:
            return []
        note = Note(kind=EventKind.FAILURE, fields={"step": failure.step, "reason": reason})
        verdict = self._failures.verdict()
        return [note, *(self.end("failed", verdict, code="launch.too_many_failures") if verdict else ())]

    def _over(self) -> list[Action]:
        """Ends the run once a member of the newest generation has finished and all others are done.

        Each of the others must have finished, be gone, or have come back. Waiting newcomers change nothing.
        """
        here = {m: self._finished[m] for m in self.members if m in self._finished}
        if not here or self.ended is not None:
            return []
        if any(
            m not in here and m not in self.waiting and not self.rendezvous.is_gone(m) for m in self.members
        ):
            return []
        reason, step = next(iter(here.values()))
        return self.end(reason, end_text(reason, step, trained=self.last_step is not None))


def _note(answer: RequestAnswer) -> Note:
    return Note(kind=EventKind.REQUEST_ANSWERED, fields=answer.fields)
