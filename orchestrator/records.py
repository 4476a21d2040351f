"""Frozen values that cross a process border or lie in storage: what the stages exchange.

It knows no stage, no Ray, no torch. What is written to storage goes through `json_form`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
else:  # who reads a run needs no numpy, which takes 0.1 s to load

    def __getattr__(name: str) -> Any:
        kinds = {"Int32Array": "int32", "Int64Array": "int64", "BoolArray": "bool_"}
        if name not in kinds:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy

        return numpy.typing.NDArray[getattr(numpy, kinds[name])]


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
    """Where one source's next input token lies, in normal form (data rule 2), and what was passed on the
    way.

    `block` is the position in the epoch's order, `window` counts within the block, `record` is the position
    in the window's order, `token` counts within the piece. `prefix_digest` is the xxh3_64 (16 hex digits) of
    the piece's earlier `token` tokens as little-endian int32: a resume that does not reproduce them is
    refused. `earlier_tokens` and `earlier_digest` say the same of the document's earlier pieces (0 and empty
    in its first piece, and in cursors of versions that did not know them). Counts rise when the cursor passes
    a record.

    Under `pack.mode: bestfit` and `pad` it names the begin of a window (record, piece and token are 0) and
    how many of that window's packs were taken: `packs`, of `pack_seq_len` positions each (0 where none was),
    whose tokens have digest `prefix_digest`. Counts rise when all packs of the window are taken.
    `unpacked_documents` had no target, `long_documents` were longer than a sample and skipped.

    A record may give several documents (`data.transforms`): `output` is the number of the one at hand, and
    counts are of documents as they come out. `filtered_documents` are those that a transform dropped,
    `held_out_documents` the records of `data.holdout`.
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
    earlier_tokens: int = 0
    earlier_digest: str = ""
    packs: int = 0
    pack_seq_len: int = 0
    unpacked_documents: int = 0
    long_documents: int = 0
    filtered_documents: int = 0
    held_out_documents: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureShare:
    """One source's share in a mixture (`planning.mixture`): its weight as a whole number (0: it was taken
    away), the units charged to it since the weights or the live sources last changed, and the limit of epochs
    at which it ended (0: it is live). `samples` and `tokens` (positions) are all that was drawn from it.
    """

    weight: int
    count: int = 0
    ended: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """The run's place in its data. `consumed_samples` counts those that were trained, `skipped_samples` those
    that were drawn and not trained (`resume.data: skip`): a sample's index is the number of samples drawn
    before it. `consumed_tokens` counts positions that had a real input token, under `pack.mode: bestfit` and
    `pad` all positions of a sample; `target_tokens` those with a label. `skipped_tokens` are the positions of
    the skipped samples. `mixture` is empty for one source.
    """

    consumed_samples: int = 0
    consumed_tokens: int = 0
    target_tokens: int = 0
    sources: dict[str, SourceCursor] = field(default_factory=dict)
    skipped_samples: int = 0
    mixture: dict[str, MixtureShare] = field(default_factory=dict)
    skipped_tokens: int = 0

    @property
    def drawn_samples(self) -> int:
        """Samples drawn so far on the lineage: the index of the next one (data rule 3)."""
        return self.consumed_samples + self.skipped_samples

    def drawn_from(self, sources: tuple[str, ...]) -> dict[str, tuple[int, int]]:
        """(samples, positions) drawn from each of these sources, all that the run has had."""
        if not self.mixture and len(self.sources) <= 1:
            only = next(iter(self.sources), sources[0])  # others come in now
            drawn = self.drawn_samples, self.consumed_tokens + self.skipped_tokens
            return {name: drawn if name == only else (0, 0) for name in sources}
        none = MixtureShare(weight=0)
        shares = {name: self.mixture.get(name, none) for name in sources}
        return {name: (share.samples, share.tokens) for name, share in shares.items()}

    def agrees_with(self, other: Cursor) -> bool:
        """Whether both are one place with one history, as far as both know: a cursor without the digest of
        the document's earlier pieces says nothing of them.
        """
        mine, others = {**self.sources}, {**other.sources}
        for name in mine.keys() & others.keys():
            if not (mine[name].earlier_digest and others[name].earlier_digest):
                for each in (mine, others):
                    each[name] = dataclasses.replace(each[name], earlier_tokens=0, earlier_digest="")
        return dataclasses.replace(self, sources=mine) == dataclasses.replace(other, sources=others)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step as the journal keeps it. Counts are after the step; `loss` is the mean over the
    step's target tokens (nats); `digest` is the sum modulo 2^64 of the trained samples' digests (16 hex
    digits). `ended` is when the step was applied, in seconds since 1970 (UTC) by the clock of the rank that
    brought the record, which is rank 0 unless that died. `peak_memory_bytes` is the most that a rank's
    process had taken by then (`trainer.peak_memory`). Both are None in records written before they were
    noted.
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
    ended: float | None = None
    peak_memory_bytes: int | None = None

    @property
    def key(self) -> StateKey:
        """Which state this step produced."""
        return StateKey(attempt=self.attempt, generation=self.generation, step=self.step)


# ------------------------------------------------------------ data
@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTask:
    """What a slot of the pipeline is: window `window` of this block of this source, from `record`, `output`
    and `piece` on: what lies before was trained. A stream in one process reads on to the block's end.
    """

    source: str
    epoch: int
    block: int
    window: int = 0
    record: int = 0
    piece: int = 0
    output: int = 0


# kinds of entries in a TokenChunk
PIECE, EMPTY, BAD, FILTERED, HELD_OUT = 0, 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Consecutive pieces of one window, tokenized, in order: at most about 1 M tokens.

    The entry arrays have one item per piece, and per document of which there is none: empty, bad, dropped by
    a transform, held out. `last_piece[i]` is 1 where entry i ends its document.
    """

    source: str
    epoch: int
    block: int
    window: int
    tokens: Int32Array  # (num_tokens,) all pieces one after the other, BOS/EOS included
    record: Int32Array  # (num_entries,) position of the record in the window's order
    piece: Int32Array  # (num_entries,) number of the piece in its document
    num_tokens: Int32Array  # (num_entries,)
    kind: Int32Array  # (num_entries,) PIECE, EMPTY, BAD, FILTERED or HELD_OUT
    last_piece: Int32Array  # (num_entries,)
    special_texts: Int32Array  # (num_entries,) special tokens written out in the text
    file: Int32Array  # (num_entries,) number of the record's file in the manifest
    place: Int64Array  # (num_entries,) byte offset of the record in it, in a Parquet file the row
    loss: BoolArray | None = None  # (num_tokens,) False: the token is no target; None: all are
    # (num_entries,) number of the document among those that its record gives; None: each gives one
    output: Int32Array | None = None
    bad_reasons: tuple[str, ...] = ()  # one per BAD entry: file, byte offset, line, reason
    encoder_differences: tuple[
        str, ...
    ] = ()  # documents that the two libraries encoded differently (journalled)
    ends_window: bool
    ends_block: bool

    @property
    def outputs(self) -> Int32Array:
        """(num_entries,) `output`, also where each record gives one document."""
        return self.record * 0 if self.output is None else self.output

    def output_of(self, entry: int) -> int:
        """The same of one entry."""
        return 0 if self.output is None else int(self.output[entry])


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

    def __reduce__(self) -> tuple[Callable[..., StepRange], tuple[int, int, int, int]]:
        # they are sent by the dozen, and a dataclass with slots finds its fields anew for each
        return _step_range, (self.first_sample, self.num_samples, self.num_tokens, self.seq_len)


def _step_range(first_sample: int, num_samples: int, num_tokens: int, seq_len: int) -> StepRange:
    return StepRange(
        first_sample=first_sample, num_samples=num_samples, num_tokens=num_tokens, seq_len=seq_len
    )


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

    @property
    def first_index(self) -> int:
        """Index of its first sample: `start` counts the trained ones alone."""
        return self.start + self.cursor.skipped_samples


# ------------------------------------------------------------ points
@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of a point: path relative to the point's folder, size, blake3 of its bytes (64 hex digits); of a
    rank's part blake3 of its header, which guards the rest (`parts.part_file`).
    """

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """A folder on the disk of one node, in which parts of points lie (`resume.node_folder`): `id` is what the
    folder's own node.json says (32 hex digits), `folder` its absolute path there. Host and address are for
    people.
    """

    id: str
    host: str
    address: str
    folder: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """Whose parts of a point lie on a node: the ranks that `wrote` theirs there, and those of which it has
    `copies`.
    """

    node: NodePlace
    wrote: tuple[int, ...]
    copies: tuple[int, ...]


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
    """A tensor of a point of format 1 under its `name` (also its key in the safetensors file); `group` is
    `model` or `optimizer`.
    """

    name: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor of a point of format 2 as a whole: which rows of it lie in which file follows from the layout
    of the save (`planning.state_layout`). `sharded`: its rows are divided among the shards. `dtype` is
    torch's name.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One rank's statement that its part of the save of `key` is written and synced. All ranks' votes of one
    save agree in all but rank, files, sums, tensors.

    `files` is the one file of this rank (`parts.part_file`), `layout` is (num_shards, num_replicas), `sums`
    says to each group the sum of the rows in that file (`planning.weights_sum`). Rank 0 alone lists the
    tensors of the whole state, in the order by which `planning.state_layout` divides them. `part_s`: from the
    begin of the save to this vote. `nodes` are those on whose disks the file lies, the rank's own first;
    empty where it lies in the run's storage.
    """

    key: StateKey
    rank: int
    world_size: int
    cursor: Cursor
    optimizer_steps: int
    files: tuple[FileEntry, ...]
    tensors: tuple[SavedTensor, ...]
    save_blocked_s: float
    records: tuple[StepRecord, ...]  # the voter's unacknowledged step records
    peak_memory_bytes: int = 0  # of the voter's process so far (`trainer.peak_memory`); 0: not known
    layout: tuple[int, int] | None = None
    part_s: float = 0.0
    sums: dict[str, int] = field(default_factory=dict)
    nodes: tuple[NodePlace, ...] = ()


# ------------------------------------------------------------ membership
class Source(IntEnum):
    """Where a member has a shard of a state, the one that is given first of two: what needs no further copy,
    then what lies in its own memory, then what it keeps for a neighbour.
    """

    LIVE = 0  # the tensors that it trains
    PREPARED = 1  # as good as live where another member is (membership rules 3 and 5): the state before with
    # the reduced gradient of this step, or rows that came when a generation was about to agree on its state
    STAGED = 2  # its own memory point
    NEIGHBOUR = 3  # a neighbour's memory point


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldShard:
    """A member can give shard `shard` of the `num_shards` of the state `key`; under replicate there is one.

    Only a whole copy is one: it is taken off the member's list before its first byte is overwritten, and put
    on it after the last byte has come and was verified. `cursor` is that of the state; None where it is not
    known, as with a prepared step.
    """

    key: StateKey
    shard: int
    num_shards: int
    source: Source
    cursor: Cursor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSource:
    """A member of the group that can give a shard of the parent's state, and where it has it."""

    rank: int
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberState:
    """What a member brings when it joins.

    `key`, `cursor`: the state it trains (None: blank). `leaves`: (attempt, generation) it was in, None at
    first. `prepared`: the step whose summary it waited for. `saving`: the newest save that it began and did
    not report as failed: its vote or its report may be still to come, and until then it may be writing its
    part; every older one is settled so. `records`: all that were not acknowledged. `reason`: why the last
    generation ended, for the journal. `holdings`: all that it can give, the state it trains included; empty:
    nothing but the whole of that.
    """

    key: StateKey | None
    cursor: Cursor | None
    leaves: tuple[int, int] | None
    prepared: StateKey | None
    saving: StateKey | None
    records: tuple[StepRecord, ...]
    reason: str
    holdings: tuple[HeldShard, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinRequest:
    """A member asks to be in the next generation. `key` is its state's key, None when blank.

    `leaves` is the (attempt, generation) it was in, None for a newcomer. `prepared` is the key of the step
    that it had entered the summary of without learning the result (its reduced gradient is kept):
    `StateKey(step = key.step + 1)` in the generation it leaves. `holdings`: see `MemberState`.
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
    saving: StateKey | None = None  # see `MemberState`
    holdings: tuple[HeldShard, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationView:
    """One membership of the training group, as one member sees it. `parent` is the state or point it
    continues (None: from nothing).

    `source_rank` holds the parent's state in memory (None: everybody loads `point`, or builds the initial
    state when that is None too). A member whose own key equals the parent, or that is `prepared` for exactly
    that step, holds its shard of the parent.

    `sources[s]` are all who can give shard s of the parent, `Source` by `Source`, of len(sources) shards;
    empty where `source_rank` is None. `keep` is a memory point that is complete among the members: its copies
    are not to be overwritten before a newer one is whole on every rank. `nodes[rank]` is a number
    for the node of each rank, `own_host` the host under which the others reach this member.
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
    sources: tuple[tuple[ShardSource, ...], ...] = ()
    keep: StateKey | None = None
    nodes: tuple[int, ...] = ()
    own_host: str = ""


# What a member is doing, as far as others may have to wait for it, and for how many seconds they do: a save
# or a load may take longer than a rendezvous waits for the unresponsive (membership rule 23).
STEP, FORMING, LOAD, FEED_WAIT, SAVE_WAIT = "step", "forming", "load", "feed wait", "save wait"
BETWEEN = "between steps"  # a step was finished just now
# it has heard that its generation is over and is still in a step (it computes, or compiles, or waits for
# NCCL); it says itself how long that may take
ENDING = "ending a step"
# a group forms in four steps (store, rendezvous, process group, comparison) of at most 10 s each
PHASE_LIMITS_S = {STEP: 0.0, BETWEEN: 0.0, FORMING: 45.0, LOAD: 900.0, FEED_WAIT: 900.0, SAVE_WAIT: 900.0}

# control bits that rank 0 adds to the summary of a step
SAVE, STOP, REFORM = 1, 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRequests:
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
class StillWaiting:
    """The coordinator's answer to a call that it cannot answer yet: it lives, ask again."""


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
    `paused_s` counts from the newest step that the generation before finished, else from when that one was
    formed, to the forming; None where nobody trained before. `reason` says why the generation before ended,
    as a survivor saw it ("": nobody trained before). `restarted`: by a coordinator that was restarted.
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
    """A worker of a group that stands still. `state`: what its process does
    (`cluster.machine.process_state`); None: its node's agent did not answer.
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
    """What the coordinator reports to the supervisor: counts, the last step, the newest committed point, and
    how the run ended if it did. `warnings` are texts for the user, each reported once.

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
    warnings: tuple[str, ...] = ()  # saves given up, damage found, trouble with storage
    stopping: bool = False
    changes: tuple[GroupChange, ...] = ()  # generations that were formed
    lost: tuple[Loss, ...] = ()  # since the newest generation was formed
    notices: tuple[str, ...] = ()  # what else the user must hear: who asked for a save or a stop
    pid: int = 0  # of the coordinator's process
