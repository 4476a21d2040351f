"""What a claim says it was made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.history.claims.claim_files import FORK, RESUME, REWIND, START
from orchestrator.launch.start.attempt_claim import why_claimed

FROM = st.sampled_from(("latest", "00000007-a0001-g0001", "/runs/other/points/00000007-a0001-g0001"))


@given(st.booleans(), FROM)
def test_the_first_attempt_starts_a_run_or_a_fork_wherever_it_begins(forks: bool, from_: str) -> None:
    assert why_claimed(0, forks=forks, from_=from_) == (FORK if forks else START)


@given(st.integers(1, 10_000), st.booleans(), FROM)
def test_a_later_one_goes_back_only_to_a_point_of_its_own_run(watched: int, forks: bool, from_: str) -> None:
    of_own = from_ == "00000007-a0001-g0001"
    assert why_claimed(watched, forks=forks, from_=from_) == (REWIND if of_own else RESUME)
