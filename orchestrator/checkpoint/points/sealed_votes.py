"""Votes in storage: members write them if they reach no coordinator that commits their save.

The following start makes a resume point of them (membership rules 10, 11 and 14). A vote contains its voter's
unacknowledged step records. The votes of all ranks and the journal thus contain every step up to the point.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.checkpoint.points.points import Point, differing_replicas, disagreement, random_numbers
from orchestrator.checkpoint.points.verify import DamageError, check_file
from orchestrator.errors import LaterFormatError, ResumePointError, StorageError
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.json_form import LaterSealError, SealError, decode, encode, seal, unseal
from orchestrator.records.points import Vote
from orchestrator.records.steps import StateKey, StepRecord
from orchestrator.storage.files import Storage

if TYPE_CHECKING:
    from orchestrator.checkpoint.points.point_files import PointFiles

VOTES, DECIDED = "votes", "DECIDED"
COMPLETED, REMOVED = "completed", "removed"  # the possible contents of DECIDED
_NAME = re.compile(r"\d{5,}\.json")


def keep_vote(storage: Storage, vote: Vote, run_id: str) -> None:
    """Writes the vote beside its part, durably. A second call changes nothing. Raises `StorageError`."""
    path = f"{_folder(vote.key.point_name)}/{VOTES}/{vote.rank:05d}.json"
    # 128 bits, more than a JSON number has
    sums = {group: f"{found:032x}" for group, found in vote.sums.items()}
    storage.create(path, seal({"run_id": run_id, "vote": {**encode(vote), "sums": sums}}))


def read_votes(storage: Storage, name: str, run_id: str) -> tuple[Vote, ...]:
    """Returns the votes of this run for the save `name`, by rank.

    A vote that is not as it was written, or is another save's, is ignored. Raises `LaterFormatError` for one
    that a later version wrote, and `StorageError`.
    """
    found: list[Vote] = []
    for file in storage.list(f"{_folder(name)}/{VOTES}"):
        content = _unsealed(storage, f"{_folder(name)}/{VOTES}/{file}") if _NAME.fullmatch(file) else None
        if content is None:
            continue
        sums = {group: int(number, 16) for group, number in content["vote"]["sums"].items()}
        vote = decode(Vote, {**content["vote"], "sums": sums})
        if content["run_id"] == run_id and vote.key.point_name == name:
            found.append(vote)
    return tuple(sorted(found, key=lambda vote: vote.rank))


def decides(storage: Storage, name: str, what: str) -> bool:
    """Whether the save `name` is to be `what`, COMPLETED or REMOVED. The first call decides it for all.

    Raises as `read_votes` does.
    """
    path = f"{_folder(name)}/{DECIDED}"
    return storage.create(path, seal({"what": what})) or bool(_unsealed(storage, path) == {"what": what})


def _unsealed(storage: Storage, path: str) -> Any:
    """Returns the content of a sealed file; None if it does not exist, or is not as it was written."""
    try:
        return unseal(storage.read(path))
    except LaterSealError as error:
        raise LaterFormatError(f"{storage.root}/{path} {error}") from error
    except (FileNotFoundError, SealError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Committable:
    """A save that no coordinator committed, with every rank's vote and every step's record."""

    votes: tuple[Vote, ...]
    parent: StateKey | None  # of its generation

    @property
    def key(self) -> StateKey:
        """The key of the state that it holds."""
        return self.votes[0].key

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """The records that the journal may lack: the voters' unacknowledged ones, each once, in order."""
        found = {record.key: record for vote in self.votes for record in vote.records}
        return tuple(found[key] for key in sorted(found))


def committable(
    votes: Sequence[Vote], generations: Sequence[GenerationStart], journalled: Callable[[StateKey], bool]
) -> Committable | str:
    """Returns what the votes of one save make committable, or the reason why not.

    `generations` are the journal's. `journalled` returns whether the journal has the record of a step.
    """
    if not votes:
        return "there is no vote"
    differ = differing_replicas(votes)
    if reason := disagreement(votes) or (differ and differ.sentence()):
        return reason
    key = votes[0].key
    start = next((g for g in generations if g.id == (key.attempt, key.generation)), None)
    if start is None:
        return f"generation {key.generation} of attempt {key.attempt} is in no journal"
    brought = {record.key for vote in votes for record in vote.records}
    for step in range(start.step + 1, key.step + 1):
        at = StateKey(attempt=key.attempt, generation=key.generation, step=step)
        if at not in brought and not journalled(at):
            return f"neither the journal nor a vote has the record of step {step}"
    return Committable(votes=tuple(votes), parent=start.parent)


def complete(
    points: PointFiles,
    found: Committable,
    config: Mapping[str, Any],
    run_id: str,
    fenced: Callable[[], bool],
) -> Point | None:
    """Makes a resume point of `found`, for a start that has claimed but not written its parent file.

    `config` is the flat configuration of the attempt that saved it. `fenced` returns whether a newer claim
    exists. Returns None if one exists, if the save was removed meanwhile, or if a file of it is surely
    absent.

    The coordinator of the attempt that saved it may still live and commit at the same moment, and so may an
    older start. All write the same documents, and only one of them COMMIT. Raises `StorageError`.
    """
    name, storage = found.key.point_name, points.storage
    if fenced() or not decides(storage, name, COMPLETED):
        return None
    if not (there := storage.list(f"{_folder(name)}/{VOTES}")):  # it was removed before that was decided
        storage.delete_folder(_folder(name))
    if len(there) < len(found.votes):
        return None
    try:
        for vote in found.votes:
            for entry in () if vote.nodes else vote.files:
                check_file(storage, name, entry, with_digest=False)
        if fenced():
            return None
        if not points.committed([name]):
            _commit(points, found, config, run_id)
    except (DamageError, ResumePointError):
        return None
    return None if fenced() else points.read_point(name)


def _commit(points: PointFiles, found: Committable, config: Mapping[str, Any], run_id: str) -> None:
    rng = random_numbers(config["train.seed"])
    try:
        points.commit_point(found.votes, config, rng, found.parent, 0.0, run_id, others_may=True)
    except StorageError:
        if not points.committed([found.key.point_name]):  # another process has committed it meanwhile
            raise


def _folder(name: str) -> str:
    return f"points/{name}"
