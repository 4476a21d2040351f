"""What a page, a notebook or a command shows of a run: pure functions over its journal, read as columns."""
