"""Exports a resume point to a transformers folder, and reads such folders as first weights."""
