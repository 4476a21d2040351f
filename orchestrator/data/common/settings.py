"""Settings that determine the token stream, besides the files and the tokenizer, as a frozen value.

The value pickles. It is the configuration with its defaults resolved, for example which id is EOS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from orchestrator.planning.mixture import whole_weights
from orchestrator.planning.resume.source_lists import SourceLists, SourceRequest
from orchestrator.records.cursor import Cursor, SourceCursor

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

# data rule 7: a document's tokens are those of its pieces, cut at a border found in the last sixteenth.
PIECE_BYTES = 1 << 20
CUT_SHARE = 16
# The approximate maximum number of tokens in a chunk.
CHUNK_TOKENS = 1 << 20
# `pack.long_document: split` as earlier versions implemented it: it keeps the parts of a document that have
# no loss. Runs started by those versions keep it (`frozen.DataRecord.rules`).
SPLIT_WHOLE = "split_whole"
# One document in this many is encoded by both libraries during the run, and transformed twice.
CHECK_ONE_IN = 1000
# The share of bad records is checked at the end of each window after this many records. The share of too long
# documents is checked after this many documents.
BAD_SHARE_RECORDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformRef:
    """A transform and the identity of its code.

    `name` is the name in the configuration. `source` holds the blake3 of its module's file and that module's
    `VERSION`. Changes in modules that it imports show only in `VERSION`.
    """

    name: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """Everything that determines the stream of samples, besides files and tokenizer.

    `bos_id` and `eos_id` are inserted before and after each document (None: nothing). `num_epochs` None:
    endless. `accept_changed` reads changed files by the frozen list.

    `loss` maps a source to the part of a conversation or a prompt that is trained: `assistant` (the default:
    the assistant's turns, the completion), `last` or `all`. `pack_mode`, `long_document` (or `SPLIT_WHOLE`)
    and `max_long_share` are the fields of the configuration's `pack`. `seq_len` is the samples' length: the
    positions of all its `rows_per_sample` rows together; `concat` does not use it.

    `transforms` and `holdout` (the share of records that is held out) are by source; a source without an
    entry has none. The stream contains all records that are not held out, or with `held_out` only the
    held-out ones. `loss_units` names the function of `train.objective_units`, if it is one. `piece_bytes` and
    `chunk_tokens` differ from their defaults only in tests.
    """

    seed: int = 0
    shuffle: str = "block"
    num_epochs: int | None = 1
    bos_id: int | None = None
    eos_id: int | None = None
    special_tokens_in_text: str = "text"
    on_bad_document: str = "stop"
    max_bad_share: float = 0.01
    window_bytes: int = 16 << 20
    fragment_bytes: int = 2 << 20
    piece_bytes: int = PIECE_BYTES
    chunk_tokens: int = CHUNK_TOKENS
    accept_changed: bool = False
    loss: dict[str, str] = field(default_factory=dict)
    pack_mode: str = "concat"
    seq_len: int = 0
    rows_per_sample: int = 1
    long_document: str = "stop"
    max_long_share: float = 0.5
    transforms: dict[str, tuple[TransformRef, ...]] = field(default_factory=dict)
    holdout: dict[str, float] = field(default_factory=dict)
    held_out: bool = False
    loss_units: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSettings:
    """How several sources are mixed (data rule 20).

    `weights`: whole-number weights by source. `on_end`: what happens when a source reaches its limit, `stop`
    or `drop`. `by`: whether shares are counted in tokens or samples.
    """

    weights: dict[str, int]
    on_end: str
    by: str


def settings_of(config: JobConfig) -> StreamSettings:
    """Settings from the configuration, without transforms and the tokenizer's ids."""
    data = config.data
    return StreamSettings(
        seed=data.seed,
        shuffle=data.shuffle,
        num_epochs=data.num_epochs,
        special_tokens_in_text=data.special_tokens_in_text,
        on_bad_document=data.on_bad_document,
        max_bad_share=data.max_bad_share,
        window_bytes=data.window_bytes,
        fragment_bytes=data.fragment_bytes,
        accept_changed=config.resume.accept_changed,
        loss={source.name: source.loss for source in data.sources},
        pack_mode=config.pack.mode,
        seq_len=config.sample_len,
        rows_per_sample=config.data.rows_per_sample,
        long_document=config.pack.long_document,
        max_long_share=config.pack.max_long_share,
        loss_units=config.train.objective_units if ":" in config.train.objective_units else "",
        holdout={s.name: data.holdout if s.holdout is None else s.holdout for s in data.sources},
    )


def wanted_of(config: JobConfig, restart: Collection[str] = ()) -> SourceRequest:
    """The sources that a job reads. Those in `restart` start again from their beginning."""
    names = tuple(source.name for source in config.data.sources)
    refresh = frozenset(names if config.data.refresh == "epoch" else ())
    loss = {source.name: source.loss for source in config.data.sources if source.content != "text"}
    return SourceRequest(names=names, restart=frozenset(restart), refresh=refresh, loss=loss)


def transforms_of(config: JobConfig) -> dict[str, tuple[str, ...]]:
    """The transform names of each source: its own, or `data.transforms`."""
    data = config.data
    return {s.name: data.transforms if s.transforms is None else s.transforms for s in data.sources}


def with_transforms(
    config: JobConfig, settings: StreamSettings, refs: Mapping[str, TransformRef]
) -> StreamSettings:
    """The settings with each source's transforms, looked up by name in `refs`."""
    names = transforms_of(config).items()
    return replace(settings, transforms={source: tuple(refs[n] for n in of) for source, of in names if of})


def mixture_of(config: JobConfig, num_bytes: Mapping[str, int]) -> MixtureSettings | None:
    """The mixture of the job's sources, or None for a single source.

    Without weights in the configuration, sources are weighted by their files' bytes, and a source that has
    ended is dropped.
    """
    data = config.data
    if len(num_bytes) == 1:
        return None
    given = {source.name: source.weight for source in data.sources}
    if None in given.values():
        weights = {name: Decimal(max(1, num)) for name, num in num_bytes.items()}
    else:
        weights = {name: Decimal(repr(weight)) for name, weight in given.items()}
    on_end = data.on_end or ("drop" if None in given.values() else "stop")
    return MixtureSettings(
        weights=whole_weights(weights),
        on_end="drop" if on_end == "repeat" else on_end,
        by=data.weight_by,
    )


def limits_of(config: JobConfig) -> dict[str, int | None]:
    """The epoch limits of sources that do not use `data.num_epochs`."""
    data = config.data
    limits: dict[str, int | None] = {s.name: s.max_epochs for s in data.sources if s.max_epochs is not None}
    if len(data.sources) > 1 and data.on_end == "repeat":
        limits = {s.name: limits.get(s.name) for s in data.sources}
    return limits


def has_list_to_come(config: JobConfig, cursor: Cursor, source: SourceLists) -> bool:
    """Whether the source's next epoch, if the job reaches it, has its own list of files."""
    at = cursor.sources.get(source.name, SourceCursor()).epoch
    limit = limits_of(config).get(source.name, config.data.num_epochs)
    goes_on = limit is None or at + 1 < source.began + limit
    return goes_on and source.version(at + 1) != source.version(at)
