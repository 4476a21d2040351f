"""How a run is shown in notebooks: its data as pandas DataFrames, and the display of a run that is watched.

Each column is declared once, with its unit and meaning. A watched run is shown in place in a notebook and on
a terminal, and with a line per change elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestrator.errors import RefusedError
from orchestrator.history.metrics.declared import eval_values
from orchestrator.inspect.status.view import RunView, status_html, status_lines
from orchestrator.records.steps import SKIP_CAUSES

if TYPE_CHECKING:
    import pandas as pd

    from orchestrator.inspect.views.cards import Column
    from orchestrator.inspect.views.facts.columns import Columns
    from orchestrator.inspect.views.facts.effective_steps import EffectiveSteps
    from orchestrator.records.steps import EvalRecord, StateKey

Table = Mapping[str, tuple[str, str]]  # column: (unit, meaning)

_AT = {
    "attempt": ("", "the claim under which it was trained"),
    "generation": ("", "the membership of the training group, counted within the attempt"),
    "step": ("", "label of the step; counted anew when batch size or seq_len change"),
}
_COUNTS = {
    "consumed_samples": ("samples", "all that the history had consumed then"),
    "consumed_tokens": ("tokens", "the same in positions"),
    "target_tokens": ("tokens", "of these, such that have a loss"),
}
STEPS: Table = {
    **_AT,
    **_COUNTS,
    "loss": ("nats per target token", "mean over the step's global batch"),
    "grad_norm": ("", "norm of the gradient before clipping"),
    "lr": ("", "learning rate that was applied"),
    "step_s": ("s", "from the step before to this one, on rank 0"),
    "data_wait_s": ("s", "of it, waiting for the batch; mean of the workers"),
    "save_blocked_s": ("s", "of it, held up by a save; mean of the workers"),
    "peak_memory_bytes": ("bytes", "the most that a worker had taken: of its GPU, else of the machine"),
    "mfu": ("", "share of the cards' peak that the model's products needed; missing where it is not known"),
    "skipped": ("", "why no weight was moved: nonfinite or spike; empty for a step that was applied"),
    "digest": ("", "digest of the samples that the ranks trained"),
    "time": ("UTC", "when it had ended"),
}
EVALS: Table = {
    "part": ("", "of `eval.parts`"),
    **_AT,
    "loss": ("nats per target token", "of the objective, divided by its units as in training"),
    "perplexity": ("", "e to the mean cross-entropy of the targets; missing for plug-in objectives"),
    "targets": ("tokens", "that have a loss"),
    "samples": ("samples", "that were evaluated"),
    "per_source": ("", "the mean loss of each source's targets by its name"),
    "seconds": ("s", "that it took"),
}
POINTS: Table = {
    "name": ("", "of the resume point"),
    **_AT,
    **_COUNTS,
    "world_size": ("workers", "that saved it"),
    "global_batch_size": ("samples", "per step"),
    "seq_len": ("tokens", "per sample"),
    "bytes": ("bytes", "on storage"),
    "save_blocked_s": ("s", "for which training stood: of its workers the longest"),
    "save_s": ("s", "from the first worker's vote to its commit"),
    "healthy": ("", "every digest of every file is right; none where only sizes were compared"),
    "reason": ("", "why not"),
    "quarantined": ("", "it is marked as damaged"),
    "on_lineage": ("", "it belongs to the history; an orphan does not"),
    "parent": ("", "the state that its generation continued"),
    "weights_digest": ("", "digest of the model's tensors"),
    "pinned_by": ("", "who pinned it"),
}
ATTEMPTS: Table = {
    "attempt": ("", "number of the claim"),
    "why": ("", "start, resume, rewind, or a coordinator that was restarted"),
    "started": ("UTC", "when its journal begins"),
    "ended": ("UTC", "when its journal ends"),
    "outcome": ("", "done, stopped or failed; empty without an end record"),
    "reason": ("", "of the end"),
    "host": ("", "where it ran"),
    "parent": ("", "the state that it continued"),
    "generations": ("", "how many memberships the group had"),
    "first_step": ("", "label of the first step that it trained"),
    "last_step": ("", "label of the last one"),
    "trained": ("steps", "of it that are on the history"),
    "aside": ("steps", "of it that were lost or rewound"),
    "on_history": ("", "whether any of it is on the history"),
}
EVENTS: Table = {
    "id": ("", "attempt and line of the journal"),
    "time": ("UTC", "when it was written"),
    "level": ("", "fault, change, point, data or routine"),
    "kind": ("", "of the journal's line"),
    "attempt": ("", "whose journal it is"),
    "text": ("", "the same in a sentence"),
}
SOURCES: Table = {
    "name": ("", "of the source"),
    "path": ("", "its files, as configured"),
    "format": ("", "of its files"),
    "target": ("share", "by the weights"),
    "actual": ("share", "of the samples so far"),
    "samples": ("samples", "consumed"),
    "tokens": ("tokens", "consumed"),
    "epoch": ("", "pass over its files, from 0"),
    "block": ("", "place in the epoch"),
    "num_blocks": ("", "blocks of an epoch"),
    "documents": ("documents", "read"),
    "empty": ("documents", "of these, without text"),
    "bad": ("documents", "of these, skipped as unreadable"),
    "unpacked": ("documents", "of these, without a target, in no sample of whole documents"),
    "long": ("documents", "of these, longer than a sample and skipped"),
}
SAMPLES: Table = {
    "index": ("", "of the sample in the stream, from 0"),
    "source": ("", "it was drawn from"),
    "document": ("", "number of the stretch in the sample, from 0"),
    "file": ("", "that the document lies in"),
    "unit": ("", "what `place` counts: byte or row"),
    "place": ("", "where its record begins in the file"),
    "line": ("", "of the record, from 1; missing in compressed files and where records are rows"),
    "output": ("", "number of the document among those that transforms made of the record, from 0"),
    "epoch": ("", "pass over the source's files, from 0"),
    "tokens": ("tokens", "of the document in this sample"),
    "first_token": ("", "the first of these, counted within the document"),
    "end_token": ("", "the token after the last of these"),
    "begins": ("", "the document's first token is here"),
    "ends": ("", "the document's last token is here"),
    "text": ("", "these tokens decoded; missing if it was not asked for"),
}
CARDS: Table = {
    "card": ("", "its name"),
    "title": ("", "its head on the page"),
    "column": ("", "of its rows"),
    "unit": ("", "of the column"),
    "meaning": ("", "of the column"),
}
TABLES: Mapping[str, Table] = {
    "steps": STEPS,
    "points": POINTS,
    "evals": EVALS,
    "attempts": ATTEMPTS,
    "events": EVENTS,
    "sources": SOURCES,
    "samples": SAMPLES,
}
# whole numbers in every table: pandas' Int64, which has a missing value
WHOLE = frozenset(
    (
        *("attempt", "generation", "step", "generations", "first_step", "last_step", "trained", "aside"),
        *("consumed_samples", "consumed_tokens", "target_tokens", "peak_memory_bytes", "bytes"),
        *("world_size", "global_batch_size", "seq_len", "samples", "tokens", "documents", "empty", "bad"),
        *("unpacked", "long"),
        *("epoch", "block", "num_blocks"),
        *("index", "document", "place", "line", "output", "first_token", "end_token"),
    )
)


def frame(table: Table, rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a DataFrame with the table's columns. A column `time`, `started` or `ended` takes seconds since
    1970; one of `WHOLE` has whole numbers. A field that a row does not have is missing.
    """
    import pandas as pd

    found = [[row.get(name) for name in table] for row in rows]
    made = pd.DataFrame(found, columns=list(table))
    for name, (unit, _) in table.items():
        if unit == "UTC":
            made[name] = _times(made[name])
    return _whole(made)


def card_frame(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The rows of a card, each column by its kind: whole numbers as `Int64`, times as UTC, others as
    `Float64`.
    """
    import pandas as pd

    kinds = {"text": "object", "number": "Int64", "count": "Int64", "bytes": "Int64"}
    found = {}
    for column in columns:
        values = [row[column.name] for row in rows]
        if column.kind == "time":
            found[column.name] = _times(pd.Series(values, dtype="Float64"))
        else:
            found[column.name] = pd.Series(values, dtype=kinds.get(column.kind, "Float64"))
    return pd.DataFrame(found)


def steps_frame(columns: Columns, path: EffectiveSteps) -> pd.DataFrame:
    """A row per step of the history, in order. The objective's own metrics follow the columns of `STEPS`."""
    import numpy as np
    import pandas as pd

    rows = path.rows.array
    ids = np.array([generation.id for generation in columns.generations], dtype="i8").reshape(-1, 2)
    at = columns["generation"][rows]
    values: dict[str, Any] = {"attempt": ids[at, 0], "generation": ids[at, 1]}
    for name in STEPS:
        if name not in ("attempt", "generation", "digest", "time", "skipped"):
            values[name] = columns[name][rows]
    values["skipped"] = [("", *SKIP_CAUSES)[code] for code in columns["skipped"][rows].tolist()]
    values["digest"] = [f"{digest:016x}" for digest in columns["digest"][rows].tolist()]
    values["time"] = _times(pd.Series(columns["t"][rows], dtype="float64"))
    own = {name: pd.Series(column.array[rows], dtype="float64") for name, column in columns.metrics.items()}
    return _whole(pd.DataFrame({**values, **own}, columns=[*STEPS, *own]))


def evals_frame(records: Sequence[EvalRecord]) -> pd.DataFrame:
    """A row per part and step. The objective's own metrics follow the columns of `EVALS`."""
    own = sorted({name for record in records for name in record.metrics})
    table = {**EVALS, **{name: ("", "a metric of the objective") for name in own}}
    rows = [
        {**dict(record.metrics), **{name: getattr(record, name) for name in EVALS}} for record in records
    ]
    return frame(table, rows)


def evals_at_steps(
    records: Sequence[EvalRecord], trained: Sequence[StateKey], steps: pd.DataFrame
) -> pd.DataFrame:
    """A row per evaluated state, with the position and time of its step, and a column for each value, named
    as loggers have it (`eval_holdout_loss`).

    `trained`: the key under which the state of each record was trained. `steps`: of `steps_frame`.
    """
    import pandas as pd

    place = ["attempt", "generation", "step"]
    rows: dict[StateKey, dict[str, Any]] = {}
    for record, key in zip(records, trained, strict=True):
        row = rows.setdefault(key, {name: getattr(key, name) for name in place})
        row.update(eval_values(asdict(record)))
    names = dict.fromkeys(name for row in rows.values() for name in row)
    found = _whole(pd.DataFrame(list(rows.values()), columns=list(names or place)))
    return found.merge(steps[[*place, "consumed_tokens", "time"]], how="left", on=place)


def columns_table() -> str:
    """Every column of every table as Markdown."""
    lines = ["| table | column | unit | meaning |", "|---|---|---|---|"]
    for name, table in TABLES.items():
        lines += [f"| `{name}` | `{column}` | {unit} | {doc} |" for column, (unit, doc) in table.items()]
    return "\n".join(lines)


def label(column: str) -> str:
    """A step's column with its unit, for an axis."""
    unit, _ = STEPS.get(column, ("", ""))
    return f"{column} ({unit})" if unit else column


def with_pins(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `list_points` with the pin's author as a separate value."""
    return [{**row, "pinned_by": row["pin"]["by"] if row["pin"] else ""} for row in rows]


def attempt_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the page's table of attempts with the names of this table."""
    return {**row, "started": row["t0"], "ended": row["t1"]}


def _whole(made: pd.DataFrame) -> pd.DataFrame:
    return made.astype({name: "Int64" for name in made.columns if name in WHOLE})


def _times(seconds: pd.Series) -> pd.Series:
    import pandas as pd

    return pd.to_datetime(seconds.astype("float64"), unit="s", utc=True)


def show(views: Iterable[RunView]) -> RunView:
    """Shows each view in place of the one before. Returns the last one."""
    update = _in_notebook() or (_on_terminal() if sys.stdout and sys.stdout.isatty() else _in_lines())
    with update as put:
        for view in views:  # noqa: B007  the last one is returned
            put(view)
    return view


class _Shown:
    """Calls `put` with each view between its beginning and its end."""

    def __init__(self, put: Callable[[RunView], None], live: Any = None) -> None:
        self._put, self._live = put, live

    def __enter__(self) -> Callable[[RunView], None]:
        if self._live is not None:
            self._live.start()
        return self._put

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def _in_notebook() -> _Shown | None:
    """Shows HTML without a widget, so a saved notebook keeps the last view."""
    if "IPython" not in sys.modules:
        return None
    ipython, display = import_module("IPython"), import_module("IPython.display")
    if getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    handle = display.display(display.HTML(""), display_id=True)
    return _Shown(lambda view: handle.update(display.HTML(status_html(view))))


def _on_terminal() -> _Shown:
    from rich.live import Live
    from rich.text import Text

    live = Live(auto_refresh=False)
    return _Shown(lambda view: live.update(Text("\n".join(status_lines(view))), refresh=True), live)


def _in_lines() -> _Shown:
    said: list[str] = [""]

    def put(view: RunView) -> None:
        if view.verdict != said[0]:
            said[0] = view.verdict
            sys.stdout.write("\n".join(status_lines(view)) + "\n")
            sys.stdout.flush()

    return _Shown(put)


_X = {"step": "step", "tokens": "consumed_tokens", "time": "time"}


def plot(
    steps: pd.DataFrame, evals: pd.DataFrame | None, metrics: tuple[str, ...], x: str, title: str
) -> Any:
    """One panel per metric under one another, over `step`, `tokens` or `time`; a matplotlib `Figure`. Thin
    lines show where another attempt continued. Values of `evals` (of `evals_at_steps`) have a dot for each
    evaluation.

    Raises `RefusedError` for what is no metric, and where matplotlib is not installed.
    """
    known = [name for name in steps.columns if name not in ("digest", "time", "skipped")]
    if evals is not None:
        known += [name for name in evals.columns if name not in steps.columns]
    wrong = [name for name in metrics if name not in known]
    if wrong:
        raise RefusedError(
            f"there is no metric {', '.join(wrong)}; use {', '.join(known)}", code="metrics.unknown"
        )
    if x not in _X:
        raise RefusedError(
            f"there is no axis x={x!r}; use one of {', '.join(_X)}", code="command.unknown_axis"
        )
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise RefusedError(
            "plots need matplotlib: pip install -e '.[notebook]' in the checkout, or pip install matplotlib",
            code="machine.missing_package",
        ) from error
    size = (8, 2.6 * len(metrics))
    figure, grid = pyplot.subplots(
        len(metrics), 1, figsize=size, layout="constrained", sharex=True, squeeze=False
    )
    pyplot.close(figure)  # the caller shows it: a notebook would show it twice
    panels = grid[:, 0]
    at = steps[_X[x]]
    begins = at[steps["attempt"].diff().fillna(0) != 0]
    for panel, metric in zip(panels, metrics, strict=True):
        if metric in steps.columns:
            panel.plot(at, steps[metric], linewidth=1)
        elif evals is not None:
            dots = evals[[_X[x], metric]].dropna()
            panel.plot(dots[_X[x]], dots[metric], linewidth=1, marker=".")
        panel.set_ylabel(label(metric))
        panel.grid(alpha=0.3)
        for begin in begins:
            panel.axvline(begin, color="grey", linewidth=0.6, linestyle="--")
    panels[-1].set_xlabel("time (UTC)" if x == "time" else label(_X[x]))
    figure.suptitle(title)
    return figure
