"""The layout of a run in storage, and `RunStore`, which reads and writes claims and resume points.

The layout defines names, contents and the order of writing.

    run.json                       sealed; RunFile: name, created, format, id, first_weights, identity
                                   (planning.resume.identity.RunIdentity), forked_from
    manifest/<source>.parquet      the frozen list of files (written by the data plane)
    model/0001.json                see checkpoint.points.model_folders
    attempts/0003.json             sealed; Claim: number, launch, why, host, created, run_id. Created
                                   exclusively
    attempts/0003.parent.json      sealed; ClaimParent: attempt, parent, inherited, budgets, differences,
                                   encoders, origin; written after the claim
    attempts/0003.heartbeat        grows by a byte while the attempt lives; its content has no meaning.
                                   0003.heartbeat-2, … instead, after a write has failed
    attempts/0003.end.json         sealed; AttemptEnd: attempt, outcome, reason, ended, run_id, by. Absent
                                   after a crash
    points/00000480-a0003-g0007/   step, attempt, generation of its state
        state/00003-of-00008.safetensors   the rows that a rank writes, durable before it votes
                                   (`checkpoint.files.part_file`)
        cursor.json                format, and Cursor: consumed_samples, consumed_tokens, target_tokens,
                                   sources {name: SourceCursor}
        config.json                format, and the flat configuration: dotted path -> value
        rng.json                   format, rule, seed: the random number settings that a resume needs
        parts.json                 format, layout {num_shards, num_replicas}, items [[group, name, dtype,
                                   shape, sharded]] (`checkpoint.files.manifest`)
        COMMIT                     sealed, created last; Commit: format, key {attempt, generation, step},
                                   parent (a key or null), world_size, optimizer_steps, weights_digest,
                                   save_blocked_s, save_s, files [path, bytes, digest], files_digest,
                                   run_id, state_sums {group: 32 hex}
    pins/<point>.json              see checkpoint.points.pins
    requests/<launch>/000001.json  see history.numbered_files
    quarantine/<point>.json        see checkpoint.points.verify
    findings/000001.json           see history.numbered_files
    journal/a0003/000001.jsonl     events and step records (history.journal)

A sealed file is `{"content": …, "digest": blake3 of the canonical content}`, so that a changed byte anywhere
in it is detected. `files` lists every file of the point except COMMIT. The digest of a part is that of its
header. A folder below points/ without COMMIT is not a resume point. `run_id` is run.json's `id`; a file with
another one does not belong to the run. Names that contain `.tmp-` are files whose writing did not finish.
Nothing is written twice, nothing is renamed, and nothing is a pickle.

`point_fates` classifies every committed point as kept or deleted. `remove_leftovers` removes the folders of
abandoned saves.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.files.manifest import PartManifest
from orchestrator.checkpoint.files.part_file import FORMAT
from orchestrator.checkpoint.files.part_writer import Placed
from orchestrator.checkpoint.node_local.node_folder import PartsOnNode
from orchestrator.checkpoint.points.pins import PinFiles
from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.points import parse_point_name
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile, read_run
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.errors import BusyError, StorageError
from orchestrator.history.claims.claim_files import ATTEMPTS, JOURNAL, ClaimFiles, now_text
from orchestrator.history.claims.claims import ForkedFrom
from orchestrator.history.journal.journal_lines import DamagedLines
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode, seal
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.storage.files import Storage


class RunStore(ClaimFiles, PointFiles, PinFiles):
    """One run's files: run.json, claims (`ClaimFiles`), resume points (`PointFiles`) and holds (`PinFiles`).

    Has no state. Can be pickled if its storage can.
    """

    def create_run(
        self,
        name: str,
        identity: RunIdentity,
        first_weights: str = "",
        forked_from: ForkedFrom | None = None,
        weights_by_name: bool = True,
    ) -> RunFile:
        """Writes run.json, once. Raises `BusyError` if it exists: another start was faster."""
        run = RunFile(
            format=FORMAT,
            name=name,
            created=now_text(),
            identity=identity,
            id=secrets.token_hex(8),
            first_weights=first_weights,
            weights_by_name=weights_by_name,
            forked_from=forked_from,
        )
        if not self.storage.create(RUN_FILE, seal(encode(run))):
            raise BusyError(
                f"{self.storage.root}/{RUN_FILE} exists: another launch has just started "
                "this run; run the command again"
            )
        return run

    def read_run(self) -> RunFile | None:
        """Reads run.json. Returns None without one, and raises as `run_file.read_run`."""
        return read_run(self.storage)

    def pieces(self) -> list[str]:
        """Returns the folders that contain parts of a run, whether or not run.json exists."""
        return [folder for folder in (ATTEMPTS, JOURNAL, POINTS) if self.storage.list(folder)]

    def why_not_mine(self, run_id: str) -> str:
        """Returns why the folder is no longer that of the run `run_id`; empty if it is.

        This is decided by run.json. The absence of run.json is not reported for a run without an id.
        """
        run = self.read_run()
        if run is None:
            return f"{self.storage.root}/{RUN_FILE} is gone" if run_id else ""
        if run.id != run_id:
            return f"{self.storage.root}/{RUN_FILE} is now that of run {run.id}, this launch trains {run_id}"
        return ""


class CommittedFiles:
    """The files of points that a rank reads and writes. Safe to use from threads."""

    def __init__(self, storage: Storage, on_node: PartsOnNode | None = None) -> None:
        """`on_node`: this rank's parts are written there, not to `storage`."""
        self.storage, self._points = storage, PointFiles(storage)
        self.parts = on_node.storage if on_node is not None else storage
        self.placed: Placed | None = on_node.placed if on_node is not None else None

    def manifest(self, point: str) -> PartManifest:
        """Returns the tensors of a point and the digests of their files, as listed in COMMIT.

        Thus nothing of another step, or of another save of the same step, is loaded. Raises
        `ResumePointError` for a document that is not as it was committed.
        """
        return self._points.read_manifest(point)


# ------------------------------------------------------------------------------------ kept and deleted points
@dataclass(frozen=True, kw_only=True, slots=True)
class PointStatus:
    """Names of points.

    `kept` were committed, and were not to be deleted: without COMMIT they are damaged. `deleted` are gone or
    half gone. The rest of one without COMMIT is neither a point nor damage, and may be removed. A kill before
    the deletion began leaves the point whole, and then it is a point as any other.
    """

    kept: frozenset[str]
    deleted: frozenset[str]

    def without(self, pruned: frozenset[str]) -> PointStatus:
        """Adds the points that a process deletes or has deleted (`PinFiles.deletions`).

        These deletions are in no journal if no launch of the run made them.
        """
        return PointStatus(kept=self.kept - pruned, deleted=self.deleted | pruned)


def point_fates(events: Iterable[tuple[str, Mapping[str, Any]]], inherited: Iterable[str]) -> PointStatus:
    """Classifies points from the journal's events (kind, fields) and the names that claims inherited.

    Inherited points were committed, even if the journal ended before their commit event.
    """
    committed, deleted = set(inherited), set[str]()
    for kind, fields in events:
        if kind == EventKind.POINT_COMMITTED:
            committed.add(fields["point"])
        elif kind in (EventKind.DELETING_POINTS, EventKind.POINTS_DELETED):
            deleted.update(fields["points"])
    return PointStatus(kept=frozenset(committed - deleted), deleted=frozenset(deleted))


def maybe_deleted(
    names: Iterable[str], committed_at: Mapping[str, tuple[int, int]], damages: Iterable[DamagedLines]
) -> frozenset[str]:
    """Returns those of these points whose deletion may have been in a line of the journal that is lost.

    A deletion is journalled after the commit. `committed_at` has the (attempt, line number) of each commit
    that the journal has; another point may have been deleted anywhere.
    """
    newest = max(((each.attempt, each.last or sys.maxsize) for each in damages), default=None)
    if newest is None:
        return frozenset()
    return frozenset(name for name in names if committed_at.get(name, (0, 0)) < newest)


_COMPLETED = "a start that ended before it had done so was making a resume point of its votes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A folder without COMMIT. `kept`: why it is still there; empty: it was removed."""

    point: str
    kept: str = ""

    def __str__(self) -> str:
        if self.kept:
            return f"points/{self.point}, left of a save that was given up, could not be removed: {self.kept}"
        return f"points/{self.point} was left of a save that was given up; it is removed"


def remove_leftovers(store: RunStore, number: int, fates: PointStatus) -> tuple[Leftover, ...]:
    """Removes what attempts before `number` left. Called after claim and parent file of `number` are written.

    These stay:
    - a folder with a COMMIT;
    - everything of `number` and of later attempts;
    - a point whose COMMIT is lost: it was not to be deleted, and is thus damaged, not left over;
    - what the previous launch left, until the next start, unless that launch has recorded its end: its
      coordinator may only be cut off, and about to commit.

    The rest of a point that was being deleted is removed at once. Before each deletion it checks for a newer
    claim, and stops if there is one (membership rule 7). It never raises `StorageError`: what cannot be
    removed now is tried again at the next start.

    A machine may have been cut off during a whole other launch, and write its COMMIT at the very moment in
    which its folder is removed. That leaves a damaged orphan. No claim names it (rule 6), so that it is never
    resumed, but `verify` shows it.
    """
    found: list[Leftover] = []
    try:
        names = sorted({*store.leftovers(), *store.left_on_nodes()})
        cut_off = _cut_off(store, number)
    except StorageError:
        return ()  # the start itself also reads these folders, and reports what is wrong with them
    for name in names:
        key = parse_point_name(name)
        assert key is not None, "leftovers gives names of points"
        if key.attempt >= number or name in fates.kept:
            continue
        if key.attempt in cut_off and name not in fates.deleted:
            continue
        try:
            if store.next_claim_exists(number):
                break
            removed = store.discard(name)
        except StorageError as error:
            found.append(Leftover(point=name, kept=str(error)))
        else:
            found.append(Leftover(point=name, kept="" if removed else _COMPLETED))
    return tuple(found)


def _cut_off(store: RunStore, number: int) -> frozenset[int]:
    """Returns the attempts of the launch before `number`, if that launch did not record its end.

    A claim without a parent file never began.
    """
    begun = {parent.attempt for parent in store.parents()[0]}
    older = [claim for claim in store.claims() if claim.number < number and claim.number in begun]
    if not older or store.read_end(older[-1].number) is not None:
        return frozenset()
    return frozenset(claim.number for claim in older if claim.launch == older[-1].launch)
