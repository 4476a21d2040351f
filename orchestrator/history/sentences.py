"""Sentences about a run's events for users.

Pure functions from facts to text, used by the screen, the log file, `status` and other displays, so that all
of them show the same text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from orchestrator import errors
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW
from orchestrator.records.run_status import CODE, EVALUATES, PEERS, GroupChange, GroupMember, Loss, Stall
from orchestrator.records.steps import NONFINITE, EvalRecord, StepRecord

DOT = " · "
UNRESPONSIVE = "it stopped responding and was killed"
NO_CHANGE = "the step has changed no weights"  # ends the reason of a generation whose objective failed
USER_CODE = ("train.objective=", "train.optimizer=")  # begin the reasons of workers that user code ended
DRAINED = "its node is about to be taken away"
SCREEN_CHARS, SCREEN_LINES = 160, 12  # of a message of another program
REASON_CHARS = 320  # of a line of a reason that may be ours: where, what, and what to do
STILL_LEAST_S, STILL_MEDIANS = 30.0, 5.0  # when a stall of workers that all seem to work is reported
_PROCESS_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a network file system",
    "Z": "its process is dead",
    "": "its process is gone",
}


def count(number: int, what: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def loss(value: float | None) -> str:
    """A step's loss; a step has none without target tokens, and if it was not finite."""
    return "none" if value is None else f"{value:.4f}"


def eval_values(value: float | None, perplexity: float | None) -> str:
    """The loss of an evaluated part, and its perplexity if it has one: `loss 3.2102, perplexity 24.78`."""
    text = f"loss {loss(value)}"
    return text if perplexity is None else f"{text}, perplexity {perplexity:,.2f}"


def evaluated(record: EvalRecord) -> str:
    """The line for a part that was evaluated."""
    values = eval_values(record.loss, record.perplexity)
    return (
        f"eval {record.part} at step {record.step}: {values}, {count(record.samples, 'sample')}, "
        f"{record.seconds:.1f} s"
    )


def step_skipped(record: StepRecord) -> str:
    """The line for a step that a policy about losses has left out."""
    why = "its loss or gradient is not finite" if record.skipped == NONFINITE else "it is a spike"
    value = "" if record.loss is None else f"loss {record.loss:.4f}, "
    return (
        f"step {record.step} is skipped, because {why} ({value}gradient norm {record.grad_norm:.4g}): "
        "weights and optimizer stay as they are"
    )


def not_finite(names: Sequence[str], step: int, part: str = "", objective: str = "") -> str:
    """The line for metrics of a step, or of the evaluation of `part` after it, that are not finite.

    `objective`: the plug-in that computes them ("": the built-in one, or not known).
    """
    where = f"the evaluation of {part} after step {step}" if part else f"step {step}"
    of = f" of {objective}" if objective else ""
    what, verb = ("metric", "is") if len(names) == 1 else ("metrics", "are")
    advice = "; weights do not depend on it: correct it, or give it the count 0 where it has no value"
    return (
        f"{what} {', '.join(names)}{of} {verb} not finite (or absurdly large) in {where}, and recorded as "
        f"null{advice if objective else ''}"
    )


def worker(member: GroupMember) -> str:
    """`worker 1 (10.0.0.7, pid 22506)`, without unknown parts."""
    rank = "a worker that was joining" if member.rank is None else f"worker {member.rank}"
    place = [member.host] if member.host else []
    place += [f"pid {member.pid}"] if member.pid else []
    return f"{rank} ({', '.join(place)})" if place else rank


def workers(members: Sequence[GroupMember]) -> str:
    """Several workers in short form: `3 workers on 10.0.0.7 (ranks 4, 5, 6)`, `3 workers on 10.0.0.7 (rank 0,
    2 that were joining)`.
    """
    if len(members) == 1:
        return worker(members[0])
    hosts = dict.fromkeys(member.host for member in members if member.host)
    ranks = sorted(member.rank for member in members if member.rank is not None)
    place = f" on {', '.join(hosts)}" if hosts else ""
    who = [f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"] if ranks else []
    if joining := len(members) - len(ranks):
        who.append(f"{joining} that {'was' if joining == 1 else 'were'} joining")
    return f"{len(members)} workers{place} ({', '.join(who)})"


def losses(lost: Sequence[Loss]) -> str:
    """The lost workers and the reasons. Workers of one host with the same reason are grouped."""
    groups: dict[tuple[str, str], list[GroupMember]] = {}
    for loss in lost:
        groups.setdefault((loss.worker.host, loss.reason), []).append(loss.worker)
    return "; ".join(
        f"{workers(members)} {_ended_how(reason)}: {reason}" for (_, reason), members in groups.items()
    )


def _ended_how(reason: str) -> str:
    if reason == DRAINED:
        return "left"
    return "failed" if reason.startswith(USER_CODE) else "lost"


def untold(lost: Sequence[Loss], reason: str) -> list[Loss]:
    """Those of the lost workers whose reason is not in the `reason` of the run's end, which follows."""
    text = " ".join(reason.split())
    return [loss for loss in lost if loss.reason.rstrip("….") not in text]


def group_change(change: GroupChange, heard: Sequence[Loss] = ()) -> str:
    """The line for a generation that was formed. `heard`: losses that were already reported."""
    there = f"{change.world_size} of {change.wanted}"
    next_step = f"step {change.step + 1}"
    if change.reason.endswith(NO_CHANGE) and not (change.lost or change.joined or change.restarted):
        return _cut_inside(" ".join(change.reason.split()))
    if change.paused_s is None and not change.lost and not change.restarted:
        return f"{there} workers are ready{DOT}starting at {next_step}"
    parts = [f"the coordinator was restarted (attempt {change.attempt})"] if change.restarted else []
    if lost := [loss for loss in change.lost if loss not in heard]:
        parts.append(losses(lost))
    if change.joined:
        parts.append(f"{workers(change.joined)} joined")
    if change.lost and not change.joined:
        parts.append(f"{there} left, continuing at {next_step}")
    elif change.joined or change.restarted:
        parts.append(f"{there} workers, continuing at {next_step}")
    else:
        after = f" after: {first_sentence(change.reason)}" if change.reason else ""
        parts.append(f"re-formed with {there} workers (generation {change.generation}){after}")
        parts.append(f"continuing at {next_step}")
    again = change.step_before - change.step
    if again > 0:
        parts.append(
            f"no remaining worker holds step {change.step_before}: "
            f"{count(again, 'step')} {'is' if again == 1 else 'are'} trained again"
        )
    if change.paused_s is not None:
        parts.append(f"paused {change.paused_s:.1f} s")
    return DOT.join(parts)


def machine_refused(newcomer: GroupMember, kind: str, text: str, retry_s: float) -> str:
    """The line for a joining worker whose machine cannot work for the run."""
    parts = [
        f"{worker(newcomer)} cannot take part: {failure(kind, text)}",
        "the others train without it",
        f"its machine is tried again in {retry_s:.0f} s",
    ]
    return DOT.join(parts)


def waiting(lost: Sequence[Loss], minimum: int, wait_s: float) -> str:
    """The line for a run that cannot continue: fewer workers than its minimum are left."""
    parts = [losses(lost)] if lost else []
    parts.append(f"fewer than {minimum} workers are left" if minimum > 1 else "no worker is left")
    parts.append(f"waiting up to {wait_s:g} s for a replacement (cluster.wait_s)")
    return DOT.join(parts)


def drained(course: str, hosts: Sequence[str], num_workers: int, grace_s: float, save_s: float | None) -> str:
    """The line for nodes that are about to be removed.

    `course`: the group's reaction (`elastic.drain.DrainCourse`). `grace_s` inf: when they are idle.
    `save_s`: the time of a save, if known.
    """
    when = "when it is idle" if math.isinf(grace_s) else f"in {grace_s:.0f} s"
    what = (
        f"node {', '.join(hosts)} is taken away {when}"
        if len(hosts) == 1
        else (f"nodes {', '.join(hosts)} are taken away {when.replace('it is', 'they are')}")
    )
    takes = (
        "how long a save takes is not known yet" if save_s is None else f"a save takes up to {save_s:.1f} s"
    )
    who = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    does = {
        "stay": [f"the run needs its {who} and keeps them until the node goes; add a node"],
        "leave": [f"without its {who} after this step; the others hold the whole state"],
        "save and leave": [takes, f"saving after this step, then without its {who}"],
        "save": [
            f"{takes}, which may be too long: a resume point is begun, and training continues",
            "steps after the newest whole state are trained again when the node goes; save more often, or "
            "set resume.memory_every_steps",
        ],
    }
    return DOT.join([what, *does[course]])


def cannot_leave(why: str) -> str:
    """The line for a node that is not left for now."""
    return (
        f"the group still needs the workers of a node that is taken away: {why}. Leaving them is tried again "
        "until the node goes"
    )


def saves_fail(retry_s: float, most_s: float) -> str:
    """The line for the first save that storage failed.

    The next try comes in `retry_s`, each later one at most `most_s` after the one before.
    """
    return (
        f"a failed save does not stop training. The next save is tried in {retry_s:g} s, later ones after "
        f"longer pauses (at most {most_s:g} s), and one right after the last step. No committed point is "
        "lost. Until a save succeeds, losing all workers costs the training since the newest resume point"
    )


def deletes_fail(point: str, reason: str, most_s: float) -> str:
    """The line for the first point that storage did not delete. It is tried at least every `most_s`."""
    return (
        f"resume point {point} is no longer needed and cannot be deleted: {reason}. Training continues, but "
        "older points stay and storage fills up. Allow this process to delete in run.storage. It tries again "
        f"at least every {most_s:g} s and reports the first success"
    )


def deletes_work(point: str) -> str:
    """The line for the first point that is deleted after such a failure."""
    return f"old resume points are deleted again: {point} was the first"


def last_save_fails(limit_s: float) -> str:
    """The same if no step follows. `limit_s`: the total time of the tries."""
    return (
        f"the last state of the run is not saved yet. Saving is tried for {limit_s:g} s, then the run ends "
        "without it. No committed point is lost. Until a save succeeds, the training since the newest resume "
        "point exists only in the workers' memory"
    )


def stop_within(by: str, grace_s: float, save_s: float | None, fits: bool) -> str:
    """The line for a stop by a caller that kills the launch in `grace_s` seconds."""
    if save_s is None:
        return f"{by}: {grace_s:.0f} s are left; how long a save takes is not known yet"
    if fits:
        return f"{by}: {grace_s:.0f} s are left, a save takes up to {save_s:.1f} s"
    return (
        f"{by}: {grace_s:.0f} s are left, and a save may take {save_s:.1f} s. If it is killed before, the "
        "next start continues from the point before. Give it more time between SIGTERM and SIGKILL"
    )


def asked(what: str, by: str, outcome: str = "", text: str = "") -> str:
    """The line for a received request.

    `outcome` and `text` are those of the answer, if it is answered at once; then the line contains only the
    result.
    """
    meant = {
        SAVE: ["a resume point is saved after this step"],
        STOP: ["saving and stopping after this step"],
        STOP_NOW: ["stopping at once, without a save"],
    }
    who, wanted = by or "an unknown sender", what or "something unreadable"
    became = [f"{outcome}: {text}"] if outcome else meant.get(what, [])
    return DOT.join([f"{who} asks for: {wanted}", *became])


def part_died(part: str, pid: int, who: str) -> str:
    """The line for a part of the launch whose process died, which `who` restarts."""
    process = f" (pid {pid})" if pid else ""
    return f"the {part}{process} died: {who} restarts it; the workers wait for it"


def died(part: str, pid: int, host: str, reason: str) -> str:
    """The same with its reason, for a later look. `pid` 0: not known."""
    place = ", ".join([host] * bool(host) + [f"pid {pid}"] * bool(pid))
    return f"the {part}{f' ({place})' if place else ''} died: {reason}"


def clock_jumped(by_s: float, known_by: str = "") -> str:
    """The line for a jump of the clock. `known_by`: the evidence, if the process itself did not note it."""
    way = "forward" if by_s > 0 else "back"
    least = f"at least {-by_s:,.0f}" if known_by else f"{abs(by_s):,.0f}"
    shown = f" ({known_by})" if known_by else ""
    return f"the clock of the coordinator's machine went {way} by {least} s{shown}; durations do not count it"


def coordinator_is_frozen(pid: int, silent_s: float) -> str:
    """The line for a coordinator that is about to be killed because it does not answer."""
    process = f" (pid {pid})" if pid else ""
    return (
        f"the coordinator{process} has not answered for {silent_s:.0f} s: it is killed and restarted; the "
        "workers wait for it"
    )


def not_saved(by: str, grace_s: float) -> str:
    """The reason of a launch that ends because its last save took too long."""
    return (
        f"{by}: the last state could not be saved within the grace time of {grace_s:.0f} s; start the same "
        "command again: it continues from the newest resume point"
    )


def coordinator_is_slow(pid: int, silent_s: float) -> str:
    """The line for a coordinator that does not answer because its machine is busy."""
    process = f" (pid {pid})" if pid else ""
    return (
        f"warning: the coordinator{process} has not answered for {silent_s:.0f} s, but it is at work: its "
        "machine is busy. Training continues"
    )


def stall(seen: Stall) -> list[str]:
    """The lines for a group without a step for long.

    They name the workers that cannot answer, else those for which the others wait in a collective. If all
    seem to work, one line reports that, after max(30 s, 5 × median step).
    """
    held_up = [each for each in seen.held if each.state is None or each.state in _PROCESS_STATES]
    others = "the others wait for it" if len(held_up) < len(seen.held) else "no worker trains"
    lines = []
    for each in held_up:
        why = "its node does not answer" if each.state is None else _PROCESS_STATES[each.state]
        who = f"{worker(each.worker)} has not answered for {seen.quiet_s:.1f} s"
        lines.append(f"{who}: {why}{DOT}{others}")
    evaluates = [each.worker for each in seen.held if each.doing and each.doing.kind == EVALUATES]
    lines = lines or ([] if evaluates else _in_code(seen))
    if not lines and seen.quiet_s >= max(STILL_LEAST_S, STILL_MEDIANS * seen.median_s):
        waits = "no worker's process is stopped: they wait for data or storage, or for each other"
        if evaluates:
            waits = "the workers evaluate"
        if seen.stopping:
            waits += (
                ". The run stops when its last state is saved or the save fails; a second Ctrl-C or SIGTERM "
                "stops it at once, without a save"
            )
        lines.append(
            f"no step was finished for {seen.quiet_s:.0f} s (median {seen.median_s:.1f} s){DOT}{waits}"
        )
    return lines


def _in_code(seen: Stall) -> list[str]:
    """The lines for workers that have not entered the collective in which others wait for them.

    If all wait in it, one line names them and their machines.
    """
    doing = [(each.worker, each.doing) for each in seen.held if each.doing is not None]
    waits = [who for who, what in doing if what.kind == PEERS]
    if len(waits) == len(seen.held) > 1:
        ranks = {each.worker.rank: each.worker for each in seen.held}
        cut_off = [
            f"{worker(who)} does not reach {workers([ranks[r] for r in what.unreached if r in ranks])}"
            for who, what in doing
            if any(r in ranks for r in what.unreached)
        ]
        if cut_off:
            return [f"{line}: look at the network between these machines" for line in cut_off]
        return [
            f"{workers(waits)} have waited for each other for {seen.quiet_s:.1f} s: all are in a collective, "
            "so some of them do not reach each other; look at the network between these machines"
        ]
    lines = []
    for who, what in doing:
        if what.kind == CODE and waits:
            lines.append(
                f"{worker(who)} has not come to the collective for {what.since_s:.1f} s: it is at "
                f"{what.place}{DOT}{workers(waits)} {'waits' if len(waits) == 1 else 'wait'} for it"
            )
    return lines


def failure(kind: str, text: str) -> str:
    """Why a worker ended that reported it: the last line of the error.

    The class of one of our errors (`errors`) is left out, because its text is enough.
    """
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    last = lines[-1].strip()
    return first_sentence(last if last.startswith(kind) or hasattr(errors, kind) else f"{kind}: {last}")


def ended(outcome: str, reason: str) -> str:
    """How a run ended (`done`, `stopped` or `failed`), and why."""
    return reason if reason.startswith(outcome) else f"{outcome}: {reason}"


def first_sentence(text: str, limit: int = SCREEN_CHARS) -> str:
    """The first sentence of a text, on one line, at most `limit` characters."""
    line = " ".join(text.split())
    first = re.split(r"(?<=[.!?])\s", line, maxsplit=1)[0]
    return first if len(first) <= limit else first[: limit - 1] + "…"


def shortened(text: str, where: str) -> str:
    """A long reason in the form for the screen.

    It has no frames of tracebacks, and at most `SCREEN_LINES` lines, each at most `REASON_CHARS` long. The
    file `where` has the full text ("": there is none). Long lines are cut in the middle: the place is at the
    beginning, the remedy at the end.
    """
    lines = [line for line in text.splitlines() if not re.match(r"\s+File \"|\s{4,}", line)]
    short = "\n".join(map(_cut_inside, lines[:SCREEN_LINES]))
    return short if short == text or not where else f"{short}\n(all of it in {where})"


def _cut_inside(line: str) -> str:
    """A line, cut in the middle to `REASON_CHARS`."""
    half = REASON_CHARS // 2
    return line if len(line) <= REASON_CHARS else f"{line[: half - 1]}…{line[-half:]}"


def foreign(who: str, text: str, where: str) -> str:
    """The one line on the screen for a long message of another program.

    The file `where` has the full text ("": there is none).
    """
    line = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    pid = re.search(r"Worker PID: (\d+).*?Worker exit type: (\w+)", line, re.DOTALL)
    host = re.search(r"Worker IP address: (\S+)", line)
    if pid is not None:
        on = f" on {host.group(1)}" if host else ""
        short = f"process {pid.group(1)}{on} died ({pid.group(2)})"
    else:
        short = first_sentence(line)
    more = len(" ".join(line.split())) - len(short)
    return f"{who}: {short}" + (f" ({more:,} more characters in {where})" if more > 0 and where else "")
