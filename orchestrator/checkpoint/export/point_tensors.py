"""Reads the model's tensors of a committed point one at a time, and verifies their digests first."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.checkpoint.files.dtypes import num_bytes
from orchestrator.checkpoint.files.manifest import MODEL, PartDamage
from orchestrator.checkpoint.files.reading import BytesTarget, PointReader, Wanted
from orchestrator.checkpoint.points.reading_progress import ReadingProgress
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import ResumePointError
from orchestrator.records.points import Damage, SavedTensor


class PointTensors:
    """The model's tensors of the point `name`. `entries` are ordered by name.

    `say` is called with the progress of reading.
    """

    def __init__(self, store: RunStore, name: str, say: Callable[[str], None] = lambda text: None) -> None:
        """Raises `ResumePointError` naming the damaged file."""
        manifest = store.read_manifest(name)
        self._name, self._reader = name, PointReader(store.storage, manifest)
        self.entries = tuple(
            tensor for (group, _), tensor in sorted(manifest.tensors.items()) if group == MODEL
        )
        self._progress = ReadingProgress(say, f"weights of {name}")
        self._progress.expect(sum(num_bytes(entry.dtype, entry.shape) for entry in self.entries))

    def read(self, entry: SavedTensor) -> bytearray:
        """Returns the bytes of one whole tensor, in order. Raises `ResumePointError` if they are not as
        committed.

        Takes memory for it, and for at most 64 MiB of a file that it shares with others.
        """
        data = bytearray(num_bytes(entry.dtype, entry.shape))
        rows = range(entry.shape[0] if entry.shape else 1)
        try:
            self._reader.read({(entry.group, entry.name): Wanted(rows=rows, target=BytesTarget(data))})
        except PartDamage as error:
            damage = Damage(point=self._name, file=error.file, reason=error.reason)
            raise ResumePointError(
                f"{damage}; restore the file, or take another point", code="point.damaged"
            ) from error
        self._progress.read(len(data))
        return data
