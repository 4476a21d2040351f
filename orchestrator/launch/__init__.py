"""Launches a run: the API's functions, the steps of every start, and the code of workers."""
