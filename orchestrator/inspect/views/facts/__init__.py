"""The facts of a run, read from its journal as columns."""
