"""Random histories of `tests.history.histories` written to storage as coordinators write them: claims, parent
files, and journals with copies of step records, in small segments, at random times.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random

from orchestrator.checkpoint.points.run_file import RUN_FILE
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.history.journal.journal_writer import JournalWriter
from orchestrator.json_form import encode, seal
from orchestrator.records.steps import StepRecord
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import no_sleep
from tests.history.histories import World
from tests.storage.crashfs import ModelDisk

SEGMENT_BYTES = 1500
BEGIN = datetime(2026, 11, 21, 22, 0, tzinfo=UTC)
RUN = {
    "format": 2,
    "name": "run",
    "created": BEGIN.isoformat(),
    "id": "",
    "identity": {
        "format_version": 1,
        "order_version": 1,
        "tokenizer": "t",
        "tokenizer_digest": "",
        "encoder_name": "e",
        "encoder_version": "1",
        "settings": {},
        "manifests": {},
    },
}


def write(world: World, seed: int) -> RunStore:
    """The run that the world's claims, parent files, generations and records are."""
    random, store = Random(seed), RunStore(Storage("/run", ModelDisk(), no_sleep))
    store.storage.create(RUN_FILE, seal(RUN))
    for claim in world.claims:
        store.storage.create(f"attempts/{claim.number:04d}.json", seal(encode(claim)))
    for parent in world.parents:
        store.storage.create(f"attempts/{parent.attempt:04d}.parent.json", seal(encode(parent)))
        if random.random() < 0.3:
            outcome = random.choice(["done", "stopped", "failed"])
            store.write_end(parent.attempt, outcome, "because")
    times = Times(random)
    brought: list[StepRecord] = []
    for number in sorted({start.attempt for start in world.starts}):
        journal = JournalWriter(store.storage, number, "run", SEGMENT_BYTES, times)
        for record in brought:
            journal.step(record)
        mine: list[StepRecord] = []
        for start in (start for start in world.starts if start.attempt == number):
            journal.generation(start)
            records = [r for r in world.records if (r.attempt, r.generation) == start.id]
            for record in records:
                journal.step(record)
                if random.random() < 0.1:
                    journal.flush()
            mine += records
        brought = random.sample(mine, random.randrange(len(mine) + 1)) if random.random() < 0.4 else []
        journal.close()
    return store


class Times:
    """A clock that goes on by random steps, and now and then back."""

    def __init__(self, random: Random) -> None:
        self._random, self._at = random, BEGIN

    def __call__(self) -> datetime:
        far = self._random.random()
        seconds = 40_000 * self._random.random() if far < 0.02 else 2 * self._random.random() - 0.2
        self._at += timedelta(seconds=seconds)
        return self._at
