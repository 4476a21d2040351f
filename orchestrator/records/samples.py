"""How many rows of a micro-batch a sample has, and how many positions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

PREFERENCE = "preference"  # the content of samples with two rows: a chosen and a rejected answer


def rows_per_sample(contents: Iterable[str]) -> int:
    """Returns the rows of each sample, for the contents of a job's sources."""
    return 2 if PREFERENCE in contents else 1


def sample_len_of(flat: Mapping[str, Any]) -> int:
    """Returns `JobConfig.sample_len` of a stored flat configuration, also of an earlier version."""
    contents = (source.get("content", "text") for source in flat["data.sources"])
    length: int = flat["pack.seq_len"]
    return rows_per_sample(contents) * length
