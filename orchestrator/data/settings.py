"""What shapes the token stream beside the files and the tokenizer, as one frozen value that pickles.

It is the configuration with its choices made (which id is EOS, say) and knows no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# data rule 7: a document's tokens are those of its pieces, cut at a border found in the last sixteenth.
PIECE_BYTES = 1 << 20
CUT_SHARE = 16
# A chunk has at most about so many tokens.
CHUNK_TOKENS = 1 << 20
# One document in so many is encoded by both libraries while running.
CHECK_ONE_IN = 1000
# From so many records on, the share of bad ones is judged at the end of each window.
BAD_SHARE_RECORDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """`bos_id` and `eos_id` stand before and after each document (None: nothing). `num_epochs` None: endless.

    `accept_changed` reads changed files by the frozen list. `loss` says by source what is learnt of a
    conversation or a prompt: `assistant` (also of a source not named: the assistant's turns, the completion),
    `last` or `all`. `pack_mode` and `long_document` are those of the configuration's `pack`; `seq_len` is
    that of the samples, which `concat` need not know. `piece_bytes` and `chunk_tokens` differ from the
    defaults in tests only.
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
    long_document: str = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureSettings:
    """How several sources take turns (data rule 20): whole-number weights by source; what happens when one
    has come to its limit (`on_end`: `stop` or `drop`); whether shares are counted `by` tokens or samples.
    """

    weights: dict[str, int]
    on_end: str
    by: str
