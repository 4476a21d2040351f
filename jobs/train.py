"""The entry point for Ray jobs: `ray job submit --working-dir . -- python jobs/train.py CONFIG
[key=value …]`; docs/howto/clusters.md has the whole command.

The same as `orchestrator train`, so submitting it again continues the run. A job is stopped by SIGTERM: give
it time to save with `RAY_JOB_STOP_WAIT_TIME_S` in the job's environment. A run.storage in the job's copy of
its working directory is refused: Ray deletes that copy.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A job's working directory holds the package; where it is installed as well, this copy is the one that was
# submitted.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.cli.commands import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
