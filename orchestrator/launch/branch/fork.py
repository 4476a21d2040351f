"""Makes a new run from another run's resume point, without training.

This is the new run's content, and the claim that takes the point over.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.run_file import RunFile
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.checkpoint.points.verify import ReadAtOnce
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.coordinator.attempt.attempt import Attempt
from orchestrator.coordinator.attempt.forking import describe, found_run, take_over, trained_code
from orchestrator.coordinator.attempt.survey import require_journals, survey
from orchestrator.errors import BusyError, RefusedError
from orchestrator.history.claims.claim_files import FORK
from orchestrator.history.claims.claims import ClaimParent, ForkedFrom
from orchestrator.launch.branch.point_query import PointMatch, PointPlan, PointQuery, find, planned
from orchestrator.launch.branch.rewind import end_at_once
from orchestrator.launch.start import attempt_claim
from orchestrator.launch.start import run_preparation as starting
from orchestrator.launch.start.run_preparation import refuse_around, refuse_inside
from orchestrator.storage.open import absolute, split


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkPlan(PointPlan):
    """The content of the run `fork` at its beginning.

    `stands_there`: it exists already, so that nothing is to be done. `done`: it exists now.
    """

    fork: str
    weights_digest: str
    bytes: int
    stands_there: bool
    done: bool = False

    def lines(self) -> list[str]:
        """The plan as text: what the fork would begin with, what is done to the run, and how to continue."""
        begins = f"would be a run of its own that begins with {self.point} of {self.run}"
        lines = self.point_lines(f"{self.fork}: {begins}")
        if self.stands_there:
            return [*lines, "  it exists already: nothing is to be done"]
        storage, name = split(self.fork)
        words = shlex.join([f"run.name={name}", f"run.storage={storage or '.'}"])
        start = f"orchestrator train CONFIG {words}"
        return [
            *lines,
            f"  {self.run} would stay as it is, with its point pinned",
            f"  afterwards `{start}` trains it on",
        ]

    def outcome(self) -> str:
        """The result as text."""
        return f"forked: {self.fork} begins with {self.point} of {self.run}, where it is pinned"


def fork(
    store: RunStore,
    new_uri: str,
    wanted: PointQuery,
    by: str,
    agree: Callable[[ForkPlan], bool],
    say: Callable[[str], None] = lambda text: None,
    run: str = "",
    pinned: bool = True,
) -> ForkPlan:
    """Shows `agree` the plan of the fork at `new_uri`, and makes the fork if that returns True.

    Returns the plan, with its result. `pinned`: see `found_run`. The run itself is only read, except for the
    pin on its point, so that a launch may work on it meanwhile. After a kill, repeating the command
    continues, and so does a start of the fork, once its run.json exists.

    Raises `RefusedError` if there is another run at `new_uri`, inside it or around it, and for a place that
    the history does not have, `ResumePointError` for a damaged point, `BusyError` if a launch is active on
    the fork.
    """
    folder = absolute(new_uri)
    new = RunStore(store.storage.beside(folder))
    seen = survey(store)
    require_journals(store, seen)
    foreign = store.foreign(seen.committed)
    own = [name for name in seen.committed if name not in foreign]
    read = ReadAtOnce(store.storage, say, "the resume point to fork")
    found = find(store, seen, wanted, own, each=read)
    origin = describe(store, found.point.name)
    there = _there(new, origin, wanted)
    if there is None:
        refuse_inside(new)
        refuse_around(new, store.storage.root)
    config = _config(found.point, folder)
    stands_there = there is not None and bool(new.parents()[0])
    plan = fork_plan(run or store.storage.root, new_uri, found, wanted, origin, stands_there)
    if not agree(plan):
        return plan
    if not stands_there:
        carry_out(new, origin, config, by, say, pinned)
    return replace(plan, done=True)


def fork_plan(
    run: str, new_uri: str, found: PointMatch, wanted: PointQuery, origin: ForkedFrom, stands_there: bool
) -> ForkPlan:
    """The plan of a fork that begins with `found`."""
    return ForkPlan(
        **planned(run, found, wanted),
        fork=new_uri,
        weights_digest=origin.weights_digest,
        bytes=found.point.num_bytes,
        stands_there=stands_there,
    )


def carry_out(
    new: RunStore,
    origin: ForkedFrom,
    config: dict[str, Any],
    by: str,
    say: Callable[[str], None] = lambda text: None,
    pinned: bool = True,
) -> None:
    """Makes the fork, or its missing parts: run.json, and an attempt that takes the point over and ends.

    Raises as `fork`.
    """
    run = starting.find_run(new)
    newest = 0 if run is None else attempt_claim.refuse_busy(new, say)
    if run is None:
        run = found_run(new, config["run.name"], origin, by, pinned)
    take_over_and_end(new, run, newest, config, by)


def take_over_and_end(store: RunStore, run: RunFile, newest: int, config: dict[str, Any], by: str) -> None:
    """Claims the attempt after `newest` for a fork that has taken nothing over yet.

    Its history begins as soon as the parent file is durable. A kill before that leaves it to the next start.
    """
    with attempt_claim.claiming(store, run.id, newest + 1, FORK) as claim:
        if survey(store).lineage.attempt is not None:
            raise BusyError(f"{store.storage.root}: another start has just made this fork; look at it first")
        point, origin = take_over(store, run, claim.number)
        parent = ClaimParent(
            attempt=claim.number,
            parent=point.key,
            inherited=(point.name,),
            budgets=origin.budgets,
            encoders=origin.encoders,
            sources=origin.sources,
            origin=origin,
        )
        store.write_parent(parent)
        code = trained_code(store, point.name)  # kept, for the other run may be gone at the next start
        attempt = replace(
            Attempt.claimed(claim, parent, point, point.key.step, run.id),
            code=code.code if code is not None else {},
        )
        reason = f"forked from {origin.forked_from.run} at {origin.forked_from.point} by {by}"
        end_at_once(store, attempt, run, config, reason)


def _config(point: Point, folder: str) -> dict[str, Any]:
    """The point's configuration with the fork's name. Raises `ConfigError` for an invalid name."""
    flat = in_todays_fields(point.config)
    storage, name = split(folder)
    job = parse_config(nested({**flat, "run.name": name, "run.storage": storage, "resume.from": "latest"}))
    starting.check_writable(starting.run_storage(job))
    return job.flat()


def _there(new: RunStore, origin: ForkedFrom, wanted: PointQuery) -> RunFile | None:
    """The fork, if it was begun before. Raises `RefusedError` for any other run."""
    run = starting.find_run(new)
    if run is None or run.forked_from == origin:
        return run
    root, was = new.storage.root, run.forked_from
    if was is not None and (was.run, was.run_id) == (origin.run, origin.run_id):
        raise RefusedError(
            f"{root} is a fork of {was.run} already, at {was.point}, and {wanted} is {origin.point} now; "
            f"nothing is changed. Finish that one with --at {was.point}, or take another name",
            code="run.forked_elsewhere",
        )
    raise RefusedError(
        f"{root} is a run already, which is not a fork of {origin.run}; nothing is changed. Take another "
        "name",
        code="run.exists",
    )
