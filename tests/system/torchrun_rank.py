"""A rank of a torchrun group under a fault plan: jobs/torchrun_train.py with the plan as its first word.

One place is its own: `started`, before anything else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.faults import hook
from orchestrator.torchrun.run import main

if __name__ == "__main__":
    hook(sys.argv[1])("started", -1, int(os.environ["RANK"]))
    main(sys.argv[2:], fault_plan=sys.argv[1])
