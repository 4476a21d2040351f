"""`status` of a run: whether it is alive, its progress, its last fault, and its expected end.

The command and notebooks show this view of a `RunSnapshot`, as lines of text or as HTML. It reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from orchestrator.history import sentences
from orchestrator.inspect.status.snapshot import (
    FAILED,
    GONE,
    OVER,
    STILL_S,
    EvaluatedPart,
    NewestGeneration,
    RunSnapshot,
    verdict,
)
from orchestrator.planning.state.memory import layout_text
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.records.cursor import Cursor
from orchestrator.text import html_facts, html_lines, html_page, span, visible

LeftOut = Mapping[str, Mapping[str, int]]  # by source: `filtered`, `held_out`, `long`, `unpacked`


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run at a glance; None is what is not known. Times are UTC by the clock of who wrote them, ages by
    this machine's: for people, nothing is decided by them. `quiet_s`: for how long `watch` has seen no new
    step. `layout`: how the newest group holds the state. `last_evaluation`: the parts of the newest state
    that was evaluated, which is that after `last_evaluation_step`. `skipped_documents` and
    `left_out_documents` (`filtered` by transforms, `held_out`, too `long`, `unpacked`: without a target) are
    those up to `newest_point`, by source. `missing` names what is seen to be gone of the run's folder
    (`missing_pieces`); `quarantined` are the points that are marked as damaged, of which none counts as
    `newest_point`.
    """

    run: str
    state: str
    verdict: str
    alive: bool | None
    attempt: int | None
    step: int | None
    total_steps: int | None
    loss: float | None
    lr: float | None
    tokens_per_s: float | None
    consumed_samples: int
    consumed_tokens: int
    workers: int | None
    workers_wanted: int | None
    layout: str | None
    last_step_at: str | None
    last_step_age_s: float | None
    quiet_s: float | None
    eta_s: float | None
    newest_point: str | None
    newest_point_at: str | None
    newest_point_age_s: float | None
    num_points: int
    last_evaluation: tuple[EvaluatedPart, ...]
    last_evaluation_step: int | None
    last_evaluation_at: str | None
    last_fault: str | None
    last_fault_at: str | None
    reason: str
    skipped_documents: Mapping[str, int] | None
    left_out_documents: LeftOut | None
    missing: tuple[str, ...]
    quarantined: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more without a command."""
        return self.state in OVER

    @property
    def is_broken(self) -> bool:
        """Whether the run needs attention: it failed, its processes are gone without an end, or a part of its
        folder is missing.
        """
        return self.state in (FAILED, GONE) or bool(self.missing)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


Quiet = Callable[[RunView, int | None], float | None]  # with the number of the newest generation


def not_watched(view: RunView, generation: int | None) -> float | None:
    """The `quiet_s` of a single look."""
    del view, generation
    return None


def view_of(run: str, snapshot: RunSnapshot, now: datetime, quiet_s: Quiet = not_watched) -> RunView:
    """Returns the view of a run. `quiet_s` computes the field of this name. It is called with the view before
    its sentence is made, and with the newest generation.
    """
    step, point, fault, evaluation = snapshot.step, snapshot.point, snapshot.fault, snapshot.evaluation
    cursor, generation = snapshot.cursor, snapshot.generation
    view = RunView(
        run=run,
        state=snapshot.state,
        verdict="",
        alive=snapshot.alive,
        attempt=snapshot.number,
        step=step.step if step else None,
        total_steps=snapshot.total_steps if step else None,
        loss=step.loss if step else None,
        lr=step.lr if step else None,
        tokens_per_s=snapshot.tokens_per_s,
        consumed_samples=step.consumed_samples if step else 0,
        consumed_tokens=step.consumed_tokens if step else 0,
        workers=snapshot.workers,
        workers_wanted=snapshot.wanted,
        layout=_layout(generation),
        last_step_at=_text(step.t) if step else None,
        last_step_age_s=_age(step.t, now) if step else None,
        quiet_s=None,
        eta_s=snapshot.eta_s,
        newest_point=point,
        newest_point_at=_text(snapshot.point_t) if snapshot.point_t is not None else None,
        newest_point_age_s=_age(snapshot.point_t, now) if snapshot.point_t is not None else None,
        num_points=snapshot.num_points,
        last_evaluation=evaluation.parts if evaluation else (),
        last_evaluation_step=evaluation.step if evaluation else None,
        last_evaluation_at=_text(evaluation.t) if evaluation else None,
        last_fault=fault.text if fault else None,
        last_fault_at=_text(fault.t) if fault else None,
        reason=snapshot.reason,
        skipped_documents={n: at.bad_documents for n, at in cursor.sources.items()} if cursor else None,
        left_out_documents=left_out(cursor) if cursor else None,
        missing=snapshot.missing,
        quarantined=snapshot.quarantined,
    )
    quiet = quiet_s(view, generation.generation if generation is not None else None)
    text = verdict(snapshot.standing(now.timestamp(), quiet))
    return replace(view, quiet_s=quiet, verdict=text)


def skipped_lines(skipped: Mapping[str, int] | None, before: str = "") -> list[str]:
    """The number of skipped documents of each source, a line each, which begins with `before`. Sources that
    skipped none have no line.
    """
    return [
        f"{before}{number:,} document{'' if number == 1 else 's'} of source {source} "
        f"{'was' if number == 1 else 'were'} skipped (data.on_bad_document=skip)"
        for source, number in (skipped or {}).items()
        if number
    ]


def left_out(cursor: Cursor) -> dict[str, dict[str, int]]:
    """What transforms dropped, what is held out, and what no sample of whole documents holds because it is
    too long or has no target, up to a cursor.
    """
    return {
        name: {
            "filtered": at.filtered_documents,
            "held_out": at.held_out_documents,
            "long": at.long_documents,
            "unpacked": at.unpacked_documents,
        }
        for name, at in cursor.sources.items()
    }


def left_out_lines(left_out: LeftOut | None, before: str = "") -> list[str]:
    """The same for documents that are left out for another reason than being bad."""
    words = {
        "filtered": "dropped by data.transforms",
        "held_out": "held out (data.holdout)",
        "long": "longer than a sample holds and skipped (pack.long_document=skip)",
        "unpacked": "without a target and in no sample",
    }
    return [
        f"{before}{number:,} document{'' if number == 1 else 's'} of source {source} "
        f"{'was' if number == 1 else 'were'} {words[kind]}"
        for source, counts in (left_out or {}).items()
        for kind, number in counts.items()
        if number
    ]


def _layout(begun: NewestGeneration | None) -> str | None:
    if begun is None or not begun.num_shards:
        return None
    return layout_text(layout_of(begun.world_size, begun.num_shards))


def _text(t: float) -> str:
    """A time as the journal writes it."""
    return datetime.fromtimestamp(t, UTC).isoformat(timespec="milliseconds")


def _age(t: float, now: datetime) -> float | None:
    """Seconds since then; None if this machine's clock is behind the writer's."""
    age = now.timestamp() - t
    return age if age >= 0 else None


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
        lines.append(f"  done in     about {span(view.eta_s)}")
    if view.last_evaluation_step is not None:
        when = moment(view.last_evaluation_at, None)
        lines.append(f"  last eval   {view.last_evaluation_step:,}  {_evaluation(view)}  {when}")
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


def moment(time: str | None, age_s: float | None) -> str:
    """A time of the journal with its age; empty if there is none."""
    if time is None:
        return ""
    text = time[:19].replace("T", " ") + " UTC"
    return f"{text}, {span(age_s)} ago" if age_s is not None else text


def _evaluation(view: RunView) -> str:
    """The values of the evaluated parts: `holdout: loss 3.2102, perplexity 24.78; code: loss 2.9100`."""
    parts = view.last_evaluation
    return "; ".join(f"{at.part}: {sentences.eval_values(at.loss, at.perplexity)}" for at in parts)


def status_html(view: RunView) -> str:
    """The same as a piece of static HTML."""
    speed = None if view.tokens_per_s is None else f"{view.tokens_per_s:,.0f} tokens/s"
    step = "" if view.step is None else f"{view.step:,}"
    if view.step is not None and view.total_steps is not None:
        step += f" of {view.total_steps:,}"
    evaluated = None
    if view.last_evaluation_step is not None:
        evaluated = f"step {view.last_evaluation_step:,}, {_evaluation(view)}"
    pairs = [
        ("last step", step),
        ("loss", view.loss),
        ("speed", speed),
        ("last evaluation", evaluated),
        ("workers", view.workers and f"{view.workers} of {view.workers_wanted or view.workers}"),
        ("state", view.layout),
        ("done in", view.eta_s and f"about {span(view.eta_s)}"),
        ("newest point", view.newest_point),
        ("quarantined", ", ".join(view.quarantined)),
        ("last fault", view.last_fault),
    ]
    left_out = [*skipped_lines(view.skipped_documents), *left_out_lines(view.left_out_documents)]
    return html_page(f"{view.run}: {view.verdict}", html_facts(pairs), html_lines(left_out))
