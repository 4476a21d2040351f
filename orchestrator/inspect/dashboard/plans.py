"""The planner: `orchestrator plan` for the newest attempt's configuration with changes.

The changes are another number of workers, batch or length, or another resume point. It also shows how a step
would be distributed to the workers. `planning.resume.resume_plan` makes the plan. The run's data come from
the views, so that a long journal is not read again.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.field_rules import in_todays_fields, nested
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.coordinator.attempt.forking import point_info
from orchestrator.coordinator.attempt.resume_point_choice import (
    StartData,
    choose_among,
    decide,
    find_known_epochs,
    rewind_text,
    up_to,
)
from orchestrator.coordinator.attempt.source_resolution import SourceResolution, skip_here, sources_here
from orchestrator.data.code_process import reads_without_code
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError, OrchestratorError, RefusedError
from orchestrator.history.journal.journal_reader import beginning_of
from orchestrator.history.journal.line_format import EventKind
from orchestrator.inspect.dashboard.runs import OpenRun
from orchestrator.inspect.views.run_views import RunViews
from orchestrator.json_form import encode
from orchestrator.launch.capacity.placement_check import noted_machines, with_known_shape
from orchestrator.launch.start.preview import feed_memory, said_of_files, with_memory
from orchestrator.launch.start.run_preparation import read_frozen_data
from orchestrator.planning.batches import idle_share, micro_batches_per_rank, num_micro_batches, rank_run
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.records.points import Damage
from orchestrator.records.steps import sample_len_of

SHOWN_WORKERS = 64
_DATA_S = 30.0  # files are not read again within this time
FIELDS = {
    "num_workers": "cluster.num_workers",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "seq_len": "pack.seq_len",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The question: a point's name (None: the newest whole one), and new values as they are typed."""

    point: str | None
    values: Mapping[str, str]  # of FIELDS, without unchanged ones

    @property
    def overrides(self) -> list[str]:
        """The values in the form of the command line."""
        return [f"{FIELDS[name]}={text}" for name, text in self.values.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Data:
    """The current data: identities (the run's, theirs), notes, the refusal, and the data themselves if this
    machine can see them.
    """

    identities: tuple[RunIdentity, RunIdentity] | None
    notes: tuple[str, ...]
    refused: OrchestratorError | None = None
    spec: DataSpec | None = None


class Planner:
    """Plans for one run. Safe to use from threads."""

    def __init__(self, run: OpenRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock, self._lock = run, clock, threading.Lock()
        self._configs: dict[int, dict[str, Any] | None] = {}  # by attempt: its flat configuration
        self._data: dict[str, tuple[float, _Data]] = {}

    def document(self, asked: WhatIf) -> dict[str, Any]:
        """The document of `plan --json`, with `layout`, `tokens_per_step`, `estimate` and `command`.

        Raises `ConfigError` for values that the command line refuses to read, `RefusedError` for an unknown
        point or a run that has not begun.
        """
        with self._lock, self._run.readable() as views:
            flat = self._newest_config()
            wanted = asked.point or "latest"
            job = parse_config(nested(in_todays_fields(flat)), [*asked.overrides, f"resume.from={wanted}"])
            point, damages, refused = self._choose(views, wanted)
            facts, key, store = views.facts, point.key if point is not None else None, self._run.store
            parents = tuple(facts.files.parents.values())
            skip = skip_here(job, key, parents, facts.path.lineage)
            info = point_info(store, point) if point is not None else None
            here = sources_here(job, store.storage, info, parents, facts.path.lineage)
            data = self._look_at_data(job, here)
            events = facts.events(EventKind.ATTEMPT, EventKind.POINT_COMMITTED)
            epochs = find_known_epochs(store, parents, events, job)
            start_data = StartData(
                identities=data.identities, spec=data.spec, sources=here, epochs=epochs
            )
            found = decide(store, job, point, start_data, skip)
            found = _completed(store, job, found, data, damages, refused, point)
            if data.spec is not None:
                # not this machine's memory: the dashboard may run where no worker does
                known = noted_machines(store)
                found = with_memory(with_known_shape(job, known.before), known, found)
            if point is not None and asked.point:
                found = replace(found, rewind=_rewinds(views, wanted, point))
            return {**found.to_json(), **_of_the_page(views, job, flat, asked, found, point)}

    def _newest_config(self) -> dict[str, Any]:
        """The configuration of the newest attempt that has begun."""
        for number in reversed(self._run.store.claim_numbers()):
            if self._configs.get(number) is None:
                self._configs[number] = (beginning_of(self._run.store.storage, number) or {}).get("config")
            if found := self._configs[number]:
                return found
        raise RefusedError(
            f"{self._run.uri}: no attempt of this run has begun yet, so it cannot be planned",
            code="run.not_begun",
        )

    def _choose(
        self, views: RunViews, wanted: str
    ) -> tuple[Point | None, tuple[Damage, ...], OrchestratorError | None]:
        """The point, the damages of newer ones, and the reason if the named one cannot be used."""
        store, names = self._run.store, _on_history(views)
        try:
            point, damages = choose_among(store, names, (), wanted, fast=True)
        except OrchestratorError as error:
            if wanted == "latest" or wanted not in store.point_names():
                raise
            return _readable(store, wanted), (), error
        return point, damages, None

    def _look_at_data(self, job: JobConfig, here: SourceResolution) -> _Data:
        pack = "" if job.pack.mode == "concat" else job.to_json()["pack"]
        epochs = [here.reading.epoch(source.name) for source in job.data.sources]
        lists = [encode(here.reading.sources), epochs]
        key = json.dumps([job.to_json()["data"], job.resume.accept_changed, pack, lists])
        known = self._data.get(key)
        if known is None or self._clock() - known[0] > _DATA_S:
            known = self._data[key] = (self._clock(), self._data_now(job, here))
        return known[1]

    def _data_now(self, job: JobConfig, here: SourceResolution) -> _Data:
        run = self._run.store.read_run()
        if run is None:
            return _Data(identities=None, notes=())
        same = (run.identity, run.identity)
        if not reads_without_code(job, self._run.store.storage):
            why = "this page runs no code that a run names, and asks no hub; `orchestrator plan CONFIG` does"
            return _Data(identities=same, notes=(f"the data are not looked at: {why}",))
        try:
            spec = read_frozen_data(job, here.storage, here.reading)
        except DataIdentityError as error:
            return _Data(identities=None, notes=(), refused=error)
        except OrchestratorError as error:  # they are elsewhere: this machine need not see them
            note = f"the data are not looked at from here, where the dashboard runs: {error}"
            return _Data(identities=same, notes=(note,))
        identities = (run.identity, spec.identity())
        return _Data(identities=identities, notes=spec.notes, spec=spec)


def layout(job: JobConfig) -> list[dict[str, Any]]:
    """The distribution of a step's micro-batches to the workers, with the fewest and the most of them."""
    cluster, train = job.cluster, job.train
    num_micro = num_micro_batches(train.global_batch_size, train.micro_batch_size)
    return [
        {
            "world_size": world,
            "num_micro": num_micro,
            "per_worker": [
                len(rank_run(num_micro, rank, world)) for rank in range(min(world, SHOWN_WORKERS))
            ],
            "rounds": micro_batches_per_rank(num_micro, world),
            "idle": idle_share(num_micro, world),
        }
        for world in sorted({cluster.start_workers, cluster.max_workers})
    ]


def _on_history(views: RunViews) -> list[str]:
    """The points on the history, oldest first, including damaged ones."""
    names: list[str] = []
    while True:
        page = views.points(state="all", sort="step", q="", offset=len(names), limit=500)
        names += [row["name"] if not row.get("orphan_why") else "" for row in page["rows"]]
        if not page["rows"] or len(names) >= page["total"]:
            return [name for name in names if name]


def _readable(store: RunStore, name: str) -> Point | None:
    """A point that cannot be resumed, for the plan that would otherwise apply."""
    try:
        return store.read_point(name)
    except OrchestratorError:
        return None


def _completed(
    store: RunStore,
    job: JobConfig,
    found: ResumePlan,
    data: _Data,
    damages: Sequence[Damage],
    refused: OrchestratorError | None,
    point: Point | None,
) -> ResumePlan:
    """The plan with the additions of `orchestrator.launch.api.plan`."""
    notes = [f"warning: {damage}; falling back to an older resume point" for damage in damages]
    if point is not None and refused is None:
        notes.append(said_of_files(store, point))
    for error in filter(None, (refused, data.refused)):
        found = found.refused([str(error)], error.code)
    memory = () if data.spec is None else (feed_memory(job, data.spec),)
    return replace(found, notes=(*found.notes, *notes, *data.notes, *memory))


def _rewinds(views: RunViews, wanted: str, point: Point) -> str:
    """What would leave the history; see `coordinator.attempt.resume_point_choice.rewind_sentence`."""
    aside = views.point(wanted)["aside"]
    names = _on_history(views)
    kept = {*up_to(names, point)}
    after = [name for name in names if name not in kept]
    steps = aside["steps"] if aside else 0
    return rewind_text(wanted, steps, _labels_after(views, point) if steps else (0, 0), after)


def _labels_after(views: RunViews, point: Point) -> tuple[int, int]:
    """The labels of the first and the last step of the history after a point."""
    table = views.timeline(px=None)["segments"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    rows = [row for row in rows if row["fate"] == 0]
    key = point.key
    here = [row for row in rows if (row["attempt"], row["generation"]) >= (key.attempt, key.generation)]
    own = (key.attempt, key.generation)
    if here and (here[0]["attempt"], here[0]["generation"]) == own and here[0]["s1"] > key.step:
        return key.step + 1, rows[-1]["s1"]
    later = [row for row in here if (row["attempt"], row["generation"]) > own]
    return (later[0]["s0"] if later else key.step) + 1, rows[-1]["s1"]


def _of_the_page(
    views: RunViews,
    job: JobConfig,
    flat: Mapping[str, Any],
    asked: WhatIf,
    found: ResumePlan,
    point: Point | None,
) -> dict[str, Any]:
    """What the page shows beside the plan."""
    summary = views.summary(full=True)
    new = job.train.global_batch_size * job.sample_len
    old = point.config["train.global_batch_size"] * sample_len_of(point.config) if point else new
    return {
        "layout": layout(job),
        "tokens_per_step": [old, new],
        "estimate": _estimate(views, summary, job.cluster.start_workers, new, found.remaining_steps),
        "command": _command(views, asked, job, flat),
    }


def _estimate(
    views: RunViews, summary: Mapping[str, Any], workers: int, tokens: int, steps: int | None
) -> dict[str, float | None]:
    """Seconds of a step and of all remaining ones, if each worker is as fast as in the last steps."""
    rate = (summary.get("speed") or {}).get("tokens_per_s")
    table = views.timeline(px=None)["segments"]
    world = table["rows"][-1][table["columns"].index("world")] if table["rows"] else None
    if not rate or not world or not workers:
        return {"step_s": None, "remaining_s": None}
    step_s = tokens / (rate / world * workers)
    return {"step_s": step_s, "remaining_s": None if steps is None else step_s * steps}


def _command(views: RunViews, asked: WhatIf, job: JobConfig, flat: Mapping[str, Any]) -> str:
    """The command that does it: the one that began the newest attempt, with the changes to that attempt's
    configuration.

    If no command was recorded, CONFIG stands for the configuration file, which may be another run's.
    """
    facts = views.facts
    commanded, now = facts.commanded(), job.flat()
    if commanded is None:
        words, base = ["orchestrator", "train", "CONFIG", f"run.name={facts.name}"], flat
    else:
        words, base = shlex.split(commanded[1]), in_todays_fields(facts.config(commanded[0]))
    changed = {key: value for key, value in now.items() if key != "resume.from" and value != base.get(key)}
    kept = [word for word in words if word.partition("=")[0] not in {*changed, "resume.from"}]
    new = [f"{key}={json.dumps(value)}" for key, value in changed.items()]
    new += [f"resume.from={asked.point}"] if asked.point else []
    return shlex.join([*kept, *new])
