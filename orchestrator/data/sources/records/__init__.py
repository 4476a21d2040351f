"""Decodes lines and columns into the records of a source."""
