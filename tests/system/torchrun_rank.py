"""A rank of a torchrun group under a fault plan: jobs/torchrun_train.py with the plan as its first word."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.static_run import main

if __name__ == "__main__":
    main(sys.argv[2:], fault_plan=sys.argv[1])
