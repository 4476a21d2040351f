"""Points in a bucket: the writer's process puts its part there, and it is read and compared from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.checkpoint.files.manifest import PartDamage, manifest_of, parts_document
from orchestrator.checkpoint.files.part_writer import PartWriter
from orchestrator.checkpoint.files.reading import PointReader
from orchestrator.errors import StorageError
from orchestrator.planning.state.state_layout import layout_of
from orchestrator.storage.files import Storage
from orchestrator.storage.open import open_storage
from tests.checkpoint.files.samples import POINT, STATE, bytes_of, job_of, read_rank, saved
from tests.raising import raises
from tests.storage.servers import moto, new_bucket, reach

LIMIT_S = 120


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    with moto() as url:
        reach(monkeypatch, url, tmp_path)
        yield open_storage(f"{new_bucket(url)}/runs/tiny")


def test_a_process_writes_into_a_bucket_what_any_layout_reads_there(bucket: Storage, tmp_path: Path) -> None:
    said: list[str] = []
    writer = PartWriter(bucket, said.append, process_from_bytes=0)
    job = job_of(tmp_path / "buffer")
    written = writer.write(job).result(LIMIT_S)
    assert writer.process_id is not None
    writer.close()
    assert said == []
    document = parts_document(job.layout, saved().values())
    manifest = manifest_of(POINT, [written.entry], document)
    PointReader(bucket, manifest).check(written.entry.path)
    layout = layout_of(3, None)
    for rank in range(3):
        held = read_rank(bucket, manifest, layout, rank)
        for whole in STATE:
            rows, memory = held[whole.group, whole.name]
            assert memory == bytes_of(whole)[rows.start * whole.row_bytes : rows.stop * whole.row_bytes]
    bucket.delete(f"points/{POINT}/{written.entry.path}")
    with pytest.raises(PartDamage) as missing:
        PointReader(bucket, manifest).check(written.entry.path)
    assert missing.value.file == written.entry.path
    assert isinstance(missing.value.__cause__, FileNotFoundError)


def test_a_bucket_that_is_not_there_is_said_by_the_process(bucket: Storage, tmp_path: Path) -> None:
    writer = PartWriter(open_storage("s3://not-there/run"), lambda text: None, process_from_bytes=0)
    with raises(StorageError, "storage.not_found", "s3://not-there"):
        writer.write(job_of(tmp_path / "buffer")).result(LIMIT_S)
    writer.close()
