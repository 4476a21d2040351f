"""The worker's side of training: model, numerics, state, membership of the group, and the loop that joins them."""
