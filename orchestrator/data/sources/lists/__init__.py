"""The list of a source's files, frozen for the run, and how it is cut into fragments."""
