"""One source's stream from a cursor on, made by the audit's own packer, and what of it was trained.

`inspect.audit.stream_recheck` determines which samples were trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from orchestrator.data.spec import DataSpec
from orchestrator.inspect.audit.checksums.epoch_checksum import EpochTotals
from orchestrator.inspect.audit.reference.reference_encoding import EncodingDifference, ReferenceEncoding
from orchestrator.inspect.audit.reference.reference_packing import ReferencePacker, Samples
from orchestrator.inspect.audit.reference.reference_windows import ReferenceWindows
from orchestrator.inspect.audit.sample_check import TrainedTokens
from orchestrator.inspect.audit.trained_documents import TrainedDocuments
from orchestrator.records.cursor import Cursor, SourceCursor


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStretch:
    """What a part of the history took of a source, from `begin` to `end`.

    `up_to_end` is what lies before the document (the window, where whole ones are packed) of `end`, which the
    next part counts, and `at_end` what else was trained if none follows. `ends_data`: `end` is its epoch's
    last token. `fault`: where the samples do not hold the documents' tokens.
    """

    begin: SourceCursor
    end: SourceCursor
    before_wanted: SourceCursor  # the begin of the first requested step
    up_to_end: EpochTotals = field(default_factory=EpochTotals)
    at_end: EpochTotals = field(default_factory=EpochTotals)
    ends_data: bool = False
    fault: str | None = None
    walked: bool = False
    differences: tuple[EncodingDifference, ...] = ()  # between the run's encoder and `tokenizers`


Stretches = dict[tuple[str, int], SourceStretch]
"""By source, and the start of the lists that it followed (`planning.resume.manifests`)."""


class SourceWalk:
    """The stream from a cursor on, and the trained samples of it."""

    def __init__(
        self,
        spec: DataSpec,
        source: str,
        begin: SourceCursor,
        packer: type[ReferencePacker],
        windows: type[ReferenceWindows] = ReferenceWindows,
        by_reference: bool = False,
    ) -> None:
        """`by_reference`: each document is encoded by `tokenizers`, too."""
        self.begin, cursor = begin, Cursor(sources={source: begin})
        chunks = spec.endless().chunks(cursor, source)
        self._encoding = ReferenceEncoding(spec, cursor, source) if by_reference else None
        if self._encoding is not None:
            chunks = self._encoding.compare(chunks)
        self._trained: TrainedTokens | TrainedDocuments
        self.packer: ReferencePacker | ReferenceWindows
        if spec.settings.pack_mode == "concat":
            self._trained = TrainedTokens(self.begin.earlier_tokens + self.begin.token)
            self.packer = packer(self._trained.watch(chunks), self.begin)
        else:
            self._trained = TrainedDocuments(self.begin.packs, spec.settings.long_document)
            self.packer = windows(self._trained.watch(chunks), self.begin, spec.settings)
        self._num_blocks = partial(spec.num_blocks, source)
        self._walked = False
        self.before_wanted = SourceCursor()  # the begin of the first requested step

    def take(self, num_tokens: int, seq_len: int) -> tuple[Samples, str | None]:
        """Returns its next samples, and a fault within them, if any."""
        self._walked = True
        found = self.packer.samples(num_tokens, seq_len)
        if isinstance(self.packer, ReferenceWindows) and isinstance(self._trained, TrainedDocuments):
            passed, self.packer.passed_packs = self.packer.passed_packs, []
            if wrong := self._trained.pass_over(passed, self.begin.pack_seq_len):
                return found, wrong
        return found, self._trained.add(found, num_tokens)

    def place(self) -> SourceCursor:
        """The place of the next input token."""
        return self.packer.cursor() if self._walked else self.begin

    def stretch(self, may_be_last: bool) -> SourceStretch:
        """After the last step. If it is not the source's last stretch, what lies behind its end is not looked
        at.
        """
        end = self.place()
        common = {"begin": self.begin, "end": end, "before_wanted": self.before_wanted}
        if not self._walked:
            return SourceStretch(**common)  # type: ignore[arg-type]
        self._trained.border(end)
        up_to_end = self._trained.checksums.take()
        ends_data = may_be_last and not at_border(end) and self.packer.ends_epoch(self._num_blocks(end.epoch))
        fault = self._trained.end()
        return SourceStretch(
            **common,
            up_to_end=up_to_end,
            at_end=self._trained.checksums.take(),
            ends_data=ends_data,
            fault=fault,
            walked=True,
            differences=() if self._encoding is None else tuple(self._encoding.differences),
        )


def at_border(cursor: SourceCursor) -> bool:
    """Whether the cursor names an epoch's beginning."""
    place = (cursor.block, cursor.window, cursor.record, cursor.output, cursor.piece, cursor.token)
    return not any((*place, cursor.packs))
