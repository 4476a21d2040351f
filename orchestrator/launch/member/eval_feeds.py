"""Opens the parts that a member evaluates, in its own process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.data.feed.local_feed import InProcessFeed
from orchestrator.trainer.evaluation import EvalPart

if TYPE_CHECKING:
    from orchestrator.data.spec import DataSpec

# Packed samples that a process keeps from one evaluation to the next. It reads the others again.
_KEPT_BYTES = 256 << 20


def open_parts(specs: Mapping[str, DataSpec]) -> list[EvalPart]:
    """Returns the parts of `data.dataset.eval_specs`. Nothing is read before it is needed."""
    return [
        EvalPart(
            name=name,
            feed=InProcessFeed(spec, _KEPT_BYTES),
            sources={spec.lists_of(plan.source).number: plan.source for plan in spec.plans},
        )
        for name, spec in specs.items()
    ]
