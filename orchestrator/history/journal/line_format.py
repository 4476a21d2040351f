"""The form of a journal's lines: the number of the format, the two checksums of each line, and the kinds of
events with their fields.

A line is one JSON object. From format 3 on it has `prev`, the checksum of the line before it in the attempt's
journal, and ends with `sum`, its own checksum: xxh3_64 of all bytes of the line before `,"sum":` (16 hex
digits). So a reader sees for each line by itself whether it is as it was written, and for two lines whether
one was written after the other. Later formats keep `sum` as it is; else a reader of this version could not
tell a line of a later format from a damaged one.

Lines of formats 1 and 2 have no checksum: they count as whole if they are JSON.

The names of kinds and fields are stored in the journals of runs, so they must not change. A journal may hold
kinds that this version does not have: readers keep such events by their text and skip them.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any, NamedTuple

import orjson
import xxhash

from orchestrator.errors import LaterFormatError, OrchestratorError, StorageError
from orchestrator.records.run_status import GroupChange

FORMAT = 3
WITHOUT_SUMS = (1, 2)  # lines of format 1 have no number
DAMAGED = "journal.damaged"  # the code of the error for a line that is not as it was written
FIRST = "0" * 16  # `prev` of an attempt's first line
_KEY = b',"sum":"'
_TAIL = len(_KEY) + 16 + len(b'"}')  # bytes of a line from `_KEY` on


class LaterLineError(StorageError):
    """A later version wrote the line: nothing is torn or damaged, and nothing was decided from it."""

    code = LaterFormatError.code


class DamagedLineError(OrchestratorError):
    """A line is not as it was written. The text says why, and names no file."""

    code = DAMAGED


class ParsedLine(NamedTuple):
    """A line that is as it was written.

    `sum` is its checksum (16 hex digits), also for a line without the field. `prev` is None for such a line.
    """

    fields: dict[str, Any]
    seq: int
    sum: str
    prev: str | None


def line_bytes(fields: dict[str, Any], prev: str) -> tuple[bytes, str]:
    """The line with these fields, line feed included, and its checksum.

    `prev` is the checksum of the line before it, `FIRST` for the first. `fields` are JSON values, `format`
    the first of them, and without `prev` and `sum`.
    """
    text = orjson.dumps({**fields, "prev": prev})
    found = xxhash.xxh3_64_hexdigest(text[:-1])
    return b"%b%b%b\"}\n" % (text[:-1], _KEY, found.encode()), found


def parse_line(text: bytes) -> ParsedLine:
    """Checks one line, without its line feed.

    Raises `DamagedLineError`, and `LaterLineError` (its text names no file) for a line of a later format.
    """
    has_sum = text[-_TAIL:-18] == _KEY
    found = xxhash.xxh3_64_hexdigest(text[:-_TAIL] if has_sum else text)
    if has_sum and text[-18:] != found.encode() + b'"}':
        raise DamagedLineError(f"its checksum is {found}, the line says {_shown(text[-18:-2])}")
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise DamagedLineError(f"it is no JSON: {error}") from error
    if type(fields) is not dict:
        raise DamagedLineError("it is no JSON object")
    number = fields.get("format", 1)
    if number != FORMAT or type(number) is not int or not has_sum:
        _require_known(number, has_sum)
    seq = fields.get("seq")
    if type(seq) is not int or seq < 1 or type(fields.get("kind")) is not str:
        raise DamagedLineError(f"its fields are seq {seq!r} and kind {fields.get('kind')!r}")
    fields.pop("sum", None)
    return ParsedLine(fields, seq, found, fields.pop("prev", None))


def _require_known(number: Any, has_sum: bool) -> None:
    """Checks the number of a line that is not of this format, or has no checksum."""
    if number == FORMAT and type(number) is int:
        raise DamagedLineError(f"it has format {FORMAT}, but does not end with its checksum")
    if type(number) is not int or number < 1:
        raise DamagedLineError(f"its format is {number!r}")
    if number in WITHOUT_SUMS and has_sum:
        raise DamagedLineError(f"it has a checksum, which lines of format {number} do not have")
    if number not in WITHOUT_SUMS:
        known = ", ".join(map(str, (*WITHOUT_SUMS, FORMAT)))
        raise LaterLineError(
            f"has format {number}, this version reads {known}; use the version that wrote it, or a later one"
        )


def first_line(data: bytes, path: str) -> ParsedLine | None:
    """The first line of a journal's beginning; None if it is incomplete or damaged.

    Raises `LaterLineError`, which names `path`.
    """
    text, end, _ = data.partition(b"\n")
    try:
        return parse_line(text) if end else None
    except LaterLineError as error:
        raise LaterLineError(f"{path} line 1 {error}") from error
    except DamagedLineError:
        return None


def _shown(text: bytes) -> str:
    return text.decode("ascii", "backslashreplace")


# ----------------------------------------------------------------------------------------------------- events
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
        "places",
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

    # ---- how the model is computed
    KERNELS = "kernels", "blocks", "attention"  # chosen on GPUs, or compiled

    # ---- evaluations
    EVALUATED = (
        *("evaluated", "generation", "step", "part", "loss", "perplexity", "targets", "samples"),
        *("per_source", "metrics", "seconds"),
    )

    # ---- metrics and losses
    NOT_FINITE = "not finite", "generation", "step", "part", "names"  # once in a generation

    # ---- callbacks
    CALLBACK_FAILED = "callback failed", "text"

    # ---- the data
    CURSOR = "cursor", "cursor"
    SOURCES = "sources", "counts", "tokens", "num_blocks", "weights"
    SAMPLES_SKIPPED = "samples skipped", "point", "samples", "tokens", "first_index", "setting"  # on purpose
    SOURCES_CHANGED = "sources changed", "changes", "text"
    BAD_DOCUMENT = "bad document", "text", "source", "file", "place", "why"
    ENCODERS_DIFFER = "encoders differ", "text"
