"""Calls of members that stay open: a `join` until its member is in a generation, an `ended` until that one is
over.

It decides no answer. A call that its member has made anew is nobody's any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from orchestrator.records.membership import GenerationView, Refusal, RunOver, StillWaiting

JoinAnswer = GenerationView | Refusal | RunOver | StillWaiting


class OpenJoins:
    """By member; on one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Any]] = {}

    def open(self, member: str) -> asyncio.Future[JoinAnswer]:
        """A call that waits from now on, in place of the member's earlier one."""
        old = self._open.pop(member, None)
        if old is not None and not old.done():
            old.set_result(StillWaiting())  # a call that nobody waits for any more
        future = self._open[member] = asyncio.get_running_loop().create_future()
        return future

    def answer(self, member: str, answer: JoinAnswer) -> None:
        """Answers the member's call, if it has one."""
        future = self._open.pop(member, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def forget(self, member: str) -> None:
        """It is dead: its call is not answered."""
        self._open.pop(member, None)


class GenerationEnds:
    """Generations whose end is waited for, apart from all other news: a thousand members are not woken for
    less.
    """

    def __init__(self) -> None:
        self._overs: dict[tuple[int, int], asyncio.Event] = {}

    async def wait(self, generation: tuple[int, int], seconds: float) -> bool:
        """Whether the generation (attempt, number) is over, within so long."""
        over = self._overs.setdefault(generation, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await over.wait()
        return over.is_set()

    def release(self, is_over: Callable[[int, int], bool]) -> None:
        """Answers whoever waits for one that is over."""
        for identity, over in list(self._overs.items()):
            if is_over(*identity):
                over.set()
                del self._overs[identity]
