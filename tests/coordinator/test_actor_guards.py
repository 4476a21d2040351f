"""What the coordinator does besides answering, without Ray: whom it has killed, whose calls it heeds, and
what is durable before it says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from orchestrator.coordinator.actor import Coordinator
from orchestrator.elastic.formation import RendezvousSettings
from orchestrator.records import GenerationView
from orchestrator.resume.store import RunStore
from tests.coordinator import test_actor
from tests.coordinator.test_actor import (
    JOIN,
    run,
    status,
    what_it_needs,
)

store, patient = test_actor.store, test_actor.patient


def test_the_supervisor_hears_once_whom_to_kill_because_he_did_not_come_back(store: RunStore) -> None:
    async def launch() -> None:
        start = what_it_needs(store, max_workers=2)
        settings = RendezvousSettings(missing_grace_s=0.0)
        actor = Coordinator(replace(start, rendezvous=settings), lambda info: None)
        unresponsive = replace(JOIN, member="n", port=2, pid=22)
        await asyncio.gather(actor.join(JOIN), actor.join(unresponsive))
        assert (await status(actor)).left_out == ()
        view = await actor.join(replace(JOIN, leaves=(1, 1)))
        assert isinstance(view, GenerationView)
        assert view.members == ("m",)
        news = await status(actor)
        assert [(info.member, info.pid) for info in news.left_out] == [("n", 22)]
        assert (await actor.status((news.attempt, news.version), 0.0)).left_out == ()
        await actor.end("stopped", "enough")

    run(launch)
