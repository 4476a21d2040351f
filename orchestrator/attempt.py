"""One attempt of a run: look at what is there, claim the next number, choose the parent, write down what is
inherited.

The order of these is what fences (MEMBERSHIP.md rule 6): first the claim, then the list of points, then the
parent file. The driver begins a launch with it, the coordinator continues one after its own restart, and
`plan` uses only the looking.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config import JobConfig, field_rules
from orchestrator.data.encoder import installed_encoders
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.errors import DataIdentityError, RefusedError, ResumePointError
from orchestrator.faults import Hook
from orchestrator.monitor.journal import JournalWriter
from orchestrator.monitor.reader import Journal, read_journal
from orchestrator.plan.claims import ClaimParent
from orchestrator.plan.encoders import EncoderSpan, with_encoder
from orchestrator.plan.identity import RunIdentity
from orchestrator.plan.lineage import Lineage, effective_history, require_sound
from orchestrator.plan.resume import PointInfo, ResumePlan, plan_resume
from orchestrator.plan.schedule import Budgets
from orchestrator.records import MemberInfo, StateKey
from orchestrator.resume.claims import (
    RESTARTED,
    RESUME,
    REWIND,
    START,
    UNREADABLE,
    UnreadableFile,
    unreadable_claim,
)
from orchestrator.resume.leftovers import Leftover, remove_leftovers
from orchestrator.resume.points import Damage, Point, parse_point_name
from orchestrator.resume.store import RunStore

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A run as it lies in storage: its journal, its effective history, and the names of the points on it,
    oldest first. `lost` are points on it that were committed, are not there, and nobody deleted. `encoders`
    made it (empty: the run's first alone). `unreadable` are the attempts' files that could not be used, for
    the user to hear of.
    """

    journal: Journal
    lineage: Lineage
    points: tuple[str, ...]
    lost: tuple[str, ...]
    encoders: tuple[EncoderSpan, ...]
    unreadable: tuple[UnreadableFile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A claimed attempt and what it continues. It pickles: the driver hands it to the coordinator.

    `step_label` is the label of the last step done as this launch counts. `previous` is the generation that
    trains on while a restarted coordinator takes over, `members` where its members live; `leftovers` are
    older launches' saves that this one removed; `encoders` say who makes which documents; `ended` is
    (outcome, reason) when the launch had ended before that restart.
    """

    number: int
    launch: str
    why: str
    point: Point | None
    inherited: tuple[str, ...]
    step_label: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    damages: tuple[Damage, ...] = ()
    unreadable: tuple[UnreadableFile, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    previous: PreviousGeneration | None = None
    members: tuple[MemberInfo, ...] = ()
    ended: tuple[str, str] | None = None

    @property
    def parent(self) -> StateKey | None:
        """The key of the point that it continues."""
        return self.point.key if self.point else None


def survey(store: RunStore) -> Survey:
    """Reads claims, journal and the list of points. Raises `OrchestratorError` if the history contradicts
    itself.
    """
    claims, (parents, cut_off) = store.claims(), store.parents()
    unreadable = (*(unreadable_claim(c.number) for c in claims if c.why == UNREADABLE), *cut_off)
    journal = read_journal(store.storage)
    lineage = require_sound(effective_history(claims, parents, journal.generations, journal.records))
    there = store.point_names()
    encoders = next((parent.encoders for parent in parents if parent.attempt == lineage.attempt), ())
    return Survey(
        journal=journal,
        lineage=lineage,
        points=_on_lineage(lineage, there),
        lost=_on_lineage(lineage, _committed_and_kept(journal) - set(there)),
        encoders=encoders,
        unreadable=unreadable,
    )


def _on_lineage(lineage: Lineage, names: Iterable[str]) -> tuple[str, ...]:
    keys = {name: parse_point_name(name) for name in names}
    return tuple(name for name, key in keys.items() if key is not None and lineage.on_lineage(key))


def _committed_and_kept(journal: Journal) -> set[str]:
    names = {event.fields["point"] for event in journal.events if event.kind == "point committed"}
    gone = (event.fields["points"] for event in journal.events if event.kind == "points deleted")
    return names.difference(*gone)


def require_frozen(seen: Survey, data: DataSpec) -> None:
    """Raises `DataIdentityError` where something was trained and the data that it was trained on are not
    those that the run has frozen, because these are gone.
    """
    if seen.lineage.records and data.tokenizer_folder is None:
        raise DataIdentityError(
            f"{len(seen.lineage.records)} steps of this run are trained, and its frozen data are gone "
            "(manifest/data.json in the run's folder); restore manifest/ and tokenizer/"
        )


def choose_point(
    store: RunStore, seen: Survey, wanted: str, fast: bool = False
) -> tuple[Point | None, tuple[Damage, ...]]:
    """The point to resume from: the newest healthy one on the lineage, or the one that `resume.from` names.

    A named point must be whole: another one is not taken in its place. `fast` trusts sizes (for `plan`).
    """
    if wanted == "latest":
        return store.healthy_newest((*seen.points, *seen.lost), fast=fast)
    if wanted not in seen.points:
        listed = ", ".join(seen.points) or "none"
        raise RefusedError(
            f"resume.from={wanted}, but the points on this run's lineage are: {listed}; name one of these, "
            "or latest"
        )
    if damages := store.verify_point(wanted, fast=fast):
        listed = "; ".join(map(str, damages))
        raise ResumePointError(
            f"resume.from={wanted}, which is damaged ({listed}); name another point, or latest"
        )
    return store.read_point(wanted), ()


def point_info(store: RunStore, point: Point) -> PointInfo:
    """What resume decision needs of a point; budgets and encoders stand in the parent file of its attempt."""
    parent = store.read_parent(point.key.attempt)
    budgets, encoders = Budgets(), tuple[EncoderSpan, ...]()
    if isinstance(parent, ClaimParent):
        budgets, encoders = parent.budgets or budgets, parent.encoders
    return PointInfo(
        name=point.name,
        key=point.key,
        cursor=point.cursor,
        global_batch_size=point.config["train.global_batch_size"],
        seq_len=point.config["pack.seq_len"],
        world_size=point.commit.world_size,
        optimizer_steps=point.commit.optimizer_steps,
        budgets=budgets,
        encoders=encoders,
    )


def decide(
    store: RunStore,
    config: JobConfig,
    point: Point | None,
    identities: tuple[RunIdentity, RunIdentity] | None,
) -> ResumePlan:
    """Whether and how `config` continues `point`; see `plan.resume.plan_resume`."""
    rules = {rule.path: rule.rule for rule in field_rules()}
    info, flat = (point_info(store, point), point.config) if point else (None, None)
    return plan_resume(config, rules, info, flat, identities, installed=installed_encoders())


def begin_launch(
    store: RunStore,
    config: JobConfig,
    launch: str,
    host: str,
    run: RunIdentity,
    data: DataSpec,
    faults: Hook,
) -> tuple[Attempt, ResumePlan]:
    """Claims the next attempt for a start command and writes what it inherits. `run` is the run's identity,
    `data` the job's data.

    Raises `BusyError` if another start was quicker, `RefusedError` if the configuration may not continue the
    run (the claim then stays without descendants and harms nobody).
    """
    newest = store.newest_claim()
    number = (newest.number if newest else 0) + 1
    rewind = config.resume.from_ != "latest"
    why = START if newest is None else REWIND if rewind else RESUME
    store.claim(number, launch, why, host)
    faults("claim_made", -1, -1)
    seen = survey(store)
    require_frozen(seen, data)
    point, damages = choose_point(store, seen, config.resume.from_)
    plan = decide(store, config, point, (run, data.identity()))
    if plan.action == "refuse":
        raise RefusedError("\n".join(plan.refusals))
    inherited, encoders = seen.points, plan.encoders
    if plan.encoder is not None and plan.encoder != encoders[-1].encoder:
        begins = data.made_by(encoders).next_documents(point.cursor) if point else {}
        encoders = with_encoder(encoders, plan.encoder, begins)
    store.write_parent(
        ClaimParent(
            attempt=number,
            parent=point.key if point else None,
            inherited=inherited,
            budgets=plan.budgets,
            differences=plan.differences,
            encoders=encoders,
        )
    )
    attempt = Attempt(
        number=number,
        launch=launch,
        why=why,
        point=point,
        inherited=inherited,
        step_label=plan.step_after,
        budgets=plan.budgets,
        encoders=encoders,
        damages=damages,
        unreadable=seen.unreadable,
        leftovers=remove_leftovers(store, number),
    )
    return attempt, plan


def note_beginning(journal: JournalWriter, attempt: Attempt, config: Mapping[str, Any]) -> None:
    """Journals that the attempt begins in this process, under this flat configuration, and all that its start
    found and did.
    """
    journal.event("attempt", launch=attempt.launch, why=attempt.why, pid=os.getpid(), config=dict(config))
    for damage in attempt.damages:
        journal.event("damaged point", point=damage.point, file=damage.file, reason=damage.reason)
    for file in attempt.unreadable:
        journal.event("unreadable file", file=file.path, reason=file.reason)
    for left in attempt.leftovers:
        if left.kept:
            journal.event("leftover kept", point=left.point, reason=left.kept)
        else:
            journal.event("leftover removed", point=left.point)


def continue_launch(store: RunStore, first: Attempt, host: str, faults: Hook) -> Attempt:
    """What a coordinator process goes on with: `first` as the driver claimed it, or the next attempt if this
    process is a restarted one.

    It is a restarted one if the launch's newest attempt has a journal: that is the first thing a coordinator
    writes. Leftovers stay until the next start command, for members that live may still be writing into them.
    Raises `FencedError` if another launch has taken the run over.
    """
    newest = store.newest_claim()
    assert newest is not None, "the driver has claimed before it starts a coordinator"
    if newest.number == first.number and not store.storage.list(f"journal/a{first.number:04d}"):
        return first
    end = store.read_end(newest.number) if newest.launch == first.launch else None
    if end is not None:
        return replace(first, number=newest.number, why=RESTARTED, ended=(end.outcome, end.reason))
    number = newest.number + 1
    store.claim(number, first.launch, RESTARTED, host)
    faults("claim_made", -1, -1)
    seen = survey(store)
    try:
        point, _ = choose_point(store, seen, "latest", fast=True)
    except ResumePointError:
        point = None  # the members hold a newer state than any point; without them the next start refuses
    if point is None or (first.parent is not None and point.key < first.parent):
        point = first.point
    store.write_parent(
        ClaimParent(
            attempt=number,
            parent=point.key if point else None,
            inherited=seen.points,
            budgets=first.budgets,
            encoders=first.encoders,
        )
    )
    older = [g for g in seen.journal.generations if first.number <= g.attempt < number]
    last = max(older, key=lambda g: g.id, default=None)
    return replace(
        first,
        number=number,
        why=RESTARTED,
        point=point,
        inherited=seen.points,
        damages=(),
        unreadable=tuple(file for file in seen.unreadable if file not in first.unreadable),
        leftovers=(),
        previous=None
        if last is None
        else PreviousGeneration(attempt=last.attempt, generation=last.generation, members=last.members),
        members=_where_they_live(seen.journal, last.members if last else ()),
    )


def _where_they_live(journal: Journal, members: tuple[str, ...]) -> tuple[MemberInfo, ...]:
    """As they said when they last joined."""
    joins = {e.fields["member"]: e.fields for e in journal.events if e.kind == "join"}
    return tuple(
        MemberInfo(
            member=m,
            actor_id=joins[m]["actor"],
            node_id=joins[m]["node"],
            pid=joins[m]["pid"],
            host=joins[m].get("host", ""),
        )
        for m in members
        if m in joins
    )
