"""The documents of which no block needs a Ray cluster, run as those in test_docs_run.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.blocks import ALONE, NAMES, blocks, started

pytestmark = pytest.mark.system


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.quick("docs/howto/formats.md")
def test_every_block_of_a_document_does_what_it_says(
    name: str, warm: str, programs: Path, folder: Path
) -> None:
    with started(warm, programs, folder) as start:
        for block in blocks(NAMES[name]):
            assert block.once is None, "a block that waits for another one belongs to test_docs_run.py"
            assert not block.own_terminal
            if block.reason is None:
                start(block).end()
