"""A small world of runs whose true history is known by object links: claims, generations, points, and
cut-off attempts that go on.

It shares no code with `orchestrator.history.claims.lineage`: every state holds its parent, and every commit
and listing has a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.history.claims.claims import Claim, ClaimParent, GenerationStart
from orchestrator.records.steps import StateKey, StepRecord


def claim(number, launch="one"):
    return Claim(number=number, launch=launch, why="start", host="here", created="")


def key(attempt, generation, step):
    return StateKey(attempt=attempt, generation=generation, step=step)


def record(attempt, generation, step, tokens=None, **changes):
    """The record of a step; by default every step consumes 10 positions from label 0 on."""
    consumed = 10 * step if tokens is None else tokens
    values = {
        "attempt": attempt,
        "generation": generation,
        "step": step,
        "consumed_samples": consumed,
        "consumed_tokens": consumed,
        "target_tokens": consumed,
        "loss": 2.0,
        "grad_norm": 1.0,
        "lr": 0.1,
        "digest": "00000000000000aa",
        "step_s": 0.1,
        "data_wait_s": 0.0,
        "save_blocked_s": 0.0,
    }
    return StepRecord(**{**values, **changes})


def start(attempt, generation, parent, step, tokens=None, batch=10):
    consumed = 10 * step if tokens is None else tokens
    return GenerationStart(
        attempt=attempt,
        generation=generation,
        parent=parent,
        step=step,
        consumed_samples=consumed,
        consumed_tokens=consumed,
        target_tokens=consumed,
        world_size=2,
        global_batch_size=batch,
        seq_len=1,
    )


@dataclass(eq=False)
class State:
    """A training state; the truth about its past is `parent`."""

    key: StateKey
    parent: State | None
    tokens: int
    batch: int
    trained: bool  # by a step, not by a rendezvous

    def past(self):
        """This state and all before it, newest first."""
        state = self
        while state is not None:
            yield state
            state = state.parent


class World:
    """What lies in storage (`claims` to `points`) and, apart from it, what truly happened."""

    def __init__(self):
        self.claims, self.parents, self.starts, self.records = [], [], [], []
        self.points = {}  # name -> (state, time of its COMMIT)
        self.listed = {}  # attempt -> time at which it listed the points
        self.newest = {}  # attempt -> its newest state
        self.continues = {}  # attempt -> the state that its claim names
        self.launch = 0
        self.now = 0
        self.live = None  # attempt whose coordinator and members are well
        self.claim_and_form("start")

    # ---------------------------------------------------------------- what happens
    def train(self, attempt):
        old = self.newest.get(attempt)
        if old is None:
            return
        here = key(old.key.attempt, old.key.generation, old.key.step + 1)
        state = State(here, old, old.tokens + old.batch, old.batch, trained=True)
        self.newest[attempt] = state
        self.records.append(record(here.attempt, here.generation, here.step, state.tokens))

    def save(self, attempt, back=0):
        """COMMIT the attempt's newest state, or one `back` before it whose COMMIT was on its way."""
        state = self.newest.get(attempt)
        states = [s for s in state.past() if s.key.attempt == attempt] if state else []
        if states:
            chosen = states[min(back, len(states) - 1)]
            self.points.setdefault(chosen.key.point_name, (chosen, self.now))

    def form(self, attempt, parent, batch):
        """A new generation of the attempt, its label re-based where the batch size differs."""
        number = 1 + max((s.generation for s in self.starts if s.attempt == attempt), default=0)
        tokens = parent.tokens if parent else 0
        same = parent is not None and parent.batch == batch
        step = parent.key.step if same else -(-tokens // batch)
        self.starts.append(start(attempt, number, parent.key if parent else None, step, tokens, batch))
        self.newest[attempt] = State(key(attempt, number, step), parent, tokens, batch, trained=False)

    def claim(self):
        number = len(self.claims) + 1
        self.claims.append(claim(number, str(self.launch)))
        self.live = None
        return number

    def claim_and_list(self, back=0):
        """A claim with its parent file: the newest point on the true history, or one `back` before it."""
        held = self.true_points()
        number = self.claim()
        held = sorted(held, key=lambda state: state.key)
        chosen = held[max(0, len(held) - 1 - back)] if held else None
        inherited = tuple(state.key.point_name for state in held)
        self.parents.append(ClaimParent(attempt=number, parent=chosen and chosen.key, inherited=inherited))
        self.listed[number] = self.now
        self.continues[number] = chosen
        return number

    def claim_and_form(self, why, back=0, batch=10):
        live = self.newest.get(self.live) if self.live else None
        if why == "coordinator":
            if live is None:
                return
        else:
            self.launch += 1
        number = self.claim_and_list(back)
        self.form(number, live if why == "coordinator" else self.continues[number], batch)
        self.live = number

    # ---------------------------------------------------------------- what is true
    def true_history(self):
        """The states of the effective history, oldest first."""
        newest = max(self.listed, default=None)
        head = self.newest.get(newest) or self.continues.get(newest)
        return list(head.past())[::-1] if head else []

    def true_points(self):
        """The states of the points on the lineage: on the history, and committed before any later listing."""
        history = set(self.true_history())
        return [
            state
            for state, committed in self.points.values()
            if state in history
            and all(committed < time for number, time in self.listed.items() if number > state.key.attempt)
        ]


def play(moves):
    """The world after these moves, each a (name of `MOVES`, number) pair; a move that cannot be made is
    none.
    """
    world = World()
    for name, number in moves:
        world.now += 1
        MOVES[name](world, number)
    return world


def batch_of(number):
    return (10, 10, 7, 24)[number % 4]


def reform(world, number):
    if world.live:
        world.form(world.live, world.newest[world.live], batch_of(number))


def all_lost(world, number):
    """Every member died: the attempt goes on from its newest point, or from nothing where it began so."""
    held = sorted(world.true_points(), key=lambda state: state.key)
    if world.live and (held or world.continues[world.live] is None):
        world.form(world.live, held[-1] if held else None, batch_of(number))


def to_memory(world, number):
    """A shard is lost: the others go on from an older state that they hold in memory, which no point on the
    history is newer than. It may lie before the newest generation.
    """
    if not world.live:
        return
    newest = max((s.key for s in world.true_points()), default=key(0, 0, 0))
    past = [s for s in world.newest[world.live].past() if s.key >= newest]
    held = [s for s in past if s.key.attempt == world.live]
    if held:
        world.form(world.live, held[min(number, len(held) - 1)], batch_of(0))


def only_claim(world, number):
    world.launch += 1
    world.claim()


def claim_and_die(world, number):
    world.launch += 1
    world.claim_and_list()


def cut_off(act):
    """The move `act(world, number, attempt)` of some attempt that is not the live one."""

    def move(world, number):
        attempts = [attempt for attempt in sorted(world.newest) if attempt != world.live]
        if attempts:
            act(world, number, attempts[number % len(attempts)])

    return move


MOVES = {
    "train": lambda world, number: world.train(world.live),
    "save": lambda world, number: world.save(world.live),
    "reform": reform,
    "all lost": all_lost,
    "to memory": to_memory,
    "coordinator": lambda world, number: world.claim_and_form("coordinator", batch=batch_of(number)),
    "resume": lambda world, number: world.claim_and_form("resume", batch=batch_of(number)),
    "rewind": lambda world, number: world.claim_and_form(
        "rewind", back=1 + number % 3, batch=batch_of(number)
    ),
    "claim, no generation": claim_and_die,
    "claim, no parent file": only_claim,
    "cut-off trains": cut_off(lambda world, number, attempt: world.train(attempt)),
    "cut-off saves": cut_off(lambda world, number, attempt: world.save(attempt, back=number % 4)),
    "cut-off reforms": cut_off(
        lambda world, number, attempt: world.form(attempt, world.newest[attempt], batch_of(number))
    ),
}
