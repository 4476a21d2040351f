"""Random histories of a run whose starts ask for skips (crashes, resumes, rewinds, damaged points, restarts
of the coordinator, forks): no sample is skipped twice, or without standing in a claim that whoever reads the
history finds; wrong versions planted here are caught.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from orchestrator.history.claims import lineage as skips_module
from orchestrator.history.claims.claims import ORIGIN, Claim, ClaimParent, ForkedFrom, GenerationStart, Origin
from orchestrator.history.claims.lineage import Lineage, SkipAt, effective_history, skip_claims
from orchestrator.planning.resume import skipping
from orchestrator.planning.resume.skipping import LATEST, Skip, SkipClaim, SkipDecision, SkipRequest
from orchestrator.planning.schedule import Budgets
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey, StepRecord

BATCH = 4
SEEDS = 120
EVENTS = 40


class BrokenError(Exception):
    """A rule does not hold."""


@dataclass(frozen=True)
class State:
    """A training state, and the truth about its past: the skips that were done on the way to it."""

    key: StateKey
    cursor: Cursor
    done: tuple[tuple[SkipRequest, int, int], ...] = ()  # request, first index, samples


@dataclass(frozen=True)
class Launch:
    """What a driver hands to its coordinators."""

    number: int
    point: State | None  # with the cursor after what is skipped
    skip: Skip | None


class World:
    """Claims, journal and points as they would lie in storage, and what truly happened."""

    def __init__(self, seed: random.Random, origin: State | None = None) -> None:
        self.random, self.num = seed, Counter[str]()
        self.claims: list[Claim] = []
        self.parents: list[ClaimParent] = []
        self.starts: list[GenerationStart] = []
        self.records: list[StepRecord] = []
        self.points: dict[str, State] = {}
        self.states: list[State] = []
        self.origin = origin
        self.launch: Launch | None = None
        self.attempt = self.generation = 0
        self.member: State | None = None  # what the members hold; None: they are blank
        self.asked: tuple[str, SkipRequest | None] | None = None

    # ------------------------------------------------------------------ what happens
    def lineage(self) -> Lineage:
        begins = [parent.begins for parent in self.parents if parent.begins is not None]
        found = effective_history(self.claims, self.parents, [*begins, *self.starts], self.records)
        assert not found.errors, found.errors
        return found

    def on_lineage(self) -> list[State]:
        lineage = self.lineage()
        return sorted(
            (s for s in self.points.values() if lineage.on_lineage(s.key)), key=lambda state: state.key
        )

    def asks(self, points: list[State]) -> tuple[str, SkipRequest | None]:
        """`latest` or a point by name, with or without a skip; or what was asked last, as a restart does."""
        if self.asked is not None and self.random.random() < 0.5:
            return self.asked
        where = LATEST
        if points and self.random.random() < 0.4:
            where = self.random.choice(points).key.point_name
        samples, steps = self.random.choice([(None, None), (5, None), (None, 2), (None, 3)])
        if (samples, steps) == (None, None):
            return where, None
        return where, SkipRequest(where=where, samples=samples, steps=steps)

    def start(self) -> None:
        """A start command."""
        points = self.on_lineage()
        where, request = self.asks(points)
        again = self.asked == (where, request)  # `wanted_point`: the rewind is done
        point = points[-1] if points else None
        if where != LATEST and not again:
            point = self.points.get(where, point)
            if point not in points:
                return
        elif len(points) > 1 and self.random.random() < 0.1:
            point = points[-2]  # the newest is damaged
        fresh = self.origin is not None and not self.parents
        if fresh:
            assert self.origin is not None
            key = replace(self.origin.key, attempt=ORIGIN, generation=len(self.claims) + 1)
            point = replace(self.origin, key=key)
        path = {claim.attempt for claim in self.lineage().attempts}
        decision = skipping.decide_skip(
            request, point.key if point else None, skip_claims(self.parents), path
        )
        number = self.claim(launch=len(self.claims) + 1)
        if decision.refusal:
            self.num["refused"] += 1
            return
        self.num["done before"] += bool(decision.note)
        skipped = self.drawn(decision, point)
        if fresh:
            assert point is not None
            self.points[point.key.point_name] = point
        if self.random.random() < 0.1:
            return  # killed before the parent file
        origin = None
        if fresh and point is not None:
            fork = ForkedFrom(run="/other", run_id="x", point="p", weights_digest="d")
            origin = Origin(
                forked_from=fork, step=point.key.step, cursor=point.cursor, world_size=1,
                global_batch_size=BATCH, seq_len=1, budgets=Budgets(),
            )  # fmt: skip
        self.write_parent(number, point, skipped, origin)
        self.asked = (where, request)
        if point is not None and skipped is not None:
            self.num["skipped"] += 1
            row = (skipped.request, point.cursor.drawn_samples, skipped.samples)
            point = replace(point, cursor=skipped.end, done=(*point.done, row))
        self.launch, self.member = Launch(number, point, skipped), None
        self.attempt, self.generation = number, 0

    def drawn(self, decision: SkipDecision, point: State | None) -> Skip | None:
        if decision.request is None or point is None:
            return None
        num, begin = decision.request.num_samples(BATCH), point.cursor
        return Skip(
            request=decision.request, samples=num, tokens=num, global_batch_size=BATCH, seq_len=1,
            begin=begin, end=replace(begin, skipped_samples=begin.skipped_samples + num),
        )  # fmt: skip

    def claim(self, launch: int) -> int:
        number = len(self.claims) + 1
        self.claims.append(
            Claim(number=number, launch=f"launch {launch}", why="", host="", created="", run_id="r")
        )
        return number

    def write_parent(
        self, number: int, point: State | None, skip: Skip | None, origin: Origin | None = None
    ) -> None:
        names = tuple(s.key.point_name for s in self.on_lineage() if point and s.key <= point.key)
        if origin is not None and point is not None:
            names = (point.key.point_name,)
        self.parents.append(
            ClaimParent(
                attempt=number, parent=point.key if point else None, inherited=names, origin=origin, skip=skip
            )
        )

    def restart_coordinator(self) -> None:
        """As `continue_launch`: the newest point, with the launch's skip where it is the launch's own."""
        first = self.launch
        if first is None or len(self.claims) != self.attempt:
            return
        points = self.on_lineage()
        point = points[-1] if points else None
        if point is None or (first.point is not None and point.key <= first.point.key):
            point = first.point
        key = first.point.key if first.point else None
        skip = skipping.still_due(first.skip, key, point.key if point else None)
        launch = self.claims[-1].launch
        number = self.claim(0)
        self.claims[-1] = replace(self.claims[-1], launch=launch)
        names = tuple(s.key.point_name for s in points)
        self.parents.append(
            ClaimParent(attempt=number, parent=point.key if point else None, inherited=names, skip=skip)
        )
        self.attempt, self.generation = number, 0
        self.launch = replace(first)
        self.newest = point
        self.num["restarts"] += 1

    def form(self) -> None:
        """The next generation, from the members' state or the newest point; blank members load it."""
        if self.launch is None or len(self.parents) == 0 or self.parents[-1].attempt != self.attempt:
            return
        points = [s for s in self.on_lineage() if self.launch.point is None or s.key > self.launch.point.key]
        newest = points[-1] if points else self.launch.point
        state = self.member
        if newest is not None and (state is None or newest.key > state.key):
            state = newest
        self.generation += 1
        step = state.key.step if state else 0
        cursor = state.cursor if state else Cursor()
        self.starts.append(
            GenerationStart(
                attempt=self.attempt, generation=self.generation, parent=state.key if state else None,
                step=step, consumed_samples=cursor.consumed_samples, consumed_tokens=cursor.consumed_tokens,
                target_tokens=cursor.target_tokens, world_size=1, global_batch_size=BATCH, seq_len=1,
            )
        )  # fmt: skip
        key = StateKey(attempt=self.attempt, generation=self.generation, step=step)
        self.member = State(key, cursor, state.done if state else ())

    def train(self) -> None:
        state = self.member
        if state is None or (state.key.attempt, state.key.generation) != (self.attempt, self.generation):
            return
        key, cursor = replace(state.key, step=state.key.step + 1), state.cursor
        tokens = cursor.consumed_tokens + BATCH
        cursor = replace(
            cursor,
            consumed_samples=cursor.consumed_samples + BATCH,
            consumed_tokens=tokens,
            target_tokens=tokens,
        )
        self.records.append(
            StepRecord(
                attempt=key.attempt, generation=key.generation, step=key.step,
                consumed_samples=cursor.consumed_samples, consumed_tokens=tokens, target_tokens=tokens,
                loss=1.0, grad_norm=1.0, lr=1.0, digest="", step_s=1.0, data_wait_s=0.0, save_blocked_s=0.0,
            )
        )  # fmt: skip
        self.member = State(key, cursor, state.done)
        self.states.append(self.member)
        self.num["steps"] += 1

    def save(self) -> None:
        state = self.member
        if state is not None and (state.key.attempt, state.key.generation) == (self.attempt, self.generation):
            self.points[state.key.point_name] = state

    def kill_members(self) -> None:
        self.member = None

    # ------------------------------------------------------------------ the rules
    def check(self) -> None:
        for state in self.states:
            _once(state, len(_before(self)))
        lineage = self.lineage()
        head = self.states[-1] if self.states else None
        claimed = {(c.request, c.attempt) for c in skip_claims(self.parents)}
        requests = {request for request, _ in claimed}
        if any(r not in requests for s in self.states for r, _, _ in s.done[len(_before(self)) :]):
            raise BrokenError("a skip stands in no claim")
        if self.launch and self.launch.skip and self.states and self.states[-1].key.attempt == self.attempt:
            (request, index) = (self.launch.skip.request, self.launch.skip.begin.drawn_samples)
            if (request, index) not in {(r, i) for r, i, _ in self.states[-1].done}:
                raise BrokenError("what a launch claimed to skip was trained")
        if head is None or not lineage.records or lineage.records[-1].attempt != head.key.attempt:
            return
        if lineage.records[-1].key != head.key:
            return
        # after the last record nothing is trained yet
        found = [at for at in skips_module.skips_of(lineage) if at.index < len(lineage.records)]
        told = [(at.skip.request, at.skip.begin.drawn_samples, at.skip.samples) for at in found]
        if told != list(head.done[len(_before(self)) :]):
            raise BrokenError(f"the history skipped {head.done}, its claims say {told}")
        if followed(self, lineage, found) != head.cursor:
            raise BrokenError("who follows the records and the claims comes elsewhere")
        self.num["followed"] += bool(told)


def _before(world: World) -> tuple[Any, ...]:
    return world.origin.done if world.origin is not None else ()


def _once(state: State, in_another_run: int) -> None:
    for number, (request, begin, samples) in enumerate(state.done):
        own = [each[0] for each in state.done[in_another_run:number]]  # a fork is a run of its own
        for other, earlier_begin, earlier in state.done[:number]:
            if begin < earlier_begin + earlier:
                raise BrokenError(f"sample {begin} is skipped twice")
            if number >= in_another_run and other in own and request.repeats(other):
                raise BrokenError(f"{request} is done twice on one history")
        assert samples


def followed(world: World, lineage: Lineage, skips: Iterable[SkipAt]) -> Cursor:
    """As audit and replay go along the history."""
    cursor = world.origin.cursor if world.origin is not None else Cursor()
    skips = list(skips)
    for index, record in enumerate(lineage.records):
        for at in skips:
            if at.index == index:
                cursor = at.skip.carry(cursor)
        cursor = replace(
            cursor,
            consumed_samples=record.consumed_samples,
            consumed_tokens=record.consumed_tokens,
            target_tokens=record.target_tokens,
        )
    return cursor


def walk(number: int) -> Counter[str]:
    """A random history, checked after each event; at last a fork of one of its points, likewise."""
    seed = random.Random(number)
    world, num = World(seed), Counter[str]()
    for turn in range(2):
        world.start()
        for _ in range(EVENTS):
            what = seed.choices(
                ("start", "form", "train", "save", "kill_members", "restart_coordinator"), (2, 4, 8, 3, 1, 1)
            )[0]
            getattr(world, what)()
            if what in ("start", "restart_coordinator"):
                world.form()
            world.check()
        num += world.num
        points = world.on_lineage()
        if turn or not points:
            break
        world = World(seed, origin=seed.choice(points))
        num["forks"] += 1
    return num


def walks() -> Counter[str]:
    return sum((walk(number) for number in range(SEEDS)), Counter[str]())


def test_no_sample_is_skipped_twice_and_none_without_being_in_the_claim() -> None:
    seen: Counter[str] = Counter()
    for number in range(SEEDS):
        try:
            seen += walk(number)
        except BrokenError as broken:
            raise AssertionError(f"seed {number}: {broken}") from broken
    what = ("skipped", "done before", "refused", "restarts", "forks", "followed", "steps")
    assert min(seen[each] for each in what) > 50, seen


right = skipping.decide_skip


def skips_at_every_start(
    request: SkipRequest | None, point: StateKey | None, claims: Iterable[SkipClaim], path: Collection[int]
) -> SkipDecision:
    return right(request, point, (), path)


def forgets_what_another_spelling_did(
    request: SkipRequest | None, point: StateKey | None, claims: Iterable[SkipClaim], path: Collection[int]
) -> SkipDecision:
    return right(request, point, [c for c in claims if c.request == request], path)


def forgotten_by_a_restarted_coordinator(skip: Skip | None, *points: Any) -> Skip | None:
    return None


def said_by_each_claim_of_the_launch(skip: Skip | None, *points: Any) -> Skip | None:
    return skip


def every_claim_on_the_way(lineage: Lineage) -> tuple[SkipAt, ...]:
    found = []
    for segment in lineage.segments:
        claim = next((c for c in lineage.attempts if c.attempt == segment.start.attempt), None)
        if claim is not None and claim.skip is not None and claim.parent is not None:
            index = sum(r.key.attempt < claim.attempt for r in lineage.records)
            found.append(SkipAt(index=index, attempt=claim.attempt, parent=claim.parent, skip=claim.skip))
    return tuple(found)


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (skipping, "decide_skip", skips_at_every_start),
        (skipping, "decide_skip", forgets_what_another_spelling_did),
        (skipping, "still_due", forgotten_by_a_restarted_coordinator),
        (skipping, "still_due", said_by_each_claim_of_the_launch),
        (skips_module, "skips_of", every_claim_on_the_way),
    ],
)
def test_a_wrong_version_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(BrokenError):
        walks()
