"""The values of a resume point: files, their nodes, tensors, and the ranks' votes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.errors import ResumePointError
from orchestrator.records.cursor import Cursor
from orchestrator.records.steps import StateKey, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """A file of a point: path relative to the point's folder, size, and blake3 of its bytes (64 hex digits).

    For a rank's part it is the blake3 of its header, which guards the rest (`checkpoint.files.part_file`).
    """

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file of a point that is surely absent or has other bytes than were committed."""

    point: str
    file: str
    reason: str

    def __str__(self) -> str:
        return f"resume point {self.point}: {self.file} {self.reason}"


class DamagedPointError(ResumePointError):
    """A point that is to be loaded is damaged; `damages` name its files."""

    code = "point.damaged"

    def __init__(self, text: str, damages: tuple[Damage, ...] = ()) -> None:
        super().__init__(text)
        self.damages = damages


def damaged_point(damages: Sequence[Damage]) -> DamagedPointError:
    """Builds the error that names these damages of one point."""
    listed = "; ".join(map(str, damages))
    return DamagedPointError(
        f"{listed}; restore the file, or resume from another point (`orchestrator points` lists them)",
        tuple(damages),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """A folder on the disk of one node that holds parts of points (`resume.node_folder`).

    `id` is from the folder's own node.json (32 hex digits), `folder` its absolute path there. Host and
    address are for people.
    """

    id: str
    host: str
    address: str
    folder: str

    def __str__(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """The parts of a point on one node: of the ranks that `wrote` theirs there, and `copies` of other ranks'
    parts.
    """

    node: NodePlace
    wrote: tuple[int, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor of a point as a whole.

    The place of its rows in files follows from the layout of the save (`planning.state.state_layout`).
    `sharded`: its rows are divided among the shards. `dtype` is torch's name.
    """

    group: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sharded: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDigests:
    """Digests (32 hex digits) of the rows that a rank holds together with others
    (`trainer.saving.staging`).

    `of_shard`: with the ranks that have the same shard. `of_all`: with every rank. Empty: no other rank holds
    such rows, or the digest was not computed.
    """

    of_shard: str = ""
    of_all: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """One rank's statement that its part of the save of `key` is written and synced.

    All ranks' votes of one save agree in everything except rank, files, sums, tensors and `replicas`.

    `files`: the one file of this rank (`checkpoint.files.part_file`).
    `layout`: (num_shards, num_replicas).
    `sums`: for each group the sum of the rows in that file (`planning.state.state_layout`).
    `tensors`: of the whole state, listed by rank 0 only, in the order by which `planning.state.state_layout`
    divides them.
    `part_s`: from the begin of the save to this vote.
    `nodes`: those on whose disks the file is, the rank's own first; empty if it is in the run's storage.
    `replicas`: for comparing replicas.
    `fixed`: the digests of the weights that the state is trained with and does not contain, listed by rank 0
    only.
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
    peak_memory_bytes: int = 0  # of the voter's process so far (`trainer.loop`); 0: unknown
    layout: tuple[int, int] | None = None
    part_s: float = 0.0
    sums: dict[str, int] = field(default_factory=dict)
    nodes: tuple[NodePlace, ...] = ()
    replicas: ReplicaDigests = ReplicaDigests()
    fixed: dict[str, str] = field(default_factory=dict)
