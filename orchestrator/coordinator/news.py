"""What the supervisor has yet to hear of: warnings, notices, members to be killed, groups that formed.

It knows only its own versions: the supervisor names the newest that it has seen, and gets what came after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from orchestrator.records.run_status import GroupChange, MemberInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Unheard:
    """What came after some version, in order; the fields are named as in `RunStatus`."""

    left_out: tuple[MemberInfo, ...]
    warnings: tuple[str, ...]
    notices: tuple[str, ...]
    changes: tuple[GroupChange, ...]


class News:
    """Each piece comes with the next version (`publish`), and is given out for that one alone; on one event
    loop. Whoever waits is woken by every version.
    """

    def __init__(self, warnings: Iterable[str] = ()) -> None:
        """`warnings` come with version 1."""
        self.version = 0
        self._warnings = [(1, text) for text in warnings]
        self._notices: list[tuple[int, str]] = []
        self._kills: list[tuple[int, MemberInfo]] = []
        self._changes: list[tuple[int, GroupChange]] = []
        self._changed = asyncio.Condition()

    def warn(self, text: str) -> None:
        """Something is wrong."""
        self._warnings.append((self.version + 1, text))

    def say(self, text: str) -> None:
        """Nothing is wrong."""
        self._notices.append((self.version + 1, text))

    def kill(self, member: MemberInfo) -> None:
        """It was left out."""
        self._kills.append((self.version + 1, member))

    def formed(self, change: GroupChange) -> None:
        """A generation, and how it differs from the one before it."""
        self._changes.append((self.version + 1, change))

    def since(self, version: int) -> Unheard:
        """What came after `version`, the newest that was seen."""
        new = range(version + 1, self.version + 1)
        return Unheard(
            left_out=tuple(member for at, member in self._kills if at in new),
            warnings=tuple(text for at, text in self._warnings if at in new),
            notices=tuple(text for at, text in self._notices if at in new),
            changes=tuple(change for at, change in self._changes if at in new),
        )

    async def publish(self) -> None:
        """Something changed: what was given before is out."""
        self.version += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait(self, seconds: float) -> None:
        """Until something is published, at most so long."""
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.01, seconds)):
                    await self._changed.wait()
