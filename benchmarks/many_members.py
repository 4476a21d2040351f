"""What a coordinator's rendezvous takes of its CPU to form a group of 10,000 members anew after a loss.

    python -m benchmarks.many_members [--json]

Members of FSDP2 (each holds its shard, a copy of a memory point, and its neighbour's) and of HSDP with 8
shards join; one of them is dead. `joins_s`: all others report what they hold; `choice_s`: the state that they
continue, who gives which shard, and the group; `views_s`: the answer of each member. CPU seconds of one
thread; nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

from orchestrator.elastic.formation import Form, GroupSize
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import HeldShard, JoinRequest, Source
from orchestrator.records.steps import StateKey

NUM_MEMBERS = 10_000
_LIVE, _COPIED = (StateKey(attempt=1, generation=1, step=step) for step in (10, 8))


def main() -> None:
    """Prints the figures, with `--json` as one object in the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = {"num_members": NUM_MEMBERS, "fsdp2": measure(NUM_MEMBERS), "hsdp": measure(8)}
    print(json.dumps(found) if arguments.json else json.dumps(found, indent=2))


def measure(num_shards: int) -> dict[str, float]:
    """A first generation, then the next one without a member."""
    rendezvous = Rendezvous(
        attempt=1, launch="l", size=GroupSize(min_workers=1, max_workers=NUM_MEMBERS, expected=NUM_MEMBERS)
    )
    members = [_member(number, num_shards) for number in range(NUM_MEMBERS)]
    for member in members:
        rendezvous.join(replace(member, key=None, cursor=None, leaves=None, holdings=()), 0.0)
    _form(rendezvous, 1)
    rendezvous.dead(members[7].member, 1.0)
    began = time.process_time()
    for member in members:
        if member is not members[7]:
            rendezvous.join(replace(member, port=member.port + 1), 1.0)
    joined = time.process_time()
    formed = _form(rendezvous, 2)
    chosen = time.process_time()
    for name in formed.formation.members:
        assert rendezvous.view_for(name) is not None
    seconds = (joined - began, chosen - joined, time.process_time() - chosen)
    return dict(zip(("joins_s", "choice_s", "views_s"), (round(each, 3) for each in seconds), strict=True))


def _form(rendezvous: Rendezvous, number: int) -> Form:
    (action,) = rendezvous.tick(number)
    assert isinstance(action, Form), action
    rendezvous.formed(number, number)
    return action


def _member(number: int, num_shards: int) -> JoinRequest:
    own, other = number % num_shards, (number + 1) % NUM_MEMBERS % num_shards

    def held(key: StateKey, shard: int, source: Source) -> HeldShard:
        return HeldShard(key=key, shard=shard, num_shards=num_shards, source=source, cursor=Cursor())

    facts: dict[str, Any] = {"launch": "l", "host": "10.0.0.1", "prepared": None, "actor_id": str(number)}
    return JoinRequest(
        member=f"m{number:05d}",
        node_id=f"n{number // 8}",
        port=10_000 + number,
        key=_LIVE,
        cursor=Cursor(),
        leaves=(1, 1),
        holdings=(
            held(_LIVE, own, Source.LIVE),
            held(_COPIED, own, Source.STAGED),
            held(_COPIED, other, Source.NEIGHBOUR),
        ),
        **facts,
    )


if __name__ == "__main__":
    main()
