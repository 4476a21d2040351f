"""Slots as windows, searched: whoever reads, dies or comes early, and wherever the stream goes on, each
source's stream is whole and in order.
"""

from __future__ import annotations

import heapq
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest

from orchestrator.data.feed import window_scheduler as machine
from orchestrator.data.feed.window_scheduler import NoTask, Slots, SourceWindows
from orchestrator.errors import DataIdentityError, FeedError
from orchestrator.records.tokens import TokenChunk, WindowTask
from tests.raising import raises

HISTORIES = 1000
Place = tuple[str, int, int, int, int]  # source, epoch, block, window, number of the chunk
Start = tuple[int, int, int]  # epoch, block, window


@dataclass(frozen=True)
class Table:
    """How many windows each block of a source has, or seems to have."""

    windows: tuple[int, ...]

    def __call__(self, epoch: int, block: int) -> int:
        return self.windows[(block + epoch) % len(self.windows)]


@dataclass
class Source:
    """A source as it is: `real` is known to who reads it, `guess` to the machine."""

    name: str
    real: Table
    guess: Table
    num_blocks: int
    num_epochs: int
    start: Start = (0, 0, 0)
    chunks_per_window: int = 1
    lists: set[int] | None = None  # the epochs that have one by now; None: all, at once

    def places(self) -> list[Place]:
        """Its whole stream from the start on."""
        return [
            (self.name, epoch, block, window, chunk)
            for epoch in range(self.num_epochs)
            for block in range(self.blocks(epoch))
            for window in range(self.real(epoch, block))
            for chunk in range(self.chunks_per_window)
            if (epoch, block, window) >= self.start
        ]

    def blocks(self, epoch: int) -> int:
        return self.num_blocks + epoch % 2

    def windows(self) -> SourceWindows:
        epoch, block, window = self.start
        if self.lists is not None:
            self.lists.add(epoch)  # who opens it reads that one
        first = WindowTask(source=self.name, epoch=epoch, block=block, window=window, record=5)
        return SourceWindows(
            source=self.name,
            first=first if epoch < self.num_epochs else None,
            num_blocks=self.blocks,
            num_epochs=self.num_epochs,
            expected=self.expected,
            has_list=self.has_list,
        )

    def has_list(self, epoch: int) -> bool:
        return self.lists is None or epoch in self.lists

    def expected(self, epoch: int, block: int) -> int:
        assert self.has_list(epoch), "nobody asks for what only the list can say"
        return self.guess(epoch, block)


NOTHING: Any = ()


def chunk_at(place: Place, source: Source) -> TokenChunk:
    name, epoch, block, window, number = place
    ends = number == source.chunks_per_window - 1
    return TokenChunk(
        source=name, epoch=epoch, block=block, window=window, tokens=NOTHING, record=NOTHING, piece=NOTHING,
        num_tokens=NOTHING, kind=NOTHING, last_piece=NOTHING, special_texts=NOTHING, file=NOTHING,
        place=NOTHING, bad_reasons=(str(number),), ends_window=ends,
        ends_block=ends and window == source.real(epoch, block) - 1,
    )  # fmt: skip


def place_of(chunk: TokenChunk) -> Place:
    return (chunk.source, chunk.epoch, chunk.block, chunk.window, int(chunk.bad_reasons[0]))


@dataclass
class Tokenizer:
    """A process: the slot that Ray gave it, and the task that it has been told and has perhaps read."""

    slot: int | None = None
    task: WindowTask | NoTask | None = None
    has_read: bool = False
    waits: bool = False  # it asked in vain, and nothing has happened since


@dataclass
class World:
    """Ray Data (slots go out and come back in order), tokenizers that die, a drawing that wants sources by
    turns, and goes on at other places; the machine between them.
    """

    sources: dict[str, Source]
    num_tokenizers: int
    accidents: int = 0
    make: Callable[..., Slots] = Slots
    wanted: tuple[str, ...] = ()
    moves: tuple[dict[str, Start], ...] = ()  # the places where the stream will go on, in order
    most_done: int = 10  # Ray gives out so many slots beyond the one being taken: more than are ever given
    slots: Slots = field(init=False)
    tokenizers: list[Tokenizer] = field(init=False)
    next_slot: int = 0
    outputs: dict[int, list[TokenChunk | None]] = field(default_factory=dict)
    coming: int = 0  # the slot of which so many parts came
    parts_taken: int = 0
    streams: dict[str, list[Place]] = field(init=False)
    delivered: dict[str, list[Place]] = field(init=False)
    drawn: dict[str, int] = field(init=False)
    num_drawn: int = 0

    def __post_init__(self) -> None:
        self.tokenizers = [Tokenizer() for _ in range(self.num_tokenizers)]
        self.wanted = self.wanted or tuple(self.sources)
        self.open(None)

    def open(self, after: Slots | None) -> None:
        windows = [source.windows() for source in self.sources.values()]
        self.slots = self.make(windows, self.num_tokenizers, after)
        self.streams = {name: source.places() for name, source in self.sources.items()}
        self.delivered = {name: [] for name in self.sources}
        self.drawn = dict.fromkeys(self.sources, 0)

    def buffered(self, source: str) -> int:
        return len(self.delivered[source]) - self.drawn[source]

    @property
    def needs(self) -> str | None:
        """The source that the drawing waits for, if any."""
        ended = self.slots.ended
        for number in range(len(self.wanted)):
            name = self.wanted[(self.num_drawn + number) % len(self.wanted)]
            if self.buffered(name):
                return None
            if name not in ended:
                return name
        return None

    def kinds(self) -> list[str]:
        """What may happen at all: a tokenizer goes on, dies, or executes a slot once more; a chunk is taken,
        a sample is drawn, the stream goes on elsewhere.
        """
        each = [
            f"{what} {number}" for what in ("go", "kill", "again") for number in range(self.num_tokenizers)
        ]
        return ["take", "draw", "move", "list", *each]

    def can(self, kind: str) -> bool:
        """Whether it can happen now."""
        what, _, number = kind.partition(" ")
        if what == "take":
            return self.coming in self.outputs and (self.slots.arriving or self.needs is not None)
        if what == "move":
            return bool(self.moves)
        if what == "list":
            return bool(self.slots.awaited)
        if what == "draw":
            return self.needs is None and any(self.buffered(name) for name in self.sources)
        at = self.tokenizers[int(number)]
        if what == "go":  # Ray gives out slots as long as few are done and not taken
            return not at.waits and (
                at.slot is not None or self.next_slot < self.slots.taken + self.most_done
            )
        if what == "kill":
            return self.accidents > 0 and at.slot is not None
        return self.accidents > 0 and at.slot is None and bool(self.outputs)

    def happens(self, kind: str) -> None:
        """Whoever asked in vain asks again, unless this was nothing but another vain question."""
        what, _, number = kind.partition(" ")
        if not number:
            {"take": self.take, "draw": self.draw, "move": self.move, "list": self.make_list}[what]()
        else:
            at = self.tokenizers[int(number)]
            {"go": self.go, "kill": self.kill, "again": self.execute_again}[what](at)
            if at.waits:
                return
        for other in self.tokenizers:
            other.waits = False

    # ---------------------------------------------------------------- what happens
    def go(self, at: Tokenizer) -> None:
        """A tokenizer's next thing: Ray gives it a slot, it asks, it reads, it is done."""
        if at.slot is None:
            at.slot, self.next_slot = self.next_slot, self.next_slot + 1
        elif at.task is None:
            self.ask(at)
        elif isinstance(at.task, WindowTask) and not at.has_read:
            self.read(at)
        else:
            self.finish(at)

    def ask(self, at: Tokenizer) -> None:
        assert at.slot is not None
        found = self.slots.begin(at.slot, self.buffered)
        at.waits = found is NoTask.NOT_YET
        if not at.waits:
            at.task = found
            self.check_bound()

    def read(self, at: Tokenizer) -> None:
        assert at.slot is not None
        task = at.task
        assert isinstance(task, WindowTask)
        real = self.sources[task.source].real(task.epoch, task.block)
        self.slots.read(at.slot, task, real if task.window >= real - 1 else None)
        at.has_read = task.window < real or not self.slots.has(at.slot)
        if not at.has_read:
            at.task = None  # it asks what the slot is instead

    def finish(self, at: Tokenizer) -> None:
        assert at.slot is not None
        task, chunks = at.task, list[TokenChunk | None]([None])
        if isinstance(task, WindowTask):
            source = self.sources[task.source]
            start = (task.source, task.epoch, task.block, task.window)
            chunks = [chunk_at((*start, n), source) for n in range(source.chunks_per_window)]
            if not self.slots.has(at.slot):  # of a place that was left, and left in the middle
                chunks[-1] = None
            else:
                first = start[1:] == source.start
                assert task.record == (5 if first else 0), "the first window's place is told"
        if at.slot >= self.coming:
            done = self.outputs.setdefault(at.slot, chunks)
            assert done == chunks or not self.slots.has(at.slot), "a slot brings the same again"
        at.slot, at.task, at.has_read = None, None, False

    def kill(self, at: Tokenizer) -> None:
        self.accidents -= 1
        at.task, at.has_read, at.waits = (
            None,
            False,
            False,
        )  # Ray executes the slot again, in the process that replaces it

    def execute_again(self, at: Tokenizer) -> None:
        """A slot that was done already, perhaps also taken."""
        self.accidents -= 1
        at.slot = max(0, min(self.outputs) - self.accidents % 2)

    def take(self) -> None:
        slot = self.coming
        chunk = self.outputs[slot][self.parts_taken]
        self.parts_taken += 1
        for delivered in self.slots.take(slot, chunk):
            found = self.delivered[delivered.source]
            found.append(place_of(delivered))
            due = self.streams[delivered.source][len(found) - 1 : len(found)]
            assert due == found[-1:], f"{found[-1]} is delivered where {due} is due"
        if self.parts_taken == len(self.outputs[slot]):
            del self.outputs[slot]
            self.coming, self.parts_taken = slot + 1, 0
        self.check_bound()

    def move(self) -> None:
        """Whatever is going on: what is done and not taken comes all the same."""
        place, self.moves = self.moves[0], self.moves[1:]
        self.sources = {name: replace(of, start=place[name]) for name, of in self.sources.items()}
        self.open(self.slots)

    def make_list(self) -> None:
        """The list of an epoch that comes next is there now."""
        name, epoch = self.slots.awaited[0]
        lists = self.sources[name].lists
        assert lists is not None
        assert epoch not in lists
        lists.add(epoch)

    def draw(self) -> None:
        for _ in self.wanted:
            name = self.wanted[self.num_drawn % len(self.wanted)]
            self.num_drawn += 1
            if self.buffered(name):
                self.drawn[name] += 1
                return

    def state(self) -> str:
        """Equal for worlds in which the same can happen from now on."""
        held = self.slots
        machines: list[Any] = [
            [[vars(block) for block in s._blocks], s._coming and vars(s._coming), sorted(s._held)]
            for s in held._sources.values()
        ]
        tasks = {slot: task for slot, task in sorted(held._tasks.items()) if slot >= held.taken - 1}
        mine = [self.tokenizers, self.next_slot, sorted(self.outputs), self.parts_taken, self.accidents]
        place: list[Any] = [held._first, self.moves]
        place += [[source.lists and sorted(source.lists) for source in self.sources.values()]]
        place += [[source._border for source in held._sources.values()]]
        return repr([held.taken, held.given, tasks, sorted(held._freed), machines, mine, self.drawn, place])

    # ---------------------------------------------------------------- what holds
    def check_bound(self) -> None:
        most = self.num_tokenizers + machine.SLOTS_AHEAD + 1
        assert self.slots.undelivered <= most, "more is read ahead than the bound allows"

    def check_end(self) -> None:
        assert self.delivered == self.streams, "a stream is not whole"
        assert set(self.slots.ended) == set(self.sources)


def some_start(rng: random.Random, real: Table, num_blocks: int, epochs: int) -> Start:
    epoch = rng.randint(0, epochs)
    block = rng.randrange(num_blocks) if epoch < epochs else 0
    window = rng.randrange(real(epoch, block)) if epoch < epochs else 0
    return rng.choice(((0, 0, 0), (epoch, block, window)))


def some_source(rng: random.Random, name: str, crossed: bool = False) -> Source:
    """`crossed`: its long blocks seem short, and its short ones long."""
    num_blocks = rng.randint(1, 3)
    real = tuple(rng.choice((1, 1, 2, 3, 6)) for _ in range(num_blocks))
    guess = tuple(max(1, n + rng.choice((0, 0, 0, -1, 1, -6, 4))) for n in real)
    if crossed:
        guess = tuple(1 if n > 1 else 6 for n in real)
    epochs = rng.randint(1, 2)
    start = some_start(rng, Table(real), num_blocks, epochs)
    chunks, lists = rng.randint(1, 2), rng.choice((None, None, {start[0]}))
    return Source(name, Table(real), Table(guess), num_blocks, epochs, start, chunks, lists)


def live(world: World, rng: random.Random) -> None:
    """Lets things happen until all is over. Nothing waits for ever."""
    kinds = world.kinds()
    speeds = [rng.choice((1, 1, 5, 30)) if kind.startswith(("go", "take", "draw")) else 0.5 for kind in kinds]
    for number in count():
        if world.slots.over:
            return
        kind = next(filter(world.can, rng.choices(kinds, speeds, k=4)), None)
        if kind is None:
            able = [kind for kind in kinds if world.can(kind)]
            assert able, f"nothing can happen any more: {world}"
            kind = rng.choice(able)
        world.happens(kind)
        assert number < 20_000, "it does not end"


def search(seeds: range, make: Callable[..., Slots] = Slots) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        names = ["a", "b", "c"][: rng.choice((1, 1, 2, 3))]
        sources = {name: some_source(rng, name, crossed=seed % 3 == 0) for name in names}
        wanted = tuple(rng.choices(names, k=rng.randint(1, 6))) + tuple(names)
        places = [
            {name: some_start(rng, of.real, of.num_blocks, of.num_epochs) for name, of in sources.items()}
            for _ in range(seed % 4)
        ]
        world = World(sources, rng.randint(1, 4), rng.choice((0, 0, 3, 8)), make, wanted, tuple(places))
        live(world, rng)
        world.check_end()


def search_all(sources: dict[str, Source], num_tokenizers: int, accidents: int, move: bool) -> int:
    """Every order in which things can happen, with one return to the start on `move`; how many states there
    are.
    """
    moves = (dict.fromkeys(sources, (0, 0, 0)),) if move else ()
    first = World(sources, num_tokenizers, accidents, moves=moves, most_done=num_tokenizers + 3)
    seen, coming = {first.state()}, [pickle.dumps(first)]
    while coming:
        state = coming.pop()
        world = pickle.loads(state)
        if world.slots.over:
            world.check_end()
            continue
        able = [kind for kind in world.kinds() if world.can(kind)]
        assert able, f"nothing can happen any more: {world}"
        for kind in able:
            after = pickle.loads(state)
            after.happens(kind)
            if (key := after.state()) not in seen:
                seen.add(key)
                coming.append(pickle.dumps(after))
    return len(seen)


@pytest.mark.quick("some")
@pytest.mark.parametrize("seeds", [range(300), range(300, HISTORIES)], ids=["some", "more"])
def test_each_source_is_delivered_whole_and_in_order_and_nothing_waits_for_ever(seeds: range) -> None:
    search(seeds)


def test_lists_that_come_late_are_waited_for_in_every_order_of_things() -> None:
    source = Source("a", Table((1,)), Table((1,)), 1, num_epochs=2, lists={0})
    assert search_all({"a": source}, 2, 0, move=False) > 100


def test_while_a_source_waits_for_its_list_no_other_is_read_ahead_of_it() -> None:
    """What is delivered of the other would be held in memory, for as long as the list takes."""
    waiting = Source("a", Table((1,)), Table((1,)), 1, num_epochs=2, lists={0})
    other = Source("b", Table((1,)), Table((1,)), 100, num_epochs=1)
    world = World({"a": waiting, "b": other}, 2, wanted=("a", "b"))
    kinds = [kind for kind in world.kinds() if kind != "list"]
    while able := [kind for kind in kinds if world.can(kind)]:
        world.happens(able[0])
    assert len(world.delivered["b"]) <= 2 * world.slots.limit
    world.happens("list")
    live(world, random.Random(0))
    world.check_end()


@pytest.mark.quick("real7-guess7-0-True")
@pytest.mark.parametrize(
    ("real", "guess", "accidents", "move"),
    [
        ((1, 1), (1, 1), 1, False),
        ((2, 1), (1, 1), 0, False),
        ((1, 2), (1, 1), 0, False),
        ((1, 1), (3, 1), 0, False),
        ((3,), (2,), 0, False),
        ((2,), (1,), 0, True),
        ((1,), (2,), 0, True),
        ((1,), (1,), 0, True),
    ],
)
def test_in_small_bounds_every_order_of_things_is_tried(
    real: tuple[int, ...], guess: tuple[int, ...], accidents: int, move: bool
) -> None:
    source = Source("a", Table(real), Table(guess), len(real), num_epochs=1)
    assert search_all({"a": source}, 2, accidents, move) > 300


class Forgetful(Slots):
    """Gives a slot that is asked for again the next window."""

    def begin(self, slot: int, buffered: Callable[[str], int], has_room: bool = True) -> WindowTask | NoTask:
        if slot in self._tasks:
            return self._choose(buffered, room=True)
        return super().begin(slot, buffered, has_room)


class Hasty(Slots):
    """Delivers what comes, as it comes."""

    def take(self, slot: int, chunk: TokenChunk | None) -> list[TokenChunk]:
        delivered = super().take(slot, chunk)
        return delivered if chunk is None or delivered else [chunk]


class Generous(Slots):
    """Knows no bound."""

    def _choose(self, buffered: Callable[[str], int], room: bool) -> WindowTask | NoTask:
        return super()._choose(buffered, room=True)


class Tight(Slots):
    """Has room for another window now and then: from slot 3 to 5, from 9 to 11, and so on."""

    def begin(self, slot: int, buffered: Callable[[str], int], has_room: bool = True) -> WindowTask | NoTask:
        has_room, given, freed = slot // 3 % 2 == 1, self.given, slot in self._freed
        found = super().begin(slot, buffered, has_room)
        if self.given > given and isinstance(found, WindowTask) and not has_room and not freed:
            assert given == self.taken, "a window is begun while one is on its way"
        return found


class Cramped(Slots):
    """The same, and counts what came early as if it were on its way."""

    def begin(self, slot: int, buffered: Callable[[str], int], has_room: bool = True) -> WindowTask | NoTask:
        self._most = getattr(self, "_most", self.limit)
        self.limit = self._most if slot // 3 % 2 == 1 else 1
        return super().begin(slot, buffered, has_room)


class LaterFirst(machine._Source):
    def next_block(self) -> Any:
        return self._coming or super().next_block()


class Careless(Slots):
    """Gives what is later while a window is missing that is known to be there."""

    def __init__(
        self, sources: Sequence[SourceWindows], num_tokenizers: int, after: Slots | None = None
    ) -> None:
        super().__init__(sources, num_tokenizers, after)
        self._sources = {source.source: LaterFirst(source) for source in sources}


class Deaf(Slots):
    """Believes the estimate, whatever a reader says of more windows."""

    def read(self, slot: int, task: WindowTask, num_windows: int | None) -> None:
        if num_windows is not None:
            super().read(slot, task, num_windows)


class Blind(Slots):
    """Takes the chunks of the place before for its own."""

    def __init__(
        self, sources: Sequence[SourceWindows], num_tokenizers: int, after: Slots | None = None
    ) -> None:
        super().__init__(sources, num_tokenizers, after)
        self._first = self.taken


class Reusing(Blind):
    """Gives the slots of the place before to its own windows."""

    def __init__(
        self, sources: Sequence[SourceWindows], num_tokenizers: int, after: Slots | None = None
    ) -> None:
        super().__init__(sources, num_tokenizers, after)
        self.given = self.taken


class Counting(Slots):
    """Believes that each slot of the place before brings one chunk."""

    def take(self, slot: int, chunk: TokenChunk | None) -> list[TokenChunk]:
        return super().take(slot, None if self.arriving else chunk)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (Forgetful, "is due|brought|the same again|told|nothing can happen"),
        (Hasty, "is due"),
        (Generous, "more is read ahead"),
        (Careless, "nothing can happen"),
        (Cramped, "nothing can happen"),
        (Deaf, "nothing can happen|brought|is due"),
        (Blind, "brought|the same again|told|is due"),
        (Reusing, "brought|the same again|told|is due"),
        (Counting, "brought"),
    ],
)
def test_the_search_finds_a_mistake_that_is_planted(planted: type[Slots], found: str) -> None:
    with pytest.raises((AssertionError, FeedError), match=found):
        search(range(HISTORIES), planted)


@pytest.mark.chaos
def test_without_room_one_window_after_the_other_is_begun_and_nothing_waits_for_ever() -> None:
    search(range(HISTORIES), Tight)


def slots_of(
    sources: dict[str, Source], shares: dict[str, float] | None = None, num_tokenizers: int = 6
) -> Slots:
    windows = [replace(source.windows(), share=(shares or {}).get(n, 1.0)) for n, source in sources.items()]
    return Slots(windows, num_tokenizers)


def test_the_source_that_will_run_dry_first_is_read_first() -> None:
    sources = {name: Source(name, Table((1,) * 90), Table((1,) * 90), 90, 1) for name in ("much", "little")}
    slots = slots_of(sources, {"much": 3.0, "little": 1.0})

    def given(buffered: dict[str, int]) -> str:
        task = slots.begin(slots.given, buffered.__getitem__)
        assert isinstance(task, WindowTask)
        return task.source

    assert [given({"much": 0, "little": 0}) for _ in range(4)] == ["much", "little", "much", "much"]
    assert given({"much": 40 * machine.FIRST_GUESS, "little": 0}) == "little"
    assert given({"much": 0, "little": machine.FIRST_GUESS}) == "much"


@pytest.mark.parametrize(
    ("start", "said"),
    [((0, 0, 3), (2,)), ((0, 0, 0), (None, 1)), ((0, 0, 0), (1, None)), ((0, 0, 0), (1, 0))],
)
def test_a_block_that_has_another_number_of_windows_than_it_had_is_refused(
    start: tuple[int, int, int], said: tuple[int | None, ...]
) -> None:
    slots = slots_of({"a": Source("a", Table((9,)), Table((9,)), 1, 1, start)})
    task = slots.begin(0, lambda _: 0)
    assert isinstance(task, WindowTask)
    for num_windows in said[:-1]:
        slots.read(0, task, num_windows)
    with raises(DataIdentityError, "resume.cursor_mismatch", "block 0 ", "source a ", "epoch 0 "):
        slots.read(0, task, said[-1])


def test_a_chunk_of_another_slot_or_window_is_refused() -> None:
    source = Source("a", Table((2,)), Table((2,)), 1, 1)
    slots = slots_of({"a": source})
    for slot in range(2):
        slots.begin(slot, lambda _: 0)
    for slot, window in ((1, 1), (0, 1)):
        with raises(FeedError, "feed.chunk_order", f"slot {slot} ", "slot 0 "):
            slots.take(slot, chunk_at(("a", 0, 0, window, 0), source))


def seconds(source: Source, num_tokenizers: int) -> float:
    """What a source takes by a clock of the test's: a window is read, or passed over, in 1 s and tokenized in
    3 s; each tokenizer keeps its place in a block.
    """
    slots = slots_of({source.name: source}, num_tokenizers=num_tokenizers)
    numbers = count()
    asking = {tokenizer: next(numbers) for tokenizer in range(num_tokenizers)}
    places = dict.fromkeys(asking, (0, 0))  # the block, and the window that is read next
    happening = list[tuple[float, int, int, bool]]()  # when, who, for which slot, whether it was read
    tasks: dict[int, WindowTask] = {}
    done: dict[int, TokenChunk] = {}
    now = 0.0
    while True:
        for tokenizer, slot in list(asking.items()):
            task = slots.begin(slot, lambda _: 0)
            if isinstance(task, WindowTask):
                del asking[tokenizer]
                block, place = places[tokenizer]
                begin = place if block == task.block and place <= task.window else 0
                end = min(task.window + 1, source.real(0, task.block))
                tasks[slot], places[tokenizer] = task, (task.block, end)
                heapq.heappush(happening, (now + end - begin, tokenizer, slot, True))
        now, tokenizer, slot, was_read = heapq.heappop(happening)
        task, num_windows = tasks[slot], source.real(0, tasks[slot].block)
        if was_read:
            slots.read(slot, task, num_windows if task.window >= num_windows - 1 else None)
        if was_read and task.window < num_windows:
            heapq.heappush(happening, (now + 3, tokenizer, slot, False))
            continue
        asking[tokenizer] = slot if was_read else next(numbers)
        if not was_read:
            done[slot] = chunk_at((source.name, 0, task.block, task.window, 0), source)
        while slots.taken in done:
            slots.take(slots.taken, done[slots.taken])
        if slots.over:
            return now


@pytest.mark.parametrize(
    ("real", "guess", "two", "four"),
    [
        ((1,) * 60, (1,) * 60, 2.0, 4.0),
        ((2,) * 40, (1,) * 40, 1.9, 3.3),
        ((60,), (48,), 1.55, 2.1),  # each decodes all of it: at most (1 + 3) / (n + 3) · n
        ((60,), (2,), 1.55, 2.0),
        ((3,) * 30, (2,) * 30, 1.6, 2.9),
        ((3,) * 30, (4,) * 30, 1.6, 2.4),
    ],
)
def test_windows_are_tokenized_side_by_side_however_large_a_block_is_and_seems(
    real: tuple[int, ...], guess: tuple[int, ...], two: float, four: float
) -> None:
    source = Source("a", Table(real), Table(guess), len(real), num_epochs=1)
    one = seconds(source, 1)
    assert one <= 4 * sum(real)
    assert one / seconds(source, 2) >= two
    assert one / seconds(source, 4) >= four
