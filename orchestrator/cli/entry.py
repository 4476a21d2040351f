"""The entry of the program `orchestrator`: an interruption while it loads ends it as a later one does."""

from __future__ import annotations

import sys
from contextlib import suppress

INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main() -> None:
    """Runs the command; see `orchestrator.cli.commands`."""
    try:
        from orchestrator.cli.commands import main as run
        from orchestrator.launch.process.safe_output import show_faults_as_data

        show_faults_as_data()
        run()
    except KeyboardInterrupt:
        with suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
