"""One attempt of a run: what was claimed, and what it continues.

A value. A start command makes one (`begin_launch`), a coordinator after its own restart the
next (`continue_launch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.elastic.failure_budget import Failure
from orchestrator.elastic.formation import PreviousGeneration
from orchestrator.history.claim_files import UnreadableFile
from orchestrator.history.claims import Claim, ClaimParent, ForkedFrom
from orchestrator.history.code_record import Code
from orchestrator.planning.encoders import EncoderSpan
from orchestrator.planning.manifests import SourceLists
from orchestrator.planning.parallel_choice import ParallelChoice
from orchestrator.planning.restarting import RestartRequest, SourceChange
from orchestrator.planning.schedule import Budgets
from orchestrator.planning.skipping import Skip
from orchestrator.planning.state_layout import Layout, layout_of
from orchestrator.records.points import Damage
from orchestrator.records.run_status import MemberInfo
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.resume.leftovers import Leftover
from orchestrator.resume.points import Point


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFindings:
    """What a start found in storage, and did there, for the journal and the user to hear of.

    `damages` are those of newer points than the one that is continued; `verified_s` is how long it took to
    read back the points down to that one (None: it was not), `lifted` whether that lifted its mark as
    damaged. `unreadable` are files of attempts that could not be used; `leftovers` older launches' saves that
    were removed; `lists` what became of the sources at the start command. `brought` are step records before
    the continued point that no journal has, from the votes of the save that a start `completed` (None: the
    journal says that the point was committed). `parallel` is what
    `train.parallel` came to in an earlier attempt, with its number (None: none has noted it).
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
class EarlierCoordinator:
    """What earlier coordinators of the launch have left to the one that takes their place.

    `previous` is the generation that trains on meanwhile, `members` where its members live, `finished`
    (member, reason, step) those whose part is over; `ended` is (outcome, reason) when the launch had ended
    before; `failures` and `last_step` are what its failure budget counts, `answered` the requests from
    outside that are, `reported` the members that have reported an error. `died` is the process (pid and host;
    0: not known) of the one whose place is taken.
    """

    previous: PreviousGeneration | None = None
    members: tuple[MemberInfo, ...] = ()
    finished: tuple[tuple[str, str, int], ...] = ()
    ended: tuple[str, str] | None = None
    failures: tuple[Failure, ...] = ()
    last_step: StepRecord | None = None
    answered: tuple[int, ...] = ()
    reported: tuple[str, ...] = ()
    died: tuple[int, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A claimed attempt and what it continues. It pickles: the driver hands it to the coordinator.

    `step_label` is the label of the last step done as this launch counts; `encoders` say who makes which
    documents; `run_id` is run.json's; `command` is the command line that would continue the run, without
    secrets ("": nobody typed one); `num_blocks` has the number of blocks of each source, `weights` its weight
    in the mixture; `forked_from` is the point of another run that it takes over; `losses` are the mean losses
    of points; `history` counts the histories of the run that points held, of which the one that it continues
    is held up to `history_saved_to` tokens (see `history.saved_history`). `skip` is what the claim leaves out
    after the point, whose cursor stands after it here. `sources` say which lists are read in which epoch: the
    point's cursor stands in them; `restart` asked for a new start of some. `parallel` says how the state is
    divided (None: nothing is trained, or nobody said), `code` which files the functions of the configuration
    lie in; for `orchestrator fork`, which trains nothing, those that its point was trained with (empty: not
    recorded). `found` is for the process that begins the attempt, `earlier` for a restarted coordinator.
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
        """The attempt of a claim whose parent file says this, and which therefore continues `point`."""
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
        """How the state lies on a group of so many members; replicate where nobody said."""
        return layout_of(world_size, self.parallel.num_shards if self.parallel is not None else 1)

    @property
    def parent(self) -> StateKey | None:
        """The key of the point that it continues."""
        return self.point.key if self.point else None
