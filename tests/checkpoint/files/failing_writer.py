"""The writer of parts, as `orchestrator.checkpoint.files.part_writer` is started, on storage that
fails at one of its calls: `FAILING_CALL` is its number, `FAILING_HOW` a name of `How`, `FAILING_MARK` a file
that is made first. A slow call writes into the named pipe `FAILING_STANDS`, and continues when it can read
from `FAILING_GO`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from orchestrator.checkpoint.files import part_writer
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import LocalStore
from tests.storage.failing import FailingAppendingStore, Failure, How

STANDS = b"s"


class Marked(Failure):
    """Says that it struck, whatever becomes of the process then."""

    def strikes(self, call: str) -> bool:
        hit = super().strikes(call)
        if hit:
            Path(os.environ["FAILING_MARK"]).write_text(call, encoding="utf-8")
        if hit and self.how is How.SLOW:
            Path(os.environ["FAILING_STANDS"]).write_bytes(STANDS)
            Path(os.environ["FAILING_GO"]).read_bytes()
            return False
        return hit


def open_failing(root: str) -> Storage:
    failure = Marked(nth=int(os.environ["FAILING_CALL"]), how=How[os.environ["FAILING_HOW"]])
    return Storage.on(FailingAppendingStore(LocalStore(root, sleep=lambda seconds: None), failure))


if __name__ == "__main__":
    part_writer.open_storage = open_failing
    part_writer.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
