"""Determines whether another launch is active on this run (membership rule 12).

A start repeatedly observes the newest attempt. Observations and times are passed in as values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One observation of a run.

    `newest`: the newest attempt's number, 0 for a run without any. `over`: it recorded its end, or its
    processes are known to be dead. `signs`: everything that would change if it were alive.
    """

    newest: int
    over: bool
    signs: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Attempt `number` is watched since `since_s` (seconds, any origin) and has not changed. Observe
    again.
    """

    number: int
    signs: bytes
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """No launch is active on attempt `number` (0: there is none). The start may claim exactly the next
    number.

    If another launch has claimed that number meanwhile, it is alive: the claim fails, and the run is busy.
    """

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Attempt `number` is alive."""

    number: int


def judge(watch: Watch | None, look: Look, now_s: float, watch_s: float) -> Watch | Free | Busy:
    """The verdict from an observation and the watch so far (None: this is the first observation).

    Guarantee: an attempt that is judged free has ended, or showed no change for `watch_s` seconds. A launch
    that shows a change every `watch_s` seconds, from its claim on, is therefore never taken for dead.
    """
    if watch is not None and look.newest > watch.number:
        return Busy(number=look.newest)  # it was claimed just now
    if look.newest == 0 or look.over:
        return Free(number=look.newest)
    if watch is None:
        return Watch(number=look.newest, signs=look.signs, since_s=now_s)
    if look.signs != watch.signs:
        return Busy(number=watch.number)
    if now_s - watch.since_s >= watch_s:
        return Free(number=watch.number)
    return watch
