"""What a run was trained on, by source: shares, epochs, what was skipped and why, and what an audit found.

What the journal does not say is None, never computed from something else.
"""

from __future__ import annotations

import re
from typing import Any

from orchestrator.history.event_kinds import EventKind
from orchestrator.monitor.views.columns import Event
from orchestrator.monitor.views.facts import Facts, short
from orchestrator.resume.points import parse_point_name

_PLACE = re.compile(r" at (byte|line|column) \d+.*$")
_AUDIT = (
    "exactly_once",
    "first_step",
    "last_step",
    "final_up_to_step",
    "samples",
    "tokens",
    "not_shown",
    "seconds",
)


def sources(facts: Facts) -> dict[str, Any]:
    """The document."""
    config, identity = facts.config(facts.files.begun), facts.files.run and facts.files.run.identity
    listed = config.get("data.sources") or []
    cursor = newest_cursor(facts)
    counts = _counts(facts)
    last = counts[-1] if counts else None
    since = _since(counts)
    total_weight = sum(source["weight"] for source in listed) or 1
    rows = []
    for source in listed:
        row = _row(source, total_weight, cursor)
        if last is not None and source["name"] in last.fields["counts"]:
            _counted(row, last, since)
        elif len(listed) == 1 and len(facts.history):
            row["samples"] = int(facts.history["consumed_samples"][-1])
            row["tokens"], row["actual"] = facts.tokens, 1.0
        rows.append(row)
    return {
        "at": last.t if last is not None else cursor.t if cursor is not None else None,
        "since": since["t"] if since is not None else None,
        "sources": rows,
        "skipped": skipped(facts),
        "max_bad_share": config.get("data.max_bad_share"),
        "on_bad_document": config.get("data.on_bad_document"),
        "audit": audit(facts),
        "encoder": {
            "name": identity.encoder_name if identity else None,
            "version": identity.encoder_version if identity else None,
            "differences": len(facts.events(EventKind.ENCODERS_DIFFER)),
        },
        "tokenizer": identity.tokenizer if identity else None,
        "order": {"shuffle": config.get("data.shuffle"), "seed": config.get("data.seed")},
    }


def skipped(facts: Facts) -> list[dict[str, Any]]:
    """Why documents were skipped: each reason of each source once, the most frequent first."""
    events = facts.events(EventKind.BAD_DOCUMENT)
    return facts.kept("skipped", len(events), lambda: _skipped(events))


def newest_cursor(facts: Facts) -> Event | None:
    """The last event that says where the run stands in its data."""
    events = facts.events(EventKind.POINT_COMMITTED, EventKind.CURSOR)
    return events[-1] if events else None


def documents(facts: Facts) -> tuple[int, int] | None:
    """(documents read, of these skipped) up to the newest cursor; None where the journal has none."""
    cursor = newest_cursor(facts)
    if cursor is None:
        return None
    at = cursor.fields["cursor"]["sources"].values()
    return sum(each["documents"] for each in at), sum(each["bad_documents"] for each in at)


def audit(facts: Facts) -> dict[str, Any] | None:
    """What the newest audit found, if that was kept."""
    found = facts.events("audit")
    return {"t": found[-1].t} | {name: found[-1].fields.get(name) for name in _AUDIT} if found else None


def _row(source: dict[str, Any], total_weight: float, cursor: Event | None) -> dict[str, Any]:
    at = cursor.fields["cursor"]["sources"].get(source["name"], {}) if cursor is not None else {}
    return {
        "name": source["name"],
        "path": source["path"],
        "format": source["format"],
        "target": source["weight"] / total_weight,
        "samples": None,
        "tokens": None,
        "actual": None,
        "actual_since": None,
        "epoch": at.get("epoch"),
        "block": at.get("block"),
        "num_blocks": None,
        "cursor": at,
        "documents": at.get("documents"),
        "empty": at.get("empty_documents"),
        "bad": at.get("bad_documents"),
        "special": at.get("special_texts"),
    }


def _counted(row: dict[str, Any], last: Event, since: dict[str, Any] | None) -> None:
    """What the newest counts say of one source."""
    name, counts = row["name"], last.fields["counts"]
    row["samples"], row["tokens"] = counts[name]["samples"], counts[name]["tokens"]
    row["actual"] = short(row["samples"] / max(1, sum(each["samples"] for each in counts.values())))
    row["num_blocks"] = (last.fields.get("num_blocks") or {}).get(name)
    if since is not None:
        row["actual_since"] = short(since["counts"].get(name, 0) / max(1, sum(since["counts"].values())))


def _since(counts: list[Event]) -> dict[str, Any] | None:
    """The samples of each source since the weights were changed last; None if they never were."""
    if not counts:
        return None
    last = counts[-1].fields
    base = next((e for e in reversed(counts) if e.fields.get("weights") != last.get("weights")), None)
    if base is None:
        return None
    before = base.fields["counts"]
    grown = {n: c["samples"] - before.get(n, {"samples": 0})["samples"] for n, c in last["counts"].items()}
    return {"t": base.t, "counts": grown}


def _counts(facts: Facts) -> list[Event]:
    """What was counted by source, on the history."""
    events = facts.events("sources")
    key = (facts.shape, len(events))
    return facts.kept("source counts", key, lambda: [e for e in events if _on_history(facts, e)])


def _on_history(facts: Facts, event: Event) -> bool:
    key = parse_point_name(str(event.fields.get("point", "")))
    return key is None or facts.path.has(key)


def _skipped(events: list[Event]) -> list[dict[str, Any]]:
    reasons: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        text = event.fields["text"]
        why = event.fields.get("why") or text.rsplit(": ", 1)[-1]
        key = event.fields.get("source") or "?", _PLACE.sub("", why)
        row = reasons.setdefault(key, {"source": key[0], "why": key[1], "count": 0})
        row |= {"count": row["count"] + 1, "last": text, "t": event.t}
    return sorted(reasons.values(), key=lambda row: -row["count"])
