"""The view of a run for people: lines of text, and a piece of HTML."""

from __future__ import annotations

from orchestrator import html_text
from orchestrator.history import sentences
from orchestrator.inspect.status.verdict import STILL_S
from orchestrator.inspect.status.view import RunView, left_out_lines, skipped_lines
from orchestrator.terminal_text import visible


def status_lines(view: RunView) -> list[str]:
    """The view of a run: the verdict first, then the known facts, a line each."""
    lines = [f"{view.run}: {view.verdict}"]
    if view.step is not None:
        speed = "" if view.tokens_per_s is None else f"  {view.tokens_per_s:,.0f} tokens/s"
        loss = sentences.loss(view.loss)
        # the verdict has the time without a step, by the watcher's clock: no other clock's time may stand
        # beside it
        says_quiet = (view.quiet_s or 0.0) >= STILL_S
        when = moment(view.last_step_at, None if says_quiet else view.last_step_age_s)
        lines.append(f"  last step   {view.step:,}  loss {loss}{speed}  {when}")
    if view.workers is not None:
        lines.append(f"  workers     {view.workers} of {view.workers_wanted or view.workers}")
    if view.layout is not None:
        lines.append(f"  state       {view.layout}")
    if view.eta_s is not None:
        lines.append(f"  done in     about {duration(view.eta_s)}")
    point = view.newest_point or "none"
    when = moment(view.newest_point_at, view.newest_point_age_s)
    lines.append(f"  last point  {point}  {when}".rstrip())
    if view.quarantined:
        lines.append(f"  damaged     {', '.join(view.quarantined)}: quarantined, and not counted")
    lines += skipped_lines(view.skipped_documents, "  skipped     ")
    lines += left_out_lines(view.left_out_documents, "  left out    ")
    if view.last_fault is not None:
        lines.append(f"  last fault  {view.last_fault}  {moment(view.last_fault_at, None)}")
    return [visible(line) for line in lines]


def duration(seconds: float) -> str:
    """`12 s`, `5 min`, `3 h 20 min`, `2 d 4 h`."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if hours < 1:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(time: str | None, age_s: float | None) -> str:
    """A time of the journal with its age; empty if there is none."""
    if time is None:
        return ""
    text = time[:19].replace("T", " ") + " UTC"
    return f"{text}, {duration(age_s)} ago" if age_s is not None else text


def status_html(view: RunView) -> str:
    """The same as a piece of static HTML."""
    speed = None if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f} tokens/s"
    step = "" if view.step is None else f"{view.step:,}"
    if view.step is not None and view.total_steps is not None:
        step += f" of {view.total_steps:,}"
    pairs = [
        ("last step", step),
        ("loss", view.loss),
        ("speed", speed),
        ("workers", view.workers and f"{view.workers} of {view.workers_wanted or view.workers}"),
        ("state", view.layout),
        ("done in", view.eta_s and f"about {duration(view.eta_s)}"),
        ("newest point", view.newest_point),
        ("quarantined", ", ".join(view.quarantined)),
        ("last fault", view.last_fault),
    ]
    left_out = [*skipped_lines(view.skipped_documents), *left_out_lines(view.left_out_documents)]
    return html_text.page(f"{view.run}: {view.verdict}", html_text.facts(pairs), html_text.lines(left_out))
