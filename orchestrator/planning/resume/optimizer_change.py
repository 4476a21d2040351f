"""What a resume with another optimizer does: it is refused, or the optimizer's state begins anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config.optimizer_fields import optimizer_text, stateful_key
from orchestrator.errors import Refusal

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

OTHER_OPTIMIZER = "resume.changed_optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChange:
    """Another optimizer than that of the point. `refusal`: None if its state may begin anew."""

    note: str
    refusal: Refusal | None


def optimizer_change(
    old: Mapping[str, Any], job: JobConfig, point: str, num_steps: int
) -> OptimizerChange | None:
    """Compares the optimizer of the job with that of `point`; None: its state is continued.

    `old` is the point's flat configuration with all fields, `num_steps` the number of its optimizer's steps.
    Arguments of a plug-in may also change which state it has; a worker finds that in the tensors.
    """
    new = job.flat()
    if stateful_key(old) == stateful_key(new):
        return None
    before, after = optimizer_text(old), optimizer_text(new)
    refusal = None
    if job.resume.optimizer != "reset":
        refusal = Refusal(
            OTHER_OPTIMIZER,
            f"resume point {point} has the state of the optimizer {before} after {num_steps} steps, the job "
            f"asks for {after}, which cannot continue it; keep train.optimizer and its arguments, or let the "
            "optimizer's state begin anew with resume.optimizer=reset",
        )
    return OptimizerChange(
        note="the optimizer's state begins anew where resume.optimizer=reset: the point has that of "
        f"{before} after {num_steps} steps, the job trains with {after}",
        refusal=refusal,
    )
