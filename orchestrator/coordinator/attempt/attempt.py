"""The value of one attempt of a run: what was claimed, and what it continues.

A start command makes one (`begin_launch`). A coordinator makes the next one after its own restart
(`continue_launch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.checkpoint.points.point_status import Leftover
from orchestrator.checkpoint.points.points import Point
from orchestrator.coordinator.machine.launch_history import EarlierCoordinator
from orchestrator.history.claims.claim_files import UnreadableFile
from orchestrator.history.claims.claims import Claim, ClaimParent, ForkedFrom
from orchestrator.history.journal.code_record import Code
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.resume.skipping import Skip
from orchestrator.planning.resume.source_lists import RestartRequest, SourceChange, SourceLists
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.state.memory import ParallelChoice
from orchestrator.planning.state.state_layout import Layout, layout_of
from orchestrator.records.points import Damage
from orchestrator.records.steps import StateKey, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFindings:
    """What a start found and did in storage, for the journal and the user.

    `damages`: those of newer points than the continued one.
    `verified_s`: how long it took to read back the points down to that one (None: they were not read).
    `lifted`: whether that removed its mark as damaged.
    `unreadable`: files of attempts that could not be used.
    `leftovers`: saves of older launches that were removed.
    `lists`: what happened to the sources at the start command.
    `brought`: step records before the continued point that are in no journal, from the votes of the save that
    a start `completed` (None: the point's commit is in the journal).
    `parallel`: the result of `train.parallel` in an earlier attempt, with its number (None: none recorded).
    """

    damages: tuple[Damage, ...] = ()
    verified_s: float | None = None
    lifted: bool = False
    unreadable: tuple[UnreadableFile, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    lists: tuple[SourceChange, ...] = ()
    parallel: tuple[int, ParallelChoice] | None = None
    brought: tuple[StepRecord, ...] = ()
    completed: Point | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A claimed attempt and what it continues. It can be pickled: the driver passes it to the coordinator.

    `step_label`: the label of the last finished step as this launch counts.
    `encoders`: which encoder makes which documents.
    `run_id`: the id in run.json.
    `command`: the command line that would continue the run, without secrets ("": there was none).
    `num_blocks`: the number of blocks of each source; `weights`: its weight in the mixture.
    `forked_from`: the point of another run that it takes over.
    `losses`: the mean losses of points.
    `history`: the number of histories of the run that points held; the one that it continues is held up to
    `history_saved_to` tokens (see `history.metrics.loggers`).
    `skip`: what the claim leaves out after the point; the point's cursor is already after it.
    `sources`: which lists are read in which epoch, and thus the meaning of the point's cursor; `restart`: the
    request for a new start of some.
    `parallel`: how the state is divided (None: nothing is trained, or it is unknown).
    `code`: the files of the configuration's functions; for `orchestrator fork`, which trains nothing, those
    that its point was trained with (empty: not recorded).
    `found` is for the process that begins the attempt, `earlier` for a restarted coordinator.
    """

    number: int
    launch: str
    why: str
    point: Point | None
    inherited: tuple[str, ...]
    step_label: int
    budgets: Budgets
    encoders: tuple[EncoderSpan, ...]
    run_id: str = ""
    command: str = ""
    num_blocks: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    forked_from: ForkedFrom | None = None
    losses: Mapping[str, float | None] = field(default_factory=dict)
    history: int = 1
    history_saved_to: int = 0
    skip: Skip | None = None
    sources: tuple[SourceLists, ...] = ()
    restart: RestartRequest | None = None
    parallel: ParallelChoice | None = None
    code: Mapping[str, Code] = field(default_factory=dict)
    found: StartFindings = StartFindings()
    earlier: EarlierCoordinator = EarlierCoordinator()

    @classmethod
    def claimed(
        cls, claim: Claim, parent: ClaimParent, point: Point | None, step_label: int, run_id: str
    ) -> Attempt:
        """Builds the attempt of a claim with this parent file, which therefore continues `point`."""
        assert parent.budgets is not None, "a start command's claim says what may be trained"
        return cls(
            number=claim.number,
            launch=claim.launch,
            why=claim.why,
            point=point,
            inherited=parent.inherited,
            step_label=step_label,
            budgets=parent.budgets,
            encoders=parent.encoders,
            run_id=run_id,
            forked_from=parent.origin.forked_from if parent.origin else None,
            skip=parent.skip,
            sources=parent.sources,
            restart=parent.restart,
        )

    def layout(self, world_size: int) -> Layout:
        """Returns the layout of the state on a group of `world_size` members; replicate if unknown."""
        return layout_of(world_size, self.parallel.num_shards if self.parallel is not None else 1)

    @property
    def parent(self) -> StateKey | None:
        """The key of the point that it continues."""
        return self.point.key if self.point else None
