"""What needs another launch is refused under torchrun, whose processes cannot make one."""

import pytest

from orchestrator.errors import ConfigError
from orchestrator.torchrun.run import _require_no_rewind
from tests.planning.jobs import job
from tests.raising import raises

SPIKE = "train.on_spike={window: 8, threshold: 4, action: rewind_and_skip}"


@pytest.mark.parametrize("policy", ["train.on_nonfinite=rewind_and_skip", SPIKE])
def test_a_policy_that_goes_back_is_refused_by_name(policy: str) -> None:
    with raises(ConfigError, "config.conflict", policy.partition("=")[0], "rewind_and_skip", "skip_step"):
        _require_no_rewind(job(policy))


def test_other_policies_are_taken() -> None:
    _require_no_rewind(job("train.on_nonfinite=skip_step", SPIKE.replace("rewind_and_skip", "stop")))
