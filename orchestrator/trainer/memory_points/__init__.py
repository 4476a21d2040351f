"""Copies of the state in the memory of another rank, for recovery without storage."""
