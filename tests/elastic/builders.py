"""Requests and generations of a rendezvous, nodes as the supervisor finds them, and the status of a run."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.elastic.formation import Form, Formation, GroupSize
from orchestrator.elastic.rendezvous import Rendezvous
from orchestrator.elastic.supervision.policy import LaunchLimits, NodeFacts
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import JoinRequest
from orchestrator.records.run_status import RunStatus
from orchestrator.records.steps import StateKey, StepRecord

ATTEMPT = 3


def key(generation: int, step: int, attempt: int = ATTEMPT) -> StateKey:
    return StateKey(attempt=attempt, generation=generation, step=step)


def request(
    member: str, state: StateKey | None = None, leaves: int | tuple[int, int] | None = None, **other: object
) -> JoinRequest:
    """A join of `member` from node `n-member`, leaving generation `leaves` (of this attempt, if it is a
    number).
    """
    asked = JoinRequest(
        member=member,
        launch="launch",
        actor_id=f"actor-{member}",
        node_id=f"n-{member}",
        host=f"host-{member}",
        port=1000 + ord(member[0]),
        key=state,
        leaves=(ATTEMPT, leaves) if isinstance(leaves, int) else leaves,
        prepared=None,
        cursor=None if state is None else Cursor(consumed_samples=state.step),
    )
    return replace(asked, **other)  # type: ignore[arg-type]


def rendezvous(low: int = 1, high: int = 3, expected: int = 3, **other: object) -> Rendezvous:
    return Rendezvous(
        attempt=ATTEMPT,
        launch="launch",
        size=GroupSize(min_workers=low, max_workers=high, expected=expected),
        **other,  # type: ignore[arg-type]
    )


def only(actions: list[object], kind: type) -> object:
    """The single action of a tick, which must be of this kind."""
    assert len(actions) == 1, actions
    assert isinstance(actions[0], kind), actions
    return actions[0]


def form(machine: Rendezvous, now: float = 0.0) -> Formation:
    """Ticks, expects a formation, and has it journalled."""
    made = only(machine.tick(now), Form)
    assert isinstance(made, Form)
    machine.formed(made.formation.generation, now)
    return made.formation


def started(members: str = "abc", **other: object) -> Rendezvous:
    """A machine whose generation 1 of `members` runs from nothing."""
    machine = rendezvous(expected=len(members), **other)
    for member in members:
        assert machine.join(request(member), 0.0) is None
    form(machine)
    return machine


LIMITS = LaunchLimits(
    start_workers=3,
    min_workers=1,
    max_workers=3,
    cpus_per_worker=1.0,
    gpus_per_worker=0.0,
    num_tokenizers=2,
    wait_s=600.0,
)


def node(
    name: str, cpus: float, free: float | None = None, gpus: float = 0.0, *, head: bool = False
) -> NodeFacts:
    return NodeFacts(
        node_id=name,
        host=f"host-{name}",
        is_head=head,
        cpus=cpus,
        gpus=gpus,
        free_cpus=cpus if free is None else free,
        free_gpus=gpus,
    )


def status(step: int | None, step_s: float = 0.5, **other: object) -> RunStatus:
    last = None
    if step is not None:
        counts = dict.fromkeys(("consumed_samples", "consumed_tokens", "target_tokens"), 8 * step)
        floats = dict.fromkeys(("loss", "grad_norm", "lr", "data_wait_s", "save_blocked_s"), 0.5)
        last = StepRecord(
            attempt=1, generation=1, step=step, digest="0" * 16, step_s=step_s, **counts, **floats
        )
    made = RunStatus(
        version=1,
        attempt=1,
        generation=1,
        world_size=2,
        last_step=last,
        newest_point=None,
        committed=Cursor(),
        waiting_since=None,
        ended=None,
        reason="",
        left_out=(),
        members=(),
        failures=(),
    )
    return replace(made, **other)  # type: ignore[arg-type]
