"""Which of several that create one name has created it, where a store lets all of them write it: what each
asks the store for next, and what follows from the answer (membership rule 9).

It is Disk Paxos (Gafni and Lamport, Distributed Computing 16, 2003) with a single disk, which is the store:
each try is a ballot, with an entry of its own that says that it has begun and, once it has seen no greater
one, a second entry with the content it votes for, which is that of the greatest vote it saw before, else its
own. What was voted for while no greater ballot had begun is decided, for good: every later one finds that
vote. Whoever finds a decision publishes its content, also for one who died over it.

It needs three things of a store: an entry is there whole or not at all, a list shows all that was written
before it, and no other name. An entry never has two contents, so a request that is repeated late, or comes
when its sender is gone, changes nothing. It does not need that anybody is alive, or on time; two who are
there at the same moment may hinder each other, so each waits for a random while before its next ballot.

It asks nothing itself: `creating` does, and a search over all orders (`tests/storage/test_agreement.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from orchestrator.errors import StorageError

MOST_TRIES = 12
_ENTRY = re.compile(r"(\d{6})-([0-9a-z]+)\.(asks|votes)")


@dataclass(frozen=True, order=True, slots=True)
class Ballot:
    """One try of one creator; no two are equal, and of two one is greater. `token` is the creator's random
    one, of `0-9a-z`.
    """

    round: int
    token: str

    @property
    def asks(self) -> str:
        """The name of the entry that says that it has begun."""
        return f"{self.round:06d}-{self.token}.asks"

    @property
    def votes(self) -> str:
        """The name of the entry with its vote."""
        return f"{self.round:06d}-{self.token}.votes"


@dataclass(frozen=True, slots=True)
class Content:
    """What an object is to hold, and the token of who wanted that: two may want the same."""

    author: str
    data: bytes

    def to_entry(self) -> bytes:
        """As it stands in a vote's entry."""
        return self.author.encode() + b"\n" + self.data

    @classmethod
    def from_entry(cls, entry: bytes) -> Content:
        """What stands in a vote's entry."""
        author, newline, data = entry.partition(b"\n")
        if not newline:
            raise StorageError("a vote about who has created a name is not as it was written; restore it")
        return cls(author.decode(errors="replace"), data)


class Stage(Enum):
    """What a creator asks for next."""

    LOOK = "is the name there? (bool)"
    BEGIN = "write the ballot's first entry, empty"
    LIST = "the names of all entries"
    READ = "the bytes of the entry of `Creator.adopts`"
    VOTE = "write the ballot's second entry, `Creator.content`"
    LIST_AGAIN = "the names of all entries, once more"
    PUBLISH = "write the object, `Creator.content`"
    WAIT = "wait for a random while that grows with `Creator.tries`"
    CREATED = "nothing: this one has created the name"
    TAKEN = "nothing: another one has, and the object is there"
    GIVEN_UP = "nothing: others were there at the same time, in each of `MOST_TRIES`"


ENDS = frozenset({Stage.CREATED, Stage.TAKEN, Stage.GIVEN_UP})


@dataclass(frozen=True, kw_only=True, slots=True)
class Creator:
    """One who creates a name exclusively: at which stage it is. `content`: what it votes for, its own until
    it adopts another's. `has_voted`: a vote for its own may be there, so that others may publish it.
    """

    token: str
    data: bytes
    content: Content
    round: int = 1
    tries: int = 1
    stage: Stage = Stage.LOOK
    adopts: Ballot | None = None
    has_voted: bool = False

    @classmethod
    def of(cls, token: str, data: bytes) -> Creator:
        """One that has asked nothing yet. `token`: never used before, by anybody."""
        return cls(token=token, data=data, content=Content(token, data))

    @property
    def ballot(self) -> Ballot:
        """Its present try."""
        return Ballot(self.round, self.token)

    def looked(self, there: bool) -> Creator:
        """After LOOK. Of what is there while its own content may have been published by others, the votes
        say whose it is.
        """
        taken = there and not self.has_voted
        return replace(self, stage=Stage.TAKEN if taken else Stage.BEGIN)

    def listed(self, names: Iterable[str]) -> Creator:
        """After LIST and LIST_AGAIN. Raises `StorageError` if they do not show what this one wrote before."""
        asked, voted = _entries(names)
        if self.ballot not in (voted if self.stage is Stage.LIST_AGAIN else asked):
            raise StorageError(
                "the store does not list at once what was written to it, so nobody can tell who created a "
                "name; take a store that does, or a folder"
            )
        greatest = max((*asked, *voted))
        if greatest > self.ballot:
            if self.tries >= MOST_TRIES:
                return replace(self, stage=Stage.GIVEN_UP)
            return replace(self, stage=Stage.WAIT, round=greatest.round + 1, tries=self.tries + 1)
        if self.stage is Stage.LIST_AGAIN:
            return replace(self, stage=Stage.PUBLISH)
        if voted:
            return replace(self, stage=Stage.READ, adopts=max(voted))
        return self.read(Content(self.token, self.data))

    def read(self, content: Content) -> Creator:
        """After READ."""
        mine = content.author == self.token
        return replace(self, stage=Stage.VOTE, content=content, has_voted=self.has_voted or mine)

    def done(self) -> Creator:
        """After BEGIN, VOTE, PUBLISH and WAIT."""
        return replace(self, stage=self._after())

    def _after(self) -> Stage:
        match self.stage:
            case Stage.BEGIN:
                return Stage.LIST
            case Stage.VOTE:
                return Stage.LIST_AGAIN
            case Stage.WAIT:
                return Stage.LOOK
        assert self.stage is Stage.PUBLISH, f"{self.stage} has an answer"
        return Stage.CREATED if self.content.author == self.token else Stage.TAKEN


def _entries(names: Iterable[str]) -> tuple[list[Ballot], list[Ballot]]:
    """The ballots that have begun, and those that have voted."""
    asked, voted = list[Ballot](), list[Ballot]()
    for match in filter(None, map(_ENTRY.fullmatch, names)):
        (asked if match[3] == "asks" else voted).append(Ballot(int(match[1]), match[2]))
    return asked, voted
