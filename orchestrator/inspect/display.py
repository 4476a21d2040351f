"""Shows a run that is watched: in place in a notebook and on a terminal, a line per change elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from orchestrator.inspect.status.view import RunView
from orchestrator.inspect.status.view_text import status_html, status_lines


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
