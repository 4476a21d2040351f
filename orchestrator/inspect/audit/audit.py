"""Proves what a run was trained on: recomputes its stream from the files and compares it with its journal.

It uses the files and the result of `coordinator.attempt.survey.survey`. It also decides again about each step
that a policy about losses has skipped (`planning.loss_policy`), from the records before it and the
configuration of its attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.coordinator.attempt.survey import Survey, survey
from orchestrator.data.code_process import needs_code
from orchestrator.data.sources.lists.listing import same_files
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.history.claims.lineage import SkipAt, skips_of
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.step_names import find_steps, step_name
from orchestrator.inspect.audit.audit_run import NOTHING_COMPARED, AuditRun, HowToAudit, StepsCompared
from orchestrator.inspect.audit.history_parts import History, history_of
from orchestrator.inspect.audit.reference.reference_encoding import reference_choice
from orchestrator.inspect.audit.reference.reference_mixture import begins_anew
from orchestrator.inspect.audit.trained_data import named, trained_data
from orchestrator.planning.loss_policy import SKIP_STEP, LossPolicies, judge
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.steps import NONFINITE, LossHistory, StateKey, StepRecord

_FORKED = "the steps up to {0:,}: they are the history of {1}, of which this run is a fork; audit them there"
_SKIPPED = (
    "that every token was trained: {0.samples:,} samples ({0.tokens:,} tokens) from sample {1:,} on were "
    "skipped on purpose after {2} by attempt {3} ({0.request}); epochs and documents count them as read"
)
_HOW = HowToAudit()
_NAMED = 3  # damaged places of the journal that an audit names


def audit(store: RunStore, uri: str, steps: str | None, how: HowToAudit) -> dict[str, Any]:
    """The document of `audit --json` for the run at `uri`; see `audit_history`.

    Raises as that and `trained_data`.
    """
    # before the journal is read: a point committed in between may have records that were not read
    there, foreign = store.names_and_foreign()
    points = [name for name in there if name not in foreign]
    seen = survey(store)
    spec = trained_data(store, uri, seen)
    how = replace(how, apart=needs_code(spec))
    report = audit_history(spec, seen, steps, points, how)
    return {**report, "attempts": len(store.claim_numbers())}


def audit_history(
    spec: DataSpec,
    seen: Survey,
    steps: str | None = None,
    committed: Iterable[str] = (),
    how: HowToAudit = _HOW,
) -> dict[str, Any]:
    """The document of `audit --json`, without the number of attempts.

    It shows that each step trained exactly the samples that the plan gives it, each once, in order: their
    digests are recomputed by a packer of the audit's own (`inspect.audit.reference.reference_packing`). And
    it shows that the tokens of these samples are, for every epoch that was read from its first to its last
    document, those in the files, read in their own order (data rules 26 and 27).

    `steps` (`A:B`) limits the audit to these; it is read from the nearest cursor in the journal on. Audits of
    adjacent steps join, because a cursor that is passed is compared. `not_shown` lists what this audit leaves
    open. `exactly_once` is None if there is nothing to compare, or if lines of the journal that are needed
    are lost: then `first_difference` says which, and nothing is shown of these steps. `all_final`: no step
    that was audited may still be replaced. `repeated_files` are those of which the run's frozen list has more
    than one path (older versions made such lists): each token of the stream was trained once, their documents
    were not.

    `skipped_documents` counts, by source, the bad documents that the audited steps passed; None if there is a
    difference, or nothing to compare. `left_out_documents` counts those that transforms dropped (`filtered`)
    and the records that are held out (`held_out`). `skipped_samples` are those that an attempt was configured
    to leave out before one of the audited steps (`resume.data: skip`). They are drawn as the claim says, end
    where it says, and are compared with no record. They belong to the proven content of an epoch; `not_shown`
    reports that they were not trained. Steps that `train.on_nonfinite` or `train.on_spike` skipped are
    among them, without a point. The decisions of these policies about each step are made again.

    Raises `DataIdentityError` for a step that differs in an attempt that was configured to continue with
    changed files (data rule 27), and before it reads anything for files of a list that are gone or changed
    (`require_lists`).

    `committed` are the names of the run's committed points, listed before `seen` was read: no point is
    committed before the records up to its step are durable, so these must be there.

    `how` sets the number of processes, and changes nothing in the result. With `how.by_reference` each
    document of the walked steps is encoded by `tokenizers`, too, and `reference` has the differences in ids
    (None without it).
    """
    if how.by_reference:
        reference_choice(spec)
    asked = _asked(seen, steps, committed)
    wanted = asked.wanted
    found, first, not_shown = _compared(spec, seen, asked, how)
    repeated, texts = _repeated(spec)
    if wanted:
        not_shown += texts + _history_before(seen)
    if not asked.lost:
        beside = "no step that was audited lacks its line"
        not_shown += [f"{damage} ({beside})" for damage in seen.damages[:_NAMED]]
    return {
        "exactly_once": None if asked.lost or not (wanted or first) else first is None,
        **_amounts(seen, wanted, asked.points),
        "first_difference": first,
        "not_shown": not_shown,
        "repeated_files": repeated,
        "skipped_documents": found.skipped_documents() if wanted and first is None else None,
        "left_out_documents": found.left_out_documents() if wanted and first is None else None,
        "skipped_samples": [
            *(_skip_row(at) for at in found.passed),
            *(skipped_steps(seen, wanted) if wanted and first is None else ()),
        ],
        "reference": found.reference(spec, seen) if how.by_reference and first is None else None,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """The requested steps with records, and which lines of the journal about them are lost (None: none is).

    `missing`: of the steps after the last record.
    """

    wanted: range
    points: list[StateKey]
    gap: dict[str, Any] | None
    missing: dict[str, Any] | None

    @property
    def lost(self) -> bool:
        """Whether the journal lacks lines about these steps."""
        return self.gap is not None or self.missing is not None


def _asked(seen: Survey, steps: str | None, committed: Iterable[str]) -> _Asked:
    records = seen.lineage.records
    points = [key for key in map(parse_point_name, committed) if key is not None]
    missing, reason = _missing_records(seen, points)
    all_steps: list[StepRecord | StateKey] = [*records, *missing]
    asked = range(len(all_steps)) if steps is None else find_steps(all_steps, steps)
    wanted = range(min(asked.start, len(records)), min(asked.stop, len(records)))
    gap = _gap(seen, wanted, asked.stop + (steps is None))
    return _Asked(
        wanted=wanted,
        points=points,
        gap={"step": None, "reason": gap} if gap else None,
        missing={"step": None, "reason": reason} if asked.stop > len(records) else None,
    )


def _gap(seen: Survey, wanted: range, stop: int) -> str:
    """Why nothing can be shown of these steps: a line about them is lost. Empty if none is.

    `stop`: holes of the history from `wanted.start` to before this index concern them.
    """
    if any(wanted.start <= hole < stop for hole in seen.lineage.holes):
        return _named_damages(seen, seen.lineage.gaps[0])
    trained = {record.attempt for record in seen.lineage.records[wanted.start : wanted.stop]}
    begun = {event.attempt for event in seen.journal.events if event.kind == EventKind.ATTEMPT}
    if lacking := sorted(trained - begun):
        return _named_damages(
            seen, f"the journal does not say with which configuration attempt {lacking[0]} trained"
        )
    return ""


def _named_damages(seen: Survey, reason: str) -> str:
    places = "; ".join(map(str, seen.damages[:_NAMED]))
    more = f"; and {len(seen.damages) - _NAMED} more places" if len(seen.damages) > _NAMED else ""
    return f"{reason} ({places}{more})" if places else reason


def _compared(
    spec: DataSpec, seen: Survey, asked: _Asked, how: HowToAudit
) -> tuple[StepsCompared, dict[str, Any] | None, list[str]]:
    """The results for the steps, the first difference, and what is not shown. Nothing is read after a
    difference.
    """
    wanted, found, first, not_shown = asked.wanted, NOTHING_COMPARED, asked.gap, list[str]()
    if first is not None:
        return found, first, not_shown
    history = history_of(spec, seen)
    require_lists(spec, history, wanted)
    with AuditRun(spec, history, wanted, how) as run:
        if wanted:
            found = run.compare_steps()
            first = named(seen, found.difference) if found.difference is not None else None
        first = first or asked.missing
        if first is None and wanted:
            reason, not_shown = run.compare_epochs(found)
            first = None if reason is None else {"step": None, "reason": reason}
    if first is None:
        first = wrong_decision(seen, wanted)
    if first is None:
        not_shown += [*_left_out(wanted, found.passed), *skipped_notes(seen, wanted)]
    return found, first, not_shown


def _amounts(seen: Survey, wanted: range, points: Iterable[StateKey]) -> dict[str, Any]:
    """The amounts of the audited steps, and up to where they are final."""
    records, origin = seen.lineage.records, seen.fork.origin if seen.fork is not None else None
    before = records[wanted.start - 1] if wanted and wanted.start else origin and origin.cursor
    last = records[wanted.stop - 1] if wanted else None
    final = [key for key in sorted(points) if seen.lineage.on_lineage(key)]
    return {
        "samples": (last.consumed_samples if last else 0) - (before.consumed_samples if before else 0),
        "tokens": (last.consumed_tokens if last else 0) - (before.consumed_tokens if before else 0),
        "steps": len(wanted),
        "first_step": step_name(records, wanted.start) if wanted else None,
        "last_step": step_name(records, wanted.stop - 1) if wanted else None,
        "final_up_to_step": final[-1].step if final else None,
        "all_final": bool(last and final and last.key <= final[-1]),
    }


def _left_out(wanted: range, passed: Iterable[SkipAt]) -> list[str]:
    nothing = [] if wanted else ["anything: nothing is trained yet, so there is nothing to compare"]
    return nothing + [
        _SKIPPED.format(at.skip, at.skip.begin.drawn_samples, at.parent.point_name, at.attempt)
        for at in passed
    ]


def _history_before(seen: Survey) -> list[str]:
    origin = seen.fork.origin if seen.fork is not None else None
    return [] if origin is None else [_FORKED.format(origin.step, origin.forked_from.run)]


def _skip_row(at: SkipAt) -> dict[str, Any]:
    return {
        "attempt": at.attempt,
        "point": at.parent.point_name,
        "setting": str(at.skip.request),
        "first_index": at.skip.begin.drawn_samples,
        "samples": at.skip.samples,
        "tokens": at.skip.tokens,
    }


def _repeated(spec: DataSpec) -> tuple[int, list[str]]:
    """The number of files that are in the sources' frozen lists more than once, and a note about them."""
    found = [_repeated_files(plan.manifest) for plan in spec.plans]
    return sum(num for num, _ in found), [text for num, text in found if num]


def _repeated_files(manifest: Manifest) -> tuple[int, str]:
    """The number of files with more than one path in the frozen list, and a note about them."""
    others = same_files(manifest.base, [row.path for row in manifest.files])
    if not others:
        return 0, ""
    name = min(others)
    return len(set(others.values())), (
        f"that each document was trained once: {len(others)} paths of source {manifest.source} lead to files "
        f"that the run has under another path, too, e.g. {name} and {others[name]}; its stream holds their "
        "documents once for each path, and it is the tokens of this stream that are shown"
    )


def _missing_records(seen: Survey, points: Iterable[StateKey]) -> tuple[list[StateKey], str]:
    """The steps after the last record that must have been trained, and a note about them.

    A point after them is committed. Gaps before the last record are found by the lineage.
    """
    newest = max((key for key in points if _is_behind(seen, key)), default=None)
    if newest is None:
        return [], ""
    advice = (
        f"a point is committed only behind the records up to its step, so a part of journal/"
        f"a{newest.attempt:04d} is lost, and what was trained there cannot be compared; restore it"
    )
    head = seen.lineage.segments[-1] if seen.lineage.segments else None
    if head is None or head.start.id != (newest.attempt, newest.generation):
        return [newest], (
            f"{newest.point_name} was committed at step {newest.step}, but the journal does not know "
            f"generation {newest.generation} of attempt {newest.attempt}: {advice}"
        )
    missing = [replace(newest, step=step) for step in range(head.stop_step, newest.step + 1)]
    return missing, (
        f"{newest.point_name} was committed at step {newest.step}, but the journal's last record before it "
        f"is that of step {head.stop_step - 1}: the records of {len(missing)} "
        f"step{'' if len(missing) == 1 else 's'} are missing; {advice}"
    )


def _is_behind(seen: Survey, point: StateKey) -> bool:
    """Whether the point is on the history and after its last record.

    Also true for a point of the newest attempt whose generation is not in the journal.
    """
    head = seen.lineage.segments[-1] if seen.lineage.segments else None
    if head is not None and head.open and head.start.id == (point.attempt, point.generation):
        return point.step >= head.stop_step
    known = {start.id for start in seen.journal.generations}
    return point.attempt == seen.lineage.attempt and (point.attempt, point.generation) not in known


# ---------------------------------------------------------------------------------------- files that are gone
@dataclass(frozen=True, kw_only=True, slots=True)
class _StepSpan:
    """Steps between two cursors of the journal; `lacking`: each (source, epoch) that they need and whose list
    lacks files.
    """

    steps: range
    lacking: tuple[tuple[str, int], ...]


def require_lists(spec: DataSpec, history: History, wanted: range) -> None:
    """Raises `DataIdentityError` if steps of `wanted` were read by a list whose files are changed or gone,
    with the steps that could be audited.

    `data.dataset` reports the lists, and the journal's cursors show which epochs were read. What was read
    after the last cursor shows later.
    """
    if not spec.lacking or not wanted:
        return
    stretches = [each for each in _stretches(spec, history) if _common(each.steps, wanted)]
    lacking = dict.fromkeys(place for each in stretches for place in each.lacking)
    if not lacking:
        return
    source, epoch = next(iter(lacking))
    texts = dict.fromkeys(
        spec.lacking[name][spec.lists_of(name).version(at)]
        for name, at in lacking
        if spec.lists_of(name).version(at) in spec.lacking[name]
    )
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    could = [_steps_text(history, steps, wanted) for steps in _without(stretches, wanted)]
    raise DataIdentityError(
        f"nothing was compared: files of epoch {epoch} of source {source}{more}, on which these steps were "
        "trained, have changed or are gone:\n"
        + "\n".join(texts)
        + "\n"
        + (
            f"steps that do not need them: {', '.join(f'--steps {text}' for text in could)}"
            if could
            else "each of these steps needs them"
        ),
        code="data.changed_files",
    )


def _stretches(spec: DataSpec, history: History) -> Iterator[_StepSpan]:
    borders = sorted({0, *history.known, len(history.records)})
    for first, stop in pairwise(borders):
        begin = history.known.get(first, Cursor())
        needed = _needed(history, first, begin, history.known.get(stop, begin))
        yield _StepSpan(steps=range(first, stop), lacking=tuple(p for p in needed if _lacks(spec, *p)))


def _lacks(spec: DataSpec, source: str, epoch: int) -> bool:
    return spec.lists_of(source).version(epoch) in spec.lacking.get(source, ())


def _needed(history: History, first: int, begin: Cursor, end: Cursor) -> Iterator[tuple[str, int]]:
    """Each (source, epoch) that the steps from `first` on, up to the next cursor, have trained."""
    lists = history.lists[history.records[first].attempt]
    for source in lists.sources:
        at, to = (cursor.sources.get(source.name, SourceCursor()) for cursor in (begin, end))
        if not source.active or (at == to and begin != end):
            continue  # nothing of it was trained
        anew = begins_anew(source, at) if at != SourceCursor() else None
        opened = at.epoch if anew is None else anew
        yield from ((source.name, epoch) for epoch in range(opened, max(opened, to.epoch) + 1))


def _without(stretches: list[_StepSpan], wanted: range) -> Iterator[range]:
    """The longest stretches of the wanted steps whose files all exist."""
    for lacks, some in groupby(stretches, key=lambda each: bool(each.lacking)):
        listed = list(some)
        if not lacks:
            yield _common(range(listed[0].steps.start, listed[-1].steps.stop), wanted)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _steps_text(history: History, steps: range, wanted: range) -> str:
    """The steps in the form of `--steps`."""
    to_end = steps.stop == len(history.records) == wanted.stop
    last = "" if to_end else step_name(history.records, steps.stop - 1)
    return f"{step_name(history.records, steps.start)}:{last}"


# ---------------------------------------------------------------------------------------------- skipped steps
_NAMED_SKIPS = 5


def wrong_decision(seen: Survey, wanted: range) -> dict[str, Any] | None:
    """Returns the first of the steps that should have been skipped and was not, or the other way round.

    The form is that of `first_difference` of an audit. Steps behind a hole of the journal are not checked,
    because the losses before them are not known.
    """
    records = seen.lineage.records[: min(wanted.stop, *seen.lineage.holes, len(seen.lineage.records))]
    policies = _policies(seen)
    most = max((each.window for each in policies.values()), default=0)
    history = LossHistory()
    for index, record in enumerate(records):
        if index in wanted and record.attempt in policies:
            expected = _expected(policies[record.attempt], history, record)
            if expected != record.skipped:
                was, should = record.skipped or "applied", expected or "applied"
                reason = (
                    f"the step was {_word(was)}, and train.on_nonfinite and train.on_spike of attempt "
                    f"{record.attempt} say {_word(should)}: its loss is {record.loss}, the norm of its "
                    f"gradient {record.grad_norm}"
                )
                return {"step": step_name(seen.lineage.records, index), "reason": reason}
        history = history.after(record, most)
    return None


def skipped_steps(seen: Survey, wanted: range) -> list[dict[str, Any]]:
    """Returns a row for each of these steps that was skipped, as in `skipped_samples` of an audit."""
    records, skips = seen.lineage.records, skips_of(seen.lineage)
    origin = seen.fork.origin if seen.fork is not None else None
    begin = (origin.cursor.consumed_samples, origin.cursor.consumed_tokens) if origin else (0, 0)
    counts = [begin, *((record.consumed_samples, record.consumed_tokens) for record in records)]
    found = []
    for index, (before, after) in enumerate(pairwise(counts)):
        if index in wanted and records[index].skipped is not None:
            left_out = max((at.skip.end.skipped_samples for at in skips if at.index <= index), default=0)
            found.append(
                {
                    "attempt": records[index].attempt,
                    "point": None,
                    "setting": _setting(records[index]),
                    "first_index": before[0] + left_out,
                    "samples": after[0] - before[0],
                    "tokens": after[1] - before[1],
                }
            )
    return found


def skipped_notes(seen: Survey, wanted: range) -> Iterator[str]:
    """Yields what an audit does not show of skipped steps."""
    rows = skipped_steps(seen, wanted)
    if rows:
        indices = [index for index in wanted if seen.lineage.records[index].skipped is not None]
        names = ", ".join(step_name(seen.lineage.records, index) for index in indices[:_NAMED_SKIPS])
        more = f" and {len(indices) - _NAMED_SKIPS} more" if len(indices) > _NAMED_SKIPS else ""
        samples, tokens = (sum(row[name] for row in rows) for name in ("samples", "tokens"))
        yield (
            f"that every step moved the weights: {samples:,} samples ({tokens:,} tokens) of step {names}"
            f"{more} were skipped on purpose ({', '.join(sorted({row['setting'] for row in rows}))})"
        )


def _policies(seen: Survey) -> dict[int, LossPolicies]:
    return {
        event.attempt: LossPolicies.of_flat(event.fields["config"])
        for event in seen.journal.events
        if event.kind == EventKind.ATTEMPT
    }


def _expected(policies: LossPolicies, history: LossHistory, record: StepRecord) -> str | None:
    """Returns for which cause the step was to be skipped. A loss that was not finite has left no value."""
    is_wrong = record.grad_norm - record.grad_norm != 0 or record.skipped == NONFINITE
    wrong = "it is not finite" if is_wrong else None
    verdict = judge(policies, history, record.loss, record.grad_norm, wrong)
    if verdict is None:
        return None
    return verdict.cause if verdict.action == SKIP_STEP else f"{verdict.cause}: {verdict.action}"


def _setting(record: StepRecord) -> str:
    return f"train.on_{record.skipped}"


def _word(what: str) -> str:
    return what if what == "applied" else f"skipped ({what})"
