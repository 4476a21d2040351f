"""The entry point under plain torchrun, without Ray: start and continue a run on a fixed group.

    torchrun --nproc-per-node 2 jobs/torchrun_train.py configs/quickstart.yaml [key=value ...]

The same command again continues, with any number of ranks; so does `orchestrator train` on a cluster.
"""

from __future__ import annotations

import sys
from pathlib import Path

# this copy's neighbour counts, also where the package is installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.torchrun.run import main

if __name__ == "__main__":
    main(sys.argv[1:])
