"""Checks, before an audit reads data, that its files exist.

Reports which lists lack files, and which steps can be audited without them. `data.dataset` reports the
lists, the journal's cursors the epochs that were read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from orchestrator.data.spec import DataSpec
from orchestrator.errors import DataIdentityError
from orchestrator.history.step_names import step_name
from orchestrator.inspect.audit.history_parts import History
from orchestrator.inspect.audit.reference.reference_lists import begins_anew
from orchestrator.records.cursor import Cursor, SourceCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Steps between two cursors of the journal; `lacking`: each (source, epoch) that they need and whose list
    lacks files.
    """

    steps: range
    lacking: tuple[tuple[str, int], ...]


def require_lists(spec: DataSpec, history: History, wanted: range) -> None:
    """Raises `DataIdentityError` if steps of `wanted` were read by a list whose files are changed or gone,
    with the steps that could be audited. What was read after the journal's last cursor shows later.
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


def _stretches(spec: DataSpec, history: History) -> Iterator[_Stretch]:
    borders = sorted({0, *history.known, len(history.records)})
    for first, stop in pairwise(borders):
        begin = history.known.get(first, Cursor())
        needed = _needed(history, first, begin, history.known.get(stop, begin))
        yield _Stretch(steps=range(first, stop), lacking=tuple(p for p in needed if _lacks(spec, *p)))


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


def _without(stretches: list[_Stretch], wanted: range) -> Iterator[range]:
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
