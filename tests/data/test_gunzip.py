"""A .gz file gives what Python's own gzip gives, and is refused where that refuses it: cut off at any
byte, with any byte changed, with anything behind it.
"""

from __future__ import annotations

import gzip
import io
import random
import zlib
from pathlib import Path

import pytest

from orchestrator.data.sources.access.compressed import DAMAGE, decoded
from orchestrator.data.sources.access.input_file import open_input

_random = random.Random(0)
TEXTS = [bytes(_random.choices(b"abcdefgh \n", k=size)) for size in (900, 0, 9)]
WHOLE = b"".join(gzip.compress(text, mtime=0) for text in TEXTS)


def by_gzip(data: bytes) -> bytes | None:
    """None: it refuses."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            return stream.read() if data else None  # an empty file is none of ours
    except (OSError, EOFError, zlib.error):
        return None


def by_us(data: bytes, folder: Path) -> bytes | None:
    (folder / "a.gz").write_bytes(data)
    try:
        with open_input(str(folder), "a.gz") as file:
            return b"".join(decoded(file, "a.gz", len(data)))
    except DAMAGE:
        return None


@pytest.mark.parametrize(
    "rest", [b"", b"\0" * 9, b"x", b"\x1f", b"\0more", b"\0\0" + WHOLE, b"no gzip at all"]
)
def test_what_follows_the_last_stream_is_read_passed_over_or_refused(rest: bytes, tmp_path: Path) -> None:
    assert by_us(WHOLE + rest, tmp_path) == by_gzip(WHOLE + rest)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    borders = set()
    for size in range(len(WHOLE)):
        found = by_us(WHOLE[:size], tmp_path)
        assert found == by_gzip(WHOLE[:size])
        borders |= {size} if found is not None else set()
    assert len(borders) == len(TEXTS) - 1  # between two streams nothing shows that one more followed


def test_a_changed_byte_is_refused_wherever_it_changes_anything(tmp_path: Path) -> None:
    refused = 0
    for place in range(len(WHOLE)):
        for bits in (1, 0x80):
            data = bytearray(WHOLE)
            data[place] ^= bits
            found = by_us(bytes(data), tmp_path)
            assert found == by_gzip(bytes(data))
            assert found in (None, b"".join(TEXTS))
            refused += found is None
    assert refused > len(WHOLE)
