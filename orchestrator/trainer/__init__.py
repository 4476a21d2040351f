"""The worker's side of training: model, numerics, state, membership, and the loop that joins them."""
