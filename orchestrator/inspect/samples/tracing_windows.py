"""The audit's packer of whole documents, which records the documents of its last samples.

It takes them from the chunks of the windows that it packs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.tokens.token_chunk import PIECE, TokenChunk
from orchestrator.inspect.audit.reference.reference_packing import Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.reference.reference_windows import Stretch as Content
from orchestrator.inspect.samples.tracing_packer import Stretch
from orchestrator.records.cursor import SourceCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Document:
    file: int
    place: int
    output: int
    num_tokens: int


class TracingWindows(ReferenceWindows):
    """Keeps the content of the newest samples, for `stretches`."""

    def __init__(self, chunks: Iterator[TokenChunk], cursor: SourceCursor, settings: StreamSettings) -> None:
        super().__init__(chunks, cursor, settings)
        self._newest: list[tuple[list[TokenChunk], list[Content]]] = []  # a window and a pack for each sample
        self._capacity = 0

    def samples(self, num_tokens: int, seq_len: int) -> Samples:
        """See `ReferenceWindows`."""
        self._newest, self._capacity = [], seq_len
        found = super().samples(num_tokens, seq_len)
        # packs before the cursor were taken on the way and are no samples of this call
        self._newest = self._newest[-len(found.input_ids) :]
        return found

    def stretches(self, start: int, stop: int) -> list[Stretch]:
        """The documents of the sample with positions [start, stop), counted from the newest samples' first:
        each has `seq_len` of them, padding included. Input tokens; the last label follows them.
        """
        assert stop - start <= self._capacity, "the positions are those of one sample"
        chunks, pack = self._newest[start // self._capacity]
        documents, begin, found = _documents(chunks), 0, list[Stretch]()
        for content in pack:
            document = documents[content.document]
            found.append(
                Stretch(
                    file=document.file,
                    place=document.place,
                    output=document.output,
                    epoch=chunks[0].epoch,
                    begin=begin,
                    num_tokens=content.size,
                    first_token=content.first_token,
                    begins=content.first_token == 0,
                    ends=content.first_token + len(content.tokens) == document.num_tokens,
                )
            )
            begin += content.size
        return found

    def _take(self) -> list[Content]:
        while self._taken == len((window := next(self._coming())).packs):
            self._leave()
        pack = super()._take()
        self._newest.append((window.chunks, pack))
        return pack


def _documents(chunks: list[TokenChunk]) -> list[_Document]:
    """The documents of a window, in order, without bad and empty ones."""
    found, num_tokens = list[_Document](), 0
    for chunk in chunks:
        for entry, kind in enumerate(chunk.kind.tolist()):
            if kind != PIECE:
                continue
            num_tokens += int(chunk.num_tokens[entry])
            if chunk.last_piece[entry]:
                file, place = int(chunk.file[entry]), int(chunk.place[entry])
                output = chunk.output_of(entry)
                found.append(_Document(file=file, place=place, output=output, num_tokens=num_tokens))
                num_tokens = 0
    return found
