"""The layout of a run in storage, and `RunStore`, which reads and writes claims and resume points.

It defines names, contents and the order of writing.

    run.json                       sealed; RunFile: name, created, format, id, first_weights, identity
                                   (planning.identity.RunIdentity), forked_from
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
    quarantine/<point>.json        see checkpoint.points.quarantine
    findings/000001.json           see history.numbered_files
    journal/a0003/000001.jsonl     events and step records (history.journal)

A sealed file is `{"content": …, "digest": blake3 of the canonical content}`, so that a changed byte anywhere
in it is detected. `files` lists every file of the point except COMMIT. The digest of a part is that of its
header. A folder below points/ without COMMIT is not a resume point. `run_id` is run.json's `id`; a file with
another one does not belong to the run. Names that contain `.tmp-` are files whose writing did not finish.
Nothing is written twice, nothing is renamed, and nothing is a pickle.
"""

from __future__ import annotations

import secrets

from orchestrator.checkpoint.files.part_file import FORMAT
from orchestrator.checkpoint.points.pins import PinFiles
from orchestrator.checkpoint.points.point_files import PointFiles
from orchestrator.checkpoint.points.run_file import RUN_FILE, RunFile, read_run
from orchestrator.checkpoint.points.verify import POINTS
from orchestrator.errors import BusyError
from orchestrator.history.claims.claim_files import ATTEMPTS, JOURNAL, ClaimFiles, now_text
from orchestrator.history.claims.claims import ForkedFrom
from orchestrator.json_form import encode
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.storage.sealed import seal


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
