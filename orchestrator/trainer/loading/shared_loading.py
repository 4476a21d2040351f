"""Loads a point on several members together.

Members that hold the same rows each read and verify a part of them, and send each other the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from orchestrator.checkpoint.files.manifest import PartDamage, damaged
from orchestrator.checkpoint.files.pieces import FilePiece
from orchestrator.checkpoint.files.reading import PointReader
from orchestrator.errors import ConfigError, OrchestratorError, ResumePointError, StorageError
from orchestrator.planning.state.state_layout import Layout, Move, even_runs, readers_with
from orchestrator.records.points import Damage, DamagedPointError, damaged_point
from orchestrator.trainer.comm.group import GenerationEnded, Group, collective
from orchestrator.trainer.comm.reshard import DigestError, Parcel, exchange, tensor_as_bytes
from orchestrator.trainer.loading.state_tensors import (
    Continues,
    Item,
    StateFiles,
    begin_anew,
    point_reader,
    wanted_of,
)

# The errors of one member that all members raise. If there are several kinds, the first one listed here is
# raised.
TOGETHER = (DamagedPointError, ResumePointError, ConfigError, StorageError)
_TOLD_BYTES = 2000

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
    as in `reshard.exchange`. `loading` is called with the bytes
    that this rank has read, and the total that it reads.

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
    heard = [
        (kind, rank, bytes(texts[rank][:num_bytes]).decode(errors="replace"))
        for rank, (kind, num_bytes) in enumerate(rows)
        if kind
    ]
    kind, rank, text = min(heard)
    if TOGETHER[kind - 1] is DamagedPointError:
        found = [_damage(text) for each, _, text in heard if each == kind]
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
        return "\n".join((first.point, first.file, first.reason)).encode()[:_TOLD_BYTES]
    return b"" if problem is None else f"{problem.code}\n{problem}".encode()[:_TOLD_BYTES]


def _damage(said: str) -> Damage:
    point, file, reason = said.split("\n", 2)
    return Damage(point=point, file=file, reason=reason)
