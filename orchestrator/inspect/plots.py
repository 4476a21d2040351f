"""Curves of a run's history, for notebooks and papers; needs matplotlib, which is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.errors import RefusedError
from orchestrator.inspect.frames import STEPS, label

if TYPE_CHECKING:
    import pandas as pd

_X = {"step": "step", "tokens": "consumed_tokens", "time": "time"}


def plot(steps: pd.DataFrame, metrics: tuple[str, ...], x: str, title: str) -> Any:
    """One panel per metric under one another, over `step`, `tokens` or `time`; a matplotlib `Figure`. Thin
    lines show where another attempt went on.

    Raises `RefusedError` for what is no metric, and where matplotlib is not installed.
    """
    known = [name for name, (unit, _) in STEPS.items() if unit != "UTC" and name != "digest"]
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
        panel.plot(at, steps[metric], linewidth=1)
        panel.set_ylabel(label(metric))
        panel.grid(alpha=0.3)
        for begin in begins:
            panel.axvline(begin, color="grey", linewidth=0.6, linestyle="--")
    panels[-1].set_xlabel("time (UTC)" if x == "time" else label(_X[x]))
    figure.suptitle(title)
    return figure
