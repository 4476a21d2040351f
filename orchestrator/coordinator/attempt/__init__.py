"""Begins and continues an attempt: which point, which sources, which settings."""
