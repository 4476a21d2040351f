"""Trains recorded steps again and compares the weights."""
