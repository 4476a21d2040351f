"""Memory limits of this process: for a record, a window, a decoder and remembered words.

A tokenizer process receives its share of `data.memory_bytes` when it starts. Any other process has only the
limits of the data rules. The limits do not change the stream: data that exceed one stop the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from orchestrator.errors import DataError

_NO_LIMIT = 1 << 62
TOO_LITTLE_MEMORY = "feed.too_little_memory"
# A document is built from its record through this many copies of it, at four bytes a character. A record of a
# window takes this many bytes beside its own, most of them while the window's records are ordered.
COPIES_OF_A_RECORD, BYTES_A_RECORD = 8, 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """The limits of one process, in bytes except `open_blocks` and `num_tokenizers`.

    `words_bytes`: growth of an encoder. `work_bytes`: the current window and the document built from it.
    `decoder_bytes`: the memory of one decoder. `open_blocks`: blocks read at a time. `memory_bytes`: the
    total that the other limits are derived from, for messages.
    """

    words_bytes: int = _NO_LIMIT
    work_bytes: int = _NO_LIMIT
    decoder_bytes: int = 1 << 31
    open_blocks: int = 8
    memory_bytes: int = _NO_LIMIT
    num_tokenizers: int = 1

    @property
    def record_bytes(self) -> int:
        """The longest record, in bytes, that a document can be built from."""
        return self.work_bytes // COPIES_OF_A_RECORD

    def require_record(self, num_bytes: int) -> None:
        """Raises `DataError` if a record of `num_bytes` is too long for this process."""
        if num_bytes > self.record_bytes:
            needed = self._needed(num_bytes * COPIES_OF_A_RECORD)
            raise DataError(
                f"it has {num_bytes:,} bytes, and a tokenizer's share of "
                f"data.memory_bytes={self.memory_bytes} is enough for records of {self.record_bytes:,}; "
                f"continue with data.memory_bytes={needed} or more, or with fewer data.num_tokenizers",
                code=TOO_LITTLE_MEMORY,
            )

    def require_records(self, num_records: int) -> None:
        """Raises `DataError` if a window of `num_records` records does not fit into this process."""
        work = num_records * BYTES_A_RECORD
        if work > self.work_bytes:
            raise DataError(
                f"a window of {num_records:,} records takes {work:,} bytes while they are ordered, and a "
                f"tokenizer's share of data.memory_bytes={self.memory_bytes} for it is {self.work_bytes:,}; "
                f"continue with data.memory_bytes={self._needed(work)} or more, or with fewer "
                "data.num_tokenizers",
                code=TOO_LITTLE_MEMORY,
            )

    def refuse_decoder(self, path: str, reason: str) -> NoReturn:
        """Raises `DataError`: the decoder of the file at `path` needs too much memory. `reason` is its
        library's error.
        """
        more = self._needed(self.work_bytes + 4 * self.decoder_bytes) if self.is_bounded else None
        remedy = f"continue with data.memory_bytes={more} or more, or " if more else ""
        raise DataError(
            f"{path}: its decoder needs more than its limit of {self.decoder_bytes:,} bytes ({reason}); "
            f"{remedy}compress it with a smaller window (zstd without --long, xz -6)",
            code="data.decoder_memory",
        )

    @property
    def is_bounded(self) -> bool:
        """Whether the limits come from `data.memory_bytes`."""
        return self.memory_bytes != _NO_LIMIT

    def _needed(self, work_bytes: int) -> int:
        """The `data.memory_bytes` that gives a tokenizer `work_bytes`, rounded up to 64 MiB."""
        more = self.memory_bytes + 2 * self.num_tokenizers * max(0, work_bytes - self.work_bytes)
        return -(-more // (64 << 20)) * (64 << 20)


_limits = ProcessLimits()


def limit_process(limits: ProcessLimits) -> None:
    """Sets the limits of this process."""
    global _limits  # noqa: PLW0603  a process has one memory
    _limits = limits


def process_limits() -> ProcessLimits:
    """The limits of this process."""
    return _limits
