"""The supervisor of node groups: when to start, stop and replace them."""
