"""A run without Ray: the ranks that torchrun started are a group that never changes."""
