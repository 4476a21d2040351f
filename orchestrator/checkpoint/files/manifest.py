"""The manifest of a committed point: its tensors, and the files that contain their rows.

`documents` builds it from storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from orchestrator.checkpoint.files.dtypes import SAFETENSORS
from orchestrator.checkpoint.files.part_file import part_path
from orchestrator.planning.state.state_layout import (
    Layout,
    StateTensor,
    held_rows,
    writing_replicas,
    written_rows,
)
from orchestrator.records.points import (
    Damage,
    DamagedPointError,
    FileEntry,
    SavedTensor,
    damaged_point,
)

MODEL, OPTIMIZER = "model", "optimizer"  # groups of tensors
Name = tuple[str, str]  # group and name of a tensor


class PartDamage(Exception):
    """A file of a point is surely absent, or is not as it was written.

    Carries this to the place where it is reported.
    """

    def __init__(self, file: str, reason: str) -> None:
        self.file, self.reason = file, reason
        super().__init__(f"{file} {reason}")


def damaged(point: str, damage: PartDamage) -> DamagedPointError:
    """Builds the error with which a process that loads the point reports the damage."""
    return damaged_point([Damage(point=point, file=damage.file, reason=damage.reason)])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The tensors of the point `point`, by (group, name), and its tensor files, by path.

    The rows in each file follow from `layout`.
    """

    point: str
    layout: Layout
    tensors: dict[Name, SavedTensor]
    files: dict[str, FileEntry]

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """The tensors in the form of `planning.state.state_layout`, in the order of the point."""
        return tuple(state_tensor(tensor) for tensor in self.tensors.values())

    def rows_of_rank(self, rank: int) -> dict[Name, range]:
        """Returns the rows of each tensor in the file of `rank`. Tensors without any are left out."""
        rows = written_rows(self.state, self.layout, rank)
        return {name: found for name, found in zip(self.tensors, rows, strict=True) if found}

    def files_of(self, name: Name, rows: range) -> list[str]:
        """Returns the files that contain any of `rows` of a tensor."""
        number = self._numbers[name]
        tensor, first = self.state[number], self._replicas[number] * self.layout.num_shards
        shards = range(self.layout.num_shards if tensor.sharded else 1)
        held = ((shard, held_rows(tensor, self.layout.num_shards, shard)) for shard in shards)
        return [
            part_path(first + shard, self.layout.world_size)
            for shard, theirs in held
            if max(theirs.start, rows.start) < min(theirs.stop, rows.stop)
        ]

    @cached_property
    def _numbers(self) -> dict[Name, int]:
        return {name: number for number, name in enumerate(self.tensors)}

    @cached_property
    def _replicas(self) -> tuple[int, ...]:
        return writing_replicas(self.state, self.layout)


def state_tensor(saved: SavedTensor) -> StateTensor:
    """Converts a tensor of a point to the form of `planning.state.state_layout`."""
    return StateTensor(
        group=saved.group,
        name=saved.name,
        shape=saved.shape,
        itemsize=SAFETENSORS[saved.dtype][1],
        sharded=saved.sharded,
    )
