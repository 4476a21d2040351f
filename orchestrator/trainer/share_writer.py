"""Writes a rank's staged part as files of format 1, in a thread.

It knows buffers and files; which save is wanted, its caller decides.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from orchestrator.parts.part_job import JobPart, PartJob
from orchestrator.records import FileEntry, TensorEntry
from orchestrator.trainer.state import Item
from orchestrator.trainer.weights import StateFiles, write_items


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareWritten:
    """What a vote says of it."""

    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]


class ShareWriter:
    """Writes one job after the other."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._jobs: queue.SimpleQueue[tuple[PartJob, Future[ShareWritten]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="share-writer", daemon=True).start()

    def write(self, job: PartJob) -> Future[ShareWritten]:
        """The files, once they are durable. Raises `StorageError`."""
        answer: Future[ShareWritten] = Future()
        self._jobs.put((job, answer))
        return answer

    def cancel(self) -> None:
        """A file that is begun is written to its end."""

    def close(self) -> None:
        """Ends the thread, after what it was given."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (task := self._jobs.get()) is not None:
            job, answer = task
            try:
                answer.set_result(self._written(job))
            except BaseException as error:  # noqa: BLE001  whoever waits hears of it
                answer.set_exception(error)

    def _written(self, job: PartJob) -> ShareWritten:
        items = []
        if job.num_bytes:
            handle = os.open(job.buffer, os.O_RDWR)
            shared = torch.frombuffer(
                mmap.mmap(handle, os.fstat(handle).st_size, mmap.MAP_SHARED), dtype=torch.uint8
            )
            os.close(handle)
            items = [_item(shared, part) for part in job.parts]
        files, tensors = write_items(items, job.point, job.rank, job.layout.world_size, self._files)
        return ShareWritten(files=files, tensors=tensors)


def _item(shared: torch.Tensor, part: JobPart) -> Item:
    place = part.place
    flat = shared[place.offset : place.offset + place.num_bytes].view(getattr(torch, part.dtype))
    return Item(whole=place.tensor, tensor=flat.view(place.tensor.shape), first_row=place.rows.start)
