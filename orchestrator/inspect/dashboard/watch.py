"""Shares one look at a run among all its listeners.

A reader looks every few seconds while there are listeners, and ends with the last of them. A listener takes
the newest look when it is ready, so a slow or dead one delays no other and costs no memory except the look
that it saw last. Everything runs in one event loop, except for the look itself, which is taken in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from orchestrator.inspect.dashboard.runs import OpenRun

EVERY_S = 2.0
_CLOSING_S = 0.25  # how soon a reader notices that the server ends

Look = TypeVar("Look")


class Closing(Protocol):
    """Whether the server is about to end."""

    def is_set(self) -> bool:
        """Returns true from then on."""


class Reader(Generic[Look]):
    """Looks at one run. `count` is the number of looks so far."""

    def __init__(
        self,
        run: OpenRun,
        look: Callable[[OpenRun, Look | None], Look],
        closing: Closing,
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        self.run, self.listeners, self.count, self.is_over = run, 0, 0, False
        self._look, self._closing, self._pause = look, closing, pause
        self._newest: Look | None = None
        self._failure: BaseException | None = None
        self._news = anyio.Event()
        self._task = asyncio.get_running_loop().create_task(self._read(), name=f"looks at {run.name}")

    async def after(self, count: int) -> Look | None:
        """Waits for a look after number `count`, and returns the newest one; None if the server ends. Raises
        the error of a look: the reader is over then.
        """
        while self._newest is None or self.count <= count:
            if self._failure is not None:
                raise self._failure
            if self.is_over:
                return None
            await self._news.wait()
        return self._newest

    def end(self) -> None:
        """Ends the reader: no listener is left."""
        self.is_over = True
        self._task.cancel()

    async def _read(self) -> None:
        try:
            while not self._closing.is_set():
                self._newest = await anyio.to_thread.run_sync(self._look, self.run, self._newest)
                self.count += 1
                self._tell()
                await self._pause()
        except Exception as error:  # noqa: BLE001  each listener raises it
            self._failure = error
        finally:
            self.is_over = True
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


class Watches(Generic[Look]):
    """The readers of all runs with listeners. `look` takes a run and the look before it."""

    def __init__(
        self,
        look: Callable[[OpenRun, Look | None], Look],
        closing: Closing,
        every_s: float = EVERY_S,
        pause: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`pause` waits between two looks: `every_s` seconds, less if the server ends."""
        self.every_s = every_s
        self._look, self._closing, self._pause = look, closing, pause or self._wait
        self._readers: dict[str, Reader[Look]] = {}

    @contextmanager
    def listening(self, run: OpenRun) -> Iterator[Reader[Look]]:
        """The run's reader, which exists for as long as this lasts."""
        reader = self._readers.get(run.name)
        if reader is None or reader.is_over or reader.run is not run:
            reader = self._readers[run.name] = Reader(run, self._look, self._closing, self._pause)
        reader.listeners += 1
        try:
            yield reader
        finally:
            reader.listeners -= 1
            if reader.listeners == 0:
                reader.end()
                if self._readers.get(run.name) is reader:
                    del self._readers[run.name]

    async def _wait(self) -> None:
        left = self.every_s
        while left > 0 and not self._closing.is_set():
            await anyio.sleep(min(left, _CLOSING_S))
            left -= _CLOSING_S
