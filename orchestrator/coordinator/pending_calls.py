"""Calls of members that stay open.

A `join` is open until its member is in a generation, an `ended` until that generation is over. When a member
repeats a call, the earlier one is abandoned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from orchestrator.records.membership import GenerationView, Refusal, RunOver, StillWaiting

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
