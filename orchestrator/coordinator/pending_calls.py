"""Calls that stay open: of members until they are answered, and of the supervisor until there is news.

A `join` is open until its member is in a generation, an `ended` until that generation is over. When a member
repeats a call, the earlier one is abandoned. The supervisor passes the newest version that it has seen, and
gets everything after it: warnings, notices, members to be killed, and groups that formed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator.records.membership import GenerationView, Refusal, RunOver, StillWaiting
from orchestrator.records.run_status import GroupChange, MemberInfo

JoinAnswer = GenerationView | Refusal | RunOver | StillWaiting


class OpenJoins:
    """The open joins by member. For use on one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Any]] = {}

    def open(self, member: str) -> asyncio.Future[JoinAnswer]:
        """Opens a call, which replaces the member's earlier one."""
        old = self._open.pop(member, None)
        if old is not None and not old.done():
            old.set_result(StillWaiting())  # a call that nothing waits for any more
        future = self._open[member] = asyncio.get_running_loop().create_future()
        return future

    def answer(self, member: str, answer: JoinAnswer) -> None:
        """Answers the member's call, if it has one."""
        future = self._open.pop(member, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def forget(self, member: str) -> None:
        """Drops the call of a dead member without an answer."""
        self._open.pop(member, None)


class GenerationEnds:
    """Waits for the ends of generations, separate from other news.

    A thousand members are thus woken only for these.
    """

    def __init__(self) -> None:
        self._overs: dict[tuple[int, int], asyncio.Event] = {}

    async def wait(self, generation: tuple[int, int], seconds: float) -> bool:
        """Waits up to `seconds`; returns whether the generation (attempt, number) is over."""
        over = self._overs.setdefault(generation, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()
        return over.is_set()

    def release(self, is_over: Callable[[int, int], bool]) -> None:
        """Answers the waits for all generations that are over."""
        for identity, over in list(self._overs.items()):
            if is_over(*identity):
                over.set()
                del self._overs[identity]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewEvents:
    """Everything after some version, in order. The fields are named as in `RunStatus`."""

    left_out: tuple[MemberInfo, ...]
    warnings: tuple[str, ...]
    notices: tuple[str, ...]
    changes: tuple[GroupChange, ...]


class EventFeed:
    """Messages with versions. Each one belongs to the next version (`publish`), and is returned only for that
    one.

    For use on one event loop. Every version wakes all waiting calls.
    """

    def __init__(self, warnings: Iterable[str] = ()) -> None:
        """`warnings` belong to version 1."""
        self.version = 0
        self._warnings = [(1, text) for text in warnings]
        self._notices: list[tuple[int, str]] = []
        self._kills: list[tuple[int, MemberInfo]] = []
        self._changes: list[tuple[int, GroupChange]] = []
        self._changed = asyncio.Condition()

    def warn(self, text: str) -> None:
        """Adds a warning."""
        self._warnings.append((self.version + 1, text))

    def say(self, text: str) -> None:
        """Adds a notice that is not a warning."""
        self._notices.append((self.version + 1, text))

    def kill(self, member: MemberInfo) -> None:
        """Adds a member that was left out and is to be killed."""
        self._kills.append((self.version + 1, member))

    def formed(self, change: GroupChange) -> None:
        """Adds a formed generation, and how it differs from the previous one."""
        self._changes.append((self.version + 1, change))

    def since(self, version: int) -> NewEvents:
        """Returns everything after `version`, the newest that was seen."""
        new = range(version + 1, self.version + 1)
        return NewEvents(
            left_out=tuple(member for at, member in self._kills if at in new),
            warnings=tuple(text for at, text in self._warnings if at in new),
            notices=tuple(text for at, text in self._notices if at in new),
            changes=tuple(change for at, change in self._changes if at in new),
        )

    async def publish(self) -> None:
        """Publishes what was added, under a new version."""
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, seconds: float) -> None:
        """Waits until something is published, for at most `seconds`."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, seconds)):
                    await self._changed.wait()
