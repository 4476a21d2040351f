"""The stream of one source, with the face that a mixture has, too: fed by source, drawn by step.

It knows no slot and no pipeline.
"""

from __future__ import annotations

from orchestrator.data.packing.stream import Packer, StepSamples
from orchestrator.records import StepRange, TokenChunk


class SingleStream:
    """Keeps the tokens of one step buffered beside those that are drawn: the step after the one at hand is
    there before it is asked for.
    """

    def __init__(self, source: str, packer: Packer) -> None:
        self._source, self._packer = source, packer
        self._wanted = 1  # the first chunk is wanted before the first step

    @property
    def needs(self) -> frozenset[str]:
        """The sources whose next chunk is wanted now."""
        return frozenset() if self._packer.buffered_tokens >= self._wanted else frozenset({self._source})

    def buffered_tokens(self, source: str) -> int:
        """Tokens of the source that are there and not drawn."""
        assert source == self._source, f"{source} is not {self._source}"
        return self._packer.buffered_tokens

    def feed(self, chunk: TokenChunk) -> None:
        """The next chunk of its source. Raises as `Packer.feed` does."""
        self._packer.feed(chunk)

    def finish(self, source: str) -> None:
        """The source has no other chunk. Raises as `Packer.finish` does."""
        assert source == self._source, f"{source} is not {self._source}"
        self._packer.finish()

    def draw(self, step: StepRange) -> StepSamples | None:
        """The samples of `step`; None: more chunks are needed first. Raises as `Packer.draw` does."""
        self._wanted = step.num_tokens + 1
        return self._packer.draw(step)
