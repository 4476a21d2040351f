"""Export as a Ray job: `ray job submit --working-dir . -- python jobs/export.py RUN [POINT] OUT`; paths are
those that the head sees. The same as `orchestrator export`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A job's working directory holds the package; where it is installed as well, this copy is the one that was
# submitted.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.cli.commands import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
