"""Chooses the point that a start continues, and decides whether its configuration may continue it.

This module reads and verifies points and writes nothing; `plan` uses it as a start does. It also finds out
from storage whether a launch of the run has reached the end of its data (`planning.resume.plan_report`
derives the consequences).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.checkpoint.points.model_folders import located, model_of, why_other
from orchestrator.checkpoint.points.point_files import Each
from orchestrator.checkpoint.points.points import Point, newest_first, parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields
from orchestrator.coordinator.attempt.forking import is_folder, point_info
from orchestrator.coordinator.attempt.source_resolution import SourceResolution
from orchestrator.coordinator.attempt.survey import Survey, decided, require_listed
from orchestrator.coordinator.machine.launch_actions import THE_DATA
from orchestrator.errors import RefusedError, WantedPointError
from orchestrator.history.claims.claims import ClaimParent, Origin
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import decode
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.planning.resume.plan_report import KnownEpochs, epochs_of, known_epochs
from orchestrator.planning.resume.resume_plan import DataChanges, KnownData, ResumePlan, plan_resume
from orchestrator.planning.resume.skipping import SkipDecision
from orchestrator.planning.resume.source_lists import RestartDecision, undone
from orchestrator.records.cursor import Cursor
from orchestrator.records.points import Damage

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec

def wanted_point(seen: Survey, config: JobConfig) -> str:
    """Returns `resume.from`, or `latest` if that rewind is already done.

    It is done if the newest attempt began with the same `resume.from`, and the same values of everything else
    that influences training, and has saved a newer point. The same command thus continues, also if torchrun
    repeats it. A command that would train something else rewinds again. Until there is a newer point, the
    named one is the only one that the run may continue.
    """
    from orchestrator.config.field_rules import field_rules, in_todays_fields

    wanted = config.resume.from_
    if is_folder(wanted):
        return "latest"  # a fork begins this way once, and then continues
    begun = [event.fields["config"] for event in seen.journal.events if event.kind == EventKind.ATTEMPT]
    if wanted == "latest" or not begun:
        return wanted
    before, now = in_todays_fields(begun[-1]), config.flat()
    decisive = ["resume.from", *(rule.path for rule in field_rules() if rule.rule != "free")]
    is_done = all(before.get(path) == now[path] for path in decisive)
    newest = newest_first((*seen.points, *seen.lost))[:1]
    return "latest" if is_done and newest != [wanted] else wanted


def kept_point(store: RunStore, seen: Survey, config: JobConfig) -> str:
    """Returns `wanted_point`. Raises `WantedPointError` for a named point whose deletion has begun."""
    if (wanted := wanted_point(seen, config)) != "latest":
        store.require_kept(wanted)
    return wanted


def choose_point(
    store: RunStore,
    seen: Survey,
    wanted: str,
    fast: bool = True,
    known: Sequence[Damage] = (),
    each: Each | None = None,
) -> tuple[Point | None, tuple[Damage, ...]]:
    """Chooses among the points of a survey (`choose_among`).

    `known` and `each` as in `PointFiles.healthy_newest`.

    Raises `LatePointError` for a point that is not in the survey: survey the run again (`survey.decided`).
    """
    point, damages = choose_among(store, seen.points, (*seen.lost, *seen.foreign), wanted, fast, known, each)
    require_listed(seen, point)
    return point, damages


def choose_among(
    store: RunStore,
    points: Sequence[str],
    unfit: Sequence[str],
    wanted: str,
    fast: bool = True,
    known: Sequence[Damage] = (),
    each: Each | None = None,
) -> tuple[Point | None, tuple[Damage, ...]]:
    """Returns the point to resume from: the newest healthy one on the lineage, or the one that `resume.from`
    names.

    `points` are those on the lineage, oldest first. `unfit` are those on it that are known to be lost or
    another run's. A named point must be whole: no other is taken in its place. `fast` compares sizes and
    headers; the workers verify the digests of what they load.
    """
    if wanted == "latest":
        return store.healthy_newest((*points, *unfit), fast=fast, known=known, each=each)
    if wanted not in (*points, *unfit):
        listed = ", ".join(points) or "none"
        raise RefusedError(
            f"resume.from={wanted}, but the points on this run's lineage are: {listed}; name one of these, "
            "or latest",
            code="point.unknown",
        )
    damages = [damage for damage in known if damage.point == wanted]
    if damages := damages or store.verify_point(wanted, fast=fast, each=each):
        listed = "; ".join(map(str, damages))
        raise WantedPointError(
            f"resume.from={wanted}: this resume point is damaged ({listed}); name another point, or latest",
            code="point.damaged",
        )
    return store.read_point(wanted), ()


def up_to(names: Iterable[str], point: Point | None) -> tuple[str, ...]:
    """Returns those of the points on one history that are at or before `point`.

    A history that continues `point` has these. A later point is an orphan from then on: it stays, but counts
    for nothing.
    """
    keys = {name: parse_point_name(name) for name in names}
    return tuple(name for name, key in keys.items() if point and key and key <= point.key)


def rewind_sentence(seen: Survey, config: JobConfig, point: Point | None) -> str:
    """Returns what `resume.from` means for this start, which continues `point`, as text for people.

    The text names what leaves the history, or that the rewind was already done. It is empty if there is
    nothing to report.
    """
    wanted = config.resume.from_
    if wanted == "latest" or is_folder(wanted) or point is None:
        return ""
    if wanted_point(seen, config) == "latest":
        return (
            f"resume.from={wanted}: the attempt before has done that, with the same configuration; so this "
            "one continues the newest point. It rewinds again if what is trained is to change"
        )
    steps = [record.step for record in seen.lineage.records if record.key > point.key]
    points = [name for name in seen.points if name not in up_to(seen.points, point)]
    return rewind_text(wanted, len(steps), (steps[0], steps[-1]) if steps else (0, 0), points)


def rewind_text(wanted: str, num_steps: int, labels: tuple[int, int], points: Sequence[str]) -> str:
    """Returns what leaves the history with a rewind, as text for people; empty if nothing does.

    `num_steps` steps leave it, with `labels` from the first to the last, and these points, oldest first.
    """
    if not num_steps and not points:
        return ""
    first, last = labels
    steps = f"step {last} after it" if num_steps == 1 else f"{num_steps} steps after it, {first} to {last}"
    left = [steps] if num_steps else []
    if points:
        several = f"{len(points)} resume points, {points[0]} to {points[-1]}"
        left.append(several if len(points) > 1 else f"resume point {points[0]}")
    return (
        f"warning: rewinds to {wanted}: {' and '.join(left)}, leave the run's history; the files stay where "
        "they are, but nothing is continued from there"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StartData:
    """What is known of the data that a start would read.

    `spec` are the job's data, as read according to `sources`. `identities` are those of run.json and of
    `spec`. `epochs` is the known length of epochs of the data that the point was made with.
    """

    identities: tuple[RunIdentity, RunIdentity] | None = None
    spec: DataSpec | None = None
    sources: SourceResolution | None = None
    epochs: KnownEpochs | None = None


def decide(
    store: RunStore,
    config: JobConfig,
    point: Point | None,
    start_data: StartData = StartData(),  # noqa: B008  frozen
    skip: SkipDecision = SkipDecision(),  # noqa: B008  frozen
    origin: Origin | None = None,
) -> ResumePlan:
    """Decides whether and how `config` continues `point`; see `planning.resume.resume_plan.plan_resume`.

    `origin`: the point is another run's, with which a fork begins.
    """
    from orchestrator.config.field_rules import field_rules
    from orchestrator.data.tokens.encoder import installed_encoders

    identities, data, here = start_data.identities, start_data.spec, start_data.sources
    epochs = start_data.epochs
    rules = {rule.path: rule.rule for rule in field_rules()}
    info, flat = (point_info(store, point, origin), point.config) if point else (None, None)
    at_the_point = info
    if info is not None and here is not None:
        info = replace(info, cursor=here.reading.cursor)
    if identities is not None and data is not None and data.tokenizer_folder is not None:
        identities = data.in_force(identities[0]), identities[1]
    known = KnownData(
        identities=identities,
        epochs=epochs,
        installed=installed_encoders(),
        weights=data.weights if data is not None else None,
        num_blocks={plan.source: plan.num_blocks for plan in data.plans} if data is not None else None,
        moved=_moved(store, config, point) if point is not None else {},
    )
    how = partial(plan_resume, config, rules, old_flat=flat)
    lists = here.changes(data) if here is not None and data is not None else ()
    restart = here.restart if here is not None else RestartDecision()
    began = {source.name: source.began for source in here.reading.sources} if here is not None else {}
    changes = DataChanges(skip=skip, lists=lists, restart=restart)
    of_lists = replace(known, began=began, epochs=None if lists else epochs)
    found = how(info, data=of_lists, changes=changes)
    if not (lists and found.action == "resume" and found.remaining_steps == 0):
        return found
    began = {source.name: source.began for source in here.before} if here is not None else {}
    changes = DataChanges(skip=skip, restart=undone(restart, lists))
    return how(at_the_point, data=replace(known, began=began), changes=changes)


def _moved(store: RunStore, config: JobConfig, point: Point) -> dict[str, str]:
    """Returns `moved` for `identity.refusals`: of `model.pretrained`, and of what adapters are beside."""
    old, new = model_of(in_todays_fields(point.config)), config.model
    found = {}
    if old.pretrained != new.pretrained:
        here = located(old, store), located(new, store)
        found["model.pretrained"] = why_other(store.storage, point.key.attempt, *here)
    if new.lora is not None and old.lora is not None and None not in (old.init_from, new.init_from):
        found["model.init_from"] = ""  # the workers compare the digest of the weights
    return found


class AttemptEvent(Protocol):
    """A line of the journal that is not a step."""

    @property
    def attempt(self) -> int:
        """Its attempt."""

    @property
    def kind(self) -> str:
        """A value of `EventKind`."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its kind."""


def find_known_epochs(
    store: RunStore, parents: Sequence[ClaimParent], events: Sequence[AttemptEvent], config: JobConfig
) -> KnownEpochs | None:
    """Returns the newest proof of the length of an epoch of the run's only source.

    Returns None if there is none, or if the job's epochs may have another length. A launch that is done has
    committed its last state (also if a rewind has set it aside), and its end record states whether that was
    the end of the data. `events` are the journal's, at least those of attempts and of points.
    """
    newest = max(parents, key=lambda parent: parent.attempt, default=None)
    # a fork's past is in another run
    if newest is None or any(parent.begins is not None for parent in parents):
        return None
    # another encoder, or another list of files, makes other tokens
    changed = len(newest.encoders) > 1 or any(len(source.spans) > 1 for source in newest.sources)
    if changed or len(newest.sources) > 1:
        return None
    flat = config.flat()
    if epochs_of({**flat, "data.num_epochs": flat["data.num_epochs"] or 1}) is None:
        return None
    begun = {e.attempt: e.fields for e in events if e.kind == EventKind.ATTEMPT}
    if any(fields["config"].get("resume.accept_changed") for fields in begun.values()):
        return None
    for number in sorted(begun, reverse=True):
        end = store.read_end(number)
        if end is None or (end.outcome, end.by) != ("done", THE_DATA):
            continue
        committed = [e for e in events if e.attempt == number and e.kind == EventKind.POINT_COMMITTED]
        if not committed:
            continue  # it trained nothing
        last = decode(Cursor, committed[-1].fields["cursor"])
        found = known_epochs(number, in_todays_fields(begun[number]["config"]), last)
        if found is not None:
            return found
    return None


def point_for_weights(uri: str, store: RunStore, point: str | None) -> tuple[str, tuple[Damage, ...]]:
    """Returns the named point, also one off the history. Without a name: the newest point on it that is
    healthy by sizes, and the reasons against newer ones.
    """
    if point is not None:
        names = store.point_names()
        if point not in names:
            raise RefusedError(
                f"{uri} has no resume point {point}; it has {', '.join(names) or 'none'}",
                code="point.unknown",
            )
        return point, ()
    found, damages = decided(
        store, lambda seen: choose_point(store, seen, "latest", fast=True), with_steps=False
    )
    if found is None:
        raise RefusedError(
            f"{uri} has no resume point yet; `orchestrator save` asks a running launch for one",
            code="run.no_point",
        )
    return found.name, damages
