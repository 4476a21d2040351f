"""Sends a run's metrics to loggers, in a thread, and writes TensorBoard's event files.

Training steps and the journal never wait for it. An error of a logger ends the logger, not the run.

The format of event files is TensorFlow's: records framed by length and masked CRC-32C, each an `Event`
message of protobuf (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto). It is
implemented here because the library for it, tensorboardX, loads torch if that is installed: 2.4 CPU seconds
and 220 MB.
"""

from __future__ import annotations

import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from typing_extensions import override

from orchestrator.config.redaction import redacted_text
from orchestrator.errors import text_of
from orchestrator.history.claims.claims import GenerationStart
from orchestrator.history.journal.journal_writer import Listener
from orchestrator.history.journal.line_format import EventKind
from orchestrator.history.metrics.declared import Meter, Sample
from orchestrator.history.metrics.published_folder import PublishedFolder
from orchestrator.records.steps import StepRecord

FOLDER = "logs/tensorboard"
VERSION = b"brain.Event:2"  # readers support `rewound` from 2 on


class EventFile:
    """One attempt's file in a folder that TensorBoard reads.

    TensorBoard reads files by name, so in the order of the attempts. Positions are consumed tokens, which
    decrease only by a rewind.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        """The file is created with the first record."""
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        self.path = folder / f"events.out.tfevents.{attempt:010d}.{host}"
        self._file: BinaryIO | None = None

    def scalars(self, position: int, values: Mapping[str, float], now: float) -> None:
        """Writes values by tag. Raises `OSError`."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
        )
        self._write(_event(now, position, _bytes(5, summary)))

    def rewound(self, position: int, now: float) -> None:
        """Invalidates the values in this folder at later positions than this one, which are trained again.

        Raises `OSError`.
        """
        start = _bytes(7, _varint(1, 1))  # SessionLog.START: a reader purges this step and later ones
        self._write(_event(now, position + 1, start))

    def flush(self) -> None:
        """Makes the written records visible to readers. Raises `OSError`."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Raises `OSError`."""
        if self._file is not None:
            self._file.close()

    def _write(self, event: bytes) -> None:
        if self._file is None:
            for folder in (self.path.parent.parent, self.path.parent):  # not the run's own, if that is gone
                folder.mkdir(exist_ok=True)
            self._file = self.path.open("ab")
            self._file.write(framed(_event(time.time(), 0, _bytes(3, VERSION))))
        self._file.write(framed(event))


def framed(record: bytes) -> bytes:
    """A record with its frame."""
    length = struct.pack("<Q", len(record))
    return b"".join((length, _masked(length), record, _masked(record)))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> Iterable[int]:
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        yield crc


_CRC = tuple(_table())


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


# ------------------------------------------------------------ protobuf
def _event(now: float, step: int, what: bytes) -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, now) + _varint(2, step) + what


def _varint(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _number(value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        return struct.pack("<Bf", field << 3 | 5, value)
    except OverflowError:
        return struct.pack("<Bf", field << 3 | 5, float("inf") if value > 0 else float("-inf"))


def _number(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


CLOSE_S = 5.0  # the end of a run waits this long for a logger that hangs
BATCH = 1000
HELD = 100_000  # the maximum number of facts in memory while a logger hangs


class Sink(Protocol):
    """A destination of samples. An error that it raises ends its use, and is reported once."""

    name: str

    def take(self, sample: Sample, now: float) -> None:
        """Takes one sample; `now` is seconds since 1970."""

    def flush(self) -> None:
        """Makes the samples visible to others."""


class TensorBoard(Sink):
    """The per-step metrics in the run's folder, `logs/tensorboard/`, over consumed tokens."""

    name = "TensorBoard"

    def __init__(self, run_folder: Path, attempt: int) -> None:
        self._file = EventFile(run_folder / FOLDER, attempt)

    @override
    def take(self, sample: Sample, now: float) -> None:
        if sample.rewound_to is not None:
            self._file.rewound(sample.rewound_to, now)
        if sample.tokens is not None:
            values = sample.per_step
            self._file.scalars(sample.tokens, values, now)

    @override
    def flush(self) -> None:
        self._file.flush()


class MetricLog(Listener):
    """A `history.journal.journal_writer.Listener`: converts the journal's facts to samples and passes them to
    the sinks.

    No method except `close` waits.
    """

    def __init__(self, meter: Meter, sinks: Sequence[Sink], now: Callable[[], float] = time.time) -> None:
        """Without sinks, no thread is started."""
        self._meter, self._sinks, self._now = meter, list(sinks), now
        self._facts: queue.SimpleQueue[Callable[[], Sample | None] | None] = queue.SimpleQueue()
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if self._sinks:
            self._thread = threading.Thread(target=self._write, name="metrics", daemon=True)
            self._thread.start()

    @override
    def step(self, record: StepRecord) -> None:
        self._put(partial(self._meter.step, record, self._now()))

    @override
    def generation(self, start: GenerationStart) -> None:
        self._put(partial(self._meter.generation, start))

    @override
    def event(self, kind: EventKind, fields: Mapping[str, Any]) -> None:
        self._put(partial(self._meter.event, kind, fields, self._now()))

    def troubles(self) -> list[str]:
        """The errors since the last call, as messages."""
        return [self._troubles.get_nowait() for _ in range(self._troubles.qsize())]

    def end(self) -> None:
        """Lets the thread end once everything is sent. Does not wait."""
        if self._thread is not None:
            self._facts.put(None)

    def close(self, limit_s: float | None = None) -> None:
        """Waits until everything is sent, unless a sink hangs for `limit_s` (None: `CLOSE_S`)."""
        self.end()
        if self._thread is not None:
            self._thread.join(CLOSE_S if limit_s is None else limit_s)

    def _put(self, fact: Callable[[], Sample | None]) -> None:
        if self._thread is None:
            return
        self._facts.put(fact)
        if self._facts.qsize() > HELD:
            self._thread = None
            self._troubles.put(
                f"a logger has taken none of the last {HELD:,} metrics ({self._names()}): this attempt sends "
                "no more; the run continues, and the journal has every step"
            )

    def _names(self) -> str:
        return ", ".join(sink.name for sink in self._sinks)

    def _write(self) -> None:
        over = False
        while not over and self._sinks:
            facts = [self._facts.get()]
            while len(facts) < BATCH and not self._facts.empty():
                facts.append(self._facts.get())
            over = facts[-1] is None
            samples = [sample for fact in facts if fact is not None and (sample := fact()) is not None]
            for sink in tuple(self._sinks):
                self._send(sink, samples)

    def _send(self, sink: Sink, samples: Sequence[Sample]) -> None:
        try:
            for sample in samples:
                sink.take(sample, self._now())
            sink.flush()
        except Exception as error:  # noqa: BLE001  a logger must not end a run
            self._sinks.remove(sink)
            why = redacted_text(text_of(error))  # it may contain a server's URI
            self._troubles.put(
                f"{sink.name} gets no more metrics of this attempt ({why}); the "
                "run continues without it, and the journal has every step"
            )


class MetricLogs(Listener):
    """A `history.journal.journal_writer.Listener` with several logs, each with its own thread and meter.

    A logger that waits for a network delays no other.
    """

    def __init__(
        self,
        logs: Sequence[MetricLog],
        publish: Callable[[Callable[[str], None]], PublishedFolder] | None = None,
        troubles: Iterable[str] = (),
    ) -> None:
        """`publish` makes the publisher of the logs' files; its argument receives the publisher's errors.

        `troubles` are earlier errors.
        """
        self._logs = tuple(logs)
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        for text in troubles:
            self._troubles.put(text)
        self._published = publish(self._troubles.put) if publish is not None else None

    @override
    def step(self, record: StepRecord) -> None:
        for log in self._logs:
            log.step(record)

    @override
    def generation(self, start: GenerationStart) -> None:
        for log in self._logs:
            log.generation(start)

    @override
    def event(self, kind: EventKind, fields: Mapping[str, Any]) -> None:
        for log in self._logs:
            log.event(kind, fields)

    def troubles(self) -> list[str]:
        """The errors since the last call, as messages."""
        own = [self._troubles.get_nowait() for _ in range(self._troubles.qsize())]
        return [*(text for log in self._logs for text in log.troubles()), *own]

    def close(self) -> None:
        """Waits until everything is sent, for at most `CLOSE_S` for all logs together."""
        until = time.monotonic() + CLOSE_S
        for log in self._logs:
            log.end()
        for log in self._logs:
            log.close(max(0.0, until - time.monotonic()))
        if self._published is not None:
            self._published.close(CLOSE_S)
