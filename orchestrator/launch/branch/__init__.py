"""Rewinds and forks of a run, and the points that they name."""
