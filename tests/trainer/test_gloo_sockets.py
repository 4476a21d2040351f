"""A wait in gloo is ended by closing its own connections, and no other connection is touched."""

from __future__ import annotations

import datetime
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from orchestrator.trainer.comm.group import GlooSockets, ended_by

WAIT_S = 60.0
LONG = datetime.timedelta(seconds=10 * WAIT_S)


def gloo_groups(world_size: int, sockets: GlooSockets) -> list[dist.ProcessGroupGloo]:
    """One for each rank, all in this process; `sockets` knows the connections of all of them."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool, sockets.watched():
        made = [
            pool.submit(dist.ProcessGroupGloo, store, rank, world_size, LONG) for rank in range(world_size)
        ]
        return [one.result(WAIT_S) for one in made]


def wait_for_the_others(group: dist.ProcessGroupGloo) -> None:
    group.allreduce([torch.ones(3)]).wait()


def assert_open(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"open")
    assert pair[1].recv(4) == b"open"


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


def test_of_gloos_text_what_it_knows_is_told() -> None:
    place = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    advice = (
        ". This is typically caused by a remote worker crashing. Check the logs of the remote worker. GLHF!"
    )
    for known in ("Connection closed by peer [127.0.0.1]:33710", "Read error [::1]:23938: Connection reset"):
        error = RuntimeError(f"{place}{known}{advice}")
        assert str(ended_by("summing the gradient", error)) == f"summing the gradient: {known}"
    assert str(ended_by("voting", RuntimeError("it is [a] reason."))) == "voting: it is [a] reason"


def test_all_that_waits_fails_when_the_sockets_are_shut_and_other_connections_stay_open() -> None:
    before, sockets = tcp_pair(), GlooSockets()
    groups = gloo_groups(3, sockets)
    after = tcp_pair()
    assert sockets.num_known == 6, "each rank is connected to two others"
    with ThreadPoolExecutor(2) as pool:
        # rank 2 never comes
        waits = [pool.submit(wait_for_the_others, group) for group in groups[:2]]
        sockets.shut()
        for wait in waits:
            with pytest.raises(RuntimeError, match="[Cc]onnection"):
                wait.result(WAIT_S)
    assert_open(before)
    assert_open(after)


def test_a_group_that_is_made_after_its_generation_ended_waits_for_nobody() -> None:
    sockets = GlooSockets()
    sockets.shut()
    groups = gloo_groups(2, sockets)
    with pytest.raises(RuntimeError, match="[Cc]onnection"):
        wait_for_the_others(groups[0])


def test_a_group_that_was_left_is_not_touched_any_more() -> None:
    sockets = GlooSockets()
    groups = gloo_groups(2, sockets)
    sockets.forget()
    sockets.shut()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(wait_for_the_others, groups, timeout=WAIT_S))


def test_a_descriptor_that_leads_to_another_connection_by_now_is_not_shut() -> None:
    sockets = GlooSockets()
    groups = gloo_groups(2, sockets)
    known = list(sockets._known)
    other = tcp_pair()
    kept = [os.dup(fd) for fd in known]
    for fd in known:
        os.dup2(other[0].fileno(), fd)  # gloo closed its own, and somebody else was given the number
    sockets.shut()
    assert_open(other)
    for fd, own in zip(known, kept, strict=True):
        os.dup2(own, fd)
        os.close(own)
    del groups
