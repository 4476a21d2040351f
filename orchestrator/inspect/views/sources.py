"""A run's training data by source: shares, epochs, skipped documents with reasons, and the audit's result.

A fact that the journal does not have is None. It is never computed from other facts.
"""

from __future__ import annotations

import re
from typing import Any

from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.numbered_files import newest_audit
from orchestrator.inspect.status.point_rows import stamp
from orchestrator.inspect.views.facts.columns import Event
from orchestrator.inspect.views.facts.facts import RunFacts, short

Row = dict[str, Any]

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


def sources(facts: RunFacts) -> Row:
    """The document."""
    config, identity = facts.config(facts.files.begun), facts.files.run and facts.files.run.identity
    listed = config.get("data.sources") or []
    cursor, told = (
        newest_cursor(facts),
        [e for e in facts.events("sources") if e.attempt in facts.path.attempts],
    )
    last = told[-1] if told else None
    counts = _counts(facts, [source["name"] for source in listed], last, cursor)
    since = _since(told, counts)
    rows = [_row(source, _target(listed, source, last), cursor) for source in listed]
    for row in rows:
        _counted(row, counts, last, since)
    return {
        "at": cursor.t if cursor is not None else None,
        "counted_at": _counted_at(facts, listed, last),
        "since": since["t"] if since is not None else None,
        "sources": rows,
        "skipped": skipped(facts),
        "pack_mode": config.get("pack.mode"),
        "max_bad_share": config.get("data.max_bad_share"),
        "max_long_share": config.get("pack.max_long_share"),
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


def skipped(facts: RunFacts) -> list[Row]:
    """The reasons for skipped documents: each reason of each source once, the most frequent first."""
    events = facts.events(EventKind.BAD_DOCUMENT)
    return facts.kept("skipped", len(events), lambda: _skipped(events))


def newest_cursor(facts: RunFacts) -> Event | None:
    """The last event of the history that has the run's position in its data."""
    events, kept = facts.events(EventKind.POINT_COMMITTED, EventKind.CURSOR), facts.path.attempts
    return next((e for e in reversed(events) if e.attempt in kept and _position(e) <= facts.tokens), None)


def _position(cursor: Event) -> int:
    return int(cursor.fields["cursor"]["consumed_tokens"])


def documents(facts: RunFacts) -> tuple[int, int] | None:
    """(documents read, of these skipped) up to the newest cursor; None if the journal has none."""
    cursor = newest_cursor(facts)
    if cursor is None:
        return None
    at = cursor.fields["cursor"]["sources"].values()
    return sum(each["documents"] for each in at), sum(each["bad_documents"] for each in at)


def long_documents(facts: RunFacts) -> tuple[str, int, int] | None:
    """(source, too long, documents read) up to the newest cursor, for the source with the largest share of
    too long ones. None if the journal has no cursor, or nothing was read.
    """
    cursor = newest_cursor(facts)
    found = cursor.fields["cursor"]["sources"].items() if cursor is not None else ()
    shares = [(name, at.get("long_documents", 0), at["documents"]) for name, at in found if at["documents"]]
    return max(shares, key=lambda each: each[1] / each[2], default=None)


def audit(facts: RunFacts) -> Row | None:
    """The newest audit's result; None if none is stored with the run."""
    found = newest_audit(facts.files.findings)
    if found is None:
        return None
    kept = {name: found.result.get(name) for name in _AUDIT}
    return {"t": stamp(found.created), **kept, "seconds": found.seconds, "by": found.by}


def _target(listed: list[Row], source: Row, last: Event | None) -> float | None:
    """The source's share by its weight. If no weight is given, the attempt's record has it; None if it has
    not.
    """
    if len(listed) == 1:
        return 1.0
    noted: Row = last.fields.get("weights", {}) if last is not None else {}
    weights: Row = {each["name"]: noted.get(each["name"]) or each.get("weight") for each in listed}
    return weights[source["name"]] / sum(weights.values()) if all(weights.values()) else None


def _row(source: Row, target: float | None, cursor: Event | None) -> Row:
    at = cursor.fields["cursor"]["sources"].get(source["name"], {}) if cursor is not None else {}
    return {
        "name": source["name"],
        "path": source["path"],
        "format": source["format"],
        "target": target,
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
        "unpacked": at.get("unpacked_documents"),
        "long": at.get("long_documents"),
        "filtered": at.get("filtered_documents"),
        "held_out": at.get("held_out_documents"),
    }


def _counts(facts: RunFacts, names: list[str], last: Event | None, cursor: Event | None) -> Row:
    """Samples and tokens by source, as far as they are known: up to now if there is one source, else at the
    newest cursor, or at the newest attempt's begin.
    """
    if len(names) == 1 and len(facts.history):
        samples = int(facts.history["consumed_samples"][-1])
        return {names[0]: {"samples": samples, "tokens": facts.tokens}}
    mixture: Row = cursor.fields["cursor"].get("mixture", {}) if cursor is not None else {}
    if mixture:
        return {
            n: {"samples": mixture[n]["samples"], "tokens": mixture[n]["tokens"]}
            for n in names
            if n in mixture
        }
    if last is None:
        return {}
    fields = last.fields
    return {n: {"samples": fields["counts"][n], "tokens": fields["tokens"].get(n)} for n in fields["counts"]}


def _counted(row: Row, counts: Row, last: Event | None, since: Row | None) -> None:
    """Adds the counts of one source to its row."""
    name = row["name"]
    if last is not None:
        row["num_blocks"] = last.fields["num_blocks"].get(name)
    if name not in counts:
        return
    row["samples"], row["tokens"] = counts[name]["samples"], counts[name]["tokens"]
    row["actual"] = short(row["samples"] / max(1, sum(each["samples"] for each in counts.values())))
    if since is not None:
        row["actual_since"] = short(since["counts"].get(name, 0) / max(1, sum(since["counts"].values())))


def _counted_at(facts: RunFacts, listed: list[Row], last: Event | None) -> Row | None:
    """The place of the counts of samples and tokens: {t, attempt}, attempt None for the newest step."""
    if len(listed) == 1 and len(facts.history):
        return {"t": float(facts.history["t"][-1]), "attempt": None}
    return {"t": last.t, "attempt": last.attempt} if last is not None else None


def _since(told: list[Event], counts: Row) -> Row | None:
    """The samples of each source since the last change of the weights; None if they never changed."""
    changed = None
    for before, after in zip(told, told[1:], strict=False):
        if before.fields["weights"] != after.fields["weights"]:
            changed = after
    if changed is None:
        return None
    base = changed.fields["counts"]
    return {"t": changed.t, "counts": {n: c["samples"] - base.get(n, 0) for n, c in counts.items()}}


def _skipped(events: list[Event]) -> list[Row]:
    reasons: dict[tuple[str, str], Row] = {}
    for event in events:
        text = event.fields["text"]
        why = event.fields.get("why") or text.rsplit(": ", 1)[-1]
        key = event.fields.get("source") or "?", _PLACE.sub("", why)
        row = reasons.setdefault(key, {"source": key[0], "why": key[1], "count": 0})
        row |= {"count": row["count"] + 1, "last": text, "t": event.t}
    return sorted(reasons.values(), key=lambda row: -row["count"])
