"""Metrics of steps, and the loggers that receive them."""
