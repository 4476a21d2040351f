"""The dashboard: a page and its API over one folder of runs. It reads storage only, so it also opens runs
whose cluster is gone; actions reach a run as `Run` has them. Loaded by the command `dashboard` alone.
"""
