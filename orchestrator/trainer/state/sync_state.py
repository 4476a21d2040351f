"""Synchronizes the state at the start of a generation (membership rules 1 to 5, 19).

It decides which members keep their own state, which receive rows from others, and which load a point. The
view defines the members and the parent state. Members that hold the same rows of a point each read and verify
a part of them, and send each other the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blake3 import blake3
from torch import Tensor

from orchestrator.checkpoint.files.manifest import PartDamage, damaged
from orchestrator.checkpoint.files.reading import FilePiece, PointReader
from orchestrator.errors import ConfigError, OrchestratorError, ResumePointError, StorageError, TrainingError
from orchestrator.faults import Hook
from orchestrator.planning.state.state_layout import Layout, Move, even_runs, readers_with, weights_sum
from orchestrator.records.cursor import Cursor
from orchestrator.records.membership import GenerationView
from orchestrator.records.points import Damage, DamagedPointError, damaged_point
from orchestrator.records.steps import StateKey
from orchestrator.trainer.comm.group import GenerationEnded, Group, collective
from orchestrator.trainer.comm.reshard import DigestError, Parcel, Resharding, exchange, tensor_as_bytes
from orchestrator.trainer.state.train_state import TrainState
from orchestrator.trainer.weights.state_tensors import (
    Continues,
    Item,
    StateFiles,
    begin_anew,
    digest_of,
    point_reader,
    share_sum,
    wanted_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A step whose every collective but the summary succeeded, with its whole gradient in `.grad`.

    `key` is that of the resulting state. `num_units` counts the units of loss of the whole step.
    """

    key: StateKey
    cursor: Cursor
    lr: float
    num_units: float


def apply_prepared(state: TrainState, prepared: Prepared, is_skipped: bool = False) -> None:
    """Applies the step: afterwards `state` is the one that `prepared` names.

    A step that is skipped moves neither weights nor optimizer (`planning.loss_policy`).
    """
    state.apply(prepared.lr, 0 if is_skipped else prepared.num_units)
    state.key, state.cursor = prepared.key, prepared.cursor


def settle(state: TrainState, view: GenerationView, prepared: Prepared | None) -> bool:
    """Whether this member holds the parent's state without receiving data.

    If needed, it applies its prepared step, or takes the rows that it had received when the previous
    generation ended. Needs no collective, because the view was made after it was decided that these belong to
    the history.
    """
    state.take_received(view.parent)
    if prepared is not None and prepared.key == view.parent:
        apply_prepared(state, prepared, view.losses is not None and view.losses.is_skipped)
    holds = view.parent is not None and state.key == view.parent
    if holds and view.cursor is not None and state.cursor != view.cursor:
        raise TrainingError(
            f"this rank has the state {view.parent} at {state.cursor}, but generation {view.generation} "
            f"continues it at {view.cursor}; start again from the newest resume point",
            code="training.cursors_differ",
        )
    return holds


class MemoryCopies(Protocol):
    """Shards of older states that this member keeps in memory besides the one it trains."""

    def copy_of(self, key: StateKey, shard: int) -> Sequence[Tensor]:
        """Returns the bytes of each tensor of a shard that this member has listed as held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSources:
    """Where rows that no member trains are read from.

    `files` are those of a point. `copies`: the memory points of this member, if it keeps any. `loading` as in
    `load_together`. `reset_optimizer`: a point of another optimizer is continued without its state.
    """

    files: StateFiles
    copies: MemoryCopies | None = None
    loading: Loading = lambda done_bytes, num_bytes: None
    reset_optimizer: bool = False


def sync_state(
    group: Group,
    state: TrainState,
    config_digest: str,
    prepared: Prepared | None,
    sources: StateSources,
    faults: Hook,
    warm: bool,
) -> bool:
    """Gives all members their rows of the parent's state, under this generation's key.

    The key is (attempt, generation, label).

    `warm`: this member has done a step before. Returns whether all members have.

    Raises `GenerationEnded` if a collective fails or a copy differs from its source. The member then keeps
    its previous key and tensors, or is blank if it was about to receive into these tensors. Raises
    `ResumePointError` if the point is damaged and `StorageError` if it cannot be read, on every rank,
    whichever rank found it.
    """
    view = group.view
    holds = settle(state, view, prepared)
    num_shards = state.layout_on(view.world_size).num_shards
    rows = group.compare(config_digest, num_shards, [int(holds), int(holds and state.committed)])
    state.form(group)
    state.fixed = _fixed_digests(group, state)
    if view.source_rank is not None:
        _check_holders(view, [bool(row[0]) for row in rows])
        committed = any(row[1] for row in rows)
        _receive(group, state, holds, sources.copies, faults)
    else:
        committed = view.point is not None
        # a member that holds a shard here holds one of a state that cannot be put together
        needy = [rank for rank, row in enumerate(rows) if state.sharded or not row[0]]
        _from_storage(group, state, needy, sources, faults)
    key = StateKey(attempt=view.attempt, generation=view.generation, step=view.step)
    cursor = state.cursor if view.cursor is None else view.cursor
    # A member that fails before this point still has its old key, or none, and learns from the next view what
    # to do. As with a step's summary, other members may get past this point and drop what they had.
    state.received(key, cursor, committed)
    warms = group.gather([int(warm)], "agreeing on the state")
    faults("state_agreed", view.step, view.rank)
    state.formed()
    state.key, state.cursor, state.committed = key, cursor, committed
    return all(row[0] for row in warms)


_LIMBS = range(0, 128, 32)  # of a sum of rows


def _fixed_digests(group: Group, state: TrainState) -> Mapping[str, str]:
    """Reads the weights that the state is trained with and does not contain, and returns their digests.

    This is a collective. Raises `ConfigError` if the replicas have read different weights, and the error of a
    rank that could not read its rows. Raises `ConfigError` also if they are others than in the generation
    before.
    """
    if not state.has_fixed:
        return {}
    sums = dict[str, int]()
    problem: OrchestratorError | None = None
    try:
        sums = dict(state.fixed_sums())
    except TOGETHER as error:
        problem = error
    raise_together(group, problem)
    limbs = [total >> at & 0xFFFFFFFF for total in sums.values() for at in _LIMBS]
    rows = group.gather(limbs, "comparing the weights that are not trained")
    found = dict[str, str]()
    for number, name in enumerate(sums):
        of_ranks = [
            sum(row[number * len(_LIMBS) + limb] << at for limb, at in enumerate(_LIMBS)) for row in rows
        ]
        size = state.layout.num_shards
        digests = [weights_sum(of_ranks[first : first + size]) for first in range(0, len(rows), size)]
        for replica, digest in enumerate(digests):
            if digest != digests[0]:
                raise ConfigError(
                    f"{name}: rank {replica * size} reads weights with digest {digest}, rank 0 with "
                    f"{digests[0]}; its folder must hold the same files on all machines",
                    code="weights.differ",
                )
        found[name] = digests[0]
    changed = [name for name, digest in found.items() if state.fixed.get(name, digest) != digest]
    problem = None
    if changed:
        problem = ConfigError(
            f"{changed[0]}: the weights there have digest {found[changed[0]]}, and had "
            f"{state.fixed[changed[0]]} when this run read them before; put the files back",
            code="weights.changed",
        )
    raise_together(group, problem)
    return found


def own_shard(view: GenerationView) -> int | None:
    """Returns the shard of the parent that this member trains, or None."""
    for shard, sources in enumerate(view.sources):
        if any(s.rank == view.rank and s.source.is_own for s in sources):
            return shard
    return None


def _check_holders(view: GenerationView, holds: Sequence[bool]) -> None:
    """Checks that the members hold what the view expects of them."""
    live = {s.rank for of_one in view.sources for s in of_one if s.source.is_own}
    for rank, found in enumerate(holds):
        if found != (rank in live):
            raise GenerationEnded(
                f"rank {rank} should {'' if rank in live else 'not '}hold {view.parent}, but does"
                f"{'' if found else ' not'}"
            )


def _from_storage(
    group: Group,
    state: TrainState,
    needy: Sequence[int],
    sources: StateSources,
    faults: Hook,
) -> None:
    view = group.view
    blank = view.rank in needy
    if blank:
        state.key = None
        state.writable()
    if view.point is not None:
        half = _half(view, faults)
        load_together(
            group,
            state.items(),
            state.layout,
            needy,
            view.point,
            sources.files,
            half,
            sources.loading,
            Continues(reset_optimizer=sources.reset_optimizer, fixed=state.fixed),
        )
        if blank:
            state.filled()
    elif blank:
        state.initialise()
        # the old one is of a member that trained before and lost its part of the state
        state.cursor = Cursor()


def _half(view: GenerationView, faults: Hook) -> Callable[[bool], None]:
    def half(gives: bool) -> None:
        faults("state_half_sent" if gives else "state_half_received", view.step, view.rank)

    return half


def _receive(group: Group, state: TrainState, holds: bool, copies: MemoryCopies | None, faults: Hook) -> None:
    """Moves rows of the parent's state from the members that hold them to those that need them."""
    view = group.view
    state.writable()
    live, before = own_shard(view), state.before()
    if not (holds or state.sharded):
        state.key = None  # blank from the first byte until the digests have been compared

    def old(shard: int) -> Sequence[Tensor]:
        if shard == live:
            assert before is not None, f"rank {view.rank} trains {view.parent}"
            return [tensor_as_bytes(item.tensor) for item in before[2]]
        assert copies is not None, f"rank {view.rank} keeps {view.parent}"
        assert view.parent is not None, "a member that gives rows has a state"
        return copies.copy_of(view.parent, shard)

    items = state.items()
    moving = Resharding(
        tensors=[item.whole for item in items],
        holders=[sorted({source.rank for source in sources}) for sources in view.sources],
        layout=state.layout,
        rank=view.rank,
        half=_half(view, faults),
    )
    new = [tensor_as_bytes(item.tensor) for item in items]
    faults("resharding", view.step, view.rank)
    try:
        with collective("moving the state"):
            moving.carry_out(group, old, new)
    except DigestError as error:
        raise GenerationEnded(str(error)) from error
    if not holds or state.sharded:
        state.filled()


def group_digest(group: Group, state: TrainState) -> str | None:
    """Returns the digest of a group's weights, however its state is divided.

    None on a rank that does not need it. Every rank must call it: of a sharded state each rank contributes
    the sum of its rows. Raises `GenerationEnded` as a collective does.
    """
    rank = group.view.rank
    if state.sharded:
        own = share_sum(state.items(), state.layout, rank)
        rows = group.gather([own >> at & 0xFFFFFFFF for at in range(0, 160, 32)], "a digest of the weights")
        sums = [sum(part << 32 * number for number, part in enumerate(row)) for row in rows]
        return weights_sum(sums)
    return digest_of(state.items()) if rank == 0 else None


# ----------------------------------------------------------------------------------- loading a point together
# The errors of one member that all members raise. If there are several kinds, the first one listed here is
# raised.
TOGETHER = (DamagedPointError, ResumePointError, ConfigError, StorageError)
_TEXT_BYTES = 2000

Loading = Callable[[int, int], None]  # bytes read so far, and bytes to read in total


def load_together(
    group: Group,
    items: Sequence[Item],
    layout: Layout,
    needy: Sequence[int],
    point: str,
    files: StateFiles,
    half: Callable[[bool], None],
    loading: Loading = lambda done_bytes, num_bytes: None,
    how: Continues = Continues(),  # noqa: B008  frozen
) -> None:
    """Fills the `items` of the ranks `needy` with their rows of a point, as `state_tensors.load` does.

    This is a collective: every rank of the group must call it. `TrainState.filled` must be called afterwards.

    The members of one shard that read their files remotely each read one part of its pieces, equal to within
    a piece of 64 MiB, and the headers of all its files. From a bucket all members are such readers. From a
    file system there is one on each machine. The others on that machine find the data in memory, which takes
    half the CPU time of receiving it from a peer. Data that members send each other is compared with xxh3_128
    digests. Besides the state this takes the memory of a `PointReader`, and then 64 MiB for messages. `half`
    as in `reshard.exchange`. `loading` is called with the bytes that this rank has read, and the total that
    it reads.

    If a member finds damage or cannot read, all members learn this before any data is sent. All then raise
    `DamagedPointError` with everything that was found, or `ResumePointError` or `StorageError` with its text.
    Raises `GenerationEnded` if a member is lost. After an error the items may hold anything.
    """
    rank, shard = group.view.rank, layout.shard_of(group.view.rank)
    runs: list[list[FilePiece]] = []
    kept: list[Item] = []
    problem: OrchestratorError | None = None
    machines = [row[0] for row in group.gather([_machine(rank, files)], "who shares a machine")]
    sharing: list[int] = []
    if rank in needy:
        alike = [each for each in needy if layout.shard_of(each) == shard]
        sharing = readers_with(rank, alike, machines)
        try:
            reader, kept = point_reader(items, point, files, how)
            runs = _read_own(reader, kept, len(sharing), sharing.index(rank), point, loading)
        except TOGETHER as error:
            problem = error
    raise_together(group, problem)
    if len(sharing) > 1:
        _exchange(group, kept, sharing, runs, half)
    if rank in needy:
        begin_anew(items, kept)


def _machine(rank: int, files: StateFiles) -> int:
    """Returns a number that is equal on ranks whose page cache is shared."""
    if not files.storage.traits.cached_by_machine:
        return rank
    try:
        # identifies a kernel, also across containers
        booted = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        booted = socket.gethostname().encode()
    return -1 - int.from_bytes(blake3(booted).digest()[:7], "little")


def _read_own(
    reader: PointReader, items: Sequence[Item], num_sharing: int, own: int, point: str, loading: Loading
) -> list[list[FilePiece]]:
    """Splits the pieces among the members that share the reading and reads this member's part.

    Returns the pieces of every member.
    """
    try:
        pieces = reader.pieces(wanted_of(items))
        cut = even_runs([piece.num_bytes for piece in pieces], num_sharing)
        runs = [[pieces[number] for number in run] for run in cut]
        done, num_bytes = 0, sum(piece.num_bytes for piece in runs[own])

        def was_read(bytes_more: int) -> None:
            nonlocal done
            done += bytes_more
            loading(done, num_bytes)

        reader.fetch(runs[own], was_read)
    except PartDamage as error:
        raise damaged(point, error) from error
    return runs


def _exchange(
    group: Group,
    items: Sequence[Item],
    sharing: Sequence[int],
    runs: Sequence[Sequence[FilePiece]],
    half: Callable[[bool], None],
) -> None:
    """Exchanges the runs in rounds.

    In round d each member sends its run to the d-th member after it, and receives that of the d-th before it.
    """
    numbers = {(item.group, item.name): number for number, item in enumerate(items)}
    tensors = [tensor_as_bytes(item.tensor) for item in items]
    own, num = sharing.index(group.view.rank), len(sharing)

    def parcel(peer: int, reader: int) -> list[Parcel]:
        moves = [
            Move(tensor=numbers[piece.tensor], source=piece.at, target=piece.at, num_bytes=piece.length)
            for piece in runs[reader]
        ]
        return [Parcel(peer=sharing[peer], tensors=tensors, moves=moves)]

    try:
        with collective("giving one another the point"):
            for distance in range(1, num):
                before, after = (own - distance) % num, (own + distance) % num
                exchange(group, group.view.rank, parcel(after, own), parcel(before, before), half)
    except DigestError as error:
        raise GenerationEnded(str(error)) from error


def raise_together(group: Group, problem: OrchestratorError | None) -> None:
    """Raises the same kind of error on every rank if any rank has a problem.

    A problem is of one of the kinds `TOGETHER`. This is a collective.
    """
    kind = next((n for n, each in enumerate(TOGETHER, 1) if isinstance(problem, each)), 0)
    said = _said(problem)
    rows = group.gather([kind, len(said)], "whether all ranks could read")
    if not any(kind for kind, _ in rows):
        return
    longest = max(num_bytes for _, num_bytes in rows)
    texts = group.gather([*said.ljust(longest)], "what a rank cannot read")
    reports = [
        (kind, rank, bytes(texts[rank][:num_bytes]).decode(errors="replace"))
        for rank, (kind, num_bytes) in enumerate(rows)
        if kind
    ]
    kind, rank, text = min(reports)
    if TOGETHER[kind - 1] is DamagedPointError:
        found = [_damage(text) for each, _, text in reports if each == kind]
        raise damaged_point(list(dict.fromkeys(found)))
    raised: type[OrchestratorError] = TOGETHER[kind - 1]
    if isinstance(problem, raised):
        raise problem
    code, text = text.split("\n", 1)
    raise raised(f"{text} (found by rank {rank})", code=code)


def _said(problem: OrchestratorError | None) -> bytes:
    """The text for the other ranks, after a line with the code.

    For damage it has the point, the file and the reason, one line each.
    """
    if isinstance(problem, DamagedPointError) and problem.damages:
        first = problem.damages[0]
        return "\n".join((first.point, first.file, first.reason)).encode()[:_TEXT_BYTES]
    return b"" if problem is None else f"{problem.code}\n{problem}".encode()[:_TEXT_BYTES]


def _damage(said: str) -> Damage:
    point, file, reason = said.split("\n", 2)
    return Damage(point=point, file=file, reason=reason)
