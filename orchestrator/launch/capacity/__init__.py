"""Estimates what a job needs, and checks that the cluster has it."""
