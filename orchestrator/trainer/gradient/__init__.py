"""Gradients of a global batch: invariant, DDP and sharded."""
