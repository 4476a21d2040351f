"""What grows on this machine stands whole in the bucket: every so often, and at the end."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest

from orchestrator.history.metrics.declared import Meter
from orchestrator.history.metrics.metric_log import FOLDER, MetricLog, MetricLogs, TensorBoard
from orchestrator.history.metrics.published_folder import PublishedFolder
from orchestrator.inspect.logs import LogFollower
from orchestrator.launch.process.progress import RunLog
from orchestrator.storage.files import Storage
from tests.checkpoint.samples import key, record, start
from tests.storage.model_store import PUT, Fate, ModelBucket, ModelStore

LIMIT_S = 60.0


def in_bucket(bucket: ModelBucket) -> Storage:
    return Storage.on(ModelStore(bucket))


def test_files_are_published_whole_when_they_changed_and_at_the_end(tmp_path: Path) -> None:
    bucket, twice, asked = ModelBucket(), threading.Event(), list[str]()

    def turn(what: str, name: str) -> Fate:
        asked.append(f"{what} {name}")
        if asked.count(f"{PUT} run/logs/a.log") == 2:
            twice.set()
        return Fate.ANSWERED

    (tmp_path / "logs" / "deep").mkdir(parents=True)
    (tmp_path / "logs" / "deep" / "b").write_bytes(b"x" * (3 << 20))
    log = tmp_path / "logs" / "a.log"
    log.write_text("first\n")
    published = PublishedFolder(Storage.on(ModelStore(bucket, turn=turn)), tmp_path, pytest.fail, 0.001)
    size = 1
    while not twice.wait(0.01):  # it may have begun with any size
        log.write_text("first\n" * (size := size + 1))
    log.write_text("last\n")
    assert published.close(LIMIT_S)
    found = in_bucket(bucket)
    assert found.read("logs/a.log") == b"last\n"
    assert found.size("logs/deep/b") == 3 << 20
    assert asked.count(f"{PUT} run/logs/deep/b") == 1, "what did not change is not put again"


def test_a_storage_that_fails_is_said_once_and_tried_again(tmp_path: Path) -> None:
    bucket, said, refused, fails = ModelBucket(), list[str](), threading.Semaphore(0), [True]

    def turn(what: str, name: str) -> Fate:
        refused.release()
        return Fate.REFUSED if fails[0] else Fate.ANSWERED

    (tmp_path / "a").write_text("text")
    storage = Storage.on(ModelStore(bucket, turn=turn))
    published = PublishedFolder(storage, tmp_path, said.append, 0.001)
    for _ in range(3):
        assert refused.acquire(timeout=LIMIT_S)
    fails[0] = False
    assert published.close(LIMIT_S)
    assert in_bucket(bucket).read("a") == b"text"
    (text,) = said
    assert f"the files in {tmp_path} cannot be published in {storage.root} (" in text
    fails[0] = True
    published = PublishedFolder(storage, tmp_path, said.append)
    assert not published.close(LIMIT_S)


def test_a_launchs_log_in_a_bucket_is_that_of_a_folder(tmp_path: Path) -> None:
    texts = []
    for storage in (Storage(str(tmp_path)), in_bucket(ModelBucket())):
        log = RunLog(pytest.fail)
        log.write("before there is a file")
        log.open(storage, 3)
        log.write("first\nsecond")
        log.close()
        (name,) = storage.list("logs")
        assert log.path == f"{storage.root}/logs/{name}"
        texts.append([line[30:] for line in LogFollower(storage).read().splitlines()])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def test_a_log_that_could_not_be_published_stays_on_this_machine_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = list[str]()
    log = RunLog(said.append)
    log.open(Storage.on(ModelStore(ModelBucket(), turn=lambda what, name: Fate.REFUSED)), 3)
    log.write("the reason")
    log.close()
    (text,) = said
    folder = Path(text.partition("the files in ")[2].partition(" cannot")[0])
    (file,) = (folder / "logs").iterdir()
    assert file.read_text().endswith("the reason\n")


def test_tensorboards_file_is_published_with_the_end_of_the_metrics(tmp_path: Path) -> None:
    bucket = ModelBucket()
    logs = MetricLogs(
        [MetricLog(Meter(), [TensorBoard(tmp_path, 1)])],
        lambda trouble: PublishedFolder(in_bucket(bucket), tmp_path, trouble),
    )
    logs.generation(start(1, None))
    logs.step(record(key(1)))
    logs.close()
    (name,) = in_bucket(bucket).list(FOLDER)
    assert in_bucket(bucket).read(f"{FOLDER}/{name}") == (tmp_path / FOLDER / name).read_bytes()
    assert logs.troubles() == []
