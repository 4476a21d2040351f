"""`python -m benchmarks.made_run FOLDER`: a run of any length as it would lie in storage, written by the same
code that writes real ones (claims, journal, votes, commits) and trained by nobody.

Steps are put into lines without the checks that guard a run's own, for these take most of the time. Nothing
of it is random but by `seed`. The clock in it is made up: it ends at `end_at`. About every second
attempt follows a crash that lost the steps after the newest point, others a restarted coordinator, a few a
rewind; members die and come back between. The points' files hold a few bytes each.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from orchestrator.checkpoint.files.manifest import state_tensor
from orchestrator.checkpoint.files.part_file import PartRows, make_part, write_part
from orchestrator.checkpoint.points.points import Point
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.config.loading import parse_config
from orchestrator.config.schema import JobConfig
from orchestrator.data.frozen import DataRecord, write_frozen
from orchestrator.data.sources.lists.file_rows import Files
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.history.claims.claim_files import RESTARTED, RESUME, REWIND, START
from orchestrator.history.claims.claims import ClaimParent, GenerationStart
from orchestrator.history.journal.journal_writer import STEP, JournalWriter
from orchestrator.history.journal.line_format import EventKind
from orchestrator.json_form import encode
from orchestrator.planning.order import ORDER_VERSION
from orchestrator.planning.resume.identity import FORMAT_VERSION, RunIdentity, stream_settings
from orchestrator.planning.schedule import budgets_for, learning_rate
from orchestrator.planning.state.state_layout import Layout
from orchestrator.records.cursor import Cursor, SourceCursor
from orchestrator.records.points import SavedTensor, Vote
from orchestrator.records.steps import StateKey
from orchestrator.storage.disk import OsDisk
from orchestrator.storage.files import Storage

BATCH, SEQ_LEN = 64, 2048
STEP_S, SAVE_S = 6.5, 21.0
LR_STEPS = 50  # for so many the learning rate stays, which is the slowest to compute


class _NoSync(OsDisk):
    """A disk of which nobody expects that it outlives a crash."""

    def fsync(self, handle: int) -> None:
        """Nothing."""

    def fsync_folder(self, path: str) -> None:
        """Nothing."""


class _Journal(JournalWriter):
    """Takes steps as they will stand in a line: nobody brings one twice here."""

    def row(self, fields: dict[str, Any]) -> None:
        """A step."""
        self._append(STEP, fields)


@dataclass
class _State:
    """Where the run stands: its key (None: nothing is trained) and the time in it."""

    key: StateKey | None
    step: int
    t: float


def config_of(folder: Path, max_steps: int, every_steps: int) -> JobConfig:
    """The configuration that the run has throughout."""
    return parse_config(
        {
            "run": {"name": folder.name, "storage": str(folder.parent)},
            "data": {
                "sources": [{"name": "web", "path": "web/*.jsonl", "format": "jsonl"}],
                "tokenizer": "tokenizer",
            },
            "pack": {"seq_len": SEQ_LEN},
            "model": {"config": {"model_type": "llama", "max_position_embeddings": 4096}},
            "train": {
                "global_batch_size": BATCH,
                "micro_batch_size": 4,
                "max_steps": max_steps,
                "lr": 3e-4,
                "schedule": "cosine",
                "warmup_steps": min(2000, max_steps // 10),
            },
            "cluster": {"num_workers": [2, 4]},
            "resume": {"every_steps": every_steps, "keep_latest": 1000},
        }
    )


class MadeRun:
    """Writes one run. `points` and `attempts` are about as many as asked for."""

    def __init__(
        self, folder: Path, steps: int, points: int, attempts: int, seed: int = 7, end_at: float | None = None
    ) -> None:
        self._random, self._now, self._lr = Random(seed), 0.0, 0.0
        self.store = RunStore(Storage(str(folder), _NoSync()))
        every = max(1, steps // max(1, points))
        self.config = config_of(folder, 2 * steps, every)
        self._flat, self._every = self.config.flat(), every
        self._left, self._attempts = steps, attempts
        self._budgets = budgets_for(self.config, None, Cursor())
        self._end_at = time.time() if end_at is None else end_at
        self._begin = self._end_at - steps * STEP_S * 1.05 - attempts * 120.0
        identity = RunIdentity(
            format_version=FORMAT_VERSION,
            order_version=ORDER_VERSION,
            tokenizer="tokenizer",
            tokenizer_digest="0" * 64,
            encoder_name="tokenizers",
            encoder_version=version("tokenizers"),
            settings=stream_settings(self._flat),
            manifests={"web": "0" * 64},
        )
        self.run = self.store.create_run(folder.name, identity)
        freeze(folder, identity)
        self.points: list[str] = []  # on the history, oldest first
        self.committed = 0

    def write(self, outcome: str | None = None) -> None:
        """All of it. `outcome`: how the last attempt ended; None: its driver vanished."""
        state, number, why, launch = _State(None, 0, self._begin), 0, START, ""
        total = self._left
        while self._left > 0:
            number += 1
            launch = launch if why == RESTARTED else f"{self._random.getrandbits(64):016x}"
            share = max(1, round(total / self._attempts * self._random.uniform(0.5, 1.5)))
            last = number == self._attempts
            state = self._attempt(number, why, launch, state, self._left if last else min(share, self._left))
            if self._left <= 0:
                break
            why, state = self._next(state)
        if outcome is not None:
            self.store.write_end(number, outcome, "asked to", self.run.id)

    def resume(self, steps: int) -> None:
        """One more attempt, of so many steps: it goes on from the newest point."""
        number = max(self.store.claim_numbers()) + 1
        self._left = steps
        self._attempt(
            number, RESUME, f"{self._random.getrandbits(64):016x}", self._at_point(self._now + 60), steps
        )

    def _next(self, state: _State) -> tuple[str, _State]:
        """Why the next attempt begins, and what it continues."""
        roll, gap = self._random.random(), self._random.uniform(20, 400)
        if roll < 0.45 or not self.points:
            return RESTARTED, replace_state(state, t=state.t + 5)
        if roll > 0.97 and len(self.points) > 3:
            del self.points[-2:]
            return REWIND, self._at_point(state.t + gap)
        return RESUME, self._at_point(state.t + gap)

    def _at_point(self, t: float) -> _State:
        step, attempt, generation = (int(part.lstrip("ag")) for part in self.points[-1].split("-"))
        return _State(StateKey(attempt=attempt, generation=generation, step=step), step, t)

    def _attempt(self, number: int, why: str, launch: str, at: _State, steps: int) -> _State:
        self.store.claim(number, launch, why, "host", self.run.id)
        parent = at.key
        if why == RESTARTED:  # its members hold a newer state than the newest point
            parent = self._at_point(at.t).key if self.points else None
        parent_file = ClaimParent(
            attempt=number, parent=parent, inherited=tuple(self.points), budgets=self._budgets
        )
        self.store.write_parent(parent_file)
        self.store.storage.create(f"attempts/{number:04d}.heartbeat", b".")
        self._now = at.t
        journal = _Journal(
            self.store.storage,
            number,
            now=lambda: datetime.fromtimestamp(self._now, UTC),
            run_id=self.run.id,
        )
        note(journal, EventKind.ATTEMPT, launch=launch, why=why, host="host", config=self._flat)
        state = at
        for generation, (world, count) in enumerate(self._generations(steps), 1):
            state = self._generation(journal, number, generation, world, count, state)
        journal.close()
        return state

    def _generations(self, steps: int) -> Iterator[tuple[int, int]]:
        """(world size, steps) of each generation of an attempt."""
        world = 4
        while steps > 0:
            part = steps if self._random.random() < 0.5 else max(1, steps // 3)
            yield world, part
            steps -= part
            world = 3 if world == 4 else 4

    def _generation(
        self, journal: _Journal, attempt: int, generation: int, world: int, steps: int, at: _State
    ) -> _State:
        if generation > 1:
            if world == 3:
                note(
                    journal, EventKind.MEMBER_DEAD, member=f"{self._random.getrandbits(64):016x}", reason="x"
                )
            self._now += 0.3
        parent, samples = at.key, at.step * BATCH
        members = tuple(f"{attempt:08x}{rank:08x}" for rank in range(world))
        journal.generation(
            GenerationStart(
                attempt=attempt,
                generation=generation,
                parent=parent,
                step=at.step,
                consumed_samples=samples,
                consumed_tokens=samples * SEQ_LEN,
                target_tokens=samples * SEQ_LEN,
                world_size=world,
                global_batch_size=BATCH,
                seq_len=SEQ_LEN,
                members=members,
            )
        )
        state = StateKey(attempt=attempt, generation=generation, step=at.step)
        for step in range(at.step + 1, at.step + steps + 1):
            self._step(journal, state, step)
            if step % self._every == 0:
                self._save(journal, replace(state, step=step), parent, world)
        self._left -= steps
        return _State(replace(state, step=at.step + steps), at.step + steps, self._now)

    def _step(self, journal: _Journal, state: StateKey, step: int) -> None:
        step_s = STEP_S * self._random.uniform(0.95, 1.08)
        self._now += step_s
        samples = step * BATCH
        noise = self._random.gauss(0, 0.03)
        if step % LR_STEPS == 0 or step == state.step + 1:
            self._lr = learning_rate(self.config.train, self._budgets, samples * SEQ_LEN)
        journal.row(
            {
                "attempt": state.attempt,
                "generation": state.generation,
                "step": step,
                "consumed_samples": samples,
                "consumed_tokens": samples * SEQ_LEN,
                "target_tokens": samples * SEQ_LEN,
                "loss": 2.2 + 8 / (1 + step**0.4) + noise,
                "grad_norm": 0.6 + abs(noise) * 6 + 4 / math.sqrt(step),
                "lr": self._lr,
                "digest": f"{step * 0x9E3779B97F4A7C15 % 2**64:016x}",
                "step_s": step_s,
                "data_wait_s": step_s * 0.002 * self._random.random(),
                "save_blocked_s": 0.0,
                "ended": None,
            }
        )

    def _save(self, journal: _Journal, key: StateKey, parent: StateKey | None, world: int) -> Point:
        source = SourceCursor(block=key.step // 100, token=key.step % 2048, documents=key.step * 70)
        samples = key.step * BATCH
        counts = {"consumed_tokens": samples * SEQ_LEN, "target_tokens": samples * SEQ_LEN}
        cursor = Cursor(consumed_samples=samples, sources={"web": source}, **counts)
        votes = [self._vote(key, rank, world, cursor) for rank in range(world)]
        point = self.store.commit_point(votes, self._flat, {"rule": "none"}, parent, SAVE_S, self.run.id)
        self.points.append(point.name)
        self.committed += 1
        note(
            journal,
            EventKind.POINT_COMMITTED,
            point=point.name,
            bytes=point.num_bytes,
            save_s=SAVE_S,
            save_blocked_s=0.03,
            cursor=encode(cursor),
        )
        return point

    def _vote(self, key: StateKey, rank: int, world: int, cursor: Cursor) -> Vote:
        layout = Layout(num_shards=world, num_replicas=1)
        tensor = SavedTensor(group="model", name="w", dtype="uint8", shape=(world, 64), sharded=True)
        rows = PartRows(
            tensor=state_tensor(tensor),
            dtype=tensor.dtype,
            rows=range(rank, rank + 1),
            data=memoryview(key.step.to_bytes(8, "little") * 8),
        )
        part = make_part(key.point_name, layout, rank, [rows])
        return Vote(
            key=key,
            rank=rank,
            world_size=world,
            cursor=cursor,
            optimizer_steps=key.step,
            files=(write_part(self.store.storage, key.point_name, part),),
            tensors=(tensor,) if rank == 0 else (),
            save_blocked_s=0.03,
            records=(),
            layout=(world, 1),
            sums=part.sums,
        )


def freeze(folder: Path, identity: RunIdentity) -> None:
    """The record of the run's data, which lie on another machine."""
    manifest = Manifest(source="web", base="/elsewhere/web", format="jsonl", files=Files.of(()))
    record = DataRecord(
        tokenizer="/elsewhere/tokenizer",
        tokenizer_digest=identity.tokenizer_digest,
        encoder_name=identity.encoder_name,
        encoder_version=identity.encoder_version,
        fragment_bytes=1 << 21,
        window_bytes=1 << 20,
        fragments_per_block={"web": 1},
        manifests={"web": manifest.digest},
    )
    write_frozen(Storage(str(folder)), record, [manifest], {"tokenizer.json": b"{}"})


def go_on(folder: Path, steps: int) -> None:
    """The newest attempt of the run in `folder` trains so many steps more."""
    segment = max(max(Path(folder, "journal").iterdir()).iterdir())
    lines = [json.loads(line) for line in segment.read_bytes().splitlines()]
    line, seq = next(line for line in reversed(lines) if line["kind"] == STEP), lines[-1]["seq"]
    t = datetime.fromisoformat(line["time"])
    with segment.open("ab") as file:
        for number in range(1, steps + 1):
            samples = BATCH * (line["step"] + number)
            grown = {
                "seq": seq + number,
                "time": (t + timedelta(seconds=STEP_S * number)).isoformat(timespec="milliseconds"),
                "step": line["step"] + number,
                "consumed_samples": samples,
                "consumed_tokens": samples * SEQ_LEN,
                "target_tokens": samples * SEQ_LEN,
            }
            file.write(json.dumps({**line, **grown}, separators=(",", ":")).encode() + b"\n")


def note(journal: JournalWriter, kind: EventKind, **fields: Any) -> None:
    """An event; fields of its kind that are not given are empty."""
    journal.event(kind, **{name: fields.get(name, "") for name in kind.fields})


def replace_state(state: _State, t: float) -> _State:
    """The same state at another time."""
    return _State(state.key, state.step, t)


def write_run(folder: Path, steps: int, points: int, attempts: int, **more: Any) -> MadeRun:
    """A run in `folder`, which is new."""
    outcome = more.pop("outcome", None)
    made = MadeRun(folder, steps, points, attempts, **more)
    made.write(outcome)
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--attempts", type=int, default=200)
    options = parser.parse_args()
    began = time.perf_counter()
    made = write_run(options.folder, options.steps, options.points, options.attempts)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"steps": options.steps, "points": made.committed, "seconds": seconds}))


if __name__ == "__main__":
    main()
