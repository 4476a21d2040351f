"""The process that writes parts, which says at each piece that it gets on, and not once a second only."""

import sys

from orchestrator.checkpoint.writer import writer_process

if __name__ == "__main__":
    writer_process._GROWS_EVERY_S = -1.0
    writer_process.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
