"""The newest part of a run's journal: the last steps, group, evaluation, fault and point.

For a look at a run of any length: it reads at least the newest 16 MiB, where there are so many, and at most
about twice that, and checks only the lines that it shows; proofs read the whole journal (`journal_reader`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from orchestrator.errors import OrchestratorError, StorageError, UnsavedError
from orchestrator.history import sentences
from orchestrator.history.claims.segments import SEGMENT_BYTES, read_from, segments
from orchestrator.history.journal.journal_lines import lines_backwards
from orchestrator.history.journal.journal_writer import GENERATION, OWN_FIELDS, STEP
from orchestrator.history.journal.line_format import EventKind, LaterLineError, parse_line
from orchestrator.inspect.status.snapshot import RECENT_STEPS, NewestFault, eval_record
from orchestrator.json_form import decode
from orchestrator.records.run_status import GroupChange, GroupMember, Loss
from orchestrator.records.steps import EvalRecord, StateKey
from orchestrator.storage.files import Storage

# Least size of the read segments. Normally that is about two full ones, but failed writes may have left small
# or empty ones.
LEAST_BYTES = SEGMENT_BYTES
_KIND = re.compile(rb'"kind":"([^"]*)"')
LOST = (EventKind.MEMBER_DEAD, EventKind.LEFT_OUT, EventKind.MEMBER_FAILED)  # each names the `member`
_FAULTS = (
    EventKind.SAVE_GIVEN_UP,
    EventKind.POINT_NOT_DELETED,
    EventKind.DAMAGED_POINT,
    EventKind.GROUP_ENDED,
    EventKind.UNREADABLE_FILE,
    EventKind.UNRESPONSIVE,
    EventKind.FEEDER_DIED,
    EventKind.COORDINATOR_DIED,
    EventKind.MACHINE_REFUSED,
)


@dataclass(kw_only=True, slots=True)
class Tail:
    """The result, newest first. A fact outside the part that was read is None. Lines are plain JSON objects.

    `gone` are the members that the newest generation has lost since it was formed, or who have left it.
    `waiting` is the newest message since then on too few workers, `joins` each member's newest join. `fates`
    are the events of points (kind and fields). `evaluations` have their times, and may be of states that were
    lost since. `parents` is what each generation (attempt, number) continues. `whole_from` is the attempt
    from which on the journal was read completely (0: all of it). `wrote`: when the newest line was written.
    `damaged`: the newest file, in what was read, with a line that differs from what was written; empty if
    there is none.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    generation: dict[str, Any] | None = None
    wanted: int | None = None
    gone: set[str] = field(default_factory=set)
    waiting: dict[str, Any] | None = None
    faults: list[dict[str, Any]] = field(default_factory=list)
    joins: dict[str, dict[str, Any]] = field(default_factory=dict)
    point: dict[str, Any] | None = None
    evaluations: list[tuple[EvalRecord, float]] = field(default_factory=list)
    parents: dict[tuple[int, int], StateKey | None] = field(default_factory=dict)
    fates: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    whole_from: int = 0
    wrote: str | None = None
    damaged: str = ""

    @property
    def fault(self) -> NewestFault | None:
        """The newest fault."""
        if not self.faults:
            return None
        line = self.faults[0]
        return NewestFault(text=self._sentence(line), t=_stamp(line))

    def _sentence(self, line: dict[str, Any]) -> str:
        kind = line["kind"]
        if kind == EventKind.GROUP_FORMED:
            return sentences.group_change(_change(line))
        if kind == EventKind.CLOCK_JUMPED:
            return sentences.clock_jumped(line["by_s"])
        if kind == EventKind.UNRESPONSIVE:
            return str(line["reason"])
        if kind in (EventKind.FEEDER_DIED, EventKind.COORDINATOR_DIED):
            return sentences.died(kind.removesuffix(" died"), line["pid"], line["host"], line["reason"])
        if kind == EventKind.MACHINE_REFUSED:
            worker = GroupMember(rank=None, host=line["host"], pid=line["pid"])
            return sentences.machine_refused(worker, line["error"], line["text"], line["retry_s"])
        if kind == EventKind.MEMBER_FAILED:
            reason = sentences.failure(line["error"], line["text"])
        else:
            reason = sentences.first_sentence(str(line.get("reason") or ""))
        if kind not in LOST:
            about = line.get("point") or line.get("file") or ""
            return f"{kind}{f' {about}' if about else ''}: {reason}"
        members = self.generation["members"] if self.generation is not None else []
        member, join = line["member"], self.joins.get(line["member"], {})
        rank = members.index(member) if member in members else None
        who = GroupMember(rank=rank, host=join.get("host", ""), pid=join.get("pid", 0))
        return sentences.losses([Loss(worker=who, reason=reason)])

    @property
    def workers(self) -> int | None:
        """The number of workers in the newest generation; None before the first."""
        if self.generation is None:
            return None
        lost = self.gone & set(self.generation["members"])
        return int(self.generation["world_size"]) - len(lost)


def read_tail(
    storage: Storage,
    set_aside: Callable[[dict[str, Any]], bool] = lambda _: False,
    most_bytes: int | None = None,
) -> Tail:
    """Returns the newest part of the run's journal, without the steps that are `set_aside`; empty if there is
    none.

    Lines that differ from the journal's form are skipped (the last one may be half written). A failed write
    may repeat a line in several segments; it is taken once. `most_bytes` is the most to read. Raises
    `StorageError`, and `LaterLineError` if a later version wrote what would be shown.
    """
    whole_from, lines = lines_backwards(
        storage, LEAST_BYTES if most_bytes is None else most_bytes, may_exceed=most_bytes is None
    )
    tail = Tail(whole_from=whole_from)
    oldest: dict[int, int] = {}  # the least line number taken, by attempt
    for ref, text, is_last in lines:
        kind = _KIND.search(text)
        name = kind.group(1).decode(errors="replace") if kind is not None else ""
        if not text or (name == STEP and len(tail.steps) >= RECENT_STEPS):
            continue
        try:
            line = parse_line(text)
            if ref.attempt in oldest and line.seq >= oldest[ref.attempt]:
                continue
            if name != STEP or not set_aside(line.fields):
                _take(tail, name, line.fields)
            oldest[ref.attempt] = line.seq
            tail.wrote = tail.wrote or line.fields["time"]
        except LaterLineError as error:
            raise LaterLineError(f"{ref.path} {error}") from error
        except (OrchestratorError, AttributeError, KeyError, TypeError):
            if not is_last:
                tail.damaged = tail.damaged or ref.path
    return tail


def newest_generation(storage: Storage, attempt: int) -> dict[str, Any] | None:
    """Returns the line with which an attempt's newest generation began, of any age; None if none can be read.
    At most one segment of the journal is in memory at a time.
    """
    wanted = f'"kind":"{GENERATION}"'.encode()
    for ref in reversed(segments(storage, attempt)):
        try:
            content = read_from(storage, ref)
        except (FileNotFoundError, StorageError):
            return None
        end = content.rfind(b"\n") + 1  # what follows may be half written
        if (at := content.rfind(wanted, 0, end)) < 0:
            continue
        try:
            line = parse_line(content[content.rfind(b"\n", 0, at) + 1 : content.find(b"\n", at)])
        except LaterLineError as error:
            raise LaterLineError(f"{ref.path} {error}") from error
        except OrchestratorError:
            return None
        return line.fields
    return None


def _take(tail: Tail, kind: str, line: dict[str, Any]) -> None:
    if kind in (STEP, GENERATION, EventKind.EVALUATED):
        _take_state(tail, kind, line)
    elif kind == EventKind.GROUP_FORMED:
        change = _change(line)
        tail.wanted = tail.wanted or change.wanted
        if any(loss.reason != sentences.DRAINED for loss in change.lost):
            tail.faults.append(line)
    elif kind == EventKind.JOIN:
        tail.joins.setdefault(line["member"], line)
    elif kind == EventKind.POINT_COMMITTED:
        tail.point = tail.point or line
        tail.fates.append((kind, line))
    elif kind in (EventKind.DELETING_POINTS, EventKind.POINTS_DELETED):
        tail.fates.append((kind, line))
    elif kind in LOST and tail.generation is None:
        tail.gone.add(line["member"])
        tail.faults += _fault_of_loss(line)
    elif kind == EventKind.MEMBER_LEFT and tail.generation is None:
        tail.gone.add(line["member"])  # on purpose, so it is no fault
    elif kind == EventKind.WAITING and tail.generation is None:
        tail.waiting = tail.waiting or line
    elif kind == EventKind.CLOCK_JUMPED or (kind in _FAULTS and line.get("reason")):
        tail.faults.append(line)


def _take_state(tail: Tail, kind: str, line: dict[str, Any]) -> None:
    """Takes a line about a state: that it was trained, continued or evaluated."""
    if kind == STEP:
        tail.steps.append(line)
    elif kind == GENERATION:
        tail.generation = tail.generation or line
        parent = decode(StateKey, line["parent"]) if line["parent"] is not None else None
        tail.parents.setdefault((line["attempt"], line["generation"]), parent)
    else:
        tail.evaluations.append((eval_record(line), _stamp(line)))


def _stamp(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def _fault_of_loss(line: dict[str, Any]) -> list[dict[str, Any]]:
    """The loss of a worker. Empty if it left on purpose, because its save was given up."""
    return [] if line.get("error") == UnsavedError.__name__ else [line]


def _change(line: dict[str, Any]) -> GroupChange:
    fields = {k: v for k, v in line.items() if k not in OWN_FIELDS}
    return decode(GroupChange, fields)
