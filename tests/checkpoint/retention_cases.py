"""Hypothesis strategies: the points of a run, how many are kept, and which are verified."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.checkpoint.samples import key

NAMES = [key(step).point_name for step in range(1, 9)]
points = st.sets(st.sampled_from(NAMES)).map(sorted)
keep = st.integers(1, 5)
verified_sets = st.sets(st.sampled_from(NAMES))
