"""Several starts of one run at once: every interleaving of their looks, claims, beats, coordinators and
deaths.

Time passes in ticks; with each, every process that lives and beats shows one more sign. A start's own steps
may be delayed for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orchestrator.history.claims.claim_files import RESUME, AttemptEnd, ClaimFiles
from orchestrator.history.claims.claims import Claim
from orchestrator.history.claims.liveness import Busy, Free, RunObservation, Watch, judge
from orchestrator.json_form import encode, seal
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.storage.crashfs import Files, ModelDisk
from tests.storage.nfs_client import Cache, NfsClient, trusts_the_stat

WATCH = 2  # ticks
TICKS = 6
LOOKS, CLAIMS, BEATS, RUNS, ENDED, BUSY, DEAD = "looks", "claims", "beats", "runs", "ended", "busy", "dead"
LIVE = (BEATS, RUNS)  # has claimed, and lives: first the claimer's own beat, then the coordinator's

Judge = Callable[[Watch | None, RunObservation, float, float], Watch | Free | Busy]


@dataclass(frozen=True)
class Start:
    """One start command, and the launch that comes of it. `attempt`: the number that it claimed. `cache`:
    what its machine's NFS client believes, where it looks through one.
    """

    phase: str = LOOKS
    watch: Watch | None = None
    free: int = 0
    attempt: int = 0
    cache: Cache = Cache()


@dataclass(frozen=True)
class Protocol:
    """How starts work; the planted mistakes replace one of these."""

    judge: Judge = judge
    newest_plus_one: bool = False  # the number is chosen when it is claimed
    claimer_beats: bool = True
    on_nfs: bool = False


@dataclass(frozen=True)
class World:
    """`newest` is the newest attempt, `signs` counts its own, `over`: its end is known."""

    starts: tuple[Start, ...]
    now: int = 0
    newest: int = 0
    signs: int = 0
    over: bool = False
    wrong: str = ""

    def changed(self, start: Start, **changes: Any) -> World:
        """This world after something befell `start`. Starts are alike: their order means nothing."""
        if changes["phase"] in (ENDED, BUSY, DEAD):
            changes |= {"watch": None, "free": 0, "attempt": 0, "cache": Cache()}
        rest = list(self.starts)
        rest[rest.index(start)] = replace(start, **changes)
        return replace(self, starts=tuple(sorted(rest, key=repr)))


def steps(world: World, protocol: Protocol) -> Iterator[World]:
    """All that can happen next."""
    if world.now < TICKS:
        phases = {start.phase for start in world.starts if start.attempt == world.newest}
        beats = RUNS in phases or (BEATS in phases and protocol.claimer_beats)
        yield replace(world, now=world.now + 1, signs=world.signs + beats)
    for start in set(world.starts):
        if start.phase == LOOKS:
            yield look(world, start, protocol)
        elif start.phase == CLAIMS:
            yield claim(world, start, protocol)
        elif start.phase in LIVE:
            # dies in silence, or it said its end, or its processes are seen to be dead
            died = world.changed(start, phase=DEAD)
            yield died
            if start.phase == BEATS:
                yield world.changed(start, phase=RUNS)
            elif start.attempt == world.newest:
                yield replace(world.changed(start, phase=ENDED), over=True)
                yield replace(died, over=True)


def look(world: World, start: Start, protocol: Protocol) -> World:
    seen, cache = RunObservation(
        newest=world.newest, over=world.over, signs=str(world.signs).encode()
    ), start.cache
    if protocol.on_nfs:
        client = NfsClient(ModelDisk.of(files_of(world)), cache)
        seen, cache = ClaimFiles(Storage("/run", client, no_sleep))._look(lambda _: False, {}), client.cache
    match protocol.judge(start.watch, seen, world.now, WATCH):
        case Free(number=free):
            return world.changed(start, phase=CLAIMS, free=free, watch=None, cache=cache)
        case Busy():
            return world.changed(start, phase=BUSY)
        case watch:
            return world.changed(start, phase=LOOKS, watch=watch, cache=cache)


def files_of(world: World) -> Files:
    """What lies on the server: all claims, and of the newest attempt the heartbeat and the end."""
    files: Files = {"/run": None, "/run/attempts": None}
    for number in range(1, world.newest + 1):
        claim = Claim(number=number, launch=f"launch-{number}", why=RESUME, host="", created="")
        files[f"/run/attempts/{number:04d}.json"] = seal(encode(claim))
    files[f"/run/attempts/{world.newest:04d}.heartbeat"] = b"." * world.signs
    if world.over:
        end = AttemptEnd(attempt=world.newest, outcome="done", reason="", ended="")
        files[f"/run/attempts/{world.newest:04d}.end.json"] = seal(encode(end))
    return files


def claim(world: World, start: Start, protocol: Protocol) -> World:
    if start.free != world.newest and not protocol.newest_plus_one:
        return world.changed(start, phase=BUSY)  # somebody has it
    fenced = [s.attempt for s in world.starts if s.phase in LIVE]
    number = world.newest + 1
    after = replace(world.changed(start, phase=BEATS, attempt=number, free=0), newest=number)
    wrong = f"attempt {number} fences {fenced}, which lives" if fenced else ""
    return replace(after, signs=0, over=False, wrong=wrong)


def explore(protocol: Protocol, num_starts: int) -> tuple[int, str, set[tuple[str, ...]]]:
    """The number of worlds, the first thing wrong in any of them, and how the starts stood in each."""
    first = World(starts=(Start(),) * num_starts)
    seen, todo, ends = {first}, [first], set()
    while todo:
        world = todo.pop()
        if world.wrong:
            return len(seen), world.wrong, ends
        ends.add(tuple(sorted(start.phase for start in world.starts)))
        for after in steps(world, protocol):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen), "", ends


@pytest.mark.parametrize("num_starts", [2, 3])
def test_no_start_ever_fences_a_launch_that_lives(num_starts: int) -> None:
    count, wrong, ends = explore(Protocol(), num_starts)
    assert not wrong
    assert count > 500, "the exploration must be one"
    # and yet the next start gets on: after one that died in silence, one that ended, one that was seen to die
    rest = (BUSY,) * (num_starts - 2)
    for before in (DEAD, ENDED):
        assert tuple(sorted((before, RUNS, *rest))) in ends


def test_no_start_fences_a_launch_that_lives_although_its_machine_caches_sizes_and_names() -> None:
    count, wrong, ends = explore(Protocol(on_nfs=True), 2)
    assert not wrong
    assert count > 500
    for before in (DEAD, ENDED):
        assert tuple(sorted((before, RUNS))) in ends


def test_a_start_that_takes_the_size_of_a_heartbeat_from_the_cache_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusts_the_stat(monkeypatch)
    assert explore(Protocol(on_nfs=True), 2)[1]


def test_a_start_that_takes_whatever_number_is_free_is_caught() -> None:
    assert explore(Protocol(newest_plus_one=True), 2)[1]


def test_a_claimer_that_shows_nothing_until_its_coordinator_does_is_caught() -> None:
    assert explore(Protocol(claimer_beats=False), 2)[1]


def test_a_watch_that_ends_too_soon_is_caught() -> None:
    def hasty(watch: Watch | None, seen: RunObservation, now_s: float, watch_s: float) -> Watch | Free | Busy:
        return judge(watch, seen, now_s, 0)

    assert explore(Protocol(judge=hasty), 2)[1]


def test_a_watch_that_takes_a_new_claim_for_the_one_it_watched_is_caught() -> None:
    def forgetful(
        watch: Watch | None, seen: RunObservation, now_s: float, watch_s: float
    ) -> Watch | Free | Busy:
        if watch is not None and seen.newest > watch.number:
            watch = replace(watch, number=seen.newest, signs=seen.signs)
        return judge(watch, seen, now_s, watch_s)

    assert explore(Protocol(judge=forgetful), 3)[1]
