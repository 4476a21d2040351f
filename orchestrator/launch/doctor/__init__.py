"""Checks a machine, its storage and its cluster before a run."""
