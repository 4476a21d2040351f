"""Submits a launch as a Ray job."""
