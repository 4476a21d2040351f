"""Joins the stretches of a source's stream, and compares its epochs with the content of the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from orchestrator.data.spec import DataSpec
from orchestrator.inspect.audit.checksums.epoch_checksum import EpochChecksum, EpochFiles, EpochTotals
from orchestrator.inspect.audit.reference.reference_encoding import EncodingDifference
from orchestrator.inspect.audit.source_walk import SourceStretch, Stretches, at_border
from orchestrator.planning.encoders import EncoderChoice, encoder_of_epoch
from orchestrator.records.cursor import SourceCursor

EncodedFiles = dict[EpochFiles, EpochChecksum]
JoinedSources = dict[tuple[str, int], "JoinedSource"]
"""By source and start, as `Stretches`."""

_COMPLETENESS = "completeness of epoch {} (the audited steps {} inside it); no duplicates found"
_RESTARTED = "completeness of epoch {} (its source was restarted inside it); no duplicates found"


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedSource:
    """All stretches of a source, one after the other."""

    begin: SourceCursor
    end: SourceCursor
    before_wanted: SourceCursor  # the begin of the first requested step
    totals: EpochTotals = field(default_factory=EpochTotals)
    ends_data: bool = False
    fault: str | None = None
    differences: tuple[EncodingDifference, ...] = ()
    restarted: bool = False

    @classmethod
    def of(cls, stretches: Sequence[SourceStretch], restarted: bool = False) -> JoinedSource:
        """Joins the parts of a history, in order. The last one that took any of the source ends it.
        `restarted`: a new start of the source follows.
        """
        walked = [stretch for stretch in stretches if stretch.walked]
        end, totals = stretches[-1].end, EpochTotals()
        for stretch in walked:
            totals.join(stretch.up_to_end)
        if walked:
            totals.join(walked[-1].at_end)
        return cls(
            begin=stretches[0].begin,
            end=end,
            before_wanted=stretches[0].before_wanted,
            totals=totals,
            ends_data=bool(walked) and walked[-1].ends_data,
            fault=next((stretch.fault for stretch in walked if stretch.fault), None),
            differences=tuple(one for stretch in walked for one in stretch.differences),
            restarted=restarted,
        )

    @property
    def epochs(self) -> range:
        """The epochs of which any was taken. The requested steps may begin where the source was started anew:
        then none was of the start before.
        """
        if self.restarted and self.before_wanted == self.end:
            return range(0)
        return range(self.begin.epoch, self.end.epoch + (0 if at_border(self.end) else 1))

    def left_open(self, epoch: int) -> str | None:
        """Why an epoch cannot be compared with the files; None if it was taken from its begin to its end."""
        if epoch == self.begin.epoch and not at_border(self.begin):
            return _COMPLETENESS.format(epoch, "begin")
        if epoch == self.end.epoch and not self.ends_data:
            return _RESTARTED.format(epoch) if self.restarted else _COMPLETENESS.format(epoch, "end")
        return None


def joined(stretches: Sequence[Stretches]) -> JoinedSources:
    """Joins the parts of a history, in order."""
    keys = list(dict.fromkeys(key for part in stretches for key in part))
    newest = dict(keys)  # the last start of each source
    return {
        key: JoinedSource.of(
            [part[key] for part in stretches if key in part], restarted=key[1] != newest[key[0]]
        )
        for key in keys
    }


def files_needed(spec: DataSpec, sources: JoinedSources) -> list[EpochFiles]:
    """The epochs whose files must be summed up, and the encoder for each."""
    return list(
        dict.fromkeys(
            _files(spec, name, epoch)
            for (name, _), source in sources.items()
            for epoch in source.epochs
            if source.left_open(epoch) is None
        )
    )


def _files(spec: DataSpec, source: str, epoch: int) -> EpochFiles:
    """Names the first epoch that has the same list, if transforms do not draw anew in each."""
    lists, first = spec.lists_of(source), epoch
    if not spec.settings.transforms.get(source):
        first = next(each for each in range(epoch + 1) if lists.version(each) == lists.version(epoch))
    return source, first, _encoder(spec, source, epoch)[0]


def _encoder(spec: DataSpec, source: str, epoch: int) -> tuple[EncoderChoice, bool]:
    """The encoder of an epoch, and whether it made all of it."""
    encoder = encoder_of_epoch(spec.encoders, source, epoch)
    return encoder or spec.encoders[-1].encoder, encoder is not None


def epochs_verdict(
    spec: DataSpec, sources: JoinedSources, files: EncodedFiles
) -> tuple[str | None, list[str]]:
    """The reason if an epoch held a record twice, or other documents than the files; and what of the epochs
    is not verified.
    """
    not_shown: list[str] = []
    several = len({name for name, _ in sources}) > 1
    for (name, _), source in sources.items():
        of = f"source {name}: " if several else ""
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
            path = spec.plan_of(name, epoch).manifest.path(twice[0])
            return f"epoch {epoch} held the record at {twice[1]} of {path} twice", not_shown
        if left_open := source.left_open(epoch):
            not_shown.append(left_open)
        else:
            _, alone = _encoder(spec, name, epoch)
            found, held = source.totals.sums[epoch], files[_files(spec, name, epoch)]
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
