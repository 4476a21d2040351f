"""The position of a source in its packs: the current window, how many of its packs are taken, and the
cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.data.packing.packed_window import PackedWindow
from orchestrator.data.packing.sample_spans import PackedRun
from orchestrator.planning.digest import add_tokens, token_hasher
from orchestrator.records.cursor import SourceCursor


class PackPlace:
    """All windows before the current one are taken, and `taken` packs of the current one."""

    def __init__(self, cursor: SourceCursor) -> None:
        self.cursor, self.taken, self._hasher = cursor, 0, token_hasher()

    def copy(self) -> PackPlace:
        """An independent copy."""
        new = PackPlace(self.cursor)
        new.taken, new._hasher = self.taken, self._hasher.copy()
        return new

    def take(self, windows: Sequence[PackedWindow], num: int, seq_len: int) -> tuple[list[PackedRun], int]:
        """Takes the next `num` packs of the windows. Returns them, and how many windows are used up."""
        runs, passed = list[PackedRun](), 0
        while num:
            window = windows[passed]
            here = min(num, window.packs.num - self.taken)
            if here:
                run = window.run(self.taken, self.taken + here, seq_len)
                runs.append(run)
                add_tokens(self._hasher, run.tokens)
                self.taken, num = self.taken + here, num - here
                self.cursor = replace(
                    window.begin,
                    packs=self.taken,
                    pack_seq_len=seq_len,
                    prefix_digest=self._hasher.hexdigest(),
                )
            if self.taken == window.packs.num:
                self.cursor, self.taken, self._hasher = window.end, 0, token_hasher()
                passed += 1
        return runs, passed


class PackCursors:
    """The cursors inside a run, computed on demand."""

    def __init__(self, place: PackPlace, windows: Sequence[PackedWindow], seq_len: int) -> None:
        self._place, self._windows, self._seq_len = place, windows, seq_len

    def after(self, num_positions: int) -> SourceCursor:
        """The cursor after the samples that `num_positions` positions count for."""
        place = self._place.copy()
        place.take(self._windows, -(-num_positions // self._seq_len), self._seq_len)
        return place.cursor
