"""The training code that runs in each worker: model, gradients, state, membership and the training loop."""
