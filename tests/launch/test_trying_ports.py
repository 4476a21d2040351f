"""Members find out whom they cannot reach by trying, over real sockets."""

from __future__ import annotations

import socket

from orchestrator.launch.member.coordinator_calls import unreached
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView


def test_who_does_not_listen_is_named_and_who_listens_is_not() -> None:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    probe = tuple(("127.0.0.1", int(server.getsockname()[1])) for server in listening)
    listening[1].close()
    view = GenerationView(
        attempt=1,
        generation=1,
        rank=0,
        world_size=3,
        members=("a", "b", "c"),
        host="127.0.0.1",
        port=probe[0][1],
        parent=None,
        source_rank=None,
        point=None,
        cursor=Cursor(),
        step=0,
        launch="launch",
        probe=probe,
    )
    try:
        assert unreached(view) == ("b",)
    finally:
        listening[0].close()
        listening[2].close()
