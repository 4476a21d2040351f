"""How `data.memory_bytes` is divided among the feeder, the tokenizers and what is on its way between them.

Pure: sizes go in, shares come out, and what cannot fit is refused. No share has a part in which samples there
are, or in their order: a run may be continued with another bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.data.common.process_limits import BYTES_A_RECORD, COPIES_OF_A_RECORD, ProcessLimits
from orchestrator.data.common.settings import CHUNK_TOKENS
from orchestrator.data.feed.flight import BYTES_AN_ENTRY
from orchestrator.data.feed.opening import MAX_WANTED_TOKENS
from orchestrator.data.feed.replay import MIN_STEPS, TOGETHER_BYTES
from orchestrator.data.feed.slots import SLOTS_AHEAD
from orchestrator.data.sources.records_in_memory import MAX_RECORD_BYTES
from orchestrator.data.tokens.chunk_writer import CHUNK_ENTRIES
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig
    from orchestrator.data.spec import DataSpec

MIB = 1 << 20
# Measured (benchmarks/RESULTS.md): a process with its modules, before it has read anything.
FEEDER_PROCESS_BYTES, TOKENIZER_PROCESS_BYTES = 208 * MIB, 208 * MIB
# A tokenizer's encoders, gigatoken's and that of `tokenizers`, take so much and so much for each entry; a
# piece of 1 MiB that `tokenizers` encodes takes 124 bytes a byte.
_ENCODER_BYTES, _BYTES_AN_ID, _PIECE_BYTES = 32 * MIB, 1280, 128 * MIB
# A list of files while it is read: the file, its columns, and what is made of them.
_COPIES_OF_A_LIST = 3
# Of a token of a step: as it is held, and as its arrays are made for the digest.
_BYTES_A_HELD_TOKEN, _BYTES_A_DRAWN_TOKEN = 6, 24
# A decoder of .zst and .xz may ask for so much, any other reader takes less than so much.
_LARGE_DECODERS = (".zst", ".zstd", ".xz")
_LARGE_DECODER_BYTES, _READER_BYTES = 128 * MIB, 12 * MIB
_MOST_OPEN = 8
# A record of 200 MiB.
_USUAL_WORK_BYTES = 200 * MIB * COPIES_OF_A_RECORD
_LEAST_WORDS_BYTES, _USUAL_WORDS_BYTES = 32 * MIB, 256 * MIB
# A window of text, encoded: 4 bytes for each of its bytes where every byte is a token, seldom as much as one.
_LEAST_A_BYTE, _USUAL_A_BYTE = 1, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNeeds:
    """What the shares depend on. `step_tokens` are the positions of a step, `vocab_size` the tokenizer's
    highest id plus one, `lists_bytes` the lists of files as columns; `large_decoders`: a source has files of
    .zst or .xz.
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
    """The parts of `memory_bytes`, in bytes: what the feeder and each tokenizer take whatever the documents
    (`feeder_bytes`, `tokenizer_bytes`), steps that may be asked for again and the one being drawn
    (`replay_bytes`), answers to ranks (`answers_bytes`), tokens that are made and not drawn
    (`flight_bytes`), and of each tokenizer the words that its encoder remembers, its open files, and the
    window and document at hand (`words_bytes`, `readers_bytes`, `work_bytes`).
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
        """Where tokenizers wait: each, and the feeder, may have one chunk more."""
        return self.flight_bytes - (self.num_tokenizers + 1) * chunk_bytes_at_most()

    @property
    def limits(self) -> ProcessLimits:
        """A tokenizer's."""
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
    """A share that may be smaller: what it needs at least, and what it usually gets."""

    least: int
    usual: int

    def of(self, part: int, whole: int) -> int:
        """`part` of `whole` between the two; beyond it the usual."""
        return self.least + (self.usual - self.least) * min(part, whole) // max(1, whole)


def divide_memory(needs: MemoryNeeds, asked: int | None) -> MemoryShares:
    """The shares of `asked` bytes; None: of what is usual for these needs.

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
        raise ConfigError(_too_little(needs, memory, least))
    over, whole, beyond = memory - least, usual - least, max(0, memory - usual) // num
    if needs.large_decoders:  # they have half of what is left
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
    """What there is whatever the documents."""
    lists = needs.lists_bytes * _COPIES_OF_A_LIST
    encoder = _ENCODER_BYTES + needs.vocab_size * _BYTES_AN_ID + _PIECE_BYTES
    step = needs.step_tokens * _BYTES_A_HELD_TOKEN
    return {
        "feeder": FEEDER_PROCESS_BYTES + lists,
        "tokenizers": needs.num_tokenizers * (TOKENIZER_PROCESS_BYTES + lists + encoder),
        "steps": max(needs.replay_bytes, MIN_STEPS * step) + needs.step_tokens * _BYTES_A_DRAWN_TOKEN,
        # one that is read, and one that is asked for ahead
        "answers": 2 * (needs.num_ranks * TOGETHER_BYTES + step),
    }


def _work(window_bytes: int) -> tuple[int, int]:
    """(least, usual) of a window with its order, a batch of it and the chunk that is made."""
    around = 3 * chunk_bytes_at_most()
    return window_bytes * 2 + around, max(window_bytes * (1 + BYTES_A_RECORD), _USUAL_WORK_BYTES) + around


def _readers(needs: MemoryNeeds) -> tuple[int, int]:
    """(open blocks, what a decoder may ask for beside the reader's own buffers)."""
    if needs.large_decoders:
        return min(2, needs.num_sources), _LARGE_DECODER_BYTES
    return min(_MOST_OPEN, needs.num_sources), 0


def _flight(needs: MemoryNeeds) -> tuple[int, int]:
    """(least, usual) of the windows that are given and not delivered, and one of each source."""
    windows = needs.window_bytes * (needs.num_tokenizers + SLOTS_AHEAD + 1 + needs.num_sources)
    # a step that is gathered, and the chunk that fills it, come beside what is made for later slots
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
    """A number of bytes for people."""
    return f"{num_bytes / MIB:,.0f} MiB"


def memory_of(job: JobConfig, spec: DataSpec) -> MemoryShares:
    """The shares of a job. Raises as `divide_memory` does."""
    return divide_memory(needs_of_feed(job, spec), job.data.memory_bytes)


def needs_of_feed(job: JobConfig, spec: DataSpec) -> MemoryNeeds:
    """What the shares of a job depend on."""
    lists = [plan.manifest.files for of in spec.lists.values() for plan in of.values()]
    return MemoryNeeds(
        num_tokenizers=job.data.num_tokenizers,
        num_sources=len(spec.plans),
        num_ranks=job.cluster.max_workers,
        window_bytes=spec.settings.window_bytes,
        replay_bytes=job.data.replay_bytes,
        step_tokens=job.train.global_batch_size * job.pack.seq_len,
        vocab_size=spec.vocab_size,
        lists_bytes=sum(files.nbytes for files in lists),
        large_decoders=job.data.refresh is not None
        or any(bool(files.paths_end(_LARGE_DECODERS).any()) for files in lists),
    )
