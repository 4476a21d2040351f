"""Shows a run that is watched: in place in a notebook and on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from orchestrator.errors import RefusedError
from orchestrator.inspect.frames import STEPS, label
from orchestrator.inspect.status.view import RunView, status_html, status_lines

if TYPE_CHECKING:
    import pandas as pd

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
