"""Elastic membership: the pure rendezvous and policy, and the Ray code that runs them."""
