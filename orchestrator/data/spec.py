"""The specification of a run's data as one frozen value: files, tokenizer, encoder, settings.

A process needs nothing else to read the stream. `dataset.prepare_data` makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import orjson

from orchestrator.data.common.settings import MixtureSettings, StreamSettings, limits_of, mixture_of
from orchestrator.data.frozen import FrozenData, LaterList, Refreshing
from orchestrator.data.packing.stream import Stream, StreamSource
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.tokens.chunks import Encoders, tokenize_block
from orchestrator.data.tokens.tokenizer_files import TokenizerModel
from orchestrator.errors import DataIdentityError, RefusedError
from orchestrator.planning.encoders import EncoderSpan, Place
from orchestrator.planning.resume.identity import OF_A_SOURCE, RunIdentity, content_settings
from orchestrator.planning.resume.source_lists import FIRST, SourceLists, order_of
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.tokens import TokenChunk, WindowTask

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

__all__ = ["DataSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """A run's data, and how they become tokens. Pickles; it is sent to the feeder and to every tokenizer
    process.

    `plans` are the job's sources with their current lists. `sources` has all sources of the run, also those
    that the job does not read, with their numbers and the list of each epoch. `lists` are these lists, by
    source and version, except those that `refreshing` finds or makes when their epoch comes. `mixture`
    defines how the sources are mixed (None for one). `max_epochs` are the limits of sources with a limit of
    their own (None: endless).

    `encoders` are those of the attempt (`made_by`); before there is an attempt, only the run's first.
    `tokenizer_folder` is the run's own copy of the tokenizer (None without a run), `vocab_size` its highest
    id plus one. `notes` are printed and journalled at the start. `unfrozen` are the data to be frozen, None
    if they are frozen. `unwritten` are the lists still to be written of a run with frozen data. `lacking`
    lists, for data that are read again, the files that changed since their lists were frozen. `evaluated` are
    the parts of `eval.parts` with sources of their own, by name.
    """

    plans: tuple[SourcePlan, ...]
    sources: tuple[SourceLists, ...]
    lists: dict[str, dict[str, SourcePlan]]
    settings: StreamSettings
    tokenizer: TokenizerModel
    tokenizer_folder: str | None
    vocab_size: int
    encoders: tuple[EncoderSpan, ...]
    run_identity: RunIdentity
    mixture: MixtureSettings | None = None
    max_epochs: dict[str, int | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unfrozen: FrozenData | None = None
    unwritten: tuple[LaterList, ...] = ()
    refreshing: Refreshing | None = None
    lacking: dict[str, dict[str, str]] = field(default_factory=dict)
    evaluated: dict[str, DataSpec] = field(default_factory=dict)

    def in_force(self, frozen: RunIdentity) -> RunIdentity:
        """The identity of a run whose first start froze `frozen`, updated for its later lists.

        Settings of sources that are read by later lists are those of these lists.
        """
        settings = {k: v for k, v in frozen.settings.items() if not k.startswith(OF_A_SOURCE)}
        for plan in self.plans:
            prefix = f"{OF_A_SOURCE}{plan.source}."
            of_job = {k: v for k, v in self.run_identity.settings.items() if k.startswith(prefix)}
            first = {k: v for k, v in frozen.settings.items() if k.startswith(prefix)}
            begun_first = self.lists_of(plan.source).begun_with == FIRST
            of_job.pop(f"{prefix}transform_fields", None)  # stored in the list
            settings |= first if begun_first and first else of_job | _list_settings(prefix, plan)
            settings[f"{prefix}fragments_per_block"] = str(plan.fragments_per_block)
            if (loss := self.lists_of(plan.source).loss) and f"{prefix}loss" in of_job:
                settings[f"{prefix}loss"] = orjson.dumps(loss).decode()
        manifests = {plan.source: plan.manifest.digest for plan in self.plans}
        # transforms of sources that were added or removed later are the job's
        now = self.run_identity.transforms
        transforms = {name: frozen.transforms.get(name, identity) for name, identity in now.items()}
        return replace(frozen, settings=settings, manifests=manifests, transforms=transforms)

    def identity(self) -> RunIdentity:
        """The identity of this job, with its current files and tokenizer."""
        return self.run_identity

    def lists_of(self, source: str) -> SourceLists:
        """The lists of a source by epoch, and the source's number."""
        return next(each for each in self.sources if each.name == source)

    def source_plan(self, source: str) -> SourcePlan:
        """The current files, fragments and blocks of a source."""
        return next(plan for plan in self.plans if plan.source == source)

    def plan_of(self, source: str, epoch: int) -> SourcePlan:
        """The plan that an epoch reads.

        A list of a refreshed epoch is made now if no process has reached the epoch. Raises as that does, and
        `DataIdentityError` if a frozen list is missing or altered. A reader of a history makes no list: for
        an epoch that was never reached, it uses the list of the one before, since nothing of it was trained.
        """
        version = self.lists_of(source).version(epoch)
        plan = self.lists[source].get(version)
        if plan is not None:
            return plan
        if self.refreshing is None:
            assert order_of(version)[1] > 0, f"list {version!r} of source {source} is not at hand"
            return next(reversed(self.lists[source].values()))
        return self.refreshing.plan(source, version)

    def has_list(self, source: str, epoch: int) -> bool:
        """Whether `plan_of` returns at once. The list of a refreshed epoch is cached after the first
        request.
        """
        version, made = self.lists_of(source).version(epoch), self.refreshing
        return version in self.lists[source] or made is None or made.has(source, version)

    def num_blocks(self, source: str, epoch: int) -> int:
        """The number of blocks of a source's epoch."""
        return self.plan_of(source, epoch).num_blocks

    def _path(self, source: str, epoch: int, file: int) -> str:
        return self.plan_of(source, epoch).manifest.path(file)

    @property
    def only_source(self) -> str:
        """The name of the only source of a run."""
        (plan,) = self.plans
        return plan.source

    @property
    def num_bytes(self) -> dict[str, int]:
        """The bytes of each source's files, in the list that it began with or was restarted with.

        They are the weights of sources without configured weights.
        """
        return {plan.source: self.begun_with(plan.source).manifest.num_bytes for plan in self.plans}

    def begun_with(self, source: str) -> SourcePlan:
        """The list that a source began with or was restarted with. Refreshes follow it."""
        return self.lists[source][self.lists_of(source).begun_with]

    @property
    def weights(self) -> dict[str, int]:
        """The sources' shares in the mixture, as whole numbers."""
        return dict(self.mixture.weights) if self.mixture is not None else {self.only_source: 1}

    def made_by(self, encoders: tuple[EncoderSpan, ...]) -> DataSpec:
        """The same data with these encoders."""
        return replace(self, encoders=encoders or self.encoders)

    def mixed_as(self, config: JobConfig) -> DataSpec:
        """The same data with the mixture and the limits of another configuration of the same sources."""
        settings = replace(self.settings, num_epochs=config.data.num_epochs)
        return replace(
            self, settings=settings, mixture=mixture_of(config, self.num_bytes), max_epochs=limits_of(config)
        )

    def build_encoders(self) -> Encoders:
        """The encoders for `tokenize_block`.

        They raise `DataIdentityError` if this machine has another version of a required library.
        """
        return Encoders(self.tokenizer, self.encoders, self.settings.special_tokens_in_text)

    def num_epochs(self, source: str) -> int | None:
        """The epoch before which a source ends, None: endless.

        Limits of epochs count from the start of its current list.
        """
        limit = self.max_epochs.get(source, self.settings.num_epochs)
        return None if limit is None else self.lists_of(source).began + limit

    def endless(self) -> DataSpec:
        """The same data without an end: a history itself defines how far it went."""
        settings = replace(self.settings, num_epochs=None)
        return replace(self, settings=settings, max_epochs=dict.fromkeys(self.max_epochs))

    def held_out(self) -> DataSpec:
        """The hold-out (`data.holdout`): all held-out records of every source that has some.

        They are read once, in the order of the first epoch. Raises `RefusedError` if no source has a
        hold-out.
        """
        kept = tuple(plan for plan in self.plans if self.settings.holdout.get(plan.source))
        if not kept:
            raise RefusedError(
                "nothing is held out: data.holdout is 0, and so it is for each source; only a new run can "
                "hold records out (another run.name)",
                code="data.no_holdout",
            )
        mixture = None
        if self.mixture is not None and len(kept) > 1:
            weights = {plan.source: self.mixture.weights[plan.source] for plan in kept}
            mixture = replace(self.mixture, weights=weights, on_end="drop")
        identity = self.run_identity
        return replace(
            self,
            plans=kept,
            settings=replace(self.settings, held_out=True, num_epochs=1),
            run_identity=replace(identity, settings={**identity.settings, "part": '"holdout"'}),
            mixture=mixture,
            max_epochs={},
        )

    def tasks_from(self, cursor: Cursor, source: str | None = None) -> Iterator[WindowTask]:
        """A source's block tasks from a cursor on, over all its epochs; endless without a limit.

        `source` None: the only one.
        """
        source = source or self.only_source
        start = cursor.sources.get(source, SourceCursor())
        num_epochs = self.num_epochs(source)
        epochs = count(start.epoch) if num_epochs is None else range(start.epoch, num_epochs)
        first = WindowTask(
            source=source,
            epoch=start.epoch,
            block=start.block,
            window=start.window,
            record=start.record,
            output=start.output,
            # earlier pieces are read again if the cursor can verify them
            piece=0 if start.earlier_digest else start.piece,
        )
        for epoch in epochs:
            begin = start.block if epoch == start.epoch else 0
            num_blocks = self.num_blocks(source, epoch)
            if begin >= num_blocks:
                raise DataIdentityError(
                    f"the cursor names block {begin} of source {source}, which has {num_blocks} blocks in "
                    f"epoch {epoch}; the data are not those that the run was trained with",
                    code="resume.cursor_mismatch",
                )
            for block in range(begin, num_blocks):
                task = WindowTask(source=source, epoch=epoch, block=block)
                yield first if (epoch, block) == (start.epoch, start.block) else task

    def chunks(
        self, cursor: Cursor, source: str | None = None, encoders: Encoders | None = None
    ) -> Iterator[TokenChunk]:
        """The chunks of all tasks of a source from a cursor on, tokenized in this process.

        `source` None: the only one.
        """
        encoders = encoders or self.build_encoders()
        for task in self.tasks_from(cursor, source):
            yield from tokenize_block(task, self.plan_of(task.source, task.epoch), encoders, self.settings)

    def next_documents(self, cursor: Cursor) -> dict[str, Place]:
        """By source, the first document with text of which the stream before `cursor` has trained no token.

        If whole documents are packed, that is the first document of the first window of which no pack is
        taken. Otherwise it is the document after that of the cursor's token, because that token has already
        been a target (data rule 1). Both are read, because at an epoch's border the cursor does not name the
        first. The second may be in the next epoch, even if the job does not reach it.
        """
        endless, encoders = self.endless(), self.build_encoders()
        return {
            plan.source: endless.next_document(cursor, plan.source, encoders)
            for plan in self.plans
            if plan.source in cursor.sources or len(self.plans) == 1
        }

    def next_document(self, cursor: Cursor, source: str, encoders: Encoders) -> Place:
        """The same for one source, of a specification without an end."""
        at_hand, at = None, cursor.sources.get(source, SourceCursor())
        packed = self.settings.pack_mode != "concat"
        for chunk in self.chunks(cursor, source, encoders):
            if at.packs and (chunk.epoch, chunk.block, chunk.window) == (at.epoch, at.block, at.window):
                continue
            for record in chunk.record[chunk.num_tokens > 0].tolist():
                place = (chunk.epoch, chunk.block, chunk.window, record)
                if packed or at_hand not in (None, place):
                    return place
                at_hand = place
        raise AssertionError("an endless stream has a next document")

    def stream(self, cursor: Cursor, seq_len: int | None = None) -> Stream:
        """The stream that packs those chunks into steps, with samples of `seq_len` (None: the job's)."""
        sources = [
            StreamSource(
                name=plan.source,
                number=self.lists_of(plan.source).number,
                num_blocks=partial(self.num_blocks, plan.source),
                num_epochs=self.num_epochs(plan.source),
                path_of=partial(self._path, plan.source),
            )
            for plan in self.plans
        ]
        settings = replace(self.settings, seq_len=seq_len or self.settings.seq_len)
        return Stream(cursor, sources, settings, self.mixture)


def _list_settings(prefix: str, plan: SourcePlan) -> dict[str, str]:
    """The settings that a frozen list stores for its source."""
    manifest = plan.manifest
    found = content_settings(manifest.content.kind, {"format": manifest.format, **asdict(manifest.content)})
    return {f"{prefix}{name}": value for name, value in found.items()}
