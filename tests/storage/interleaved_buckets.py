"""Several programs on one model bucket: every order in which their requests can come, and what these can come
to.

For each order the programs begin anew on the same objects, and each is held before every request that
another one could notice. Two orders after which the bucket holds the same, the same is under way, and each
program has seen the same, are followed as one. What an object holds is known by who wrote it, so that random
parts of it (a token, a time) make no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import OrchestratorError
from orchestrator.storage.store import Store
from tests.storage.model_store import CHANGES, CREATE, ROOT, DiedError, Fate, ModelBucket, ModelStore
from tests.storage.stepped import Stepped

Act = Callable[[Store], Any]


class _Died:
    def __repr__(self) -> str:
        return "DIED"


DIED = _Died()


@dataclass(frozen=True)
class Faults:
    """How many of each there may be in one order: programs that die, errors (of a request that was carried
    out, or was not), requests that come once more later; and whether a create may come again, too, which then
    makes an object that was deleted meanwhile.
    """

    deaths: int = 0
    errors: int = 0
    repeats: int = 0
    late_creates: bool = False

    def left_after(self, fate: Fate) -> Faults:
        return Faults(
            self.deaths - (fate in (Fate.DIED, Fate.DIED_WAITING)),
            self.errors - (fate in (Fate.LOST, Fate.REFUSED)),
            self.repeats - (fate is Fate.REPEATED),
            self.late_creates,
        )

    def fates(self, what: str) -> list[Fate]:
        """What a request may come to."""
        change = what in CHANGES
        fates = [Fate.ANSWERED]
        fates += [Fate.DIED] if self.deaths else []
        fates += [Fate.DIED_WAITING] if self.deaths and change else []
        fates += [Fate.REFUSED] if self.errors else []
        fates += [Fate.LOST] if self.errors and change else []
        fates += [Fate.REPEATED] if self.repeats and change and (what != CREATE or self.late_creates) else []
        return fates


class _Program(Stepped):
    """A program, and the store that it sees. `stands`: what it asks for next."""

    def __init__(
        self,
        act: Act,
        bucket: ModelBucket,
        number: int,
        shared: Callable[[str], bool],
        kind: type[ModelStore],
    ) -> None:
        super().__init__()
        self.stands, self._dead = "", False
        self._shared = shared
        self._store = kind(bucket, ROOT, self._turn, number)
        self.start(lambda: self._act(act))

    @property
    def state(self) -> object:
        """What decides how it goes on; how it ended, with what it has seen, says what it returned."""
        return tuple(self._store.seen), self.is_done, self.result is DIED

    def _act(self, act: Act) -> Any:
        try:
            return act(self._store)
        except DiedError:
            return DIED
        except OrchestratorError as error:
            return error

    def _turn(self, what: str, key: str) -> Fate:
        if self._dead:  # what it does while it unwinds, no dead process does
            return Fate.DIED
        if not self._shared(key):
            return Fate.ANSWERED
        self.stands = what
        fate = self.hold()
        assert isinstance(fate, Fate)
        self._dead = fate in (Fate.DIED, Fate.DIED_WAITING)
        return fate


Step = tuple[int, Fate] | int  # a program and what its request comes to; or the request under way that comes


def interleavings(
    contents: Mapping[str, bytes],
    programs: Sequence[Act],
    shared: Callable[[str], bool],
    faults: Faults = Faults(),
    kind: type[ModelStore] = ModelStore,
) -> Iterator[tuple[ModelBucket, list[Any]]]:
    """The bucket (a copy) and what the programs returned (`DIED`, or the `OrchestratorError` that one
    raised), for each way in which they can come to their end on these objects, and again after each request
    that comes later still.

    `contents`: the bytes by key (`run/…`: the programs' root is `s3://model/run`). `shared`: the keys, of
    folders too, at which one of them can notice another; all that is asked of others goes well. `kind`: that
    of the store.
    """
    todo: list[tuple[Step, ...]] = [()]
    known: set[object] = set()
    while todo:
        order = todo.pop()
        bucket, left = ModelBucket.of(contents), faults
        running = [_Program(act, bucket, number, shared, kind) for number, act in enumerate(programs)]
        try:
            for step in order:
                left = _take(step, bucket, running, left)
            while True:
                state = _state(bucket, running, left)
                if state in known:
                    break
                known.add(state)
                if all(program.is_done for program in running):
                    yield bucket.copy(), [program.result for program in running]
                steps = _steps(bucket, running, left)
                if not steps:
                    break
                todo += [(*order, step) for step in steps[1:]]
                order = (*order, steps[0])
                left = _take(steps[0], bucket, running, left)
        finally:
            for program in running:
                program.stop()


def _steps(bucket: ModelBucket, running: Sequence[_Program], left: Faults) -> list[Step]:
    steps: list[Step] = []
    for number, program in enumerate(running):
        if not program.is_done:
            steps += [(number, fate) for fate in left.fates(program.stands)]
    return [*steps, *range(len(bucket.under_way))]


def _take(step: Step, bucket: ModelBucket, running: Sequence[_Program], left: Faults) -> Faults:
    if isinstance(step, int):
        bucket.arrive(step)
        return left
    number, fate = step
    running[number].step(fate)
    return left.left_after(fate)


def _state(bucket: ModelBucket, running: Sequence[_Program], left: Faults) -> object:
    there = tuple(sorted((key, stored.author) for key, stored in bucket.objects.items()))
    coming = tuple(
        (request.what, request.key, request.stored and request.stored.author) for request in bucket.under_way
    )
    return there, coming, left, tuple(program.state for program in running)
