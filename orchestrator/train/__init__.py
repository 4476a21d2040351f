"""The worker's side of training: model, numerics, state, membership, and the loop that joins them."""

from orchestrator.stage import make_callable

make_callable(__name__)
