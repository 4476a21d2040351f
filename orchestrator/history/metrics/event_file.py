"""Writes TensorBoard's event file: scalars at a position, and marks that invalidate later positions.

The format is TensorFlow's: records framed by length and masked CRC-32C, each an `Event` message of protobuf
(tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto). It is implemented here because
the library for it, tensorboardX, loads torch if that is installed: 2.4 CPU seconds and 220 MB.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

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
