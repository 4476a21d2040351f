"""The kinds of events in a journal, each with its fields, for the writer and for readers.

The texts and the names of fields are stored in the journals of runs, so they must not change. A journal may
hold kinds that this version does not have: readers keep such events by their text and skip them.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from orchestrator.records.run_status import GroupChange


class EventKind(StrEnum):
    """The kind of an event. `fields` are the names of its fields, all of which an event of the kind has.

    docs/storage-format.md explains each. Steps and generations are lines of the journal, too, but have their
    own record types (`StepRecord`, `GenerationStart`).
    """

    fields: frozenset[str]

    def __new__(cls, text: str, *names: str) -> EventKind:
        """`text` is the kind in the journal, `names` are those of its fields."""
        kind = str.__new__(cls, text)
        kind._value_, kind.fields = text, frozenset(names)
        return kind

    # ---- the attempt
    ATTEMPT = (
        *("attempt", "launch", "why", "command", "host", "version"),
        *("pid", "machine", "pid_start", "config", "forked_from", "parallel", "code"),
    )
    END = "end", "outcome", "reason", "by"
    FAILURE = "failure", "step", "reason"
    CONTROL_REQUEST = "wish", "what", "by", "request"
    REQUEST_ANSWERED = "request answered", "request", "what", "outcome", "text", "point"
    UNREADABLE_FILE = "unreadable file", "file", "reason"
    CLOCK_JUMPED = "clock jumped", "by_s"  # the wall clock of the journal's writer

    # ---- members of the training group, and their node groups
    JOIN = "join", "member", "actor", "node", "pid", "host", "key", "leaves", "unreached", "reason"
    GROUP_FORMED = "group formed", *(field.name for field in dataclasses.fields(GroupChange))
    MEMBER_DEAD = "member dead", "member", "reason"
    MEMBER_FAILED = "member failed", "member", "error", "text"
    MACHINE_REFUSED = (
        *("machine refused", "node", "host", "pid", "member", "error", "text"),
        "retry_s",
    )
    MEMBER_FINISHED = "member finished", "member", "reason", "step"
    MEMBER_LEFT = "member left", "member", "reason"
    LEFT_OUT = "left out", "member", "reason"
    UNRESPONSIVE = "unresponsive", "reason"
    FEEDER_DIED = "feeder died", "pid", "host", "reason"
    COORDINATOR_DIED = "coordinator died", "pid", "host", "reason"  # written by its successor
    GROUP_STARTED = "group started", "node", "num_workers"
    GROUP_STOPPED = "group stopped", "node", "reason"
    GROUP_ENDED = "group ended", "node", "reason"

    DRAIN_NOTICE = "drain notice", "node", "host", "grace_s"
    DRAIN_COURSE = "drain course", "course", "nodes", "grace_s", "save_s", "fits"

    WAITING = "waiting", "needed", "there", "reason"

    # ---- resume points
    POINT_COMMITTED = (
        *("point committed", "point", "bytes", "save_s", "save_blocked_s", "cursor"),
        *("peak_memory_bytes", "mean_loss"),
    )
    POINT_VERIFIED = "point verified", "point", "checked", "healthy", "seconds"
    POINT_PINNED = "point pinned", "point", "by", "reason"
    POINT_UNPINNED = "point unpinned", "point", "by", "reason"
    SAVE_GIVEN_UP = "save given up", "point", "reason", "retry_s"
    DELETING_POINTS = "deleting points", "points"  # durable before the first file is deleted
    POINTS_DELETED = "points deleted", "points"
    POINT_NOT_DELETED = "point not deleted", "point", "reason"
    DAMAGED_POINT = "damaged point", "point", "file", "reason"
    LEFTOVER_REMOVED = "leftover removed", "point"
    LEFTOVER_KEPT = "leftover kept", "point", "reason"

    # ---- weights
    STATE_DIGEST = "state digest", "generation", "step", "weights_digest"

    # ---- the data
    CURSOR = "cursor", "cursor"
    SOURCES = "sources", "counts", "tokens", "num_blocks", "weights"
    SAMPLES_SKIPPED = "samples skipped", "point", "samples", "tokens", "first_index", "setting"  # on purpose
    SOURCES_CHANGED = "sources changed", "changes", "text"
    BAD_DOCUMENT = "bad document", "text", "source", "file", "place", "why"
    ENCODERS_DIFFER = "encoders differ", "text"
