"""Pure integer decisions: order, batches, schedule, identity, digests, and resuming a point."""
