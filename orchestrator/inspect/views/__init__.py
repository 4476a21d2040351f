"""The views of a run for a page, a notebook or a command: pure functions over its journal, read as
columns.
"""
