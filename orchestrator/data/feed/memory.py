"""Divides `data.memory_bytes` among the feeder, the tokenizers and the chunks in transit.

The division is pure: sizes in, shares out, an error if they do not fit. Shares do not affect which samples
there are, or their order. A run may be continued with another bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.data.common.process_limits import (
    BYTES_A_RECORD,
    COPIES_OF_A_RECORD,
    TOO_LITTLE_MEMORY,
    ProcessLimits,
)
from orchestrator.data.common.settings import CHUNK_TOKENS
from orchestrator.data.feed.buffers import BYTES_AN_ENTRY, MIN_STEPS, TOGETHER_BYTES
from orchestrator.data.feed.stream_session import MAX_WANTED_TOKENS
from orchestrator.data.feed.window_scheduler import SLOTS_AHEAD
from orchestrator.data.sources.access.records_in_memory import MAX_RECORD_BYTES
from orchestrator.data.tokens.chunk_writer import CHUNK_ENTRIES
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec

MIB = 1 << 20
# Measured (benchmarks/RESULTS.md): a process with its modules loaded, before it reads data.
FEEDER_PROCESS_BYTES, TOKENIZER_PROCESS_BYTES = 208 * MIB, 208 * MIB
# A tokenizer's two encoders, gigatoken's and that of `tokenizers`, take this much, plus this much for each
# vocabulary entry. `tokenizers` takes 124 bytes for each byte of a 1 MiB piece that it encodes.
_ENCODER_BYTES, _BYTES_AN_ID, _PIECE_BYTES = 32 * MIB, 1280, 128 * MIB
# Copies of a list of files while it is read: the file, its columns, and the values built from them.
_COPIES_OF_A_LIST = 3
# Bytes of a token of a step: as it is held, and while its arrays are built for the digest.
_BYTES_A_HELD_TOKEN, _BYTES_A_DRAWN_TOKEN = 6, 24
# A .zst or .xz decoder may allocate this much; any other reader takes less than this much.
_LARGE_DECODERS = (".zst", ".zstd", ".xz")
_LARGE_DECODER_BYTES, _READER_BYTES = 128 * MIB, 12 * MIB
_MOST_OPEN = 8
# Enough for a record of 200 MiB.
_USUAL_WORK_BYTES = 200 * MIB * COPIES_OF_A_RECORD
_LEAST_WORDS_BYTES, _USUAL_WORDS_BYTES = 32 * MIB, 256 * MIB
# Bytes of tokens for each byte of a window: 4 if every byte is a token, rarely more than 1.
_LEAST_A_BYTE, _USUAL_A_BYTE = 1, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """The quantities that the shares depend on.

    `step_tokens`: the positions of a step. `vocab_size`: the tokenizer's highest id plus one. `lists_bytes`:
    the lists of files as columns. `large_decoders`: a source has .zst or .xz files.
    """

    num_tokenizers: int
    num_sources: int
    num_ranks: int
    window_bytes: int
    replay_bytes: int
    step_tokens: int
    vocab_size: int
    lists_bytes: int
    large_decoders: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShares:
    """The parts of `memory_bytes`, in bytes.

    Independent of the documents: the feeder and all tokenizers' processes (`feeder_bytes`, `tokenizer_bytes`
    for each). Steps that may be requested again and the one being drawn: `replay_bytes`. Answers to ranks:
    `answers_bytes`. Tokens that are encoded and not drawn: `flight_bytes`. For each tokenizer: its encoder's
    remembered words, its open files, and the current window and document (`words_bytes`, `readers_bytes`,
    `work_bytes`).
    """

    memory_bytes: int
    num_tokenizers: int
    feeder_bytes: int
    tokenizer_bytes: int
    replay_bytes: int
    answers_bytes: int
    flight_bytes: int
    words_bytes: int
    readers_bytes: int
    work_bytes: int
    open_blocks: int
    decoder_bytes: int

    @property
    def flight_limit(self) -> int:
        """The bytes at which tokenizers wait. Each tokenizer, and the feeder, may have one more chunk."""
        return self.flight_bytes - (self.num_tokenizers + 1) * chunk_bytes_at_most()

    @property
    def limits(self) -> ProcessLimits:
        """The limits of a tokenizer process."""
        return ProcessLimits(
            words_bytes=self.words_bytes,
            work_bytes=self.work_bytes,
            decoder_bytes=self.decoder_bytes,
            open_blocks=self.open_blocks,
            memory_bytes=self.memory_bytes,
            num_tokenizers=self.num_tokenizers,
        )

    def __str__(self) -> str:
        num = self.num_tokenizers
        each = self.tokenizer_bytes + self.words_bytes + self.readers_bytes + self.work_bytes
        return (
            f"at most {mib(self.memory_bytes)} of memory for the feed (data.memory_bytes): the feeder "
            f"{mib(self.feeder_bytes + self.replay_bytes)} (process {mib(self.feeder_bytes)}, steps "
            f"{mib(self.replay_bytes)}), {'each of ' * (num > 1)}{_tokenizers(num)} {mib(each)} (process and "
            f"vocabulary {mib(self.tokenizer_bytes)}, words {mib(self.words_bytes)}, open files "
            f"{mib(self.readers_bytes)}, window or record at hand {mib(self.work_bytes)}: records of up to "
            f"{mib(self.limits.record_bytes)}), tokens on their way {mib(self.flight_bytes)}, answers to "
            f"ranks {mib(self.answers_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class _Room:
    """A flexible share: the least that it needs, and its usual size."""

    least: int
    usual: int

    def of(self, part: int, whole: int) -> int:
        """Interpolates between the two at `part` of `whole`. Beyond `whole`: the usual size."""
        return self.least + (self.usual - self.least) * min(part, whole) // max(1, whole)


def divide_memory(needs: MemoryNeeds, asked: int | None) -> MemoryShares:
    """Divides `asked` bytes. None: the usual total for these needs.

    Raises `ConfigError` if the least that is needed is more, with both values and the largest parts.
    """
    held, num = _held(needs), needs.num_tokenizers
    open_blocks, decoder_bytes = _readers(needs)
    readers_bytes = open_blocks * (decoder_bytes + _READER_BYTES)
    words = _Room(_LEAST_WORDS_BYTES, _USUAL_WORDS_BYTES)
    work = _Room(*_work(needs.window_bytes))
    flight = _Room(*_flight(needs))
    fixed = sum(held.values()) + num * readers_bytes
    least = fixed + num * (words.least + work.least) + flight.least
    usual = fixed + num * (words.usual + work.usual) + flight.usual
    memory = usual if asked is None else asked
    if memory < least:
        raise ConfigError(_too_little(needs, memory, least), code=TOO_LITTLE_MEMORY)
    over, whole, beyond = memory - least, usual - least, max(0, memory - usual) // num
    if needs.large_decoders:  # decoders get half of the rest
        beyond //= 2
        decoder_bytes += beyond // open_blocks
        readers_bytes += beyond
    longest = max(work.usual, MAX_RECORD_BYTES * COPIES_OF_A_RECORD)
    work_bytes = min(longest, work.of(over, whole) + beyond)
    return MemoryShares(
        memory_bytes=memory,
        num_tokenizers=num,
        feeder_bytes=held["feeder"],
        tokenizer_bytes=held["tokenizers"] // num,
        replay_bytes=held["steps"],
        answers_bytes=held["answers"],
        flight_bytes=flight.of(over, whole),
        words_bytes=words.of(over, whole),
        readers_bytes=readers_bytes,
        work_bytes=work_bytes,
        open_blocks=open_blocks,
        decoder_bytes=decoder_bytes,
    )


def _held(needs: MemoryNeeds) -> dict[str, int]:
    """The fixed parts, independent of the documents."""
    lists = needs.lists_bytes * _COPIES_OF_A_LIST
    encoder = _ENCODER_BYTES + needs.vocab_size * _BYTES_AN_ID + _PIECE_BYTES
    step = needs.step_tokens * _BYTES_A_HELD_TOKEN
    return {
        "feeder": FEEDER_PROCESS_BYTES + lists,
        "tokenizers": needs.num_tokenizers * (TOKENIZER_PROCESS_BYTES + lists + encoder),
        "steps": max(needs.replay_bytes, MIN_STEPS * step) + needs.step_tokens * _BYTES_A_DRAWN_TOKEN,
        # one that is read, and one that is prefetched
        "answers": 2 * (needs.num_ranks * TOGETHER_BYTES + step),
    }


def _work(window_bytes: int) -> tuple[int, int]:
    """(least, usual) bytes for a window with its order, a batch of it and the chunk being built."""
    around = 3 * chunk_bytes_at_most()
    return window_bytes * 2 + around, max(window_bytes * (1 + BYTES_A_RECORD), _USUAL_WORK_BYTES) + around


def _readers(needs: MemoryNeeds) -> tuple[int, int]:
    """(open blocks, bytes that a decoder may allocate beside the reader's own buffers)."""
    if needs.large_decoders:
        return min(2, needs.num_sources), _LARGE_DECODER_BYTES
    return min(_MOST_OPEN, needs.num_sources), 0


def _flight(needs: MemoryNeeds) -> tuple[int, int]:
    """(least, usual) bytes for windows that are assigned and not delivered, and one of each source."""
    windows = needs.window_bytes * (needs.num_tokenizers + SLOTS_AHEAD + 1 + needs.num_sources)
    # a step being gathered, and the chunk that completes it, add to what is encoded for later slots
    step = max(MAX_WANTED_TOKENS, needs.step_tokens) * _BYTES_A_HELD_TOKEN
    around = 2 * step + (needs.num_tokenizers + 3) * chunk_bytes_at_most()
    return windows * _LEAST_A_BYTE + around, windows * _USUAL_A_BYTE + around


def chunk_bytes_at_most() -> int:
    """Bytes of the largest chunk of tokens."""
    return 8 * CHUNK_TOKENS + CHUNK_ENTRIES * BYTES_AN_ENTRY


def _too_little(needs: MemoryNeeds, memory: int, least: int) -> str:
    held = _held(needs)
    parts = {
        f"{_tokenizers(needs.num_tokenizers)} with a vocabulary of {needs.vocab_size:,}": held["tokenizers"],
        f"data.replay_bytes={needs.replay_bytes} with steps of {needs.step_tokens:,} tokens": held["steps"],
        f"windows of data.window_bytes={needs.window_bytes} for {_tokenizers(needs.num_tokenizers)} and "
        f"{needs.num_sources} source{'s' * (needs.num_sources > 1)}": _flight(needs)[0]
        + needs.num_tokenizers * _work(needs.window_bytes)[0],
        "the feeder": held["feeder"],
    }
    largest = sorted(parts, key=lambda name: -parts[name])
    listed = ", ".join(f"{name} {mib(parts[name])}" for name in largest)
    return (
        f"data.memory_bytes={memory} ({mib(memory)}) is too little: the feed needs {least} ({mib(least)}) at "
        f"least ({listed}); set data.memory_bytes={least} or more, or lower data.num_tokenizers or "
        "data.replay_bytes; a smaller data.window_bytes needs a new run (another run.name)"
    )


def _tokenizers(num: int) -> str:
    return f"{num} tokenizer{'s' * (num > 1)}"


def mib(num_bytes: int) -> str:
    """A number of bytes as text, in MiB."""
    return f"{num_bytes / MIB:,.0f} MiB"


def memory_of(job: JobConfig, spec: DataSpec) -> MemoryShares:
    """The shares of a job. Raises as `divide_memory` does."""
    return divide_memory(needs_of_feed(job, spec), job.data.memory_bytes)


def needs_of_feed(job: JobConfig, spec: DataSpec) -> MemoryNeeds:
    """The needs of a job's feed."""
    lists = [plan.manifest.files for of in spec.lists.values() for plan in of.values()]
    return MemoryNeeds(
        num_tokenizers=job.data.num_tokenizers,
        num_sources=len(spec.plans),
        num_ranks=job.cluster.max_workers,
        window_bytes=spec.settings.window_bytes,
        replay_bytes=job.data.replay_bytes,
        step_tokens=job.train.global_batch_size * job.sample_len,
        vocab_size=spec.vocab_size,
        lists_bytes=sum(files.nbytes for files in lists),
        large_decoders=job.data.refresh is not None
        or any(bool(files.paths_end(_LARGE_DECODERS).any()) for files in lists),
    )
