"""Frozen values that cross a process border or lie in storage: the words the stages use to speak to each
other.

It knows no stage, no Ray, no torch. Everything that is written to storage has `to_json` / `from_json` through
`encode` and `decode` below, which refuse unknown and missing fields.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from orchestrator.errors import OrchestratorError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Record = TypeVar("Record")


def encode(value: Any) -> Any:
    """`value` (a dataclass of this module, nested) as plain JSON types. Arrays are refused: they do not go
    into JSON.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    assert value is None or isinstance(value, (bool, int, float, str)), f"{type(value)} has no JSON form"
    return value


def decode(kind: type[Record], value: Any, where: str = "") -> Record:
    """The inverse of `encode` for the dataclass `kind`. Raises `OrchestratorError` naming the field that is
    missing or unknown.
    """
    if not isinstance(value, Mapping):
        raise OrchestratorError(f"{where or kind.__name__}: expected an object, found {type(value).__name__}")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - set(known))
    missing = sorted(
        name
        for name, f in known.items()
        if name not in value and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise OrchestratorError(
            f"{where or kind.__name__}: unknown fields {unknown}, missing fields {missing}; was it written "
            "by another version?"
        )
    return kind(
        **{name: _decode(hints[name], v, f"{where or kind.__name__}.{name}") for name, v in value.items()}
    )


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast(type, hint), value, where)
    if origin is tuple:
        inner = args if len(args) != 2 or args[1] is not Ellipsis else (args[0],) * len(value)
        return tuple(_decode(a, v, where) for a, v in zip(inner, value, strict=True))
    if origin is dict:
        return {str(k): _decode(args[1], v, where) for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, float, bool) and type(value) is not hint:
        raise OrchestratorError(f"{where}: expected {hint.__name__}, found {value!r}")
    return value


# ------------------------------------------------------------ state and points
@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StateKey:
    """Identity of one training state, ordered: (attempt, generation in which its holder last agreed on state,
    step).
    """

    attempt: int
    generation: int
    step: int

    @property
    def point_name(self) -> str:
        """The name of the resume point of this state, e.g. `00000480-a0003-g0007`."""
        return f"{self.step:08d}-a{self.attempt:04d}-g{self.generation:04d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceCursor:
    """Where one source's next input token lies, in normal form (DATA.md rule 2), and what was passed on the
    way.

    `block` is the position in the epoch's order, `window` counts within the block, `record` is the position
    in the window's order, `token` counts within the piece. `prefix_digest` is the xxh3_64 (16 hex digits) of
    the piece's earlier `token` tokens as little-endian int32: a resume that does not reproduce them is
    refused. Counts rise when the cursor passes a record.
    """

    epoch: int = 0
    block: int = 0
    window: int = 0
    record: int = 0
    output: int = 0
    piece: int = 0
    token: int = 0
    prefix_digest: str = ""
    documents: int = 0
    empty_documents: int = 0
    bad_documents: int = 0
    special_texts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The run's place in its data. `consumed_tokens` counts positions that had a real input token; for
    `concat` it equals `target_tokens`.
    """

    consumed_samples: int = 0
    consumed_tokens: int = 0
    target_tokens: int = 0
    sources: dict[str, SourceCursor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step as the journal keeps it. Counts are after the step; `loss` is the mean over the
    step's target tokens (nats); `digest` is the sum modulo 2^64 of the trained samples' digests (16 hex
    digits).
    """

    attempt: int
    generation: int
    step: int
    consumed_samples: int
    consumed_tokens: int
    target_tokens: int
    loss: float
    grad_norm: float
    lr: float
    digest: str
    step_s: float
    data_wait_s: float
    save_blocked_s: float

    @property
    def key(self) -> StateKey:
        """Which state this step produced."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)


# ------------------------------------------------------------ data
@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTask:
    """What a slot of the pipeline is: read this block of this source from window `window` on, skipping what
    lies before the cursor.
    """

    source: str
    epoch: int
    block: int
    window: int = 0
    record: int = 0
    piece: int = 0


# kinds of entries in a TokenChunk
PIECE, EMPTY, BAD = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Consecutive pieces of one window, tokenized, in order: at most about 1 M tokens.

    The entry arrays have one item per piece, empty document or bad document. `last_piece[i]` is 1 where entry
    i ends its document.
    """

    source: str
    epoch: int
    block: int
    window: int
    tokens: Int32Array  # (num_tokens,) all pieces one behind the other, BOS/EOS included
    record: Int32Array  # (num_entries,) position of the record in the window's order
    piece: Int32Array  # (num_entries,) number of the piece in its document
    num_tokens: Int32Array  # (num_entries,)
    kind: Int32Array  # (num_entries,) PIECE, EMPTY or BAD
    last_piece: Int32Array  # (num_entries,)
    special_texts: Int32Array  # (num_entries,) special tokens written out in the text
    file: Int32Array  # (num_entries,) number of the record's file in the manifest
    place: Int64Array  # (num_entries,) byte offset of the record in it, in a Parquet file the row
    bad_reasons: tuple[str, ...] = ()  # one per BAD entry: file, byte offset, line, reason
    encoder_differences: tuple[
        str, ...
    ] = ()  # documents that the two libraries encoded differently (journalled)
    ends_window: bool
    ends_block: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRange:
    """Which samples a step trains: [first_sample, first_sample + num_samples), holding `num_tokens`
    positions, all of them full but possibly the last sample, which is shortened (and padded) where a token
    budget is no multiple of seq_len.
    """

    first_sample: int
    num_samples: int
    num_tokens: int
    seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlice:
    """One rank's share of one step: samples [start, stop) as contiguous token runs, and what holds for the
    whole step.

    `step` says what the step really trains: fewer samples than asked for where the data ends (0: there is no
    more).
    """

    step: StepRange
    start: int
    stop: int
    source_numbers: Int32Array  # (stop - start,)
    input_ids: Int32Array  # (stop - start, seq_len)
    labels: Int32Array  # (stop - start, seq_len), -100 = no loss
    document_ids: Int32Array  # (stop - start, seq_len), -1 = padding
    step_targets: int  # target tokens of the whole step
    step_digest: int  # unsigned 64 bit, of the whole step, as the feed computed it
    cursor: Cursor  # after the step
    end_of_data: bool  # nothing follows this step


# ------------------------------------------------------------ points
@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of a point: path relative to the point's folder, size, blake3 of its bytes (64 hex digits)."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorChunk:
    """Where a box of a tensor lies: `offsets` and `sizes` in the whole tensor, `file` relative to the point,
    `digest` (blake3) of its bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of a point under its `name` (also its key in the safetensors file); `group` is `model` or
    `optimizer`.
    """

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One rank's word that its part of the save of `key` is written and synced. All ranks' votes of one save
    agree in all but rank, files, tensors.
    """

    key: StateKey
    rank: int
    world_size: int
    cursor: Cursor
    optimizer_steps: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    save_blocked_s: float
    records: tuple[StepRecord, ...]  # the voter's unacknowledged step records


# ------------------------------------------------------------ membership
@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A member asks to be in the next generation. `key` is its state's key, None when blank.

    `leaves` is the (attempt, generation) it was in, None for a newcomer. `prepared` is the key of the step
    that it had entered the word of without learning the result (its reduced gradient is kept): `StateKey(step
    = key.step + 1)` in the generation it leaves.
    """

    member: str
    launch: str
    actor_id: str
    node_id: str
    host: str
    port: int
    key: StateKey | None
    leaves: tuple[int, int] | None
    prepared: StateKey | None
    cursor: Cursor | None
    records: tuple[StepRecord, ...] = ()
    reason: str = ""
    pid: int = 0  # of the member's process, so that its node's agent can kill it when it is left out
    idle_s: float = 0.0  # how long ago its last step was done when it asked; 0 for a newcomer
    unreached: tuple[str, ...] = ()  # members whose ports it tried in vain, when its last view said `probe`


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationView:
    """One membership of the training group, as one member sees it. `parent` is the state or point it
    continues (None: from nothing).

    `source_rank` holds the parent's state in memory (None: everybody loads `point`, or builds the initial
    state when that is None too). A member whose own key equals the parent, or that is `prepared` for exactly
    that step, needs no copy.
    """

    attempt: int
    generation: int
    rank: int
    world_size: int
    members: tuple[str, ...]
    host: str  # of rank 0's store
    port: int
    parent: StateKey | None
    source_rank: int | None
    point: str | None
    cursor: Cursor | None
    step: int  # the label of the last step done
    launch: str
    # not empty: form nothing, but try these (host, port) of all members, by rank, and join again
    probe: tuple[tuple[str, int], ...] = ()


# What a member is doing, as far as others may have to wait for it, and for how many seconds they do: a save
# or a load may take longer than a rendezvous waits for the silent (MEMBERSHIP.md rule 23).
STEP, LOAD, FEED_WAIT, SAVE_WAIT = "step", "load", "feed wait", "save wait"
BETWEEN = "between steps"  # a step was finished just now
PHASE_LIMITS_S = {STEP: 0.0, BETWEEN: 0.0, LOAD: 900.0, FEED_WAIT: 900.0, SAVE_WAIT: 900.0}

# control bits that rank 0 adds to the word of a step
SAVE, STOP, REFORM = 1, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the coordinator wants of a running generation. `ended`: this generation is over (also: not one of
    mine, join again).
    """

    ended: bool
    save: bool
    stop: bool
    reform: bool
    acknowledged_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The coordinator's answer to a member that may not take part: it exits."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOver:
    """The coordinator's answer to a member that joins when the run has ended: it leaves."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberInfo:
    """Where a member lives, for whoever has to kill it or to ask whether it lives."""

    member: str
    actor_id: str  # Ray's, "" outside it
    node_id: str
    pid: int
    host: str = ""  # its address; "" where an older version did not note it


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupMember:
    """A worker as people name it: its rank in the newest generation that it was in (None: in none yet), its
    host's address ("": not known) and its process (0: not known).
    """

    rank: int | None
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """A worker that ended without having been asked to, and why."""

    worker: GroupMember
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupChange:
    """How a generation differs from the one before it: who was lost, who came, how long nobody trained.

    `wanted`: how many workers the launch aims at. `step` is the label of the last step done, `step_before` of
    the newest that was known to be done before: if that is greater, the steps between are trained again.
    `paused_s` counts from the newest finished step to the forming; None where nobody trained before. `reason`
    says why the generation before ended, as a survivor saw it ("": nobody trained before). `restarted`: by a
    coordinator that was restarted.
    """

    attempt: int
    generation: int
    world_size: int
    wanted: int
    step: int
    step_before: int
    lost: tuple[Loss, ...]
    joined: tuple[GroupMember, ...]
    paused_s: float | None
    reason: str
    restarted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A worker of a group that stands still. `state`: what its process does (`machine.process_state`); None:
    its node's agent did not answer.
    """

    worker: GroupMember
    state: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Nobody finished a step for `quiet_s`; `median_s` is the usual step. `held`: all workers, looked at."""

    quiet_s: float
    median_s: float
    held: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What the coordinator tells the supervisor: counts, the last step, the newest committed point, and how
    the run ended if it did. `warnings` and `changes` are for the user to hear of, each given once.

    `ended` is None while it runs, else `done`, `stopped` or `failed`; `reason` says why. `version` changes
    whenever anything else does.
    """

    version: int
    attempt: int
    generation: int
    world_size: int
    last_step: StepRecord | None
    newest_point: str | None
    committed: Cursor  # of that point, zeros without one
    waiting_since: float | None  # seconds that the run has been below its minimum
    ended: str | None
    reason: str
    left_out: tuple[MemberInfo, ...]
    members: tuple[MemberInfo, ...]  # by rank
    failures: tuple[tuple[int, str], ...]  # (step, what) of every failure of this launch
    warnings: tuple[str, ...] = ()  # since the status before: saves given up, damage found
    changes: tuple[GroupChange, ...] = ()  # since the status before: generations that were formed
    lost: tuple[Loss, ...] = ()  # since the newest generation was formed
