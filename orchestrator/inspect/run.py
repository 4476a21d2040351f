"""A run as it lies in storage, for reading: its resume points, their health, and the proof of what it was
trained on. Needs no cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.node_local.node_storage import with_nodes
from orchestrator.checkpoint.points.pins import Hold
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import Survey, evaluations, survey
from orchestrator.errors import (
    DataIdentityError,
    OrchestratorError,
    RefusedError,
    StorageError,
)
from orchestrator.history.journal.journal_reader import documents_of
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import SAVE, STOP, STOP_NOW, VERIFY, Finding, FindingFiles, asker
from orchestrator.inspect import frames
from orchestrator.inspect.run_control import Reply, SentRequest, unheard
from orchestrator.inspect.status.integrity import NoVerifyProgress, Verifying, VerifyProgress, done_before
from orchestrator.inspect.status.lineage import Pruned, orphans_of, prune, release
from orchestrator.inspect.status.point_rows import names_of, point_rows, standing, verified_point
from orchestrator.inspect.status.snapshot import GONE
from orchestrator.inspect.status.status_reader import look_at, since_it_moved
from orchestrator.inspect.status.view import Quiet, RunView, not_watched
from orchestrator.records.steps import DocumentLoss, StepRecord
from orchestrator.storage.open import absolute, open_storage
from orchestrator.text import visible

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.config.schema import JobConfig
    from orchestrator.inspect.audit.audit_run import AuditProgress
    from orchestrator.inspect.run_control import PlannedStart
    from orchestrator.inspect.views.run_views import RunViews
    from orchestrator.launch.branch.fork import ForkPlan
    from orchestrator.launch.branch.rewind import RewindPlan
    from orchestrator.launch.replay.evaluate import Evaluated
    from orchestrator.launch.replay.replay import Replayed, StateAt

ALL = 1 << 62  # rows of a view
WATCH_S = 10.0  # how long a run without an end is watched for a sign of life (membership rule 12)


def open_run(run_uri: str | Path) -> Run:
    """The run at `run_uri` (`<storage>/<name>`). Raises `RefusedError` if there is none."""
    return Run(run_uri)


class Run:
    """Reads a run. Every method reads storage anew; a run that is being written may be read: what it shows
    stood there at one moment, but for points that the run itself deletes meanwhile, which are left out.
    """

    def __init__(self, run_uri: str | Path) -> None:
        self.uri = str(run_uri)
        self._store = RunStore(with_nodes(open_storage(self.uri)))
        self._require_run()

    def _require_run(self) -> None:
        if self._store.read_run() is None:
            from orchestrator.launch.start.run_preparation import find_run

            if find_run(self._store) is None:
                raise RefusedError(
                    f"{self.uri}: there is no run (no run.json); give <storage>/<name>, e.g. runs/quickstart",
                    code="run.unknown",
                )

    def list_points(
        self, *, verify: bool = False, progress: VerifyProgress | None = None
    ) -> list[dict[str, Any]]:
        """All committed points, oldest first, on the lineage or not, damaged ones too; the document of
        `points --json`. Compares documents and sizes: `healthy` is False for a point that they show to be
        damaged, or that is marked so, and None for all others. With `verify` it reads every byte, as `verify`
        does, which makes `healthy` True or False.
        """
        reading = Verifying(store=self._store, progress=progress or NoVerifyProgress()) if verify else None
        return standing(
            self._store, lambda seen: [row.to_json() for row in point_rows(self._store, seen, reading)]
        )

    def tree(self, rows: list[dict[str, Any]] | None = None) -> list[str]:
        """The run's lineage as lines: attempts, world sizes, points, rewinds, forks; see
        `inspect.status.lineage`. `rows`: those of `points`, which reads all of them, if you have them.
        """
        from orchestrator.coordinator.attempt.forking import forks_beside
        from orchestrator.inspect.status.lineage import attempt_facts, tree_lines

        rows = self.list_points() if rows is None else rows
        seen, store = survey(self._store, with_steps=False), self._store
        ends = {number: store.read_end(number) for number in store.claim_numbers()}
        forks = forks_beside(store, self._run_id())
        rows = [{**row, "forks": forks.pop(row["name"], [])} for row in rows]
        lines = tree_lines(self.uri, attempt_facts(seen, store.claims(), store.parents()[0], ends, rows))
        return lines + [f"├─ {name}, deleted since  fork: {', '.join(forks[name])}" for name in sorted(forks)]

    def verify(
        self, point: str | None = None, *, resume: bool = False, progress: VerifyProgress | None = None
    ) -> list[dict[str, Any]]:
        """Compares every digest of one point, or of all. Returns the document of `verify --json`.

        Reads several files at a time, and calls `progress` after each. Writes its findings into storage on
        the way (see `findings`), and marks damaged points (see `checkpoint.points.verify`), if this
        process may write there. With `resume`, points that an interrupted verification found whole are not
        read again. Raises `RefusedError` for an unknown name, and for one that the run deletes meanwhile.
        """
        reading = Verifying(store=self._store, progress=progress or NoVerifyProgress())
        if point is not None:
            return [verified_point(self._store, self.uri, point, reading)]
        reading.note, reading.before = self._note_part, done_before(self.findings()) if resume else ()
        return standing(self._store, lambda seen: reading.rows(names_of(self._store, seen)))

    def records(self) -> tuple[StepRecord, ...]:
        """The step records of the effective history, in order."""
        return survey(self._store).lineage.records

    def status(self, watch_s: float | None = None) -> RunView:
        """The run at a glance: whether it is alive, where it stands, what went wrong last, when it is done.

        A run without an end is watched until it gives a sign of life, at most `watch_s` seconds (default: 10;
        0: nobody watches, `alive` is None); no clocks of machines are compared for that. Reads the newest
        part of the journal only, so it takes no longer for a long run; see `inspect.status.tail`.
        """
        return self._view(WATCH_S if watch_s is None else watch_s, not_watched)

    def goodput(self) -> dict[str, Any]:
        """Where the run's time went, from its first line to its last: `wall_s`; `parts` of it in seconds
        (productive, data_wait, saving, evaluating, lost, rewound, reforming, starting, waiting, down, other),
        which sum to it; the same in `percent`; and by day (`days`, each with `day`, seconds since 1970 of its
        begin in UTC). `off_s` came after wanted stops and is not counted. See `inspect.views.goodput`.

        Raises `RefusedError` if the journal cannot be read.
        """
        from orchestrator.inspect.views.run_views import RunViews

        return RunViews(self._store).goodput()

    def pin(self, point: str, reason: str = "") -> Hold:
        """Keeps a resume point, whatever retention and `prune` would do, until `unpin`; also of a run that
        nobody works on. Returns the pin, or that which stood there before. Raises `RefusedError` if there is
        no such point, or the run is deleting it.
        """
        return self._store.pin(point, asker(), reason, self._run_id())

    def unpin(self, point: str) -> Hold:
        """Gives a pin back. Raises `RefusedError` if the point is not pinned."""
        if (pin := self._store.unpin(point)) is None:
            pinned = ", ".join(sorted(self._store.pins())) or "none"
            raise RefusedError(
                f"{self.uri}: resume point {point} is not pinned; pinned are: {pinned}",
                code="point.not_pinned",
            )
        return pin

    def without_pin(self, pin: Hold) -> str:
        """What it means for forks that this pin was given back; empty if nothing. See
        `coordinator.attempt.forking.without_its_pin`.
        """
        from orchestrator.coordinator.attempt.forking import without_its_pin

        return without_its_pin(self._store, pin)

    def left_of_replays(self, say: Callable[[str], None], remove: bool = False) -> None:
        """Says which folders killed replays left beside the run; `remove`: removes those that nobody is at
        work on any more. See `launch.branch.temporary_runs`.
        """
        from orchestrator.launch.branch.temporary_runs import left, remove_left

        if remove:
            remove_left(self._store, say)
            return
        for each in left(self._store):
            say(f"note: {each}")

    def prune(self, dry_run: bool = False) -> list[Pruned]:
        """Deletes the resume points that are off the history (orphans), and those that the retention of the
        newest attempt's configuration lets go, once that attempt has ended; none that is pinned. `dry_run`
        says which these are. See `inspect.status.lineage`.
        """
        seen = survey(self._store, with_steps=False)
        pruned = prune(self._store, orphans_of(self._store, seen), asker(), self._run_id(), dry_run)
        if not any(event.kind == EventKind.ATTEMPT for event in seen.journal.events):
            return pruned
        from orchestrator.inspect.audit.trained_data import attempt_configs

        keep = attempt_configs(self.uri, seen)[-1].resume
        return [*pruned, *release(self._store, seen, keep, asker(), self._run_id(), dry_run)]

    def rewind(
        self,
        to: str | None = None,
        *,
        step: int | str | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        agree: Callable[[RewindPlan], bool] = lambda plan: True,  # noqa: ARG005
        say: Callable[[str], None] = lambda text: None,
    ) -> RewindPlan:
        """Goes back to the point `to`, or to the newest whole one at or before a step (`250`, `"a2:250"`), a
        number of samples or of tokens: the next start continues from there. Nothing is deleted. `agree` hears
        the plan first, and may say no. See `launch.branch.rewind`.

        Raises `BusyError` while a launch works on the run, `RefusedError` for what the history does not have,
        `ResumePointError` for a point that is damaged.
        """
        from orchestrator.launch.branch.point_query import PointQuery
        from orchestrator.launch.branch.rewind import rewind

        wanted = PointQuery(point=to, step=step, samples=samples, tokens=tokens)
        return rewind(self._store, wanted, asker(), agree, say, self.uri)

    def fork(
        self,
        new_uri: str | Path,
        at: str | None = None,
        *,
        step: int | str | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        agree: Callable[[ForkPlan], bool] = lambda plan: True,  # noqa: ARG005
        say: Callable[[str], None] = lambda text: None,
    ) -> ForkPlan:
        """Makes a new run at `new_uri` that begins with the point `at` of this one (`latest`: the newest
        whole one), or with the newest whole one at or before a step, a number of samples or of tokens. The
        point is pinned here. `agree` hears the plan first, and may say no. See `launch.branch.fork`.

        Raises `RefusedError` if there is another run, and for what the history does not have,
        `ResumePointError` for a point that is damaged.
        """
        from orchestrator.launch.branch.fork import fork
        from orchestrator.launch.branch.point_query import PointQuery

        wanted = PointQuery(point=at, step=step, samples=samples, tokens=tokens)
        return fork(self._store, str(new_uri), wanted, asker(), agree, say, self.uri)

    def _run_id(self) -> str:
        run = self._store.read_run()
        return run.id if run is not None else ""

    def replay(
        self,
        step: int | str | None = None,
        *,
        tokens: int | None = None,
        to_point: str | Path | None = None,
        overrides: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> Replayed:
        """Trains up to a step (`250`, `"a2:250"`; or the last one within so many tokens) once more, and
        compares with what the run recorded. In this process; with `to_point` (a new run, which keeps the
        state as a resume point) and overrides like `cluster.num_workers=2` by a launch on Ray. The run is
        only read, but for the pin of a fork at `to_point`. See `launch.replay.replay`.
        """
        from orchestrator.launch.branch.point_query import PointQuery
        from orchestrator.launch.replay.replay import needs_a_launch, replay, replay_as_run

        wanted = PointQuery(step=step, tokens=tokens)
        if needs_a_launch(overrides) or to_point is not None:
            where = None if to_point is None else str(to_point)
            return replay_as_run(self._store, wanted, overrides, where, self.uri, say)
        return replay(self._store, wanted, self.uri, say, overrides)

    def evaluate(
        self,
        point: str = "latest",
        overrides: Sequence[str] = (),
        say: Callable[[str], None] = lambda text: None,
    ) -> list[Evaluated]:
        """Evaluates a resume point in this process, by default on the parts of its configuration; overrides
        of `eval.*` name others. See `launch.replay.evaluate`.
        """
        from orchestrator.launch.replay.evaluate import evaluate

        return evaluate(self._store, point, overrides, say)

    def at(self, step: int | str | None = None, *, tokens: int | None = None) -> StateAt:
        """The state after a step (`250`, `"a2:250"`) that the run has trained, saved or not: `model`,
        `optimizer_state`, `cursor`, and the `batch` of the next step. Trains in this process, from the newest
        point before it; needs no cluster.
        """
        from orchestrator.launch.branch.point_query import PointQuery
        from orchestrator.launch.replay.replay import state_at

        return state_at(self._store, PointQuery(step=step, tokens=tokens))

    def note_finding(self, what: str, result: dict[str, Any], seconds: float) -> Finding:
        """Leaves what `audit` or `verify` found in the run's storage, for others to see; the commands do so
        by themselves. `what` is audit or verify, `result` as `history.numbered_files` makes it. Raises
        `StorageError` where this process may not write there.
        """
        newest = max(self._store.claim_numbers(), default=0)
        return self._findings().add(what, newest, seconds, result)

    def findings(self) -> tuple[Finding, ...]:
        """What audits and verifications have left, oldest first."""
        return self._findings().all()

    def _findings(self) -> FindingFiles:
        return FindingFiles(self._store.storage, self._run_id())

    def export(
        self,
        out: str | Path,
        point: str | None = None,
        dtype: str | None = None,
        say: Callable[[str], None] = unheard,
        averaged: bool = False,
        merged: bool = False,
        overrides: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Writes a point's weights (default: the newest healthy one's; `averaged`: their averages; `merged`:
        adapters merged into the model) as a folder that transformers, or of adapters peft, opens; the
        document of `export --json`. `overrides`: where weights are that the point does not hold
        (`model.pretrained=NEW`). See `checkpoint.export.export.export_point`.
        """
        from orchestrator.checkpoint.export.export import export_point
        from orchestrator.coordinator.attempt.resume_point_choice import point_for_weights

        name, damages = point_for_weights(self.uri, self._store, point)
        exported = export_point(
            self._store, name, out, dtype, say=say, averaged=averaged, merged=merged, overrides=overrides
        )
        return {
            "run": self.uri,
            "point": name,
            "out": absolute(str(out)),
            "dtype": exported.dtype,
            "averaged": exported.averaged,
            "merged": exported.merged,
            "weights_digest": exported.weights_digest,
            "bytes": exported.num_bytes,
            "files": [entry.path for entry in exported.files],
            "damages": [asdict(damage) for damage in damages],
        }

    def save(self, wait: bool = True, tell: Callable[[str], None] = unheard) -> Reply:
        """Asks the launch that works on the run, wherever it is, for a resume point, and waits until it is
        committed. Training continues. `tell` is called for a save that is given up: the wait then lasts until
        one succeeds or the run ends.

        Raises `RefusedError` if none works on it.
        """
        return self._ask(SAVE, wait, tell)

    def stop(self, now: bool = False, wait: bool = True, tell: Callable[[str], None] = unheard) -> Reply:
        """Asks the launch that works on the run, wherever it is, to save and stop at the next step boundary;
        waits until it has; `tell` as for `save`. With `now` it does not save: what it has trained since its
        newest resume point is trained again when the run is started again.

        Raises `RefusedError` if none works on it.
        """
        return self._ask(STOP_NOW if now else STOP, wait, tell)

    def _ask(self, what: str, wait: bool, tell: Callable[[str], None]) -> Reply:
        asking = SentRequest(self._store, what)
        if wait:
            return asking.answer(lambda: self.status().state != GONE, tell)
        text = f"asked for, as request {asking.request.number}; the run's journal will say what became of it"
        return Reply(request=asking.request.number, what=what, outcome="open", text=text)

    def points(self, *, verify: bool = False) -> pd.DataFrame:
        """All committed points, oldest first, also damaged ones and orphans; `verify` as in `list_points`.
        Columns: `inspect.frames.POINTS`.
        """
        return frames.frame(frames.POINTS, frames.with_pins(self.list_points(verify=verify)))

    def steps(self) -> pd.DataFrame:
        """The steps of the effective history, in order. Columns: `inspect.frames.STEPS`, then one for each
        metric of the objective.
        """
        facts = self._views().facts
        return frames.steps_frame(facts.columns, facts.path)

    def evals(self) -> pd.DataFrame:
        """The evaluations of the effective history, in order: the newest of each part and step. Columns:
        `inspect.frames.EVALS`, then one for each metric of the objective.
        """
        return frames.evals_frame(evaluations(survey(self._store)))

    def attempts(self) -> pd.DataFrame:
        """The run's attempts, oldest first, coordinators that were restarted too. Columns:
        `inspect.frames.ATTEMPTS`.
        """
        rows = self._views().attempts(routine=True, limit=ALL)["rows"]
        return frames.frame(frames.ATTEMPTS, map(frames.attempt_row, reversed(rows)))

    def card(self, name: str = "") -> pd.DataFrame:
        """A card of the page, by name: a row for each of its lines, and its columns. Without a name: the
        cards there are, with their columns, the units of these and what they mean.

        Raises `RefusedError` if there is no such card, `CardError` if its function fails.
        """
        from orchestrator.inspect.views.cards import Card, all_cards, card_named

        if not name:
            rows = [
                {
                    "card": card.name,
                    "title": card.title,
                    "column": each.name,
                    "unit": each.unit,
                    "meaning": each.meaning,
                }
                for card in all_cards()
                if isinstance(card, Card)
                for each in card.columns
            ]
            return frames.frame(frames.CARDS, rows)
        return frames.card_frame(card_named(name).columns, self._views().card(name)["rows"])

    def events(self) -> pd.DataFrame:
        """What the journal tells besides steps, oldest first. Columns: `inspect.frames.EVENTS`."""
        rows = self._views().events(limit=ALL)["rows"]
        return frames.frame(frames.EVENTS, ({**row, "time": row["t"]} for row in reversed(rows)))

    def sources(self) -> pd.DataFrame:
        """What was consumed of each source. Columns: `inspect.frames.SOURCES`."""
        return frames.frame(frames.SOURCES, self._views().sources()["sources"])

    def plot(self, *metrics: str, x: str = "step") -> Any:
        """Curves of the history over `step`, `tokens` or `time`, a panel per metric (default: loss); a
        matplotlib figure. Needs the extra `notebook`. Metrics are the numbers of `steps`, and the values of
        evaluations as loggers name them, e.g. `eval_holdout_loss`.
        """
        steps, evals = self.steps(), None
        if any(metric not in steps.columns for metric in metrics):
            seen = survey(self._store)
            records = evaluations(seen)
            trained = [seen.lineage.first_name(record.key) for record in records]
            evals = frames.evals_at_steps(records, trained, steps)
        return frames.plot(steps, evals, metrics or ("loss",), x, self.uri)

    def _views(self) -> RunViews:
        from orchestrator.inspect.views.run_views import RunViews

        views = RunViews(self._store)
        views.refresh()
        return views

    def looks(self, every_s: float = 2.0) -> Iterator[RunView]:
        """`status` again and again, until nothing will change by itself any more. Counts for how long no step
        came, on this process's own clock: since it began to look, or since it saw the newest generation or
        step, whichever was last.
        """
        quiet_s = since_it_moved()
        while True:
            began = time.monotonic()
            yield (view := self._view(WATCH_S, quiet_s))
            if view.is_over:
                return
            time.sleep(max(0.0, every_s - (time.monotonic() - began)))

    def watch(self, every_s: float = 2.0) -> RunView:
        """Shows `status` live until nothing will change by itself any more, and returns the last one.

        In place in a notebook and on a terminal, a line per change elsewhere. Interrupted, it stops watching.
        """
        from orchestrator.inspect.frames import show

        try:
            return show(self.looks(every_s))
        except KeyboardInterrupt:
            self._interrupted()
            return self.status()

    def _interrupted(self) -> None:
        """The watcher stopped. The run continues."""

    def wait(self, timeout_s: float | None = None) -> RunView:
        """Waits until nothing will change by itself any more, at most `timeout_s` seconds; the run then."""
        began = time.monotonic()
        for view in self.looks():  # noqa: B007  the last one is wanted
            if timeout_s is not None and time.monotonic() - began > timeout_s:
                break
        return view

    def plan(self, overrides: Sequence[str] = ()) -> PlannedStart:
        """What the next start would do with the configuration of the newest attempt and these overrides.

        Starts nothing, writes nothing, and imports no code that the configuration names; `.execute()` of what
        it returns does it.
        """
        from orchestrator.config.loading import parse_config
        from orchestrator.inspect.run_control import PlannedStart
        from orchestrator.launch import api

        config = parse_config(self.config().to_json(), overrides)
        return PlannedStart(plan=api.plan_job(config, runs_code=False), config=config)

    def _repr_html_(self) -> str:
        from orchestrator.inspect.status.view import status_html

        return status_html(self._view(0.0, not_watched))

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The newest log file, piece by piece; with `follow` also what comes, until the run has ended. Raises
        `RefusedError` if there is none.
        """
        from orchestrator.inspect import logs

        return logs.follow(self._store) if follow else iter([logs.LogFollower(self._store.storage).read()])

    def __repr__(self) -> str:
        try:
            view = self._view(0.0, not_watched)
        except OrchestratorError as error:
            return f"Run({self.uri!r}: {error})"
        return visible(f"Run({self.uri!r}: {view.verdict}, newest point {view.newest_point or 'none'})")

    def config(self) -> JobConfig:
        """The configuration of the newest attempt."""
        from orchestrator.inspect.audit.trained_data import attempt_configs

        return attempt_configs(self.uri, survey(self._store))[-1]

    def audit(
        self,
        steps: str | int | None = None,
        processes: int | None = None,
        reference: bool = False,
        progress: AuditProgress | None = None,
    ) -> dict[str, Any]:
        """Recomputes the stream from the files and compares every step of the effective history, or `steps`
        (`A:B`, both included, or one), with the journal; the document of `audit --json`. See
        `inspect.audit.audit.audit_history`.

        By so many `processes` (None: as many as there are cores, and the steps are worth: one for 67 M
        tokens); what is found does not depend on it. With `reference` each document is also encoded by
        `tokenizers`; `progress` hears how far it is. Raises `AuditProcessError` if one of the processes ends
        early: then nothing was shown.

        The files are looked for where the newest attempt's configuration names them, and where they lay when
        the run was started. Raises `RefusedError` for steps that the history does not have,
        `DataIdentityError` if files have changed since (also where `resume.accept_changed` let the run go on
        with them), or this machine lacks an encoder: then nothing can be said.
        """
        from orchestrator.inspect.audit.audit import audit
        from orchestrator.inspect.audit.audit_run import HowToAudit, NoAuditProgress

        if processes is not None and processes < 1:
            raise RefusedError(
                f"an audit needs at least 1 process; given {processes}", code="command.too_few_processes"
            )
        how = HowToAudit(processes=processes, by_reference=reference, progress=progress or NoAuditProgress())
        return audit(self._store, self.uri, None if steps is None else str(steps), how)

    def list_samples(self, step: str | int, text: bool = False, by_loss: bool = False) -> dict[str, Any]:
        """Which documents a step of the history was trained on, sample by sample; `step` is named as
        everywhere (`250`, `a2:250`). With `text`, their tokens decoded by the run's own tokenizer. With
        `by_loss`, those with the highest mean loss again at `by_loss` (`monitor.document_losses`). The
        document of `samples --json`; see `inspect.step_documents.step_documents`.

        Reads the files from the nearest cursor in the journal on. Raises as `audit` does, and `RefusedError`
        if the journal has no losses of the step's documents.
        """
        from orchestrator.data.code_process import call, needs_code
        from orchestrator.inspect.audit.trained_data import trained_data
        from orchestrator.inspect.step_documents import step_documents

        seen = survey(self._store)
        worst = self._worst_documents(seen, str(step)) if by_loss else None
        spec = trained_data(self._store, self.uri, seen)
        return call(needs_code(spec), step_documents, spec, seen, str(step), text, worst)

    def _worst_documents(self, seen: Survey, step: str) -> tuple[DocumentLoss, ...]:
        from orchestrator.inspect.step_documents import only_step

        key = seen.lineage.records[only_step(seen, step)].key
        found = documents_of(self._store.storage, key)
        if not found:
            raise RefusedError(
                f"the journal has no losses of the documents of step {step}, because it was trained without "
                "monitor.document_losses; set it for later steps, e.g. monitor.document_losses=10",
                code="samples.no_losses",
            )
        return found

    def samples(self, step: str | int, text: bool = False) -> pd.DataFrame:
        """The same as a row for each document of each sample. Columns: `inspect.frames.SAMPLES`. Raises
        `DataIdentityError` if these are not the samples that the journal says were trained.
        """
        from orchestrator.inspect.step_documents import sample_rows

        found = self.list_samples(step, text)
        if not found["matches"]:
            raise DataIdentityError(
                f"step {found['step']}: {found['difference']}; list_samples shows what the files contain "
                "there",
                code="audit.other_samples",
            )
        return frames.frame(frames.SAMPLES, sample_rows(found))

    def _view(self, watch_s: float, quiet_s: Quiet) -> RunView:
        return look_at(self._store, self.uri, watch_s, quiet_s)

    def _note_part(self, result: dict[str, Any]) -> None:
        with suppress(StorageError):  # who may not write there reads nevertheless, and resumes nothing
            self.note_finding(VERIFY, result, 0.0)
