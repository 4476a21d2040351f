"""The digest of a model's weights in runs of format 1, from the digests of their tensors: of a resume point,
and of any step's state. Later ones have sums (`weights_sum`).
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from orchestrator.records.points import TensorEntry
from orchestrator.storage.sealed import canonical


def is_of_format_1(digest: str) -> bool:
    """Whether a recorded digest is one of these, and no sum."""
    return ":" not in digest


def weights_digest(tensors: Iterable[TensorEntry]) -> str:
    """A digest (blake3, 64 hex digits) of a model's weights, from the digests of their chunks; the
    optimizer's state is left out.

    It depends on names, dtypes, shapes, values and on how tensors are cut into chunks, not on which rank or
    file holds them.
    """
    model = [
        [t.name, t.dtype, list(t.shape), sorted([list(c.offsets), list(c.sizes), c.digest] for c in t.chunks)]
        for t in tensors
        if t.group == "model"
    ]
    return blake3(canonical(sorted(model))).hexdigest()
