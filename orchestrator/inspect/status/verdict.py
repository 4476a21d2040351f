"""One sentence on the state of a run: the same for the page, the notebook and `status`.

Pure: facts in, words out. `level` is the urgency: ok, warn, bad, or idle (nothing to do).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.history import sentences
from orchestrator.text import count, span, steps

# the states of a run; `open`: it has not ended, and it was not watched long enough to tell if it is alive
NEW, STARTING, RUNNING, WAITING, OPEN = "new", "starting", "running", "waiting", "open"
DONE, STOPPED, FAILED, GONE, UNREADABLE = "done", "stopped", "failed", "gone", "unreadable"
OVER = (NEW, DONE, STOPPED, FAILED, GONE)  # nothing will change without a command
STILL_S = 5.0  # the least time without a step that is worth mentioning


@dataclass(frozen=True, kw_only=True, slots=True)
class Risk:
    """What would be trained again if everything died now: all since the newest resume point. While a start
    continues that point: all that is trained again. `seconds` is None if unknown.
    """

    steps: int
    tokens: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The state of a run. None, or empty, means unknown or not applicable.

    `reason`: of its end, or what is unreadable. `silent_s`: the time without a sign of life; `quiet_s`: the
    time without a step. `kept_s`: the time for which this machine keeps file sizes, so a shorter watch proves
    no death. `resumes`: the newest attempt is a start that continues the newest resume point, so that all
    that came after it is gone. `has_no_point`: it is known that no resume point was ever committed.
    `concerns`: what needs attention, in few words, the worst first; `is_bad`: one of them is bad.
    """

    state: str
    attempt: int | None = None
    reason: str = ""
    step: int | None = None
    total_steps: int | None = None
    workers: int | None = None
    workers_wanted: int | None = None
    there: str = ""
    quiet_s: float | None = None
    silent_s: float = 0.0
    kept_s: float = 0.0
    point: str | None = None
    has_no_point: bool = True
    risk: Risk | None = None
    resumes: bool = False
    missing: tuple[str, ...] = ()
    concerns: tuple[str, ...] = ()
    is_bad: bool = False


def verdict(at: Standing) -> str:
    """The sentence, without a capital or a full stop, because it follows the run's name. More sentences may
    follow after `. `.
    """
    text = _state_text(at)
    if at.state == GONE and at.risk is not None and at.risk.steps and at.point is not None and not at.missing:
        work = f"{steps(at.risk.steps)} ({count(at.risk.tokens)} tokens)"
        text += f"; {work} after it {_are(at.risk)} trained again"
    if at.state == STARTING and at.resumes and at.risk is not None and at.risk.steps:
        text += f". {_work(at.risk)} after {at.point or 'its beginning'} {_are(at.risk)} trained again"
    elif at.state in (STARTING, RUNNING, WAITING) and (risk := _risk_text(at)):
        text += f". {risk}"
    if at.concerns and at.state in (RUNNING, WAITING):
        text += f". Look at: {', '.join(at.concerns)}"
    return text + (f"; {missing_text(at.missing)}" if at.missing else "")


def missing_text(missing: Sequence[str]) -> str:
    """The sentence of a look about missing paths, and the commands that check more."""
    listed = ", ".join(missing)
    return (
        f"missing or damaged in its folder: {listed}; `orchestrator plan CONFIG` says what a start would do"
    )


def silence_s(watched_s: float, last: float | None, now: float) -> float:
    """How long a run that seems dead gave no sign of life: since the last known sign, or for the time of the
    watch. `last` and `now`: seconds by one clock, or by two that may differ.
    """
    return max(watched_s, now - last if last is not None else 0.0)


def there_text(there: int, needed: int) -> str:
    """Why a run waits for workers (`Standing.there`)."""
    return f"{there} of at least {needed} workers are there"


def level(at: Standing) -> str:
    """The urgency: ok, warn, bad or idle."""
    if at.state in (FAILED, GONE, UNREADABLE) or at.missing or at.is_bad:
        return "bad"
    if at.state in (NEW, DONE, STOPPED):
        return "idle"  # a slow phase of the past needs no attention
    return "warn" if at.state == WAITING or at.concerns else "ok"


def _state_text(at: Standing) -> str:
    where = f"step {at.step:,}" if at.step is not None else "no step yet"
    if at.step is not None and at.total_steps is not None:
        where += f" of {at.total_steps:,}"
    again = f"start the same command again: it continues from {at.point or 'the beginning'}"
    if at.point is None and not at.has_no_point:
        again = "no resume point is seen; `orchestrator plan CONFIG` says what a start would do"
    workers = f"{at.workers} of {at.workers_wanted or at.workers} workers"
    still = at.quiet_s is not None and at.quiet_s >= STILL_S
    quiet = f", but no step for {at.quiet_s:.0f} s" if still else ""
    dead = "no claim of an attempt is left of this run"
    if at.attempt is not None:
        dead = (
            f"not running: attempt {at.attempt} has no end record and gave no sign of life for "
            f"{_silence(at.silent_s)}, last at {where}" + ("" if at.missing else f"; {again}")
        )
    unknown = (
        f"unknown: last seen {_silence(at.silent_s)} ago at {where}; this machine keeps the sizes of files "
        f"for {at.kept_s:.0f} s, so a short watch does not show whether the run lives"
    )
    texts = {
        NEW: "no attempt of this run has begun yet",
        STARTING: f"starting attempt {at.attempt}: {where}",
        RUNNING: f"running: {where}, {workers}{quiet}",
        WAITING: f"waiting for workers at {where}: {at.there or f'{workers} are left'}",
        OPEN: f"not ended: {where}" if not at.kept_s else unknown,
        DONE: sentences.ended(DONE, at.reason),
        STOPPED: sentences.ended(STOPPED, at.reason),
        FAILED: sentences.ended(FAILED, at.reason),
        GONE: dead,
        UNREADABLE: f"unreadable: {at.reason}",
    }
    return texts[at.state]


def _silence(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else span(seconds)


def _risk_text(at: Standing) -> str:
    if at.risk is None:
        return ""
    if not at.risk.steps:
        return "If everything died now, nothing would be lost"
    return f"If everything died now, {_work(at.risk)} would be trained again"


def _are(risk: Risk) -> str:
    return "is" if risk.steps == 1 else "are"


def _work(risk: Risk) -> str:
    work = f", {span(risk.seconds)} of work" if risk.seconds is not None else ""
    return f"{steps(risk.steps)} ({count(risk.tokens)} tokens{work})"
