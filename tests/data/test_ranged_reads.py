"""Whatever is expected and whatever is read, the bytes are the file's; what is asked for lies in one part, or
in none.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.data.sources.access import input_file
from orchestrator.data.sources.access.input_file import LocalFile, RangedReads

SIZE = 1000


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    borders=st.lists(st.integers(0, SIZE), max_size=12, unique=True).map(sorted),
    reads=st.lists(st.tuples(st.integers(0, SIZE + 50), st.integers(0, 400)), max_size=20),
    piece=st.integers(1, 300),
)
def test_reading_by_parts_gives_the_files_own_bytes(
    borders: list[int], reads: list[tuple[int, int]], piece: int, tmp_path: Path
) -> None:
    content = bytes(i * 7 % 251 for i in range(SIZE))
    (tmp_path / "a").write_bytes(content)
    parts = list(zip(borders[::2], borders[1::2], strict=False))
    asked = list[tuple[int, int]]()

    class Noted(LocalFile):
        def read_at(self, offset: int, num_bytes: int) -> bytes:
            asked.append((offset, offset + num_bytes))
            return super().read_at(offset, num_bytes)

    with pytest.MonkeyPatch.context() as patch, Noted(str(tmp_path / "a")) as file:
        patch.setattr(input_file, "PIECE_BYTES", piece)
        stream, whole = RangedReads(file), io.BytesIO(content)
        stream.expect(reversed(parts))
        for at, size in reads:
            found: list[Any] = []
            for each in (stream, whole):
                each.seek(at)
                found += [(each.read(size), each.tell())]
            assert found[0] == found[1]
        assert stream.seek(-9, io.SEEK_END) == SIZE - 9
        assert (stream.read(), stream.read(5), stream.tell()) == (content[-9:], b"", SIZE)
    for start, stop in asked:
        touched = [part for part in parts if start < part[1] and stop > part[0]]
        assert all(part[0] <= start and stop <= part[1] for part in touched)
        assert not touched or stop - start <= piece


def test_a_part_that_is_read_in_small_steps_is_asked_for_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(SIZE))
    asked = list[tuple[int, int]]()

    class Noted(LocalFile):
        def read_at(self, offset: int, num_bytes: int) -> bytes:
            asked.append((offset, num_bytes))
            return super().read_at(offset, num_bytes)

    with Noted(str(tmp_path / "a")) as file:
        stream = RangedReads(file)
        stream.expect([(100, 300), (500, 900)])
        for step in range(10):  # of two columns by turns
            for begin, size in ((100, 20), (500, 40)):
                stream.seek(begin + step * size)
                assert stream.read(size) == bytes(size)
    assert asked == [(100, 200), (500, 400)]
