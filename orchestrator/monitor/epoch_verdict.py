"""What the stretches of a source's stream say together of its epochs, beside what the files hold.

It reads nothing: what the files hold is given to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.data.spec import DataSpec
from orchestrator.monitor.epoch_checksum import EpochChecksum, EpochTotals
from orchestrator.monitor.reference_encoding import EncodingDifference
from orchestrator.monitor.source_walk import SourceStretch, at_border
from orchestrator.planning.encoders import EncoderChoice, encoder_of_epoch
from orchestrator.records import SourceCursor

EncodedFiles = dict[tuple[str, EncoderChoice], EpochChecksum]
"""What a source's files hold, as an encoder makes it."""

_COMPLETENESS = "completeness of epoch {} (the audited steps {} inside it); no duplicates found"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSource:
    """All stretches of a source, one after the other."""

    begin: SourceCursor
    end: SourceCursor
    totals: EpochTotals = field(default_factory=EpochTotals)
    ends_data: bool = False
    fault: str | None = None
    bad_documents: int = 0
    differences: tuple[EncodingDifference, ...] = ()

    @classmethod
    def of(cls, stretches: Sequence[SourceStretch]) -> JoinedSource:
        """Of the parts of a history, in order; the last one that took any of the source ends it."""
        walked = [stretch for stretch in stretches if stretch.walked]
        end, totals = stretches[-1].end, EpochTotals()
        for stretch in walked:
            totals.join(stretch.up_to_end)
        if walked:
            totals.join(walked[-1].at_end)
        return cls(
            begin=stretches[0].begin,
            end=end,
            totals=totals,
            ends_data=bool(walked) and walked[-1].ends_data,
            fault=next((stretch.fault for stretch in walked if stretch.fault), None),
            bad_documents=end.bad_documents - stretches[0].bad_documents_before,
            differences=tuple(one for stretch in walked for one in stretch.differences),
        )

    @property
    def epochs(self) -> range:
        """Those of which any was taken."""
        return range(self.begin.epoch, self.end.epoch + (0 if at_border(self.end) else 1))

    def left_open(self, epoch: int) -> str | None:
        """Why an epoch cannot be compared with the files; None: it was taken from its begin to its end."""
        if epoch == self.begin.epoch and not at_border(self.begin):
            return _COMPLETENESS.format(epoch, "begin")
        if epoch == self.end.epoch and not self.ends_data:
            return _COMPLETENESS.format(epoch, "end")
        return None


def files_needed(spec: DataSpec, sources: Mapping[str, JoinedSource]) -> list[tuple[str, EncoderChoice]]:
    """Which source's files are to be summed up, and by which encoder."""
    return list(
        dict.fromkeys(
            (name, _encoder(spec, name, epoch)[0])
            for name, source in sources.items()
            for epoch in source.epochs
            if source.left_open(epoch) is None
        )
    )


def _encoder(spec: DataSpec, source: str, epoch: int) -> tuple[EncoderChoice, bool]:
    """Who made an epoch, and whether it made all of it."""
    encoder = encoder_of_epoch(spec.encoders, source, epoch)
    return encoder or spec.encoders[-1].encoder, encoder is not None


def epochs_verdict(
    spec: DataSpec, sources: Mapping[str, JoinedSource], files: EncodedFiles
) -> tuple[str | None, list[str]]:
    """The first epoch that held a record twice, or other documents than the files, and what of the epochs is
    not verified.
    """
    not_shown: list[str] = []
    for name, source in sources.items():
        of = f"source {name}: " if len(sources) > 1 else ""
        reason, texts = _source_verdict(spec, name, source, files)
        if reason is not None:
            return of + reason, not_shown
        not_shown += [of + text for text in texts]
    return None, not_shown


def _source_verdict(
    spec: DataSpec, name: str, source: JoinedSource, files: EncodedFiles
) -> tuple[str | None, list[str]]:
    not_shown: list[str] = []
    if source.fault:
        return source.fault, not_shown
    for epoch in source.epochs:
        twice = source.totals.records[epoch].twice()
        if twice is not None:
            path = spec.source_plan(name).manifest.path(twice[0])
            return f"epoch {epoch} held the record at {twice[1]} of {path} twice", not_shown
        if left_open := source.left_open(epoch):
            not_shown.append(left_open)
        else:
            encoder, alone = _encoder(spec, name, epoch)
            found, held = source.totals.sums[epoch], files[name, encoder]
            if not alone:
                not_shown.append(f"tokens of epoch {epoch} (two encoders made them)")
                found, held = found.without_tokens(), held.without_tokens()
            if found != held:
                return f"epoch {epoch} held {found}; the files hold {held}", not_shown
        without_target, too_long = source.totals.unpacked[epoch]
        counts = (without_target, "no target"), (too_long, "more tokens than a sample (skipped)")
        not_shown += [
            f"documents of epoch {epoch} in no sample: {num:,} with {why}" for num, why in counts if num
        ]
    return None, not_shown
