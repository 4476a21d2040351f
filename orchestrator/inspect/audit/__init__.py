"""Recomputes the token stream of a run and compares it with the journal."""
