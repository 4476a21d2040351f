"""Audit as a Ray job: `ray job submit --working-dir . -- python jobs/audit.py RUN`; a relative path of the
data is looked for in the copy of the folder that was submitted. The same as `orchestrator audit`.
"""

from __future__ import annotations

import sys
from pathlib import Path

# A job's working directory holds the package; where it is installed as well, this copy is the one that was
# submitted.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from orchestrator.cli.commands import main

if __name__ == "__main__":
    main(["audit", *sys.argv[1:]])
