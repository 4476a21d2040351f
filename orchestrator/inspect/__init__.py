"""Reads a run: its state, its points, and the proof of what it was trained on."""
