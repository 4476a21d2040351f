"""Saves the state of a rank while training continues."""
