"""The dashboard: a page and its API over one folder of runs.

It reads only storage, so it also opens runs whose cluster is gone. Actions reach a run through `Run`. Loaded
only by the command `dashboard`.
"""
