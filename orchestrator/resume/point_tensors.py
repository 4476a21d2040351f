"""The model's tensors of a committed point, one at a time: their bytes are compared with their digests before
anybody gets them.

It knows the list of a point's tensors; it needs neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.errors import ResumePointError
from orchestrator.parts.dtypes import num_bytes
from orchestrator.parts.manifest import MODEL, PartDamage
from orchestrator.parts.reading import BytesTarget, PointReader, Wanted
from orchestrator.records.points import Damage, SavedTensor
from orchestrator.resume.reading_progress import ReadingProgress
from orchestrator.resume.store import RunStore


class PointTensors:
    """The model's tensors of the point `name`. `entries` are in the order of their names. `say` is called
    with how far their reading is.
    """

    def __init__(self, store: RunStore, name: str, say: Callable[[str], None] = lambda text: None) -> None:
        """Raises `ResumePointError` naming the file that is damaged."""
        manifest = store.read_manifest(name)
        self._name, self._reader = name, PointReader(store.storage, manifest)
        self.entries = tuple(
            tensor for (group, _), tensor in sorted(manifest.tensors.items()) if group == MODEL
        )
        self._progress = ReadingProgress(say, f"weights of {name}")
        self._progress.expect(sum(num_bytes(entry.dtype, entry.shape) for entry in self.entries))

    def read(self, entry: SavedTensor) -> bytearray:
        """The bytes of one tensor, whole, in order; memory for it, and for at most 64 MiB of a file in which
        it lies with others. Raises `ResumePointError` if they are not those that were committed.
        """
        data = bytearray(num_bytes(entry.dtype, entry.shape))
        rows = range(entry.shape[0] if entry.shape else 1)
        try:
            self._reader.read({(entry.group, entry.name): Wanted(rows=rows, target=BytesTarget(data))})
        except PartDamage as error:
            damage = Damage(point=self._name, file=error.file, reason=error.reason)
            raise ResumePointError(f"{damage}; restore the file, or take another point") from error
        self._progress.read(len(data))
        return data
