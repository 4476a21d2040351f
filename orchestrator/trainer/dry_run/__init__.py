"""Tries a model on the meta device before a run is claimed."""
