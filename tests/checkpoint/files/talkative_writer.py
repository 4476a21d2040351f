"""The process that writes parts, which says at each piece that it gets on, and not once a second only."""

import sys

from orchestrator.checkpoint.files import part_writer

if __name__ == "__main__":
    part_writer._GROWS_EVERY_S = -1.0
    part_writer.main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
