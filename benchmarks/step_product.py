"""One rank of a run for `benchmarks.step`, as `jobs/torchrun_train.py` starts it: with its feed, without Ray.

Arguments: those of `jobs/torchrun_train.py`. The optimizer's steps are counted by a hook of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.step_turns import Turns


def main() -> None:
    """Trains until the benchmark ends."""
    turns = Turns()
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from orchestrator.torchrun.run import main as train
    from orchestrator.trainer import loop

    turns.mark("imports")
    register_optimizer_step_post_hook(lambda *_: turns.after_step())

    def marked(function: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            turns.mark(before)
            found = function(*arguments, **named)
            turns.mark(after)
            return found

        return call

    loop.state_and_gradient = marked(loop.state_and_gradient, "configuration and data", "build")
    loop.sync_state = marked(loop.sync_state, "group", "load")
    train(sys.argv[1:])


if __name__ == "__main__":
    main()
