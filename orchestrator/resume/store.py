"""The layout of a run in storage, and `RunStore`, through which claims and resume points are read and
written.

It knows names, contents and the order of writing; when something is committed, deleted or claimed is decided
elsewhere.

    run.json                       sealed; RunFile: name, created, format, identity
    (plan.identity.RunIdentity) manifest/<source>.parquet      the frozen list of files (written by the data
    plane) attempts/0003.json             sealed; Claim: number, launch, why, host, created. Created
    exclusively attempts/0003.parent.json      sealed; ClaimParent: attempt, parent, inherited, budgets,
    differences;
                                   written after the claim
    attempts/0003.heartbeat        grows by a byte while the attempt lives; its content means nothing.
                                   0003.heartbeat-2, … in its place when a write has failed
    attempts/0003.end.json         sealed; AttemptEnd: attempt, outcome, reason, ended. Absent after a crash
    points/00000480-a0003-g0007/   step, attempt, generation of the state that it holds
        model/…, optimizer/…       tensors, written and synced by the ranks before they vote
        cursor.json                Cursor: consumed_samples, consumed_tokens, target_tokens,
                                   sources {name: SourceCursor}
        config.json                the flat configuration: dotted path -> value
        rng.json                   rule, seed: all that a resume needs to know of random numbers
        parts.json                 format, tensors [TensorEntry: name, group, dtype, shape,
                                   chunks [offsets, sizes, file, digest]]
        COMMIT                     sealed, created last; Commit: format, key {attempt, generation, step},
                                   parent (a key or null), world_size, optimizer_steps, weights_digest,
                                   save_blocked_s, save_s, files [path, bytes, digest], files_digest
    journal/a0003/000001.jsonl     events and step records (monitor.journal)

A sealed file is `{"content": …, "digest": blake3 of the canonical content}`; a changed byte anywhere in it is
noticed. `files` lists every file of the point but COMMIT. A folder below points/ without COMMIT is no resume
point. Names that contain `.tmp-` are files that never came to be. Nothing is written twice, nothing is
renamed, nothing is a pickle.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import BusyError, ResumePointError
from orchestrator.plan.identity import RunIdentity
from orchestrator.records import decode, encode
from orchestrator.resume.claims import ClaimFiles, now_text
from orchestrator.resume.point_files import PointFiles
from orchestrator.resume.points import FORMAT
from orchestrator.resume.sealed import SealError, seal, unseal

RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """The content of run.json: what the run is, frozen at its first start. `created` is a time for people."""

    format: int
    name: str
    created: str
    identity: RunIdentity


class RunStore(ClaimFiles, PointFiles):
    """One run's files: run.json, claims (`ClaimFiles`) and resume points (`PointFiles`). Holds no state;
    pickles as its storage does.
    """

    def create_run(self, name: str, identity: RunIdentity) -> RunFile:
        """Write run.json, once. Raises `BusyError` if it exists: then another start was quicker."""
        run = RunFile(format=FORMAT, name=name, created=now_text(), identity=identity)
        if not self.storage.create(RUN_FILE, seal(encode(run))):
            raise BusyError(
                f"{self.storage.root}/{RUN_FILE} exists: another launch has just started "
                "this run; run the command again"
            )
        return run

    def read_run(self) -> RunFile | None:
        """The content of run.json; None if there is no such run. Raises `ResumePointError` if it is not as it
        was written.
        """
        try:
            return decode(RunFile, unseal(self.storage.read(RUN_FILE)), RUN_FILE)
        except FileNotFoundError:
            return None
        except SealError as error:
            raise ResumePointError(
                f"{self.storage.root}/{RUN_FILE} {error}; restore it from a copy, nothing was decided from it"
            ) from error
