"""Every order in which those who create one name without exclusive creates can come to their steps: one of
them has created it, at most, whoever stops for good in between.

Who stops, or dies, or whose request comes late, is one that comes to its next step late, or never: what must
hold is looked at after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from orchestrator.errors import StorageError
from orchestrator.storage.agreement import ENDS, MOST_TRIES, Ballot, Content, Creator, Stage


@dataclass(frozen=True)
class World:
    """The entries and the object in the store, and those who create it."""

    creators: tuple[Creator, ...]
    entries: frozenset[tuple[str, Content | None]] = field(default_factory=frozenset)
    there: Content | None = None
    overwritten: bool = False

    def after(self, number: int) -> World:
        """One of them does its next step."""
        creator, entries = self.creators[number], dict(self.entries)
        written = None
        match creator.stage:
            case Stage.LOOK:
                creator = creator.looked(self.there is not None)
            case Stage.LIST | Stage.LIST_AGAIN:
                creator = creator.listed(sorted(entries))
            case Stage.READ:
                assert creator.adopts is not None
                content = entries[creator.adopts.votes]
                assert content is not None
                creator = creator.read(content)
            case Stage.BEGIN:
                written = (creator.ballot.asks, None)
            case Stage.VOTE:
                written = (creator.ballot.votes, creator.content)
        there = creator.content if self.creators[number].stage is Stage.PUBLISH else self.there
        if creator.stage is self.creators[number].stage:
            creator = creator.done()
        creators = (*self.creators[:number], creator, *self.creators[number + 1 :])
        return World(
            creators,
            self.entries | ({written} if written else frozenset()),
            there,
            self.overwritten or (self.there is not None and there != self.there),
        )

    def wrong(self) -> Iterator[str]:
        """What must not be, and is."""
        created = [creator for creator in self.creators if creator.stage is Stage.CREATED]
        if len(created) > 1:
            yield "two have created it"
        if self.overwritten:
            yield "it was overwritten"
        if any(self.there != Content(creator.token, creator.data) for creator in created):
            yield "what was created is not there"
        taken = [creator for creator in self.creators if creator.stage is Stage.TAKEN]
        if taken and self.there is None:
            yield "taken, and not there"
        if self.there is not None and self.there.author in {creator.token for creator in taken}:
            yield "who has created it was told that another one had"
        names = [name for name, _ in self.entries]
        if len(names) != len(set(names)):
            yield "an entry has two contents"

    def alone(self, number: int) -> Stage:
        """Where one of them ends if nobody else does anything more."""
        world = self
        while world.creators[number].stage not in ENDS:
            world = world.after(number)
        return world.creators[number].stage


def search(creators: tuple[Creator, ...], most_tries: int, *, alone: bool = True) -> tuple[int, set[str]]:
    """The number of states, and what was wrong in any of them."""
    first = World(creators)
    todo, known, wrong = [first], {first}, set[str]()
    while todo:
        world = todo.pop()
        wrong |= set(world.wrong())
        for number, creator in enumerate(world.creators):
            if creator.stage in ENDS or creator.tries > most_tries:
                continue
            if alone and world.alone(number) is Stage.GIVEN_UP:
                wrong.add("one alone does not come to an end")
            after = world.after(number)
            if after not in known:
                known.add(after)
                todo.append(after)
    return len(known), wrong


def creators(num: int, kind: type[Creator] = Creator, *, alike: bool = True) -> tuple[Creator, ...]:
    """`alike`: they want to write the same."""
    return tuple(kind.of("abc"[number], b"same" if alike else b"%d" % number) for number in range(num))


@pytest.mark.parametrize("alike", [True, False])
def test_of_two_that_create_one_name_one_has_created_it_whatever_stands_still(alike: bool) -> None:
    count, wrong = search(creators(2, alike=alike), 3)
    assert wrong == set()
    assert count > 4000, "the search must be one"


@pytest.mark.parametrize("most_tries", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_of_three_that_create_one_name_one_has_created_it(most_tries: int) -> None:
    count, wrong = search(creators(3), most_tries, alone=False)
    assert wrong == set()
    assert count > 800 * 250 ** (most_tries - 1)


def test_nobody_else_is_asked_where_nobody_else_is_there() -> None:
    world, asked = World(creators(1)), list[Stage]()
    while world.creators[0].stage not in ENDS:
        asked.append(world.creators[0].stage)
        world = world.after(0)
    assert asked == [Stage.LOOK, Stage.BEGIN, Stage.LIST, Stage.VOTE, Stage.LIST_AGAIN, Stage.PUBLISH]
    assert world.creators[0].stage is Stage.CREATED


def test_who_always_meets_others_gives_up_and_says_so() -> None:
    creator, names = creators(1)[0], set[str]()
    while creator.stage not in ENDS:
        if creator.stage is Stage.LIST:
            names |= {creator.ballot.asks, Ballot(creator.round, "z").asks}
            creator = creator.listed(names)
        else:
            creator = creator.looked(False) if creator.stage is Stage.LOOK else creator.done()
    assert (creator.stage, creator.tries) == (Stage.GIVEN_UP, MOST_TRIES)


def test_a_store_whose_lists_come_late_is_noticed() -> None:
    creator = creators(1)[0].looked(False).done()
    with pytest.raises(StorageError, match="does not list at once"):
        creator.listed([])


# ------------------------------------------------------------------ planted mistakes
class ListsBeforeItBegins(Creator):
    """Planted mistake: looks who else is there, and then says that it is."""

    __slots__ = ()

    def looked(self, there: bool) -> Creator:
        after = Creator.looked(self, there)
        return replace(after, stage=Stage.LIST) if after.stage is Stage.BEGIN else after

    def listed(self, names: Iterable[str]) -> Creator:
        after = Creator.listed(self, [*names, self.ballot.asks])
        return replace(after, stage=Stage.BEGIN) if after.stage is Stage.VOTE else after

    def done(self) -> Creator:
        after = Creator.done(self)
        return replace(after, stage=Stage.VOTE) if self.stage is Stage.BEGIN else after


class KeepsItsOwn(Creator):
    """Planted mistake: votes for its own content whatever others have voted for."""

    __slots__ = ()

    def read(self, content: Content) -> Creator:
        del content
        return Creator.read(self, Content(self.token, self.data))


class VotesForTheOldest(Creator):
    """Planted mistake: adopts the smallest vote instead of the greatest."""

    __slots__ = ()

    def listed(self, names: Iterable[str]) -> Creator:
        votes = [name for name in names if name.endswith(".votes") and name != self.ballot.votes]
        return Creator.listed(self, [name for name in names if name not in sorted(votes)[1:]])


class DoesNotVote(Creator):
    """Planted mistake: who has seen no greater ballot publishes what it would vote for."""

    __slots__ = ()

    def read(self, content: Content) -> Creator:
        return replace(Creator.read(self, content), stage=Stage.PUBLISH)


class ListsOnce(Creator):
    """Planted mistake: publishes what it has voted for, whoever began meanwhile."""

    __slots__ = ()

    def done(self) -> Creator:
        after = Creator.done(self)
        return replace(after, stage=Stage.PUBLISH) if self.stage is Stage.VOTE else after


class LetsEqualsPass(Creator):
    """Planted mistake: only who is in a later round counts, not who is in the same one."""

    __slots__ = ()

    def listed(self, names: Iterable[str]) -> Creator:
        mine = f"{self.round:06d}-{self.token}."
        later = [name for name in names if not name.startswith(f"{self.round:06d}-") or name.startswith(mine)]
        return Creator.listed(self, later)


class BelievesInTheObject(Creator):
    """Planted mistake: what is there is another's."""

    __slots__ = ()

    def looked(self, there: bool) -> Creator:
        return replace(Creator.looked(self, there), stage=Stage.TAKEN if there else Stage.BEGIN)


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (ListsBeforeItBegins, "two have created it"),
        (KeepsItsOwn, "two have created it"),
        (VotesForTheOldest, "two have created it"),
        (DoesNotVote, "two have created it"),
        (ListsOnce, "two have created it"),
        (LetsEqualsPass, "two have created it"),
        (BelievesInTheObject, "who has created it was told that another one had"),
    ],
)
def test_the_search_catches_a_planted_mistake(planted: type[Creator], wrong: str) -> None:
    assert wrong in search(creators(2, planted), 3, alone=False)[1]


def test_the_search_catches_creators_without_a_random_part_in_the_names_of_their_entries() -> None:
    alike = tuple(replace(creator, token="a") for creator in creators(2, alike=False))
    assert "an entry has two contents" in search(alike, 2, alone=False)[1]
