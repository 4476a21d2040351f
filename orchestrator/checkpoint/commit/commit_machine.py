"""The commit machine: decides when a save becomes a resume point, and when its voters are answered.

It is a pure machine from events to actions, and its only clock is the times in its events (membership rules 7
and 13 to 16). `retention` decides which older points are deleted then. `store_actions` carries out store
actions, and the coordinator the answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from orchestrator.checkpoint.commit.commit_events import (
    Acknowledge,
    Action,
    CheckNewerClaim,
    ClaimChecked,
    CommitWritten,
    Deleted,
    DiscardSave,
    Evaluated,
    Event,
    Failed,
    Fence,
    FlushJournal,
    GenerationFormed,
    GiveUp,
    JournalDurable,
    PartFailed,
    PartGrows,
    Tick,
    Verified,
    VoteCast,
    VoterGone,
    WriteCommit,
)
from orchestrator.checkpoint.commit.pending_save import (
    ALL_SILENT,
    NOBODY_LEFT,
    UNDER_WAY,
    DepartedRanks,
    PendingSave,
    SaveStage,
    first_of,
    set_of,
)
from orchestrator.checkpoint.commit.retention import KeptPoints
from orchestrator.checkpoint.points.points import ReplicasDiffer, differing_replicas, disagreement
from orchestrator.records.steps import StateKey

CHECK_EVERY_S = 5.0  # interval of checks for a newer claim if nothing else causes one (rule 11)
AFTER = "the training group went on from another state"
LOST = (
    "the run's folder was deleted, moved or replaced while it trained, or its file system was unmounted, so "
    "nothing more is saved there; bring it back and start the same command again: it continues from the "
    "newest resume point. Or start a new run"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitMachine:
    """The state of one attempt's saves. `on` returns the next state and the actions.

    `kept` are the points on the lineage. `vote_limit_s` is how long a save may make no progress: no rank
    votes, or reports that more of its part is written. `departures` has, for each generation of which a vote
    may still come, the ranks that have left it. `discarding` are the given up saves, with the set of ranks
    that may still be writing into them.

    Guarantees:
    - A save is acknowledged only after its COMMIT is durable. Its journal was durable before, and no newer
      claim existed at a check after the COMMIT.
    - Points are deleted only after such a check.
    - Saves are decided one at a time, oldest first. A save with all its votes waits while an older one is
      undecided, and nothing of it is lost.
    - The files of a given up save are deleted only after every rank has stopped writing them. Only its vote,
      its report or its death proves that. Leaving its generation or being left out proves nothing, and a join
      proves only what it states. A rank that is cut off may never stop; the next launch then deletes those
      files.
    - A vote, a report and a departure each have constant cost, however many came before (except for sets of
      ranks, one bit per rank).

    The driver must not report events while the store actions of an earlier event are unanswered, except for
    `VerifyPoint`, `DeletePoints` and `DiscardSave`. No COMMIT is thus in progress when a generation is formed
    (rule 15).
    """

    attempt: int
    kept: KeptPoints
    vote_limit_s: float
    generation: int = 0
    parents: Mapping[int, StateKey | None] = field(default_factory=dict)
    departures: Mapping[int, DepartedRanks] = field(default_factory=dict)
    discarding: Mapping[StateKey, int] = field(default_factory=dict)
    saves: Mapping[StateKey, PendingSave] = field(default_factory=dict)
    # reason for giving up; None: acknowledged
    outcomes: Mapping[StateKey, str | None] = field(default_factory=dict)
    asked_s: float = 0.0  # when it last checked for a newer claim by itself; the clock of `CHECK_EVERY_S`
    fenced: bool = False

    def on(self, event: Event) -> tuple[CommitMachine, tuple[Action, ...]]:
        """Returns the state after `event` and the resulting actions, in order. Once fenced, there
        are none.
        """
        if self.fenced:
            return self, ()
        handler: Callable[[Event], tuple[CommitMachine, tuple[Action, ...]]]
        handler = getattr(self, _HANDLERS[type(event)])
        after, actions = handler(event)
        after, next_ones = after._take_up_next()
        return after, (*actions, *next_ones)

    @property
    def under_way(self) -> tuple[StateKey, ...]:
        """Saves whose COMMIT is being written or may exist. A new generation waits for them (rule 15)."""
        return tuple(key for key, save in self.saves.items() if save.stage in UNDER_WAY)

    def outdates(self, generation: int, parent: StateKey | None) -> bool:
        """Whether a generation with this parent would leave out an acknowledged point."""
        newest = self.kept.newest
        if newest is None or newest.attempt != self.attempt:
            return False
        parents = {**self.parents, generation: parent}
        return not dataclasses.replace(self, generation=generation, parents=parents)._on_path(newest)

    def is_hopeless(self, key: StateKey, world_size: int) -> bool:
        """Whether a save of `key` by `world_size` ranks can never be committed. No vote of it need have come
        yet.

        It was given up, or would be at the next vote.
        """
        if key in self.outcomes:
            return self.outcomes[key] is not None
        if self._is_foreign(key) or not self._on_path(key):
            return True
        return self._missing_voter(self._save(key, world_size, 0.0)) is not None

    # ---- saves
    def _vote(self, event: VoteCast) -> tuple[CommitMachine, tuple[Action, ...]]:
        vote, key = event.vote, event.vote.key
        if key in self.outcomes:
            after, discard = self._stopped_writing(key, vote.rank)
            return after, (self._answer(key, (vote.rank,)), *discard)
        if self._is_foreign(key):
            foreign = "its generation was not formed by this attempt: join again"
            return self, (GiveUp(key=key, ranks=(vote.rank,), reason=foreign),)
        save = self._save(key, vote.world_size, event.now_s)
        if save.voted & set_of(vote.rank):
            return self, ()
        save = save.with_vote(vote, event.now_s)
        after = self._with(save)
        if not self._on_path(key):
            return after._give_up(key, AFTER)
        if (missing := self._missing_voter(save)) is not None:
            return after._give_up(key, f"rank {missing} ended before it had saved its part")
        return after, ()

    def _take_up_next(self) -> tuple[CommitMachine, tuple[Action, ...]]:
        """Continues with the oldest save if all its votes are there. Saves are decided one after
        the other.
        """
        key = min(self.saves, default=None)
        if self.fenced or key is None or any(
            s.stage is not SaveStage.COLLECTING for s in self.saves.values()
        ):
            return self, ()
        if not self.saves[key].is_complete:
            return self, ()
        votes = self.saves[key].votes
        differ = differing_replicas(votes)
        if reason := disagreement(votes) or (differ and differ.sentence()):
            after, actions = self._give_up(key, reason, differ=differ)
            after, next_ones = after._take_up_next()
            return after, (*actions, *next_ones)
        records = tuple({record.key: record for voted in votes for record in voted.records}.values())
        return self._move(key, SaveStage.FLUSHING), (FlushJournal(key=key, records=records),)

    def _part_grows(self, event: PartGrows) -> tuple[CommitMachine, tuple[Action, ...]]:
        """A save that was reported once is waited for, even if no rank ever votes."""
        key = event.key
        if key in self.outcomes or self.is_hopeless(key, event.world_size):
            return self, ()
        save = self._save(key, event.world_size, event.now_s)
        if key in self.saves and not (event.moved and save.waited_for & set_of(event.rank)):
            return self, ()
        return self._with(dataclasses.replace(save, moved_s=event.now_s)), ()

    def _part_failed(self, event: PartFailed) -> tuple[CommitMachine, tuple[Action, ...]]:
        key = event.key
        if self._is_foreign(key):
            return self, ()
        if key in self.outcomes:
            return self._stopped_writing(key, event.rank)
        save = self._save(key, event.world_size, event.now_s)
        save = dataclasses.replace(save, failed=save.failed | set_of(event.rank))
        after = self._with(save)
        # a rank that stops because the save is hopeless reports that, too
        if not self._on_path(key):
            return after._give_up(key, AFTER)
        if (missing := self._missing_voter(save)) is not None:
            return after._give_up(key, f"rank {missing} ended before it had saved its part")
        reason = f"rank {event.rank} could not save its part: {event.reason}"
        return after._give_up(key, reason, by_storage=True)

    def _voter_gone(self, event: VoterGone) -> tuple[CommitMachine, tuple[Action, ...]]:
        known = self._left(event.generation)
        if known is ALL_SILENT:
            return self, ()
        left = known.left_out(event.rank) if event.writing else known.over(event.rank, event.saving)
        after = dataclasses.replace(self, departures={**self.departures, event.generation: left})
        waiting = [save for save in after.saves.values() if save.stage is SaveStage.COLLECTING]
        doomed = {
            save.key: missing for save in waiting if (missing := after._missing_voter(save)) is not None
        }
        after, actions = after._give_up_all(
            {key: f"rank {rank} ended before it had saved its part" for key, rank in doomed.items()}
        )
        after, discards = after._discard_what_is_quiet()
        return after, (*actions, *discards)

    def _journal_durable(self, event: JournalDurable) -> tuple[CommitMachine, tuple[Action, ...]]:
        if not self._is_at(event.key, SaveStage.FLUSHING):
            return self, ()
        return self._move(event.key, SaveStage.CLEARING), (CheckNewerClaim(key=event.key),)

    def _claim_checked(self, event: ClaimChecked) -> tuple[CommitMachine, tuple[Action, ...]]:
        if event.newer or event.lost:
            newer = f"attempt {self.attempt + 1} of this run exists: another launch has taken it over"
            reason = newer if event.newer else f"{event.lost}: {LOST}"
            return dataclasses.replace(self, fenced=True), (Fence(reason=reason),)
        return dataclasses.replace(self, kept=self.kept.marked(event.quarantined))._cleared(event.key)

    def _cleared(self, key: StateKey | None) -> tuple[CommitMachine, tuple[Action, ...]]:
        """Continues after a check that found no newer claim."""
        if key is None:
            return self._prune(new_point=False)
        if self._is_at(key, SaveStage.CLEARING):
            save = self.saves[key]
            write = WriteCommit(
                key=key, votes=save.votes, parent=self.parents[key.generation], started_s=save.started_s
            )
            return self._move(key, SaveStage.WRITING), (write,)
        if not self._is_at(key, SaveStage.CHECKING):
            return self, ()
        ranks = self.saves[key].ranks
        after = dataclasses.replace(self._decided({key: None}), kept=self.kept.with_point(key.point_name))
        after, actions = after._prune(new_point=True)
        return after, (Acknowledge(key=key, ranks=ranks), *actions)

    def _commit_written(self, event: CommitWritten) -> tuple[CommitMachine, tuple[Action, ...]]:
        if not self._is_at(event.key, SaveStage.WRITING):
            return self, ()
        kept = self.kept.with_loss(event.key.point_name, event.mean_loss)
        after = dataclasses.replace(self, kept=kept)
        return after._move(event.key, SaveStage.CHECKING), (CheckNewerClaim(key=event.key),)

    def _evaluated(self, event: Evaluated) -> tuple[CommitMachine, tuple[Action, ...]]:
        return dataclasses.replace(self, kept=self.kept.evaluated(event.key.point_name, event.loss)), ()

    def _failed(self, event: Failed) -> tuple[CommitMachine, tuple[Action, ...]]:
        if event.key not in self.saves:
            return self, ()
        return self._give_up(event.key, event.reason, by_storage=True)

    # ---- generations
    def _formed(self, event: GenerationFormed) -> tuple[CommitMachine, tuple[Action, ...]]:
        assert not self.under_way, (
            f"generation {event.generation} formed while the COMMIT of {self.under_way} was under way"
        )
        assert not self.outdates(event.generation, event.parent), (
            f"{event} leaves out point {self.kept.names[-1]}"
        )
        parents = {**self.parents, event.generation: event.parent}
        after = dataclasses.replace(self, generation=event.generation, parents=parents)._pruned()
        after = dataclasses.replace(after, kept=self.kept.on_path(after._on_path))
        return after._give_up_all({key: AFTER for key in after.saves if not after._on_path(key)})

    def _pruned(self) -> CommitMachine:
        """Drops the departures of generations from which nothing more can arrive.

        All members of a generation have left it when the second one after it is formed. Members that still
        owe a vote are listed in its departures.
        """
        settled = self.generation - 2
        wanted = {key.generation for key in (*self.saves, *self.discarding)}
        kept = {
            generation: left
            for generation, left in self.departures.items()
            if generation > settled or generation in wanted or left.may_come
        }
        return dataclasses.replace(self, departures=kept)

    def _left(self, generation: int) -> DepartedRanks:
        if (left := self.departures.get(generation)) is not None:
            return left
        pruned = generation <= self.generation - 2 and all(k.generation != generation for k in self.saves)
        return ALL_SILENT if pruned else NOBODY_LEFT

    def _on_path(self, key: StateKey) -> bool:
        """Whether the newest generation is, or continues, the state `key`.

        The state is one of this attempt, or a point that it inherited. Inherited points are in order on one
        history.
        """
        generation, step = self.generation, None
        while (key.attempt, key.generation) != (self.attempt, generation):
            parent = self.parents[generation]
            if parent is None:
                return False
            if parent.attempt != self.attempt:
                return key <= parent
            generation, step = parent.generation, parent.step
        return step is None or key.step <= step

    # ---- points
    def _prune(self, new_point: bool) -> tuple[CommitMachine, tuple[Action, ...]]:
        kept, actions = self.kept.prune(new_point, self.asked_s)
        return dataclasses.replace(self, kept=kept), actions

    def _verified(self, event: Verified) -> tuple[CommitMachine, tuple[Action, ...]]:
        after = dataclasses.replace(self, kept=self.kept.read_back(event.name, event.healthy))
        # Reading back takes long, so that earlier checks for a newer claim are out of date.
        return after, (CheckNewerClaim(key=None),) if event.healthy else ()

    def _deleted(self, event: Deleted) -> tuple[CommitMachine, tuple[Action, ...]]:
        kept, actions = self.kept.deleted(event, self.asked_s)
        return dataclasses.replace(self, kept=kept), actions

    # ---- time
    def _tick(self, event: Tick) -> tuple[CommitMachine, tuple[Action, ...]]:
        late = {
            key: f"{save.num_votes} of {save.world_size} ranks had saved their part, and the others wrote "
            f"nothing for {self.vote_limit_s:g} s"
            for key, save in self.saves.items()
            if not save.is_complete and event.now_s - save.moved_s > self.vote_limit_s
        }
        after, actions = self._give_up_all(late)
        if event.now_s - self.asked_s >= CHECK_EVERY_S:
            after = dataclasses.replace(after, asked_s=event.now_s)
            actions = (*actions, CheckNewerClaim(key=None))
        return after, actions

    # ---- small steps
    def _is_foreign(self, key: StateKey) -> bool:
        return key.attempt != self.attempt or key.generation not in self.parents

    def _save(self, key: StateKey, world_size: int, now_s: float) -> PendingSave:
        return self.saves.get(key) or PendingSave(
            key=key, world_size=world_size, started_s=now_s, moved_s=now_s
        )

    def _missing_voter(self, save: PendingSave) -> int | None:
        """Returns the first rank that has not voted for the save and never will."""
        left = self._left(save.key.generation)
        return first_of(left.missing(save.key, save.waited_for))

    def _stopped_writing(self, key: StateKey, rank: int) -> tuple[CommitMachine, tuple[Action, ...]]:
        """Handles that a rank has finished its part of a save that was decided before."""
        if key not in self.discarding:
            return self, ()
        discarding = {**self.discarding, key: self.discarding[key] & ~set_of(rank)}
        return dataclasses.replace(self, discarding=discarding)._discard_what_is_quiet()

    def _discard_what_is_quiet(self) -> tuple[CommitMachine, tuple[Action, ...]]:
        writing = {
            key: self._left(key.generation).may_write(key, ranks) for key, ranks in self.discarding.items()
        }
        after = dataclasses.replace(self, discarding={key: ranks for key, ranks in writing.items() if ranks})
        return after, tuple(DiscardSave(name=key.point_name) for key, ranks in writing.items() if not ranks)

    def _is_at(self, key: StateKey, stage: SaveStage) -> bool:
        return key in self.saves and self.saves[key].stage is stage

    def _with(self, save: PendingSave) -> CommitMachine:
        return dataclasses.replace(self, saves={**self.saves, save.key: save})

    def _move(self, key: StateKey, stage: SaveStage) -> CommitMachine:
        return self._with(dataclasses.replace(self.saves[key], stage=stage))

    def _decided(self, outcomes: Mapping[StateKey, str | None]) -> CommitMachine:
        left = {key: save for key, save in self.saves.items() if key not in outcomes}
        return dataclasses.replace(self, saves=left, outcomes={**self.outcomes, **outcomes})

    def _answer(self, key: StateKey, ranks: tuple[int, ...]) -> Action:
        """Builds the answer for ranks that vote for a decided save."""
        reason = self.outcomes[key]
        return (
            Acknowledge(key=key, ranks=ranks, late=True)
            if reason is None
            else GiveUp(key=key, ranks=ranks, reason=reason, late=True)
        )

    def _give_up(
        self, key: StateKey, reason: str, by_storage: bool = False, differ: ReplicasDiffer | None = None
    ) -> tuple[CommitMachine, tuple[Action, ...]]:
        return self._give_up_all({key: reason}, by_storage, differ)

    def _give_up_all(
        self, reasons: Mapping[StateKey, str], by_storage: bool = False, differ: ReplicasDiffer | None = None
    ) -> tuple[CommitMachine, tuple[Action, ...]]:
        answers = []
        discarding = dict(self.discarding)
        for key in reasons:
            save = self.saves[key]
            answers.append(
                GiveUp(key=key, ranks=save.ranks, reason=reasons[key], by_storage=by_storage, differ=differ)
            )
            # If COMMIT may exist, the files stay: a whole point is harmless, but a COMMIT without files is
            # not.
            if save.stage not in UNDER_WAY:
                discarding[key] = save.waited_for
        after = dataclasses.replace(self._decided(reasons), discarding=discarding)
        after, discards = after._discard_what_is_quiet()
        return after, (*answers, *discards)


_HANDLERS: dict[type, str] = {
    VoteCast: "_vote",
    PartGrows: "_part_grows",
    PartFailed: "_part_failed",
    VoterGone: "_voter_gone",
    GenerationFormed: "_formed",
    JournalDurable: "_journal_durable",
    CommitWritten: "_commit_written",
    ClaimChecked: "_claim_checked",
    Verified: "_verified",
    Deleted: "_deleted",
    Failed: "_failed",
    Evaluated: "_evaluated",
    Tick: "_tick",
}
