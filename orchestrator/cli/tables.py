"""The text of commands for people: tables and sentences from the documents that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.history.sentences import count
from orchestrator.inspect.status.integrity import HEALTH
from orchestrator.inspect.status.lineage import Pruned
from orchestrator.inspect.status.view import left_out_lines, skipped_lines
from orchestrator.planning.resume.resume_plan import ResumePlan
from orchestrator.text import visible


def plan_lines(plan: ResumePlan) -> list[str]:
    """Tells what `train` would do. A refusal's reason comes first."""
    lines = [f"refused: {text}" for text in plan.refusals]
    if plan.point is None:
        lines.append(f"{plan.headline}: the run has no resume point")
    else:
        from_ = f" to continue from {plan.point}" if plan.action == "refuse" else ""
        lines += [plan.headline + from_, f"  {plan.label_text}"]
    lines.append(f"  consumed {plan.consumed_samples:,} samples, {plan.consumed_tokens:,} tokens")
    lines += [
        f"  next token: source {name}, epoch {at.epoch}, block {at.block}, window {at.window}, "
        + (f"pack {at.packs}" if at.packs else f"record {at.record}, piece {at.piece}, token {at.token}")
        for name, at in plan.cursor.sources.items()
    ]
    lines += [f"  {source}" for source in plan.sources]
    lines += [f"  {change}" for change in plan.lists]
    lines += [f"  {plan.skip}"] if plan.skip is not None else []
    left = (plan.remaining_steps, plan.remaining_samples, plan.remaining_tokens)
    known = [value for value in left if value is not None]
    if len(known) < len(left):
        lines.append("  remaining until the data ends (no max_* is given)")
    else:
        lines.append(f"  remaining {', '.join(map(count, known, ('step', 'sample', 'token')))}")
    before = "" if plan.lr_before is None else f"{plan.lr_before:.3e} -> "
    lines.append(f"  learning rate {before}{plan.lr_after:.3e}")
    meanings = {
        "same": "must stay the same",
        "may_change": "may change",
        "free": "no influence on what is trained",
    }
    if plan.action != "refuse":  # what names it differs, not what it is
        meanings["same"] = "the same contents elsewhere"
    lines += [f"  {d}  ({meanings.get(d.rule, d.rule)})" for d in plan.changes]
    return lines + [f"  {note}" for note in plan.all_notes]


# Columns of the table of points: title and key of the row.
_COUNTS = {
    "attempt": "attempt",
    "step": "step",
    "samples": "consumed_samples",
    "tokens": "consumed_tokens",
    "world": "world_size",
    "batch": "global_batch_size",
    "seq_len": "seq_len",
}


def points_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of resume points, one row each. It is as wide as needed: nothing is cut, and `-` means unknown.
    Below it a line for each damaged point gives the reason.
    """
    table = [["point", "state", *_COUNTS, "layout", "MiB", "save s", "weights"], *map(_point_row, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    left = {0, 1, len(widths) - 1}
    lines = [
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return lines + [line for line in map(_trouble, rows) if line]


def _trouble(row: Mapping[str, Any]) -> str:
    """The fault of a point; empty if there is none."""
    if row["away"]:
        return f"{row['name']}: not looked at: {row['away']}"
    if row["healthy"] is False:
        return f"{row['name']}: damaged{'' if row['on_lineage'] else ', orphan'}: {row['reason']}"
    if row["quarantined"]:
        return f"{row['name']}: quarantined, though every byte is right now; this process may not lift that"
    return ""


def _point_row(row: Mapping[str, Any]) -> list[str]:
    state = HEALTH[row["healthy"]] if row["healthy"] is not None or row["away"] else "unverified"
    state = "orphan" if not (row["healthy"] is False or row["away"] or row["on_lineage"]) else state
    state += ", pinned" if row["pin"] else ""
    counts = ["-" if row[key] is None else str(row[key]) for key in _COUNTS.values()]
    sizes = [f"{row['bytes'] / 2**20:.1f}", f"{row['save_s']:.2f}"] if row["bytes"] else ["-", "-"]
    return [row["name"], state, *counts, _layout(row), *sizes, str(row["weights_digest"])[:16] or "-"]


def _layout(row: Mapping[str, Any]) -> str:
    """The layout of the state on the group: `shard:2x3` means two shards, and three copies of all of them."""
    shards, replicas = row["num_shards"], row["num_replicas"]
    if shards is None:
        return "-"
    if shards == 1:
        return "replicate"
    return f"shard:{shards}" if replicas == 1 else f"shard:{shards}x{replicas}"


def pruned_lines(pruned: Sequence[Pruned]) -> list[str]:
    """What `points --prune` did or would do, a line for each point that may be deleted."""
    if not pruned:
        return ["nothing may go: every resume point belongs to the history, and retention keeps it"]
    return [f"{each.point}: {_fate(each)}  ({each.why})" for each in pruned]


def _fate(each: Pruned) -> str:
    return f"kept: {each.kept}" if each.kept else "deleted" if each.deleted else "would be deleted"


def verify_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per point, and one per damaged file."""
    lines = []
    for row in rows:
        marked = ", quarantined" if row["quarantined"] else ""
        lines.append(f"{row['name']}: {HEALTH[row['healthy']]}{marked}")
        lines += [f"  {row['away']}"] if row["away"] else []
        lines += [f"  {damage['file']} {damage['reason']}" for damage in row["damaged"]]
    return lines or ["the run has no resume points"]


def samples_lines(found: Mapping[str, Any]) -> list[str]:
    """A line for each sample and each document in it, then whether the journal agrees.

    With losses, only the documents that have one, the highest first.
    """
    lines = list[str]()
    for document in found.get("by_loss") or ():
        loss = "not finite" if document["loss"] is None else f"{document['loss']:.4f}"
        of = f"{count(document['targets'], 'target')} of sample {document['index']:,}"
        lines.append(f"loss {loss}  {of}  {document['source']}")
        lines.append(f"  {_document_line(document)}")
        lines += [f"    | {line}" for line in document.get("text", "").split("\n")]
    for sample in found["samples"] if found.get("by_loss") is None else ():
        lines.append(f"sample {sample['index']:,}  {sample['source']}  {sample['tokens']:,} tokens")
        for document in sample["documents"]:
            lines.append(f"  {_document_line(document)}")
            lines += [f"    | {line}" for line in document.get("text", "").split("\n")]
    num = len(found["samples"])
    if found["matches"]:
        these = "this sample has" if num == 1 else f"these {num} samples have"
        agrees = f"{these} the digest that the journal has of it, {found['digest']}"
    else:
        agrees = f"NOT what the journal says was trained: {found['difference']}"
    note = [f"note: {found['note']}"] if found["note"] else []
    return [visible(line) for line in (*lines, f"step {found['step']}: {agrees}", *note)]


def _document_line(document: Mapping[str, Any]) -> str:
    line = "" if document["line"] is None else f", line {document['line']:,}"
    line += f", document {document['output'] + 1} of its record" if document["output"] else ""
    tokens = f"{document['tokens']:,} tokens"
    if document["first_token"] is not None:
        tokens = f"tokens {document['first_token']:,} to {document['end_token'] - 1:,}"
    whole = {
        (True, True): ", the whole document",
        (True, False): ", its beginning",
        (False, True): ", its end",
        (False, False): "",
    }[document["begins"], document["ends"]]
    epoch = f" (epoch {document['epoch']})" if document["epoch"] else ""
    return f"{document['file']}: {document['unit']} {document['place']:,}{line}: {tokens}{whole}{epoch}"


def audit_lines(report: Mapping[str, Any]) -> list[str]:
    """The proof in a sentence, or the first step that differs."""
    amounts = (
        f"{count(report['samples'], 'sample')}, {count(report['tokens'], 'token')}, "
        f"{count(report['steps'], 'step')}, {count(report['attempts'], 'attempt')}"
    )
    if report["steps"] == 1:
        amounts = f"step {report['first_step']}: {amounts}"
    elif report["steps"]:
        amounts = f"steps {report['first_step']} to {report['last_step']}: {amounts}"
    first = report["first_difference"]
    if report["exactly_once"] is None and first is None:
        return ["nothing is trained yet, so there is nothing to compare"]
    not_shown = [f"not verified: {text}" for text in report["not_shown"]]
    left_out = left_out_lines(report["left_out_documents"])
    not_shown = [*skipped_lines(report["skipped_documents"]), *left_out, *not_shown]
    if report["exactly_once"]:
        final, repeated = report["final_up_to_step"], report["repeated_files"]
        later = "" if report["all_final"] else "; later ones may still be replaced"
        return [
            f"{amounts}, each token of its stream exactly once, but {count(repeated, 'file')} "
            f"{'stands' if repeated == 1 else 'stand'} in that more than once"
            if repeated
            else f"{amounts}, exactly once",
            "nothing is final yet" if final is None else f"final up to step {final}{later}",
            *_reference_lines(report["reference"]),
            *not_shown,
        ]
    if report["exactly_once"] is None:
        return [f"{amounts}, NOT PROVEN: {first['reason']}", *not_shown]
    where = "" if first["step"] is None else f"step {first['step']}: "
    return [f"{amounts}, NOT exactly once", f"first difference: {where}{first['reason']}", *not_shown]


def _reference_lines(found: Mapping[str, Any] | None) -> list[str]:
    """Another encoder's result for the documents, if there is one."""
    if found is None:
        return []
    known, others = found["documents_journalled"], found["documents_not_journalled"]
    if not known and not others:
        return [f"{found['encoder']} gives the same ids for every document of these steps"]
    lines = [
        f"{found['encoder']} gives other ids for {known + others:,} documents of these steps; {known:,} of "
        "them are in the journal. The run trained its own encoder's ids, as frozen at its start"
    ]
    named = found["not_journalled"]
    lines += [f"not in the journal: {text}" for text in named]
    more = others - len(named)
    return lines + ([f"not in the journal: {more:,} more like these"] if more else [])
