"""Is somebody at work on this run? What a start concludes from looking at its newest attempt again and again
(membership rule 12).

It reads no storage and no clock: looks and times are given to it as values.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What one look shows. `newest`: the newest attempt's number, 0 for a run without any. `over`: it said
    its end, or its processes are known to be dead. `signs`: all in which it would show that it lives.
    """

    newest: int
    over: bool
    signs: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Attempt `number` is watched since `since_s` (seconds, any origin) and has not moved; look again."""

    number: int
    signs: bytes
    since_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Nobody is at work on attempt `number` (0: there is none): the start may claim exactly the next number.

    Whoever has claimed that one meanwhile lives; then the claim fails, and the run is busy.
    """

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Attempt `number` is alive."""

    number: int


def judge(watch: Watch | None, look: Look, now_s: float, watch_s: float) -> Watch | Free | Busy:
    """What follows from a look, and from the watch so far (None: this is the first look).

    Guarantee: an attempt of which a start says that it is free has ended, or showed nothing for `watch_s`
    seconds; so a launch that shows something in every `watch_s` seconds, from its claim on, is never taken
    for dead.
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
