"""Traces the samples of a step back to their documents."""
