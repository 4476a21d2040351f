"""An attempt whose journal and heartbeat a test writes, to be looked at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.made_run import note
from orchestrator.elastic.roster import Roster
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.records.membership import JoinRequest
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, no_sleep, record, start
from tests.launch.runner import Runner

JOIN = JoinRequest(
    member="b",
    launch="l",
    actor_id="",
    node_id="n",
    host="10.0.0.7",
    port=1,
    key=None,
    leaves=None,
    prepared=None,
    cursor=None,
    pid=22506,
)


class Attempt:
    """An attempt that somebody works on, without a model."""

    def __init__(
        self,
        runner: Runner,
        segment_bytes: int = 16 << 20,
        disk: OsDisk | None = None,
    ) -> None:
        """`disk`: that its journal is written to, if not the store's."""
        attempt = runner.begin()
        self.store, self.number, self.run_id = runner.store, attempt.number, attempt.run_id
        storage = Storage(str(runner.folder), disk, no_sleep) if disk is not None else self.store.storage
        self.journal = JournalWriter(storage, self.number, segment_bytes=segment_bytes, run_id=self.run_id)
        self._runner, self._parent = runner, attempt.parent

    def begin(self) -> None:
        """A generation of two workers of two, `a` and `b`."""
        config = self._runner.config().flat()
        note(self.journal, EventKind.ATTEMPT, launch="l", why="start", config=config)
        roster = Roster(2)
        for member in "ab":
            self.journal.event(
                EventKind.JOIN,
                member=member,
                actor=JOIN.actor_id,
                node=JOIN.node_id,
                pid=JOIN.pid,
                host=JOIN.host,
                key="",
                leaves=None,
                unreached=(),
                reason="",
            )
            roster.came(replace(JOIN, member=member), 0.0)
        begun = start(1, self._parent, self.number)
        self.journal.generation(replace(begun, world_size=2, members=("a", "b")))
        self.journal.event(
            EventKind.GROUP_FORMED, **encode(roster.formed(self.number, 1, ("a", "b"), 0, 0, 1.0))
        )
        self.journal.flush()

    def steps(self, first: int, last: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            self.journal.step(replace(record(key(step, attempt=self.number)), **fields))
        self.journal.flush()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Its heartbeat goes on."""
        heart, over = self.store.heartbeat(self.number), threading.Event()

        def beat() -> None:
            while not over.wait(0.02):
                heart.beat()

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
