"""Tokens in transit: the types of their arrays, the tasks of tokenizers, and the chunks that they send to the
feeder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]
else:  # reading a run needs no numpy, which takes 0.1 s to load

    def __getattr__(name: str) -> Any:
        kinds = {"Int32Array": "int32", "Int64Array": "int64", "BoolArray": "bool_"}
        if name not in kinds:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import numpy

        return numpy.typing.NDArray[getattr(numpy, kinds[name])]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTask:
    """The task of a slot of the pipeline: a window, from `record`, `output` and `piece` on.

    Earlier parts of the window were trained. A stream in one process reads on to the block's end.
    """

    source: str
    epoch: int
    block: int
    window: int = 0
    record: int = 0
    piece: int = 0
    output: int = 0


# the kinds of entries in a TokenChunk
PIECE, EMPTY, BAD, FILTERED, HELD_OUT = 0, 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Consecutive tokenized pieces of one window, in order: at most about 1 M tokens.

    The entry arrays have one item per piece, and one per document without pieces: empty, bad, dropped by a
    transform, held out. `last_piece[i]` is 1 if entry i ends its document.
    """

    source: str
    epoch: int
    block: int
    window: int
    tokens: Int32Array  # (num_tokens,) all pieces in order, BOS/EOS included
    record: Int32Array  # (num_entries,) position of the record in the window's order
    piece: Int32Array  # (num_entries,) number of the piece in its document
    num_tokens: Int32Array  # (num_entries,)
    kind: Int32Array  # (num_entries,) PIECE, EMPTY, BAD, FILTERED or HELD_OUT
    last_piece: Int32Array  # (num_entries,)
    special_texts: Int32Array  # (num_entries,) special tokens spelled out in the text
    file: Int32Array  # (num_entries,) number of the record's file in the manifest
    place: Int64Array  # (num_entries,) byte offset of the record in it; in a Parquet file the row
    loss: BoolArray | None = None  # (num_tokens,) False: the token is no target; None: all are
    # (num_entries,) number of the document among those of its record; None: each record gives one
    output: Int32Array | None = None
    # (num_entries,) row of its sample that the piece belongs to; None: samples have one row
    row: Int32Array | None = None
    bad_reasons: tuple[str, ...] = ()  # one per BAD entry: file, byte offset, line, reason
    # documents that the two libraries encoded differently (journalled)
    encoder_differences: tuple[str, ...] = ()
    ends_window: bool
    ends_block: bool

    @property
    def outputs(self) -> Int32Array:
        """(num_entries,) `output`, also if each record gives one document."""
        return self.record * 0 if self.output is None else self.output

    def output_of(self, entry: int) -> int:
        """The same for one entry."""
        return 0 if self.output is None else int(self.output[entry])
